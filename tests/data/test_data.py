"""Synthetic data, pieces of recordings, and the batches made of them."""

from __future__ import annotations

import pytest
import torch

from kbf.data.dataset import load_data
from kbf.data.synthetic import SyntheticData
from kbf.data.windows import Span, folds, hold_out, split, stack, take, windows, without
from kbf.fitted.settings import Training
from kbf.recording import Recording
from kbf.ssm import OrientationModel, oscillatory, rotation, simulate
from kbf.training.datamodule import EpochOrder, FilterDataModule, FoldTasks

CONFIG = {
    "source": {
        "_target_": "kbf.SyntheticData",
        "problem": {"_target_": "kbf.rotation"},
        "n_train": 5,
    }
}


def counted(length: int, offset: int = 0, mask: torch.Tensor | None = None) -> Recording:
    """A sequence whose states are the numbers of its steps."""
    steps = torch.arange(offset, offset + length, dtype=torch.float64)
    return Recording(steps[:, None], -steps[:, None], mask)


def steps(sequences: list[Recording]) -> list[list[int]]:
    return [s.states[:, 0].int().tolist() for s in sequences]


@pytest.mark.parametrize(
    "problem",
    [rotation(), oscillatory(), OrientationModel()],
    ids=["rotation", "oscillatory", "orientation"],
)
def test_synthetic_data_is_one_trajectory_cut_in_two(problem):
    data = SyntheticData(problem, n_train=7, n_test=4, seed=3)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    whole = simulate(problem, start, 11, torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([data.train[0].states, data.test[0].states]), whole.states)
    assert torch.equal(torch.cat([data.train[0].obs, data.test[0].obs]), whole.obs)
    assert data.train[0].states.dtype == torch.float64
    longer = SyntheticData(problem, n_train=9, n_test=4, seed=3)
    assert torch.equal(longer.train[0].states[:7], data.train[0].states)
    assert not torch.equal(
        SyntheticData(problem, 7, 4, seed=4).train[0].states, data.train[0].states
    )


def test_folds_cover_every_step_once_and_without_is_the_rest():
    sequences = [counted(7), counted(4, 7), counted(5, 11)]
    chunks = folds([7, 4, 5], 4)
    assert sorted(
        i for spans in chunks for piece in steps(take(sequences, spans)) for i in piece
    ) == list(range(16))
    assert [sum(s.stop - s.start for s in spans) for spans in chunks] == [4, 4, 4, 4]
    for spans in chunks:
        inside = {i for piece in steps(take(sequences, spans)) for i in piece}
        left = steps(without(sequences, spans))
        assert sorted(i for piece in left for i in piece) == sorted(set(range(16)) - inside)
        for piece in left:  # no pair crosses the cut or the end of a sequence
            assert piece == list(range(piece[0], piece[-1] + 1))
            assert not any({a, a + 1} in ({6, 7}, {10, 11}) for a in piece[:-1])
    assert without(sequences, folds([7, 4, 5], 1)[0]) == []


def test_split_holds_out_the_last_steps():
    fit, held = split([counted(6), counted(4, 6)], 0.5)
    assert (steps(fit), steps(held)) == ([[0, 1, 2, 3, 4]], [[5], [6, 7, 8, 9]])
    assert split([counted(6)], 0.0)[1] == []
    with pytest.raises(ValueError, match=r"0\.2 of 5 .* leaves 4 to fit and 1"):
        split([counted(5)], 0.2)
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1"):
        split([counted(5)], 1.0)


def test_whole_recordings_are_held_out_where_that_is_about_as_much():
    """Two of ten for 0.15; not half of two recordings for 0.15, and not a part of one alone."""
    ten = [counted(4, 4 * k) for k in range(10)]
    fit, held = hold_out(ten, 0.15)
    assert (len(fit), steps(held)) == (8, [[32, 33, 34, 35], [36, 37, 38, 39]])
    assert [len(part) for part in hold_out(ten, 0.5)] == [5, 5]
    for recordings in ([counted(50), counted(50, 50)], [counted(100)]):
        assert steps(hold_out(recordings, 0.15)[1]) == [list(range(85, 100))]
    assert steps(hold_out([counted(50), counted(50, 50)], 0.35)[0]) == [list(range(50))]
    assert hold_out(ten, 0.0)[1] == []
    assert [len(s.states) for s in hold_out([counted(11), counted(1, 11)], 0.15)[1]] == [1, 1], (
        "one step alone is too few"
    )
    for refused in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            hold_out(ten, refused)
    with pytest.raises(ValueError, match="holding out"):
        hold_out([counted(5)], 0.2)


def test_windows_stay_inside_their_spans():
    found = windows([Span(0, 2, 7), Span(1, 0, 2)], 3, stride=2)
    assert found == [Span(0, 2, 5), Span(0, 4, 7)]
    batch = stack([counted(8), counted(3)], found)
    assert batch.states[..., 0].tolist() == [[2, 3, 4], [4, 5, 6]]
    assert batch.mask is None
    seen = torch.tensor([True, False, True])
    mixed = stack([counted(8), counted(3, mask=seen)], [Span(0, 0, 3), Span(1, 0, 3)])
    assert mixed.mask is not None
    assert mixed.mask.tolist() == [[True] * 3, [True, False, True]]


