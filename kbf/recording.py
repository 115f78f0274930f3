"""Recordings: states, observations, mask and controls over time, with checks of their shapes.

Shape letters, the same in every docstring and annotation of the project:

====  =====================================================================
``b``  batch of sequences (``*b``: any number of leading batch dimensions)
``T``  time steps
``d``  components of the latent state z
``x``  shape of one observation (``*x``: ``q`` numbers, or ``c h w`` for an image)
``q``  components of an observation that is a vector
``k``  components of a control
``n``  points of the training memory
``m``  other points (landmarks, transitions, queries)
``p``  columns of an explicit feature map; ``r`` its rank
``P``  particles
====  =====================================================================

One time convention: z_0 comes from the prior, then the state *moves*, then it is *observed*.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from kbf.runtime import html_repr

# What may be given as data: tensors, and NumPy arrays, which become tensors.
Array = Tensor | np.ndarray

# What to do about observations that are images, in errors of filters of vectors.
ENCODE_IMAGES = (
    "images must be encoded first: give the data an encoding with an encoder, as in "
    "configs/data/dsprites.yaml"
)


@overload
def tensor_of(values: Array, name: str) -> Tensor: ...
@overload
def tensor_of(values: Array | None, name: str) -> Tensor | None: ...
def tensor_of(values: Any, name: str) -> Any:
    """Return an array (NumPy, pandas, JAX) as a tensor that shares its memory where possible.

    Masked entries of a `numpy.ma.MaskedArray` become NaN. Other values are returned unchanged.

    Raises:
        ValueError: a list, an array whose entries are no numbers, or masked entries of bool or
            uint8, which cannot be NaN; ``name`` is in the message.

    >>> tensor_of(np.arange(3.0), "states")
    tensor([0., 1., 2.], dtype=torch.float64)
    """
    if isinstance(values, list):
        raise ValueError(
            f"{name} must be a tensor or a NumPy array, got a list: "
            f"numpy.asarray({name}) makes an array of it"
        )
    if isinstance(values, Tensor) or not hasattr(values, "__array__"):
        return values
    array = without_mask(values, name) if np.ma.is_masked(values) else np.asarray(values)
    if array.dtype.kind not in "buif":
        raise ValueError(
            f"{name} must be numbers, got an array of {array.dtype}: "
            f"{name}.astype(float) turns them into numbers"
        )
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def without_mask(values: np.ma.MaskedArray, name: str) -> np.ndarray:
    """Return a masked array with NaN in place of masked entries.

    Raises:
        ValueError: entries of bool or uint8, which cannot be NaN.
    """
    if values.dtype.kind == "b" or values.dtype == np.uint8:
        raise ValueError(
            f"{name} is a masked array of {values.dtype}, whose masked entries cannot be NaN: give "
            "plain arrays, and the steps that are observed as mask="
        )
    numbers: Any = values.astype(np.promote_types(values.dtype, np.float32))
    return numbers.filled(np.nan)


@overload
def mask_of(values: Array, name: str = "mask") -> Tensor: ...
@overload
def mask_of(values: Array | None, name: str = "mask") -> Tensor | None: ...
def mask_of(values: Any, name: str = "mask") -> Any:
    """Return a mask as a tensor of bool; numbers 0 and 1 are False and True.

    Integers would select rows by their index. Values that are no array are returned unchanged.

    Raises:
        ValueError: other numbers.

    >>> mask_of(np.array([1, 0, 1]))
    tensor([ True, False,  True])
    """
    mask = tensor_of(values, name)
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"{name} must be True where something was observed and False elsewhere, or 1 and 0; "
            f"it holds {mask[(mask != 0) & (mask != 1)][0].item():g}"
        )
    return mask == 1


def observation_of(obs: Any, batch: int) -> Any:
    """Return observations of one step as a tensor ``b *x``; a vector ``q`` is that of one track.

    Raises:
        ValueError: observations by name, or as `tensor_of`.

    >>> observation_of(np.array([1.0, 2.0]), 1)
    tensor([[1., 2.]], dtype=torch.float64)
    """
    if isinstance(obs, dict):
        raise ValueError(
            "observations by name are for the filters of kbf.fit(...).online(); this one takes an "
            "array, in the order of its training"
        )
    found = tensor_of(obs, "obs")
    return found[None] if found is not None and found.ndim == 1 and batch == 1 else found


class RecordingFields(NamedTuple):
    """What a `Recording` holds."""

    states: Tensor
    obs: Tensor
    mask: Tensor | None = None
    controls: Tensor | None = None


class Recording(RecordingFields):
    """States and observations of one recording, or of a batch of equally long ones.

    Attributes:
        states: ``*b T d``, the latent states z_t, in the units of the data.
        obs: ``*b T *x``, the observations x_t.
        mask: ``*b T`` bool or None; False where nothing was observed. None means all observed.
        controls: ``*b T k`` or None: u_t is the control that acts in the move *to* step t (or the
            time that the move takes).

    >>> Recording(states=np.zeros((300, 2)), obs=np.zeros((300, 3)))
    Recording(states: 300 x 2 float64, obs: 300 x 3 float64)
    """

    __slots__ = ()

    def __new__(
        cls, states: Array, obs: Array, mask: Array | None = None, controls: Array | None = None
    ) -> Recording:
        """Tensors as they are; NumPy arrays become tensors, their masked entries NaN.

        Raises:
            ValueError: lists, arrays whose entries are no numbers, or a mask with other values than
                bool, 0 and 1.
        """
        return super().__new__(
            cls,
            tensor_of(states, "states"),
            tensor_of(obs, "obs"),
            mask_of(mask),
            tensor_of(controls, "controls"),
        )

    def __repr__(self) -> str:
        return html_repr.described("Recording", self._asdict())

    def _repr_html_(self) -> str:
        first = self.states.flatten(0, -3)[0] if self.states.ndim > 2 else self.states
        return html_repr.page("Recording", self._asdict(), first, "states")


class Transitions(NamedTuple):
    """Indices of the pairs (z_i, z_i') of a memory: source ``m`` and target ``m``."""

    source: Tensor
    target: Tensor


def as_recordings(
    memory: Recording | list[Recording] | tuple[Recording, ...] | None,
    *,
    allow_missing_sensors: bool = False,
) -> list[Recording]:
    """Check a memory and return it as a list of single recordings.

    Args:
        memory: one or more recordings.
        allow_missing_sensors: observations may hold NaN, where a sensor is missing.

    Raises:
        ValueError: there is no memory, a recording is not a ``T d`` / ``T *x`` pair of one length,
            the recordings differ in d, x or the width of their controls ``T k``, a state, a control
            or an observed value is NaN or infinite, or the memory is empty.
    """
    if memory is None:
        raise ValueError(
            "fit() needs a memory: filters are estimated from a memory of training states and "
            "observations, give fit() recordings"
        )
    recordings = [memory] if isinstance(memory, Recording) else list(memory)
    for s in recordings:
        if not isinstance(s, Recording):
            raise ValueError(
                "recordings are kbf.Recording(states, observations) or a list of such, "
                f"got a {type(s).__name__}"
            )
    if not (recordings := [Recording(*s) for s in recordings]):
        raise ValueError("the memory holds no recording")
    for k, s in enumerate(recordings):
        if s.states.ndim != 2 or s.obs.ndim < 2 or len(s.states) != len(s.obs):
            raise ValueError(
                f"recording {k}: states must be (T, d) and observations (T, ...) of one length, "
                f"got {tuple(s.states.shape)} and {tuple(s.obs.shape)}"
            )
        if (
            s.states.shape[1:] != recordings[0].states.shape[1:]
            or s.obs.shape[1:] != recordings[0].obs.shape[1:]
        ):
            raise ValueError(
                f"recording {k}: its states or observations have another shape than those of "
                "recording 0"
            )
        if s.mask is not None and s.mask.shape != s.states.shape[:1]:
            raise ValueError(
                f"recording {k}: mask must be ({len(s.states)},), got {tuple(s.mask.shape)}"
            )
        check_finite(s.states, f"recording {k}: states", advice=KNOWN_STATES)
        if not allow_missing_sensors:
            check_finite(s.obs if s.mask is None else s.obs[s.mask], f"recording {k}: observations")
        check_controls(s, recordings[0], k)
    return recordings


def check_controls(recording: Recording, first: Recording, k: int) -> None:
    """Raise a ValueError unless the controls of recording k are finite and of the right shape."""
    if (recording.controls is None) != (first.controls is None):
        without, given = (k, 0) if recording.controls is None else (0, k)
        raise ValueError(
            f"recording {without} has no controls, recording {given} has: give them for all "
            "recordings, or for none"
        )
    if recording.controls is None or first.controls is None:
        return
    length, width = len(recording.states), first.controls.shape[-1]
    if recording.controls.shape != (length, width):
        shape = tuple(recording.controls.shape)
        wrong = f"controls must be {(length, width)}, one row a step, got {shape}"
        raise ValueError(f"recording {k}: {wrong}")
    if bad := (~torch.isfinite(recording.controls)).any(-1).nonzero().flatten().tolist():
        rows = f"{len(bad)} of {length} rows (first: row {bad[0]})"
        wrong = f"controls hold NaN or infinite values in {rows}"
        raise ValueError(
            f"recording {k}: {wrong}; a control is always known, also that of the first row: "
            "fill them in"
        )


def control_width(memory: Recording | list[Recording]) -> int:
    """Components of the controls of recordings, 0 where they have none."""
    first = memory if isinstance(memory, Recording) else memory[0]
    return 0 if first.controls is None else first.controls.shape[-1]


def moves(recordings: list[Recording]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the pairs of successive states ``m d``, ``m d`` and the control ``m k`` of each move.

    The control is None for recordings without controls.
    """
    source, target = (
        torch.cat([s.states[part] for s in recordings]) for part in (slice(-1), slice(1, None))
    )
    acted = [s.controls[1:] for s in recordings if s.controls is not None]
    return source, target, torch.cat(acted) if acted else None


def as_float(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images in ``dtype``: uint8 divided by 255, floating-point numbers as they are.

    A finite number beyond the range of ``dtype`` becomes its largest: it stays a number.

    Raises:
        ValueError: whole numbers other than uint8, whose range is not known.

    >>> as_float(torch.tensor([0, 51, 255], dtype=torch.uint8), torch.float32)
    tensor([0.0000, 0.2000, 1.0000])
    """
    if x.dtype == torch.uint8:
        return x.to(dtype) / 255
    if not x.is_floating_point():
        raise ValueError(
            "images are uint8 or floating-point numbers around [0, 1], not "
            f"{str(x.dtype).removeprefix('torch.')}"
        )
    largest = torch.finfo(dtype).max
    return (
        x.to(dtype)
        if torch.finfo(x.dtype).max <= largest
        else torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)
    )


# What to do about NaN among observations.
MASK_MISSING = (
    "To treat such observations as missing, mark them in the mask: "
    "kbf.recording.mask_missing(recording) does it."
)
# What to do about NaN among states.
KNOWN_STATES = (
    "A filter learns from known states: leave such rows out, or fill them in; a recording may be "
    "cut there in two."
)


def check_finite(values: Tensor, name: str, *, advice: str = MASK_MISSING) -> None:
    """Raise a ValueError with ``advice`` if ``values`` hold NaN or infinite entries."""
    if values.is_floating_point() and not torch.isfinite(values).all():
        bad = (~torch.isfinite(values)).reshape(len(values), -1).any(-1).nonzero().flatten()
        raise ValueError(
            f"{name} hold NaN or infinite values in {len(bad)} of {len(values)} rows "
            f"(first: row {int(bad[0])}). {advice}"
        )


def mask_missing(recording: Recording) -> Recording:
    """Return the recording with non-finite observations masked and replaced by zeros."""
    finite = torch.isfinite(recording.obs).flatten(recording.states.ndim - 1).all(-1)
    mask = finite if recording.mask is None else finite & recording.mask
    keep = mask.reshape(mask.shape + (1,) * (recording.obs.ndim - mask.ndim))
    return recording._replace(
        obs=torch.where(keep, recording.obs, torch.zeros_like(recording.obs)), mask=mask
    )


def transitions(lengths: list[int], device: torch.device | None = None) -> Transitions:
    """Return the pairs (i, i + 1) of concatenated recordings that do not cross an end.

    >>> transitions([3, 2])
    Transitions(source=tensor([0, 1, 3]), target=tensor([1, 2, 4]))
    """
    parts = [
        torch.arange(s, s + length - 1, device=device)
        for s, length in zip([sum(lengths[:k]) for k in range(len(lengths))], lengths, strict=True)
    ]
    source = torch.cat(parts)
    return Transitions(source, source + 1)


def observed_pairs(recordings: list[Recording]) -> tuple[Tensor, Tensor]:
    """Return states ``n d`` and observations ``n *x`` of the observed steps of all recordings."""
    keep = [slice(None) if s.mask is None else s.mask for s in recordings]
    states = torch.cat([s.states[k] for s, k in zip(recordings, keep, strict=True)])
    return states, torch.cat([s.obs[k] for s, k in zip(recordings, keep, strict=True)])


def pad(recordings: list[Recording]) -> Recording:
    """Stack recordings of different lengths into one batch; steps after the end are masked.

    States of the padding are NaN (an error over them would be noticed), observations and controls
    zero, mask False.
    """
    length = max(len(s.states) for s in recordings)
    first = recordings[0]
    states = first.states.new_full((len(recordings), length, *first.states.shape[1:]), float("nan"))
    obs = first.obs.new_zeros((len(recordings), length, *first.obs.shape[1:]))
    mask = torch.zeros(len(recordings), length, dtype=torch.bool, device=first.states.device)
    controls = (
        None
        if first.controls is None
        else first.controls.new_zeros(len(recordings), length, first.controls.shape[-1])
    )
    for k, s in enumerate(recordings):
        t = len(s.states)
        states[k, :t], obs[k, :t] = s.states, s.obs
        mask[k, :t] = True if s.mask is None else s.mask
        if controls is not None and s.controls is not None:
            controls[k, :t] = s.controls
    return Recording(states, obs, mask, controls)


def observed(recording: Recording) -> Tensor:
    """Return observations ``T q``, NaN in masked steps."""
    if recording.mask is None:
        return recording.obs
    return torch.where(recording.mask[:, None], recording.obs, torch.nan)


def check_vectors(recordings: list[Recording], name: str) -> None:
    """Raise a ValueError if observations are not vectors; ``name`` is the model that needs them."""
    if recordings[0].obs.ndim != 2:
        raise ValueError(
            f"{name} needs observations that are vectors, got "
            f"{tuple(recordings[0].obs.shape[1:])}; {ENCODE_IMAGES}"
        )
