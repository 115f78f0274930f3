"""Window baselines: ridge regression on the last observations, and the training mean.

`MeanModel` ignores observations, `WindowRidge` is linear in a window, and
`kbf.filters.regression.boosting` fits trees to it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from kbf.filters.held import forward_filled
from kbf.filters.protocols import WithoutHyperparameters
from kbf.filters.regression.window_width import MAX_NUMBERS, candidates, select_width
from kbf.recording import Recording, as_recordings, check_vectors, control_width, observed
from kbf.runtime.errors import FitError, fit_errors
from kbf.runtime.html_repr import Shown

# Numbers in a window of unspecified width, as far as `MAX_WINDOW_STEPS` allows.
WINDOW_NUMBERS = 600
# Most steps of such a window, unless it has fewer than `MIN_WINDOW_NUMBERS` numbers.
MAX_WINDOW_STEPS = 50
# Least numbers of such a window, even if that requires more steps.
MIN_WINDOW_NUMBERS = 100
# Windows in a block: those of 200,000 steps are never laid out all at once.
ROWS_PER_BLOCK = 8192


class WindowState(NamedTuple):
    """The last observations and controls.

    Attributes:
        window: ``b w c``, the newest last: observation and control of each step. A missing
            observation is the one before it, or NaN.
        seen: ``b q``, how many observations there were of each component; before the first the
            window holds nothing.
    """

    window: Tensor
    seen: Tensor


@dataclass(eq=False, repr=False)
class WindowFilter(Shown):
    """z = f(the last w observations and controls); the training mean before any observation.

    Attributes:
        regression: flattened windows ``b w*c`` -> ``b d``.
        width: w.
        start: ``c`` = q + k, the content of a window before any observation: the training mean.
        mean: ``d``, of the training states.
        spread: returns the covariance ``d d`` of the regression's error on held-out steps; None if
            it is not known.
        controlled: k, components of a control.
        allow_missing_sensors: whether components of an observation may be NaN.
        fills: whether the last value of a component is used where it is missing. Otherwise missing
            values, and those before the first step, are NaN in the window.
    """

    regression: Callable[[Tensor], Tensor]
    width: int
    start: Float[Tensor, " c"]
    mean: Float[Tensor, " d"]
    spread: Callable[[], Float[Tensor, "d d"]] | None = None
    controlled: int = 0
    allow_missing_sensors: bool = False
    fills: bool = True

    def init(self, batch: int, *, generator: Generator | None = None) -> WindowState:
        """The initial state, without observations."""
        seen = self.start.new_zeros(batch, len(self.start) - self.controlled)
        start = self.start if self.fills else torch.full_like(self.start, torch.nan)
        return WindowState(start.expand(batch, self.width, -1).clone(), seen)

    def predict(
        self,
        state: WindowState,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> WindowState:
        """Advance the window by a step; the last observation is repeated until `update`.

        Without ``fills`` it is NaN.
        """
        newest = state.window[:, -1:]
        newest = newest if self.fills else torch.full_like(newest, torch.nan)
        if control is not None:
            newest = torch.cat([newest[..., : -self.controlled], control[:, None]], -1)
        window = torch.cat([state.window[:, 1:], newest], 1)
        if control is not None and self.fills:  # the first control fills the window
            first = (state.seen == 0).all(1)[:, None, None]
            acted = torch.where(first, control[:, None], window[..., -self.controlled :])
            window = torch.cat([window[..., : -self.controlled], acted], -1)
        return state._replace(window=window)

    def update(self, state: WindowState, obs: Float[Tensor, "b q"]) -> WindowState:
        """Add the newest observation; with ``fills`` the first of a component fills its window."""
        q = obs.shape[-1]
        present = (
            ~obs.isnan() if self.allow_missing_sensors else torch.ones_like(obs, dtype=torch.bool)
        )
        last = torch.arange(self.width, device=obs.device) == self.width - 1
        rows = last[:, None] | (state.seen == 0)[:, None] if self.fills else last[:, None]
        here = rows & present[:, None]
        seen = torch.where(here, obs[:, None], state.window[..., :q])
        return WindowState(
            torch.cat([seen, state.window[..., q:]], -1), state.seen + present.to(state.seen)
        )

    def observe(
        self, state: WindowState, obs: Float[Tensor, "b q"]
    ) -> tuple[WindowState, Bool[Tensor, " b"]]:
        """Update; also return whether the squares of the observations are finite.

        Trees would accept an infinite observation as a large number.
        """
        possible = obs.abs() < torch.finfo(self.start.dtype).max ** 0.5
        return self.update(state, obs), (
            possible | obs.isnan() if self.allow_missing_sensors else possible
        ).all(-1)

    def estimate(self, state: WindowState) -> Float[Tensor, "b d"]:
        """The regression at the window, ``b d``."""
        found = self.regression(state.window.flatten(1)).to(self.mean)
        return torch.where((state.seen > 0).any(1, keepdim=True), found, self.mean)

    def covariance(self, state: WindowState) -> Float[Tensor, "b d d"] | None:
        """The covariance of errors on held-out steps, for any window; None if it is not known."""
        return None if self.spread is None else self.spread().expand(len(state.seen), -1, -1)


def rows_of(recording: Recording) -> Float[Tensor, "T c"]:
    """Observation and control of each step; missing components repeat the previous value.

    At the start the first value is used. A component that is always NaN remains NaN.
    """
    obs = observed(recording)
    if bool(obs.isnan().any()):
        first = recording.obs.gather(0, (~obs.isnan()).int().argmax(0, keepdim=True))
        filled = forward_filled(obs)
        obs = torch.where(filled.isnan(), first, filled)
    return with_controls(obs, recording)


def with_controls(obs: Float[Tensor, "T q"], recording: Recording) -> Float[Tensor, "T c"]:
    """Append the controls of a recording, if it has any."""
    return obs if recording.controls is None else torch.cat([obs, recording.controls.to(obs)], -1)


def windows_of(rows: Float[Tensor, "T c"], width: int) -> Float[Tensor, "T wc"]:
    """The last ``width`` rows of each step, flattened, as a view if possible.

    The first row is repeated before the beginning.

    >>> windows_of(torch.tensor([[1.0], [2.0], [3.0]]), 2)
    tensor([[1., 1.],
            [1., 2.],
            [2., 3.]])
    """
    return torch.cat([rows[:1].expand(width - 1, -1), rows]).unfold(0, width, 1).mT.flatten(1)


def windows_with_gaps(recording: Recording, width: int) -> Float[Tensor, "T wc"]:
    """The last ``width`` rows of each step, flattened, with NaN where a component is missing.

    So are all components before the first step.

    >>> windows_with_gaps(Recording(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])), 2)
    tensor([[nan, 1.],
            [1., 2.]])
    """
    rows = with_controls(observed(recording), recording)
    before = torch.full_like(rows[:1], torch.nan)
    return windows_of(torch.cat([before, rows]), width)[1:]


class WindowRegression(WithoutHyperparameters):
    """Base class of regressions on a window: windows of a memory, and the fitted filter.

    With ``allow_missing_sensors`` components of an observation may be NaN. A regression that
    requires numbers gets the last value of each, and its mean before the first; one that accepts
    NaN (``accepts_gaps``) gets NaN.

    Attributes:
        selected: ``()``, the width that `prepare` selected; 0 before, and without a selection.
    """

    allow_missing_sensors: bool = False
    accepts_gaps: bool = False

    @property
    def fills(self) -> bool:
        """Whether missing values are replaced in windows."""
        return not (self.allow_missing_sensors and self.accepts_gaps)

    def windows(self, recording: Recording) -> Float[Tensor, "T wc"]:
        """The windows of a recording as the regression gets them; the width is that of `steps`."""
        width = self.steps([recording])
        if self.fills:
            return windows_of(rows_of(recording), width)
        return windows_with_gaps(recording, width)

    def __init__(self, width: int | None = 15) -> None:
        """Set the number of observations in the window.

        ``width=None`` selects about `WINDOW_NUMBERS` numbers, but 8 to `MAX_WINDOW_STEPS` steps, or
        `MIN_WINDOW_NUMBERS` numbers.

        Raises:
            ValueError: a width that is no whole number of at least 1.
        """
        super().__init__()
        if width is not None and (not isinstance(width, int) or width < 1):
            raise ValueError(
                f"{type(self).__name__}: width must be a whole number of at least 1, got {width!r}"
            )
        self.width = width
        self.selected: Tensor = nn.Buffer(torch.tensor(0))

    def steps(self, recordings: list[Recording]) -> int:
        """The given width, else the selected one, else the usual one."""
        return self.width or int(self.selected) or self.usual_width(recordings)

    def usual_width(self, recordings: list[Recording]) -> int:
        """The width of a window of about `WINDOW_NUMBERS` numbers (see ``width=None``)."""
        columns = recordings[0].obs.shape[1] + control_width(recordings)
        return max(
            min(MAX_WINDOW_STEPS, max(8, WINDOW_NUMBERS // columns)), MIN_WINDOW_NUMBERS // columns
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: earlier versions stored no width.

        Raises:
            ValueError: a width that no selection has.
        """
        width = state_dict.setdefault(prefix + "selected", torch.zeros_like(self.selected))
        if not bool(((width >= 0) & (width <= MAX_NUMBERS)).all()):
            raise ValueError(
                f"this model was stored with a window of {width.tolist()} steps; "
                f"there are 0 to {MAX_NUMBERS}"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def inputs(
        self, memory: Recording | list[Recording] | None
    ) -> tuple[list[Recording], Float[Tensor, " c"]]:
        """Return the recordings without gaps, if the regression has none, and their mean row."""
        recordings = checked(
            memory, type(self).__name__, allow_missing_sensors=self.allow_missing_sensors
        )
        start = torch.cat([rows_of(s) for s in recordings]).nanmean(0).nan_to_num()
        if self.allow_missing_sensors and self.fills:
            recordings = [s._replace(obs=filled(s, start)) for s in recordings]
        return recordings, start

    def fit_regression(
        self, recordings: list[Recording]
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
        """Return functions of flattened windows -> states ``b d``, and -> the error covariance.

        The covariance is that of errors on held-out steps.
        """
        raise NotImplementedError

    @torch.no_grad()
    def fit(self, memory: Recording | list[Recording] | None) -> WindowFilter:
        """The filter fitted to ``memory``, in its dtype and on its device.

        Raises:
            ValueError: no memory, observations that are no vectors, or fewer than ten steps.
        """
        recordings, start = self.inputs(memory)
        regression, spread = self.fit_regression(recordings)
        mean = torch.cat([s.states for s in recordings]).mean(0)
        return WindowFilter(
            regression,
            self.steps(recordings),
            start,
            mean,
            spread,
            control_width(recordings),
            self.allow_missing_sensors,
            self.fills,
        )


def filled(recording: Recording, start: Float[Tensor, " c"]) -> Float[Tensor, "T q"]:
    """Replace NaN: a component that is always NaN has its value in ``start``."""
    obs = rows_of(recording._replace(controls=None))
    return torch.where(obs.isnan(), start[: obs.shape[1]].to(obs), obs)


def checked(
    memory: Recording | list[Recording] | None, name: str, *, allow_missing_sensors: bool = False
) -> list[Recording]:
    """The recordings of a memory with at least one observation, checked."""
    recordings = as_recordings(memory, allow_missing_sensors=allow_missing_sensors)
    check_vectors(recordings, name)
    recordings = [s for s in recordings if s.mask is None or bool(s.mask.any())]
    if (n := sum(len(s.states) for s in recordings)) < 10:
        raise FitError(f"{name} needs at least ten steps to learn from, got {n}")
    return recordings


class WindowRidge(WindowRegression):
    """Linear ridge regression of the state on the last ``width`` observations and controls.

    Inputs are standardised, states centred; the ridge is chosen by the leave-one-out error, one for
    each component of the state. With the eigenvectors V and values s of the inputs' U^T U every
    ridge costs one product: the residual without i is e_i / (1 - h_i), h_i = sum_k (u_i V)_k^2 /
    (s_k + r).

    Without a width, `prepare` selects it.

    References: Golub, Heath and Wahba (1979).
    """

    def __init__(
        self,
        width: int | None = 15,
        *,
        regs: Iterable[float] = tuple(10.0 ** (k / 2) for k in range(-6, 11)),
    ) -> None:
        """Set the window and the candidate ridges.

        Ridges are relative to the standardised sum of squares of the inputs (not multiplied by n).
        """
        super().__init__(width)
        self.regs: tuple[float, ...] = tuple(regs)

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select the width, if none is given (`kbf.filters.regression.window_width`)."""
        if self.width is not None:
            return
        recordings, _ = self.inputs(memory)
        columns = recordings[0].obs.shape[1] + control_width(recordings)
        steps = sum(len(s.states) for s in recordings)
        usual = self.usual_width(recordings)
        widths = candidates(usual, columns, steps)
        parts = [(windows_of(rows_of(s), widths[-1]), s.states) for s in recordings]
        self.selected.fill_(select_width(parts, widths, self.regs, usual))

    @fit_errors()
    def fit_regression(
        self, recordings: list[Recording]
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
        """The ridge regression, and the covariance of its leave-one-out errors."""
        states = torch.cat([s.states for s in recordings])
        parts = [(self.windows(s), s.states) for s in recordings]
        blocks = [
            (u, z)
            for us, zs in parts
            for u, z in zip(us.split(ROWS_PER_BLOCK), zs.split(ROWS_PER_BLOCK), strict=True)
        ]
        n, mean = len(states), states.double().mean(0)
        centre = torch.stack([u.double().sum(0) for u, _ in blocks]).sum(0) / n
        scale = (
            torch.stack([(u.double() - centre).square().sum(0) for u, _ in blocks]).sum(0) / n
        ).sqrt()
        scale = torch.where(scale > 0, scale, 1)
        gram, cross = (
            centre.new_zeros(len(centre), len(centre)),
            centre.new_zeros(len(centre), len(mean)),
        )
        for u, z in blocks:
            unit = (u.double() - centre) / scale
            gram += unit.mT @ unit
            cross += unit.mT @ (z.double() - mean)
        values, vectors = torch.linalg.eigh(gram)
        shrunk = 1 / (values.clamp_min(0)[:, None] + gram.new_tensor(self.regs))  # p r
        target = vectors.mT @ cross  # p d
        errors = gram.new_zeros(len(self.regs), cross.shape[1])
        for u, z in blocks:
            rotated = ((u.double() - centre) / scale) @ vectors
            left = 1 - rotated.square() @ shrunk  # m r
            for k in range(len(self.regs)):
                errors[k] += (
                    ((z - mean - rotated @ (shrunk[:, k, None] * target)) / left[:, k, None])
                    .square()
                    .sum(0)
                )
        best = errors.argmin(0)
        coefficients = vectors @ (shrunk[:, best] * target)  # p d
        spread = gram.new_zeros(len(mean), len(mean))
        for u, z in blocks:
            rotated = ((u.double() - centre) / scale) @ vectors
            residual = (z - mean - rotated @ (vectors.mT @ coefficients)) / (
                1 - rotated.square() @ shrunk[:, best]
            )
            spread += residual.mT @ residual / n
        slope, spread = (coefficients / scale[:, None]).to(states), spread.to(states)
        offset = (mean - centre @ (coefficients / scale[:, None])).to(states)
        return lambda window: window @ slope + offset, lambda: spread


class MeanModel(WindowRegression):
    """The mean of the training states, with their covariance; its NMSE is 1."""

    def __init__(self) -> None:
        """Nothing to set."""
        super().__init__(1)

    def fit_regression(
        self, recordings: list[Recording]
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
        """Mean and covariance of the states."""
        states = torch.cat([s.states for s in recordings])
        mean, centred = states.mean(0), states - states.mean(0)
        spread = centred.mT @ centred / len(states)
        return lambda window: mean.expand(len(window), -1) + 0 * window[:, :1], lambda: spread