def test_batches_are_of_one_fold_and_hold_every_window_once():
    chunks = [windows(spans, 3) for spans in folds([30], 3)]
    order = EpochOrder(chunks, batch_size=5, seed=1)
    batches = list(order)
    assert len(batches) == len(order) == 6
    assert all(span in chunks[fold] for fold, spans in batches for span in spans)
    assert sorted(s for _, spans in batches for s in spans) == sorted(
        s for chunk in chunks for s in chunk
    )
    assert list(order) == batches
    order.set_epoch(1)
    assert list(order) != batches
    assert list(EpochOrder(chunks, 5, seed=2)) != batches


def test_a_fold_without_a_window_has_no_batch():
    assert (
        len(list(EpochOrder([windows(spans, 3) for spans in folds([8], 3)], None, seed=0))) == 2
    )  # folds of 3, 2 and 3 steps


def test_processes_share_the_windows_of_each_batch():
    chunks = folds([33], 3)
    order = list(EpochOrder([windows(spans, 3) for spans in chunks], 4, seed=0))
    assert {len(spans) for _, spans in order} == {4, 1}
    for world in (1, 2, 3):
        tasks = [FoldTasks([counted(33)], chunks, rank, world) for rank in range(world)]
        for batch in order:
            whole, shares = tasks[0].__class__([counted(33)], chunks)[batch], []
            for task in (each[batch] for each in tasks):
                assert torch.equal(task.memory[0].states, whole.memory[0].states)
                shares += [task.windows.states] if task.weight else []
                n = len(task.windows.states) if task.weight else 0
                assert task.weight == pytest.approx(world * n / len(batch[1]))
            assert sorted(torch.cat(shares).flatten().tolist()) == sorted(
                whole.windows.states.flatten().tolist()
            )


def test_a_window_is_never_in_the_memory_that_filters_it():
    module = FilterDataModule(
        [counted(40), counted(20, 40)], Training(1, 0.1, folds=4, window=5, validation=0.2), seed=0
    )
    seen = set()
    for task in module.train_dataloader():
        memory = {i for piece in steps(task.memory) for i in piece}
        inside = set(task.windows.states.flatten().int().tolist())
        assert not memory & inside
        assert max(memory | inside) < 48
        seen |= inside
    assert seen == set(range(48)) - {
        36,
        37,
        38,
        39,
    }  # what is left of the first sequence in its last fold is shorter than a window
    (task,) = list(module.val_dataloader()[0])
    assert steps(task.memory) == [list(range(40)), list(range(40, 48))]
    assert task.windows.states.flatten().tolist() == list(range(48, 60))


def test_windows_of_several_short_recordings_are_as_long_as_they_are():
    short = [counted(10, 10 * k) for k in range(5)]
    module = FilterDataModule(short, Training(1, 0.1, folds=1, window=20, validation=0.2), seed=0)
    assert {each.windows.states.shape[1] for each in module.train_dataloader()} == {10}
    with pytest.raises(ValueError, match="a window of 10 steps leaves nothing after a burn-in of"):
        FilterDataModule(short, Training(1, 0.1, folds=1, window=20, burn_in=10), seed=0)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            Training(1, 0.1, folds=5, window=20, validation=0.2),
            r"no window of 20 steps fits: 48 .* \(60 .* 5 folds .* at most 10",
        ),
        (
            Training(1, 0.1, folds=90, window=1, validation=0.0),
            "60 training steps cannot be cut into 90 folds",
        ),
        (
            Training(1, 0.1, folds=2, window=5, burn_in=5),
            "window of 5 steps leaves nothing after a burn-in of 5",
        ),
    ],
)
def test_too_few_steps_are_one_error_with_numbers(training, message):
    with pytest.raises(ValueError, match=message):
        FilterDataModule([counted(60)], training, seed=0)


def test_nan_observations_are_an_error_or_missing(monkeypatch):
    data = load_data(CONFIG)
    assert data.decoded is data.test
    assert data.problem is not None

    def spoil(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.test[0].obs[4, 1] = float("nan")

    original = SyntheticData.__init__
    monkeypatch.setattr(SyntheticData, "__init__", spoil)
    with pytest.raises(
        ValueError, match=r"test data.*1 of 200 rows \(first: row 4\).*data.missing=true"
    ):
        load_data(CONFIG)
    masked = load_data({**CONFIG, "missing": True}).test[0]
    assert masked.mask is not None
    assert (~masked.mask).nonzero().flatten().tolist() == [4]


def test_n_too_small():
    with pytest.raises(ValueError, match="n_train 1 and n_test 200"):
        SyntheticData(rotation(), 1)
