"""Recordings are added to a trained filter, and a memory is kept to its budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import TRAINER

from kbf.cli import main
from kbf.data.synthetic import SyntheticData
from kbf.data.windows import Span, piece
from kbf.evaluation.score import score
from kbf.filters.kernel.kbf import KBF
from kbf.filters.rollout import rollout
from kbf.fitted.append import (
    STEPS_PER_CHUNK,
    append,
    chunks,
    coverage_features,
    gain,
    joined,
    known_parts,
    points,
    prune,
)
from kbf.fitted.checkpoint import load_filter, save_checkpoint
from kbf.recording import Recording
from kbf.runtime.errors import DataError
from kbf.ssm import rotation
from kbf.training.fit import train

KBF_NET = {"_target_": "kbf.KBF", "rank": 24}


def recording(n: int, seed: int = 0) -> Recording:
    return SyntheticData(rotation(), n_train=n, n_test=2, seed=seed).train[0]


def trained(path: Path, recordings: list[Recording], net: dict[str, Any], **data: Any) -> Path:
    config = {
        "model": {"name": "some", "net": net, "dtype": "float64", "training": None},
        "trainer": TRAINER,
        "seed": 0,
    }
    train(config | ({"data": data} if data else {}), recordings, path)
    return path / "best.ckpt"


def estimates(path: Path, obs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return rollout(load_filter(path).filter, obs[None]).estimates[0]


# append


def test_halves_added_one_by_one_are_training_on_both(tmp_path):
    """Same bandwidths and ridges (from the first half), same memory: the same filter, and the same
    from its file.
    """
    whole = recording(120)
    first, second = piece(whole, 0, 60), piece(whole, 60, 120)
    path = trained(tmp_path / "first", [first], KBF_NET)
    found = append(load_filter(path), [second])
    save_checkpoint(found.trained, tmp_path / "both.ckpt")
    assert (found.before, found.added, found.kept) == (60, 60, 120)
    model = load_filter(path).module.net
    with torch.no_grad():
        expected = rollout(model.fit([first, second]), recording(15, 4).obs[None]).estimates[0]
        other = rollout(model.fit([first]), recording(15, 4).obs[None]).estimates[0]
    assert torch.equal(estimates(tmp_path / "both.ckpt", recording(15, 4).obs), expected)
    assert torch.equal(
        rollout(found.trained.filter, recording(15, 4).obs[None]).estimates[0], expected
    )
    assert not torch.allclose(other, expected)
    assert torch.equal(estimates(path, recording(15, 4).obs), other), (
        "the old checkpoint is as it was"
    )


def test_units_are_those_of_the_checkpoint(tmp_path):
    """The scaling of the first recording serves the second, whose own would be another."""
    first = recording(60)._replace(states=1000 * recording(60).states)
    second = recording(60, 1)._replace(states=500 * recording(60, 1).states)
    path = trained(tmp_path / "first", [first], KBF_NET, normalise="standard", name="own")
    old, module = (
        load_filter(path).module.scaling,
        append(load_filter(path), [second]).trained.module,
    )
    assert old is not None
    assert module.scaling is not None
    assert torch.equal(module.scaling.z_scale, old.z_scale)
    memory = module.memory.recordings()
    torch.testing.assert_close(module.scaling.states(memory[1].states), second.states)


def test_budget_keeps_to_its_points(tmp_path):
    path = trained(tmp_path / "first", [recording(100)], KBF_NET)
    found = append(load_filter(path), [recording(100, 1)], budget=90)
    save_checkpoint(found.trained, path)
    assert 90 - STEPS_PER_CHUNK < found.kept <= 90
    assert points(load_filter(path).module.memory.recordings()) == found.kept


def test_what_does_not_fit_is_one_clear_error(tmp_path):
    path = trained(tmp_path / "first", [recording(60)], KBF_NET)
    good = recording(30, 1)
    for wrong, message in (
        (
            good._replace(states=good.states[:, :1]),
            r"the data's states have the shape \(1,\), those that .* was trained on \(2,\)",
        ),
        (
            good._replace(obs=good.obs.expand(2, -1, -1).movedim(0, 2)),
            r"the data's observations have the shape \(2, 2\)",
        ),
        (
            good._replace(controls=good.obs),
            r"the data's controls have the shape \(2,\), .* on \(0,\)",
        ),
        (good._replace(states=good.states * float("nan")), "NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            append(load_filter(path), [wrong])
    with pytest.raises(
        ValueError, match=f"a budget of 3 points is less than the {STEPS_PER_CHUNK} steps"
    ):
        append(load_filter(path), [good], budget=3)
    net = {"_target_": "kbf.LSTMFilter", "d": 2, "q": 2}
    with pytest.raises(ValueError, match=r"a model without a memory \(some\): train it again"):
        append(load_filter(trained(tmp_path / "lstm", [recording(60)], net)), [good])


def test_parts_with_known_states():
    one = recording(30)
    states = one.states.clone()
    states[10:12] = torch.nan
    mask = torch.arange(30) != 20
    some = one._replace(states=states, mask=mask)
    assert [len(part.states) for part in known_parts([some])] == [10, 18]
    assert [len(part.states) for part in known_parts([some], cut_missing=True)] == [10, 8, 9]
    with pytest.raises(DataError, match="no step has a known state"):
        known_parts([one._replace(states=torch.full_like(states, torch.nan))])


@pytest.mark.slow
def test_the_command_adds_and_tells(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [
        "n_train=60",
        "data.n_test=20",
        "particles=50",
        "logger=none",
        "run_dir=run",
        "trainer.enable_progress_bar=false",
    ]
    assert main(["train", "model=kbf_loo", *settings]) == 0
    ckpt = "checkpoint=run/checkpoints/best.ckpt"
    assert main(["append", ckpt, "seed=1", "out=more.ckpt", "budget=120"]) == 0
    ratio_dim = capsys.readouterr().out
    assert "points before" in ratio_dim
    assert points(load_filter("more.ckpt").module.memory.recordings()) <= 120
    assert load_filter("more.ckpt").monitor is not None
    assert main(["evaluate", "checkpoint=more.ckpt", "particles=50", "run_dir=again"]) == 0
    assert main(["append", ckpt, "data=dsprites", "out=other.ckpt"]) == 2
    assert main(["append", ckpt, "out=other.ckpt", "budget=0"]) == 2
    assert not Path("other.ckpt").exists()


# prune


def test_chunks_share_out_a_recording():
    spans = chunks([45, 7, 20])
    assert spans == [Span(0, 0, 22), Span(0, 22, 45), Span(1, 0, 7), Span(2, 0, 20)]
    assert joined([*spans[:2], spans[3]]) == [Span(0, 0, 45), Span(2, 0, 20)]


def test_greedy_choice_is_the_naive_one():
    """Every gain anew in each round, from the definition: the same chunks."""
    memory = [recording(90), recording(70, 1)]
    features, spans = coverage_features(memory), chunks([90, 70])
    parts = [features[(90 if k else 0) + a : (90 if k else 0) + b] for k, a, b in spans]
    chosen: list[int] = []
    for _ in range(4):
        kept = torch.cat([parts[i] for i in chosen]) if chosen else features[:0]
        M = torch.linalg.inv(
            0.1 * torch.eye(features.shape[1], dtype=torch.float64) + kept.T @ kept
        )
        gains = [-1.0 if i in chosen else gain(part, M) for i, part in enumerate(parts)]
        chosen.append(gains.index(max(gains)))
    expected = sum(len(parts[i]) for i in chosen)
    found = prune(memory, expected)
    wanted = joined(sorted(spans[i] for i in chosen))
    assert [len(s.states) for s in found] == [s.stop - s.start for s in wanted]
    for sequence, span in zip(found, wanted, strict=True):
        assert torch.equal(sequence.states, memory[span.recording].states[span.start : span.stop])


def test_of_equal_chunks_the_oldest_stays_and_a_memory_within_its_budget_is_left_alone():
    one = recording(20)
    kept = prune([one, one, recording(20, 1), one], 40)
    assert kept[0].states.data_ptr() == one.states.data_ptr()
    assert torch.equal(kept[1].states, recording(20, 1).states)
    assert prune([one], 20) == [one]


@pytest.mark.slow
def test_pruning_a_memory_that_repeats_itself_hurts_far_less_than_dropping_half_of_it():
    """200 steps all around the circle, then 600 at rest near one place: a quarter of the points
    says all.
    """
    g = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
    around = recording(200)
    rest = torch.tensor([1.0, 0.0]) + 0.02 * draw(600, 2)
    memory = [around, Recording(rest, rest + 0.2 * draw(600, 2))]
    test = recording(200, 7)

    def error(kept: list[Recording]) -> float:
        model = KBF(rank=32)
        model.prepare([around])
        with torch.no_grad():
            return score(model.fit(kept), [test]).mse.item()

    budget, spans = 400, chunks([200, 600])
    drop = [piece(memory[1], 200, 600)]
    order = torch.randperm(len(spans), generator=g)[: len(spans) // 2].tolist()
    random = [
        piece(memory[s.recording], s.start, s.stop) for s in joined(sorted(spans[i] for i in order))
    ]
    whole, pruned, oldest, half = (
        error(memory),
        error(prune(memory, budget)),
        error(drop),
        error(random),
    )
    assert points(prune(memory, budget)) <= budget
    assert pruned < 1.05 * whole
    assert half > 1.1 * whole
    assert oldest > 3 * whole
