"""Recordings drawn from a state-space model with known equations."""

from __future__ import annotations

import torch

from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.ssm import StateSpace, simulate


class SyntheticData(Shown):
    """One trajectory of a known model: its first ``n_train`` steps to learn from, the ``n_test`` steps after them as the test.

    The trajectory starts at ``start``, moves, and then observes. With one seed, a longer training
    part begins with the shorter.

    Attributes:
        train: a list of one sequence. test: a list of one sequence. problem: the model, the truth
            behind the data.

    References: Xu et al. (2022), section 6.2.
    """

    def __init__(
        self,
        problem: StateSpace,
        n_train: int,
        n_test: int = 200,
        seed: int = 0,
        start: tuple[float, ...] | list[float] | None = None,
    ) -> None:
        """Draw the data, float64.

        Args:
            problem: a model of `kbf.ssm`.
            n_train: steps to learn from.
            n_test: steps to score on.
            seed: of everything that is drawn.
            start: z_0; None for the model's own m0, or (1, 0) where it has none.

        Raises:
            ValueError: fewer than two training steps or no test step.
        """
        check_lengths("synthetic", n_train, n_test)
        z0 = torch.as_tensor(
            getattr(problem, "m0", (1.0, 0.0)) if start is None else start, dtype=torch.float64
        )
        states, obs, *_ = simulate(
            problem, z0, n_train + n_test, torch.Generator().manual_seed(seed)
        )
        self.problem = problem
        self.train: list[Recording] = [Recording(states[:n_train], obs[:n_train])]
        self.test: list[Recording] = [Recording(states[n_train:], obs[n_train:])]


def check_lengths(kind: str, n_train: int, n_test: int) -> None:
    """Raise a ValueError unless there is a move to learn from and a step to score."""
    if n_train < 2 or n_test < 1:
        raise ValueError(
            f"{kind} data needs n_train >= 2 and n_test >= 1, got n_train {n_train} and n_test {n_test}"
        )
