"""Recordings simulated from a state-space model with known equations."""

import torch
from torch import Tensor

from kbf.data.windows import piece
from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.ssm import StateSpace, simulate


class SyntheticData(Shown):
    """One trajectory of a known model: `n_train` training steps, followed by `n_test` test steps.

    The trajectory starts at ``start``; each step moves the state and then observes it. For one
    seed, the training part for a smaller `n_train` is the beginning of that for a larger one.

    Attributes:
        train: a list of one recording. test: a list of one recording. problem: the true model.

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
        """Simulate the data, in float64.

        Args:
            problem: a model of `kbf.ssm`.
            n_train: number of training steps.
            n_test: number of test steps.
            seed: of all random draws.
            start: z_0; None for the model's own m0, or (1, 0) if it has none.

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
        self.train, self.test = split_at(n_train, states, obs)


def split_at(n_train: int, states: Tensor, obs: Tensor) -> tuple[list[Recording], list[Recording]]:
    """Returns the first ``n_train`` steps and the rest, a list of one recording each."""
    whole = Recording(states, obs)
    return [piece(whole, 0, n_train)], [piece(whole, n_train, len(states))]


def check_lengths(kind: str, n_train: int, n_test: int) -> None:
    """Raises a ValueError unless there is a transition to learn from and a step to score."""
    if n_train < 2 or n_test < 1:
        raise ValueError(
            f"{kind} data needs n_train >= 2 and n_test >= 1, "
            f"got n_train {n_train} and n_test {n_test}"
        )
