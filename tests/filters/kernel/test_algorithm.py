"""Algorithm 2 on one screen against the published algorithm in NumPy, and the class against
Algorithm 2.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import reference
import torch

import kbf
from kbf.filters.kernel.algorithm import kernel_bayes_filter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.rkhs.kernels import KERNELS
from kbf.ssm import oscillatory, simulate

WIDTHS, REGS = (
    (0.7, 0.5, 0.8),
    (1e-3, 5e-4, 2e-4),
)  # ratio, transition, observation; eta, lambda', lambda


def recording(n: int, seed: int = 0) -> Recording:
    model = oscillatory()
    return simulate(model, model.m0, n, torch.Generator().manual_seed(seed))


def kernels(name: str = "gaussian", widths=WIDTHS):
    ratio, transition, obs = (partial(KERNELS[name], bandwidth=width) for width in widths)
    return ratio, transition, obs


def test_it_is_the_published_algorithm():
    memory, new = recording(60), recording(40, seed=1)
    found = kbf.kernel_bayes_filter(memory.states, memory.obs, new.obs, kernels(), REGS)
    expected = reference.published_filter(
        memory.states.numpy(), memory.obs.numpy(), new.obs.numpy(), *WIDTHS, *REGS
    )
    np.testing.assert_allclose(found.estimates.numpy(), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.weights @ memory.states, found.estimates)
    assert 0.1 < (found.weights == 0).double().mean() < 0.9, "the case must meet the clipping"


@pytest.mark.parametrize("name", KERNELS)
def test_the_class_is_algorithm_2(name):
    memory, new = recording(60), recording(40, seed=1)
    model = KBF(kernel=name, rank=None, normalise=False)
    model.set(torch.tensor(WIDTHS).double(), torch.tensor(REGS).double())
    states = []
    with torch.no_grad():
        run = rollout(model.fit(memory), new.obs[None], states=states)
        bandwidths, regs = (
            model.log_bandwidth.exp(),
            model.log_reg.exp().tolist(),
        )  # to the last bit
        found = kernel_bayes_filter(
            memory.states, memory.obs, new.obs, kernels(name, bandwidths), tuple(regs)
        )
    torch.testing.assert_close(run.estimates[0], found.estimates, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        torch.cat([s.weights for s in states]), found.weights, rtol=0, atol=1e-9
    )


def test_gradients_reach_bandwidths_and_ridges():
    memory, new = recording(12), recording(3, seed=1)

    def estimates(widths, regs):
        return kernel_bayes_filter(
            memory.states, memory.obs, new.obs, kernels(widths=widths), tuple(regs)
        ).estimates

    numbers = (
        torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for v in (WIDTHS, (0.01, 0.02, 0.05))
    )
    assert torch.autograd.gradcheck(estimates, tuple(numbers), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_filtered():
    good = recording(10)
    for states, obs, new, words in (
        (good.states[:1], good.obs[:1], good.obs, "at least 2 states"),
        (good.states, good.obs, good.obs * math.nan, "the new observations hold NaN"),
        (good.states * math.inf, good.obs, good.obs, "states hold NaN or infinite"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel_bayes_filter(states, obs, new, kernels(), REGS)
