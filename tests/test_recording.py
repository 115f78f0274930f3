"""The record: what it refuses, and what it says when it does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import kbf
from kbf.recording import (
    Recording,
    as_recordings,
    mask_missing,
    observed_pairs,
    pad,
    tensor_of,
    transitions,
)


def recording(T: int, d: int = 2, q: tuple[int, ...] = (3,), start: float = 0.0) -> Recording:
    states = start + torch.arange(T * d, dtype=torch.float64).reshape(T, d)
    return Recording(
        states, torch.ones(T, *q, dtype=torch.float64) * states[:, :1].reshape(T, *[1] * len(q))
    )


def test_one_sequence_becomes_a_list():
    one = recording(4)
    assert as_recordings(one) == [one]
    assert as_recordings((one, one)) == [one, one]
    image = recording(4, q=(3, 5, 6))
    assert as_recordings(image)[0].obs.shape == (4, 3, 5, 6)


@pytest.mark.parametrize(
    "memory, message",
    [
        ([], "no recording"),
        (
            Recording(torch.zeros(3), torch.zeros(3, 1)),
            r"recording 0: states must be \(T, d\).*got \(3,\) and \(3, 1\)",
        ),
        (Recording(torch.zeros(3, 1), torch.zeros(3)), r"got \(3, 1\) and \(3,\)"),
        (
            Recording(torch.zeros(3, 1), torch.zeros(4, 1)),
            r"of one length, got \(3, 1\) and \(4, 1\)",
        ),
        (Recording(torch.zeros(1, 3, 1), torch.zeros(1, 3, 1)), r"got \(1, 3, 1\)"),
        (
            [recording(3, d=2), recording(3, d=1)],
            "recording 1: .* another shape than those of recording 0",
        ),
        ([recording(3), recording(3, q=(4,))], "recording 1: .* another shape"),
        (
            recording(3)._replace(mask=torch.ones(2, dtype=torch.bool)),
            r"mask must be \(3,\), got \(2,\)",
        ),
    ],
)
def test_refuses_shapes(memory, message):
    with pytest.raises(ValueError, match=message):
        as_recordings(memory)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_values_that_are_not_finite(bad):
    sequence = recording(5)
    sequence.obs[1, 0] = bad
    sequence.obs[3] = bad
    with pytest.raises(
        ValueError,
        match=r"recording 1: observations .* in 2 of 5 rows \(first: row 1\).*mask_missing",
    ):
        as_recordings([recording(5), sequence])
    sequence = recording(5)
    sequence.states[4, 1] = bad
    with pytest.raises(ValueError, match=r"recording 0: states .* in 1 of 5 rows \(first: row 4\)"):
        as_recordings(sequence)


def test_values_behind_the_mask_may_be_anything():
    sequence = recording(4)
    sequence.obs[2] = math.nan
    masked = sequence._replace(mask=torch.tensor([True, True, False, True]))
    assert as_recordings(masked) == [masked]


def test_mask_missing():
    sequence = recording(4, q=(2, 2))
    sequence.obs[1, 0, 1] = math.nan
    sequence.obs[2] = math.inf
    found = mask_missing(sequence)
    assert found.mask is not None
    assert found.mask.tolist() == [True, False, False, True]
    assert (found.obs[1:3] == 0).all()
    assert torch.equal(found.obs[[0, 3]], sequence.obs[[0, 3]])
    assert sequence.obs[1, 0, 1].isnan(), "the argument must stay as it was"
    again = mask_missing(found._replace(mask=torch.tensor([False, True, True, True])))
    assert again.mask is not None
    assert again.mask.tolist() == [False, True, True, True]


def test_mask_missing_of_a_batch():
    batch = pad([recording(3), recording(2)])
    batch.obs[0, 1] = math.nan
    found = mask_missing(batch)
    assert found.mask is not None
    assert found.mask.tolist() == [[True, False, True], [True, True, False]]


def test_transitions_do_not_cross_the_end_of_a_sequence():
    pairs = transitions([3, 1, 2])
    assert pairs.source.tolist() == [0, 1, 4]
    assert pairs.target.tolist() == [1, 2, 5]


def test_observed_pairs():
    masked = recording(3)._replace(mask=torch.tensor([True, False, True]))
    states, obs = observed_pairs([masked, recording(2, start=100)])
    assert states[:, 0].tolist() == [0, 4, 100, 102]
    assert obs[:, 0].tolist() == [0, 4, 100, 102]


def test_pad():
    batch = pad([recording(2), recording(3)._replace(mask=torch.tensor([True, False, True]))])
    assert batch.mask is not None
    assert batch.mask.tolist() == [[True, True, False], [True, False, True]]
    assert batch.states[0, 2].isnan().all(), "an error over the padding must be noticed"
    assert (batch.obs[0, 2] == 0).all()
    assert torch.equal(batch.states[1], recording(3).states)
    assert batch.states.dtype == torch.float64


# Masks of numbers, and masked arrays


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32])
def test_a_mask_of_numbers_is_one_of_bool(kind, rng):
    """Integers would select rows 0 and 1 again and again."""
    seen = rng.random((2, 30)) < 0.6
    z = np.cumsum(rng.normal(size=(2, 30, 1)), 1)
    x = np.where(seen[..., None], z + 0.1 * rng.normal(size=z.shape), 1e3)
    numbers = seen.astype(kind)
    recording = Recording(z[0], x[0], numbers[0])
    assert recording.mask is not None and recording.mask.dtype == torch.bool
    np.testing.assert_array_equal(recording.mask.numpy(), seen[0])
    one, other = (kbf.LearnedKalman().fit(Recording(z[0], x[0], m[0])) for m in (seen, numbers))
    expected = kbf.rollout(one, x, mask=seen).estimates
    torch.testing.assert_close(kbf.rollout(other, x, mask=numbers).estimates, expected)
    torch.testing.assert_close(
        kbf.smooth(other, x, mask=numbers).estimates, kbf.smooth(one, x, mask=seen).estimates
    )
    torch.testing.assert_close(
        kbf.predict_ahead(other, x, 2, mask=numbers), kbf.predict_ahead(one, x, 2, mask=seen)
    )
    state = one.init(2)
    torch.testing.assert_close(
        kbf.step(one, state, x[:, 0], mask=numbers[:, 0]),
        kbf.step(one, state, x[:, 0], mask=seen[:, 0]),
    )


def test_other_values_in_a_mask_are_refused():
    z = np.zeros((3, 1))
    for wrong, found in ((np.array([0, 1, 2]), "2"), (np.array([1, np.nan, 0]), "nan")):
        with pytest.raises(ValueError, match=f"mask must be True where .*; it holds {found}"):
            Recording(z, z, wrong)


def test_masked_entries_of_arrays_are_missing():
    z = np.arange(4.0)[:, None]
    x = np.ma.array([[0.0], [-999.0], [2.0], [3.0]], mask=[[0], [1], [0], [0]])
    found = Recording(z, x)
    assert bool(found.obs[1].isnan()) and found.obs[0] == 0
    assert bool(tensor_of(np.ma.array([1, 5], mask=[0, 1]), "states").isnan()[1])
    torch.testing.assert_close(
        tensor_of(np.ma.array([1.0, 5.0]), "states"), torch.tensor([1.0, 5.0], dtype=torch.float64)
    )
    with pytest.raises(ValueError, match=r"1 of 4 rows \(first: row 1\).*mask_missing"):
        kbf.LearnedKalman().fit(found)
    assert mask_missing(found).mask is not None
    with pytest.raises(ValueError, match="states hold NaN"):
        kbf.LearnedKalman().fit(Recording(x, z))
    images = np.ma.masked_equal(np.arange(16, dtype=np.uint8).reshape(4, 2, 2), 3)
    with pytest.raises(ValueError, match=r"masked array of uint8.*as mask="):
        Recording(z, images)
