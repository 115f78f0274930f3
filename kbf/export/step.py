"""Exports one step of a filter as a program: torch.export, TorchScript or ONNX, without kbf.

The program is a function of one recording, (leaves of the state, observation, seen[, control][,
uniform][, normal]) -> (leaves of the next state, estimate[, covariance], rejected): it predicts,
and updates where ``seen`` is true. ``uniform`` and ``normal`` are random numbers, of filters that
draw (`kbf.runtime.random_inputs`). A missing sensor is NaN, in filters that allow it. The last leaf
of the state, ``rejections``, counts consecutive rejections; a lost track is re-initialised
(`kbf.filters.gating`). The program is read back from its file and compared with the filter before
the file replaces an older one.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf import __version__
from kbf.evaluation.calibration import Calibration, calibrated_covariance
from kbf.export import onnx_linalg, onnx_scalars
from kbf.filters.compile import quietly
from kbf.filters.gating import GatedFilter, GatedState
from kbf.filters.kernel.filter import KernelState
from kbf.filters.kernel_monte_carlo.filter import KernelMonteCarloFilter
from kbf.filters.protocols import (
    Filter,
    allows_missing_sensors,
    control_components,
)
from kbf.filters.selection.requirements import why_not_exported
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.runtime.atomic_files import replacing, write_json
from kbf.runtime.optional_dependencies import need
from kbf.runtime.random_inputs import RandomInputs

# Largest difference between program and filter, in standard deviations of the states; of
# covariances in products of two of them.
TOLERANCE = 1e-5
# Steps after which the comparison starts again from the filter's state, of filters that draw.
STEPS_WITH_DRAWS = 5
# Name of the description of a program; in an ONNX file the metadata property ``kbf``.
KEY = "kbf.json"

# Leaf of a program's state: the count of consecutive rejections.
REJECTIONS = "rejections"

# Loggers with messages of the exporters about themselves.
EXPORTER_LOGGERS = ("onnxscript", "onnx_ir", "torch.onnx")

aten = torch.ops.aten
# Operators that ONNX lacks, or ONNX Runtime lacks in float64.
SPELT_OUT: dict[Any, Any] = {
    aten.linalg_cholesky_ex.default: onnx_linalg.keep,
    aten.cholesky_solve.default: onnx_linalg.eliminate,
    aten.linalg_solve.default: onnx_linalg.solve,
    aten.linalg_eigh.default: onnx_linalg.eigh,
    aten.asin.default: onnx_linalg.asin,
    aten.atan.default: onnx_linalg.atan,
    aten.atan2.default: onnx_linalg.atan2,
    aten.searchsorted.Tensor: onnx_linalg.searchsorted,
    aten.linalg_solve_triangular.default: onnx_linalg.solve_triangular,
    aten.diagonal_scatter.default: onnx_linalg.diagonal_scatter,
    aten.elu.default: onnx_linalg.elu,
    aten.softplus.default: onnx_linalg.softplus,
    aten.lgamma.default: onnx_linalg.lgamma,
}


class ExportedStep(nn.Module):
    """One step of a filter as a function of tensors, which is recorded as a program."""

    def __init__(self, filter: Filter[Any], calibration: Calibration | None = None) -> None:
        """``calibration`` corrects the covariances, as `kbf filter` does."""
        super().__init__()
        self.filter: Any = filter
        self.calibration = calibration
        state: Any = filter.init(1)
        # an ensemble counts the rejections of its members under the same name
        own = REJECTIONS if REJECTIONS not in state._fields else f"all_{REJECTIONS}"
        self.kind, self.fields = type(state), [*state._fields, own]
        self.gate = GatedFilter(filter)
        self.spread: bool = calibrated_covariance(filter, state, calibration) is not None
        self.controlled: int = control_components(filter)
        self.drawn: dict[str, int] = {}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step; the random numbers are the last inputs."""
        kinds = [kind for kind, count in self.drawn.items() if count]
        given = dict(zip(kinds, inputs[len(inputs) - len(kinds) :], strict=True))
        with RandomInputs(**given):
            return self.step(*inputs[: len(inputs) - len(kinds)])

    def step(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One step with the random numbers of a `RandomInputs`."""
        n = len(self.fields)
        (*leaves, count), (obs, seen, *control) = inputs[:n], inputs[n:]
        after = self.gate.step(
            GatedState(self.kind(*leaves), count), obs, mask=seen, control=next(iter(control), None)
        )
        belief = after.inner
        rejections = torch.zeros_like(count) if after.rejections is None else after.rejections
        rejected = torch.zeros_like(seen) if after.rejected is None else after.rejected
        state = (*belief, rejections)
        C = calibrated_covariance(self.filter, belief, self.calibration)
        if C is None:
            return (*state, self.filter.estimate(belief), rejected)
        return (*state, self.filter.estimate(belief), C, rejected)

    def start(self) -> tuple[Tensor, ...]:
        """The leaves of the first state; particles are drawn from a generator with seed 0."""
        device = next(iter(self.filter.init(1))).device
        generator = torch.Generator(device).manual_seed(0)
        count = torch.zeros(1, dtype=torch.long)
        return (*self.filter.init(1, generator=generator), count)

    def inputs(self, obs: Shaped[Tensor, "1 *x"]) -> dict[str, Tensor]:
        """Example inputs by name: the first state, and an observation."""
        start = {
            f"state_{name}": leaf.contiguous().clone()
            for name, leaf in zip(self.fields, self.start(), strict=True)
        }
        found = (
            start
            | {"obs": obs, "seen": torch.ones(1, dtype=torch.bool)}
            | ({"control": obs.new_zeros(1, self.controlled)} if self.controlled else {})
        )
        with torch.no_grad(), RandomInputs() as counting:
            self.step(*found.values())
        self.drawn = counting.counts
        return found | self.random(torch.Generator().manual_seed(0))

    def random(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Random numbers of a step, by the names of the inputs; empty where nothing is drawn."""
        draw = {"uniform": torch.rand, "normal": torch.randn}
        return {
            kind: draw[kind](1, count, dtype=torch.float64, generator=generator)
            for kind, count in self.drawn.items()
            if count
        }

    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return (
            [f"next_{name}" for name in self.fields]
            + ["estimate"]
            + (["covariance"] if self.spread else [])
            + ["rejected"]
        )


class Exported(NamedTuple):
    """Largest differences between a program and its filter, in standard deviations of the states.

    Attributes:
        estimate: of the estimates.
        covariance: of the covariances.
        own: of the estimates, from the filter in its own precision, if the program has a higher
            one; otherwise None.
    """

    estimate: float
    covariance: float
    own: float | None = None


def export(
    filter: Filter[Any],
    path: Path,
    format: str,
    obs: Shaped[Tensor, "T *x"],
    scale: Float[Tensor, " d"],
    *,
    controls: Float[Tensor, "T k"] | None = None,
    calibration: Calibration | None = None,
    about: dict[str, Any] | None = None,
) -> Exported:
    """Write the step of a filter, and ``path``.json: inputs, outputs, the initial state.

    The ONNX program of a kernel filter in float32 works in float64 and is compared with the filter
    in float64: in float32, rounding errors of its linear solve differ by a few 1e-5 between
    libraries. So do the particles of a kernel Monte Carlo filter: in float32 a rounding error may
    select another particle.

    Args:
        filter: a copy is exported.
        path: the file.
        format: a key of `WRITERS`.
        obs: observations to compare on.
        scale: standard deviations of the states.
        controls: of these observations, for a filter with controls.
        calibration: of the covariances.
        about: entries that are added to the description.

    Raises:
        ValueError: a filter that cannot be recorded, a package that is not
            installed, or a program that differs by more than `TOLERANCE`.
    """
    if format not in WRITERS:
        raise ValueError(f"format must be one of {', '.join(WRITERS)}, got {format!r}")
    for package in PACKAGES.get(format, ()):  # before the work
        need(package, "export", f"format={format}")
    if reason := why_not_exported(filter):
        raise ValueError(reason)
    own, filter = filter, copied(filter)
    if format == "onnx":
        if isinstance(filter.init(1), KernelState):
            to_double(filter)
        particles_to_double(filter)
    step = ExportedStep(filter, calibration).eval().requires_grad_(False)
    inputs, outputs = step.inputs(obs[:1]), step.outputs()
    known = {"kbf": __version__, **(about or {})}
    known["inputs"] = [
        {"name": k, "shape": list(v.shape), "dtype": str(v.dtype).removeprefix("torch.")}
        for k, v in inputs.items()
    ]
    with torch.no_grad(), quietly(*EXPORTER_LOGGERS):
        known["outputs"] = [
            {
                "name": name,
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
            for name, value in zip(outputs, step(*inputs.values()), strict=True)
        ]
        known["allow_missing_sensors"] = allows_missing_sensors(filter)
        known["initial"] = {
            name: value.tolist() for name, value in inputs.items() if name.startswith("state_")
        }
        try:
            program = torch.export.export(step, tuple(inputs.values()))
        except Exception as error:
            raise ValueError(
                f"the step of this filter cannot be exported: {first_line(error)}"
            ) from error
        with replacing(path) as temporary:
            run = WRITERS[format](program, inputs, outputs, temporary, json.dumps(known))(temporary)
            apart = compare(step, run, inputs, obs, controls, scale)
            if not max(apart) <= TOLERANCE:
                raise ValueError(
                    f"the {format} program differs from the filter by {max(apart):.1e} standard "
                    "deviations of the state, more than "
                    f"{TOLERANCE:g}: it is not written"
                )
            other = not any(step.drawn.values()) and any(
                a.dtype != b.dtype for a, b in zip(own.init(1), filter.init(1), strict=True)
            )
            found = Exported(
                *apart,
                compare(ExportedStep(own), run, inputs, obs, controls, scale)[0] if other else None,
            )
    write_json(path.with_name(path.name + ".json"), known | {"difference": found._asdict()})
    return found


def copied(filter: Any) -> Any:
    """Return a copy without gradients; operators may depend on bandwidths that are learned."""
    leaves = [*filter.parameters(), *filter.buffers()] if isinstance(filter, nn.Module) else []
    return copy.deepcopy(
        filter, {id(leaf): leaf.detach().clone() for leaf in leaves if not leaf.is_leaf}
    )


def particles_to_double(part: Any) -> None:
    """Convert the kernel Monte Carlo filters that a filter consists of to float64, in place."""
    if isinstance(part, KernelMonteCarloFilter):
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(part, name, value.double())
    elif isinstance(part, dict | list):
        for each in part.values() if isinstance(part, dict) else part:
            particles_to_double(each)
    elif type(part).__module__.startswith("kbf.") and hasattr(part, "__dict__"):
        particles_to_double(vars(part))


def to_double(filter: Any) -> None:
    """Convert a filter to float64 in place, except encoders of images."""
    modules = list(filter.modules()) if isinstance(filter, nn.Module) else []
    kept = {part for module in modules if isinstance(module, Encoding) for part in module.modules()}
    for module in modules:
        if module not in kept:
            module._apply(
                lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, recurse=False
            )
        if isinstance(module, EncodedFilter):
            module.dtype = torch.float64


Run = Callable[..., Any]
Reader = Callable[[Path], Run]


def write_torch_export(
    program: Any, inputs: dict[str, Tensor], outputs: list[str], path: Path, known: str
) -> Reader:
    """Write a program for ``torch.export.load`` and AOTInductor."""
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={KEY: known})
    return lambda path: torch.export.load(path.open("rb")).module()


def write_torchscript(
    program: Any, inputs: dict[str, Tensor], outputs: list[str], path: Path, known: str
) -> Reader:
    """Write a trace of the exported program, for ``torch.jit.load`` and LibTorch in C++."""
    traced = torch.jit.trace(program.module(), tuple(inputs.values()), check_trace=False)
    with path.open("wb") as file:
        torch.jit.save(traced, file, _extra_files={KEY: known})
    return lambda path: torch.jit.load(str(path))


def write_onnx(
    program: Any, inputs: dict[str, Tensor], outputs: list[str], path: Path, known: str
) -> Reader:
    """Write a program for ONNX Runtime: operator set 20, weights inside the file."""
    onnxruntime = need("onnxruntime", "export", "format=onnx")
    spelt = program.run_decompositions(SPELT_OUT | onnx_scalars.SCALARS)
    try:
        made = torch.onnx.export(
            spelt,
            dynamo=True,
            input_names=list(inputs),
            output_names=outputs,
            opset_version=20,
            custom_translation_table=onnx_scalars.translations(),
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        found = re.search(r"aten\.\w+", str(error))
        raise ValueError(
            f"ONNX has no operator for this filter{f' ({found[0]})' if found else ''}: "
            "use torch_export"
        ) from error
    assert made is not None
    made.model.metadata_props["kbf"] = known
    made.save(path, external_data=False)

    def read(path: Path) -> Run:
        session = onnxruntime.InferenceSession(
            path.read_bytes(), providers=["CPUExecutionProvider"]
        )
        return lambda *given: [
            torch.from_numpy(value)
            for value in session.run(
                None, {k: v.numpy() for k, v in zip(inputs, given, strict=True)}
            )
        ]

    return read


WRITERS = {"torch_export": write_torch_export, "torchscript": write_torchscript, "onnx": write_onnx}
# Packages that a format requires; `torch.onnx` imports the first two itself.
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime")}


def compare(
    step: ExportedStep,
    run: Run,
    inputs: dict[str, Tensor],
    obs: Tensor,
    controls: Tensor | None,
    scale: Tensor,
) -> tuple[float, float]:
    """Return the largest differences of estimates and of covariances, as of `Exported`.

    Program and filter each continue from their own state; every seventh observation is missing.
    A program that draws continues from the filter's state every `STEPS_WITH_DRAWS` steps: particles
    that differ by rounding move apart, at last so far that resampling selects other ones.
    """
    n = len(step.fields)
    if not step.drawn:
        step.inputs(obs[:1])
    generator = torch.Generator().manual_seed(1)
    ours, theirs = step.start(), tuple(inputs.values())[:n]
    apart, units = [0.0, 0.0], (scale, scale[:, None] * scale)
    for t in range(len(obs)):
        given = (
            obs[t : t + 1],
            torch.tensor([t % 7 != 5]),
            *(() if controls is None else (controls[t : t + 1],)),
            *step.random(generator).values(),
        )
        a, b = step(*ours, *given), run(*theirs, *given)
        ours, theirs = tuple(a[:n]), tuple(b[:n])
        if any(step.drawn.values()) and t % STEPS_WITH_DRAWS == STEPS_WITH_DRAWS - 1:
            theirs = ours
        if not torch.equal(a[-1], b[-1]):  # one rejects what the other accepts
            return math.inf, math.inf
        for k, (x, y) in enumerate(zip(a[n:-1], b[n:-1], strict=True)):
            apart[k] = max(apart[k], ((x - y).abs() / units[k]).nan_to_num(torch.inf).max().item())
    return apart[0], apart[1]


def first_line(error: Exception) -> str:
    """Return the first line of the text of an error; its class if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
