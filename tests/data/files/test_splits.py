"""Folds of recordings and of blocks of time: disjoint, complete, and apart from the training."""

import math

import pytest
import torch

from kbf.data.files import FileData
from kbf.data.files.layout import Contents, FileRecording
from kbf.data.files.splits import Fold, correlation_time, described, fold_of, split
from kbf.data.windows import Span


def steps(spans):
    return [(k, t) for k, start, stop in spans for t in range(start, stop)]


def parts_of(lengths, how, number, folds, gap=0, validation=0.0):
    names = [f"r{k}" for k in range(len(lengths))]
    return split(names, lengths, how, validation, 0.2, Fold(number, folds, gap))


@pytest.mark.parametrize(
    ("lengths", "how", "folds"),
    [
        ([23], "fold", 5),
        ([7, 12], "fold", 3),
        ([5, 6, 7, 8, 9], "fold", 3),
        ([9, 9, 9], "blocks", 2),
    ],
)
def test_folds_are_disjoint_and_cover_all_steps(lengths, how, folds):
    tested = []
    for number in range(folds):
        parts = parts_of(lengths, how, number, folds, gap=1)
        assert not set(steps(parts["test"])) & set(steps(parts["train"]))
        tested += steps(parts["test"])
    assert sorted(tested) == [(k, t) for k, n in enumerate(lengths) for t in range(n)]


def test_folds_of_whole_recordings():
    parts = [parts_of([5, 6, 7, 8, 9], "fold", number, 2, gap=3) for number in (0, 1)]
    assert [{k for k, _, _ in each["test"]} for each in parts] == [{0, 1}, {2, 3, 4}]
    for each in parts:
        assert len(steps(each["train"])) + len(steps(each["test"])) == 35, "no gap is needed"
    with pytest.raises(ValueError, match="2 recordings cannot be 3 folds"):
        parts_of([5, 6], "recording", 0, 3)


@pytest.mark.parametrize("validation", [0.0, 0.25])
def test_no_training_step_is_within_the_gap_of_a_test_block(validation):
    for number in range(4):
        parts = parts_of([40, 21], "blocks", number, 4, gap=3, validation=validation)
        tested = steps(parts["test"])
        known = steps(parts["train"]) + steps(parts["validation"])
        assert not set(steps(parts["train"])) & set(steps(parts["validation"]))
        near = {(k, t + lag) for k, t in tested for lag in range(-3, 4)}
        everything = {(k, t) for k, n in ((0, 40), (1, 21)) for t in range(n)}
        assert sorted(known) == sorted(everything - near)
        assert bool(parts["validation"]) == (validation > 0)


def test_a_block_in_the_middle_leaves_two_training_recordings():
    states = torch.arange(50.0).double()[:, None]
    contents = Contents([FileRecording("a", states.clone(), states)], ["z"], ["x"], [])
    data = FileData(None, contents=contents, split="fold", fold=1, folds=5, gap=2)
    assert [s.states[:, 0].tolist() for s in data.train] == [
        list(map(float, range(8))),
        list(map(float, range(22, 50))),
    ]
    assert data.test[0].states[:, 0].tolist() == list(map(float, range(10, 20)))
    assert data.test_part == "a 10-19"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "fold"}, "data.folds must be the number of folds"),
        ({"split": "blocks", "folds": 5}, "data.fold must be a number from 0 to 4, got None"),
        ({"split": "fold", "fold": 5, "folds": 5}, "from 0 to 4, got 5"),
        ({"split": "fold", "fold": 0, "folds": 1}, "at least 2, got 1"),
        ({"fold": 0, "folds": 5}, "data.fold needs data.split=fold"),
        ({"split": "blocks", "fold": 0, "folds": 5, "gap": -1}, "data.gap must be"),
        ({"split": "chunks"}, "must be time or recording .folds: fold or blocks"),
        ({"split": "blocks", "fold": 0, "folds": 5, "gap": 99}, "too few steps"),
    ],
)
def test_impossible_folds_are_refused(settings, message):
    states = torch.arange(50.0).double()[:, None]
    contents = Contents([FileRecording("a", states.clone(), states)], ["z"], ["x"], [])
    with pytest.raises(ValueError, match=message):
        FileData(None, contents=contents, **settings)


def test_single_splits_have_no_fold():
    assert fold_of("time", None, 5, int) is fold_of("recording", None, None, int) is None


def test_correlation_time_of_an_autoregression():
    """Of z_t = a z_(t-1) + e it is -1 / log a; unknown states and offsets do not count."""
    noise = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)).double()
    states = noise.clone()
    for t in range(1, len(states)):
        states[t, 0] += 0.9 * states[t - 1, 0]
    assert abs(correlation_time([states]) - -1 / math.log(0.9)) <= 2
    assert correlation_time([noise]) == 1
    halves = [states[:2000] + 100, states[2000:].clone()]
    halves[1][50:60] = torch.nan
    assert abs(correlation_time(halves) - -1 / math.log(0.9)) <= 2
    direct = states[:, 0] - states[:, 0].mean()
    sums = [float((direct[: 4000 - k] * direct[k:]).sum()) for k in range(50)]
    expected = next(k for k, each in enumerate(sums) if each <= sums[0] / math.e)
    assert correlation_time([states[:, :1]]) == expected


def test_names_of_parts():
    spans = [Span(k, 0, 5) for k in range(8)]
    assert described(spans, list("abcdefgh"), [5] * 8) == "a, b, c, d, e and 3 more"
