"""Every candidate of the model selection exports: with controls, missing and held sensors, and as
a stack. Programs equal the filters on the same random numbers.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch

import kbf
from kbf.export import onnx_linalg
from kbf.export.step import TOLERANCE, WRITERS, ExportedStep, compare, export
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.gaussian.switching import SwitchingFilter
from kbf.filters.held import HeldReadings
from kbf.filters.kernel_monte_carlo.filter import KernelMonteCarloFilter
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.filters.regression.window import WindowRidge
from kbf.filters.rollout import rollout
from kbf.filters.selection.auto import BASELINES, LEARNED, PUBLISHED, SLOW
from kbf.filters.selection.requirements import why_not_exported
from kbf.recording import Recording
from kbf.rkhs.linalg import cholesky_by_column
from kbf.runtime.branches import all_branches
from kbf.runtime.random_inputs import RandomInputs

F64 = torch.float64
CANDIDATES = BASELINES | LEARNED | PUBLISHED | SLOW
STEPS = 12
"""Steps on which programs and filters are compared."""


def recording(steps=60, *, control=False, missing=0.0, seed=0):
    """Two states on a spiral, three noisy sensors of them."""
    g = torch.Generator().manual_seed(seed)
    A = 0.97 * torch.tensor([[0.95, 0.25], [-0.25, 0.95]], dtype=F64)
    C = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=F64)
    u, z, states = torch.randn(steps, 1, generator=g, dtype=F64), torch.zeros(2, dtype=F64), []
    for t in range(steps):
        z = A @ z + 0.2 * torch.randn(2, generator=g, dtype=F64) + (0.3 * u[t] if control else 0)
        states.append(z)
    obs = torch.stack(states) @ C.mT + 0.2 * torch.randn(steps, 3, generator=g, dtype=F64)
    obs = torch.where(torch.rand(steps, 3, generator=g) < missing, torch.nan, obs)
    return Recording(torch.stack(states), obs, controls=u if control else None)


def small(name):
    """A candidate with few particles, trees and updates."""
    model = CANDIDATES[name](0)
    for setting, value in (("particles", 20), ("updates", 3), ("iterations", 5)):
        if hasattr(model, setting):
            setattr(model, setting, value)
    return model


def written(filter, path, format, memory):
    """The differences of a program to its filter, in standard deviations of the state."""
    controls = None if memory.controls is None else memory.controls[:STEPS]
    return export(filter, path, format, memory.obs[:STEPS], memory.states.std(0), controls=controls)


CASES = [
    (name, kind)
    for name in CANDIDATES
    for kind in ("plain", "control", "missing")
    if kind != "missing" or hasattr(CANDIDATES[name](0), "allow_missing_sensors")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_candidate_exports(name, kind, tmp_path):
    model = small(name)
    memory = recording(control=kind == "control", missing=0.15 if kind == "missing" else 0.0)
    if kind == "missing":
        model.allow_missing_sensors = True
    if name not in SLOW:  # networks and trees have nothing to prepare
        model.prepare([memory])
    filter = model.fit([memory])
    assert why_not_exported(filter) is None
    assert max(written(filter, tmp_path / "step.pt2", "torch_export", memory)[:2]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_networks_and_trees_with_missing_sensors_are_onnx_programs(name, tmp_path):
    pytest.importorskip("onnxruntime")
    model, memory = small(name), recording(missing=0.15)
    model.allow_missing_sensors = True
    filter = model.fit([memory])
    assert max(written(filter, tmp_path / "step.onnx", "onnx", memory)[:2]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("format", WRITERS)
def test_a_stack_of_filters_exports(format, tmp_path):
    memory = recording()
    filters = {"kalman": LearnedKalman().fit([memory]), "window": WindowRidge(3).fit([memory])}
    weights = torch.tensor([[0.7, 0.4], [0.3, 0.6]], dtype=F64)
    stack = EnsembleFilter(filters, weights, torch.eye(2, dtype=F64).expand(2, 2, 2))
    assert why_not_exported(stack) is None
    assert max(written(stack, tmp_path / "step", format, memory)[:2]) < 1e-6


def of_two_regimes(memory):
    """The regimes are the motion of a recording, and the same motion backwards in time."""
    learned = LearnedUKF(kinds=("linear",), factors=(1.0,), switches=False)
    forward, back = (
        learned.fit([memory._replace(states=memory.states[way], obs=memory.obs[way])])
        for way in (torch.arange(len(memory.obs)), torch.arange(len(memory.obs)).flip(0))
    )
    P = torch.tensor([[0.95, 0.05], [0.1, 0.9]], dtype=F64)
    return SwitchingFilter(
        [forward, forward.with_inner(back.inner)], P, torch.tensor([0.6, 0.4], dtype=F64)
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torch_export", "torchscript", "onnx"])
def test_a_filter_of_two_regimes_exports(format, tmp_path):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    memory = recording(60)
    filter = of_two_regimes(memory)
    assert why_not_exported(filter) is None
    run = rollout(filter, memory.obs[None])
    assert 0.01 < float(run.state.probabilities[0, 0]) < 0.99  # both regimes have a part
    assert max(written(filter, tmp_path / "step", format, memory)[:2]) < 1e-6


@pytest.mark.slow
def test_held_sensors_export(tmp_path):
    memory = recording()
    obs = memory.obs.clone()
    obs[:, 2] = obs[torch.arange(len(obs)) // 3 * 3, 2]
    memory, held = memory._replace(obs=obs), torch.tensor([False, False, True])
    model = HeldReadings(LearnedKalman(), held)
    model.prepare([memory])
    assert max(written(model.fit([memory]), tmp_path / "a.pt2", "torch_export", memory)[:2]) < 1e-6


@pytest.mark.slow
def test_an_onnx_program_of_missing_sensors_runs_by_names(tmp_path):
    """Equal to `FittedFilter.online` where single sensors are missing."""
    pytest.importorskip("onnxruntime")
    memory = recording(120, missing=0.15)
    fitted = kbf.fit(
        states=memory.states.numpy(),
        observations=memory.obs.numpy(),
        model="kalman",
        allow_missing_sensors=True,
        progress=False,
    )
    fitted.export(tmp_path / "step.onnx", steps=5)
    program, online = kbf.load_onnx(tmp_path / "step.onnx"), fitted.online()
    for row in memory.obs[:30].numpy():
        ours, theirs = program.step(row), online.step(row)
        assert ours.to_dict() == pytest.approx(theirs.to_dict(), abs=1e-6)
        assert ours.std == pytest.approx(theirs.std, abs=1e-6)


def moving(memory):
    """A kernel Monte Carlo filter of a known model, with its random numbers."""
    model, sizes = kbf.ssm.oscillatory(), {"particles": 8, "draws": 2, "rank": 6}
    return KernelMonteCarloFilter(model, memory.states, **sizes)


def oscillation(steps=60):
    whole = kbf.ssm.simulate(
        kbf.ssm.oscillatory(),
        torch.tensor([[1.0, 0.0]], dtype=F64),
        steps,
        torch.Generator().manual_seed(0),
    )
    return Recording(whole.states[0], whole.obs[0])


def particles(memory):
    """A bootstrap filter of the same model."""
    return ParticleFilter(kbf.ssm.oscillatory(), particles=8).fit([memory])


@pytest.mark.slow
@pytest.mark.parametrize("make", [moving, particles])
def test_random_numbers_of_onnx_programs(make, tmp_path):
    """Particles in single precision are compared in double precision."""
    pytest.importorskip("onnxruntime")
    memory = oscillation()
    filter = make(memory)
    if make is moving:
        filter = moving(memory._replace(states=memory.states.float()))
    found = written(filter, tmp_path / "a.onnx", "onnx", memory)
    assert max(found[:2]) < 1e-6 and found.own is None


@pytest.mark.slow
@pytest.mark.parametrize("make", [moving, particles])
def test_random_numbers_are_inputs(make, tmp_path):
    """Equal on the same numbers, and another path on others."""
    memory = oscillation()
    filter = make(memory)
    assert max(written(filter, tmp_path / "a.pt2", "torch_export", memory)[:2]) < 1e-6
    step = ExportedStep(filter).eval()
    inputs = step.inputs(memory.obs[:1])
    assert {"uniform", "normal"} & inputs.keys()
    program = torch.export.load(tmp_path / "a.pt2").module()
    first = program(*inputs.values())
    again = program(*inputs.values())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = inputs | step.random(torch.Generator().manual_seed(9))
    assert not torch.equal(program(*other.values())[0], first[0])


def test_the_comparison_notices_other_random_numbers():
    memory = oscillation()
    step = ExportedStep(particles(memory)).eval()
    inputs = step.inputs(memory.obs[:1])
    scale, obs = memory.states.std(0), memory.obs[:STEPS]
    with torch.no_grad():
        assert max(compare(step, step, inputs, obs, None, scale)) == 0

        def shifted(*given):
            return step(*given[:-1], given[-1] + 0.01)

        assert max(compare(step, shifted, inputs, obs, None, scale)) > 1e-4

        def forgetful(*given):  # returns the particles of the step before
            return (given[0], *step(*given)[1:])

        assert max(compare(step, forgetful, inputs, obs, None, scale)) > 1e-4


@pytest.mark.parametrize("drawn", [0, 1])
def test_rounding_that_grows_is_no_difference_of_a_program_that_draws(drawn):
    """z' = 3 z + u mod 1: differences of 1e-13 are above 1 after 28 steps."""
    start = torch.tensor([[0.3]], dtype=torch.float64)

    class Expanding(ExportedStep):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.fields, self.drawn = ["z"], {"uniform": drawn}

        def start(self):
            return (start,)

        def inputs(self, obs):
            return {"state_z": start, "obs": obs, "seen": torch.tensor([True])}

        def forward(self, z, obs, seen, *u, error=0.0):
            after = (3 * z + sum(u) + error) % 1
            return after, after, torch.tensor([False])

    step = Expanding()
    obs = torch.zeros(50, 1, dtype=torch.float64)
    inputs, scale = step.inputs(obs[:1]), torch.ones(1, dtype=torch.float64)
    apart = compare(step, partial(step, error=1e-13), inputs, obs, None, scale)[0]
    assert (apart < TOLERANCE) == bool(drawn)
    assert compare(step, partial(step, error=1e-4), inputs, obs, None, scale)[0] > TOLERANCE


def test_a_step_with_all_branches_is_the_step():
    memory = recording()
    filter = LearnedKalman().fit([memory])
    plain = rollout(filter, memory.obs[None]).estimates
    with all_branches():
        torch.testing.assert_close(rollout(filter, memory.obs[None]).estimates, plain)


SAMPLES = 20_000


def numbers():
    g = torch.Generator().manual_seed(0)
    shape = (1, 60 * SAMPLES)
    return torch.rand(shape, generator=g, dtype=F64), torch.randn(shape, generator=g, dtype=F64)


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_gamma_numbers_have_the_moments_of_the_distribution(shape):
    """Mean and variance are both the shape; the tolerance is five standard errors and more."""
    with RandomInputs(*numbers()):
        drawn = torch._standard_gamma(torch.full((SAMPLES,), shape, dtype=F64))
    assert drawn.mean().item() == pytest.approx(shape, abs=5 * (shape / SAMPLES) ** 0.5)
    assert drawn.var().item() == pytest.approx(shape, rel=0.1)
    assert (drawn > 0).all()


def test_samplers_have_their_distributions():
    p = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=F64)
    with RandomInputs(*numbers()):
        chosen = torch.multinomial(p.expand(SAMPLES, 4), 1, replacement=True)
        whole = torch.randint(3, (SAMPLES,), generator=torch.Generator())
        coins = torch.bernoulli(torch.full((SAMPLES,), 0.3, dtype=F64))
        uniform, normal = torch.rand(5, 2), torch.randn((4, 3), dtype=F64)
    shares = chosen.flatten().bincount(minlength=4) / SAMPLES
    torch.testing.assert_close(shares.double(), p, atol=0.02, rtol=0)
    assert (whole.bincount() / SAMPLES - 1 / 3).abs().max() < 0.02 and whole.max() == 2
    assert coins.mean().item() == pytest.approx(0.3, abs=0.02)
    assert uniform.shape == (5, 2) and normal.shape == (4, 3) and normal.dtype == F64


@pytest.mark.parametrize("mean", [0.001, 0.3, 3.0, 9.99, 10.0, 30.0, 1000.0])
def test_poisson_numbers_have_the_distribution(mean):
    """The shares below 25 quantiles are within five standard errors."""
    with RandomInputs(numbers()[0], None):
        drawn = torch.poisson(torch.full((SAMPLES,), mean, dtype=F64)).numpy()
    law = scipy.stats.poisson(mean)
    at = np.unique(law.ppf(np.linspace(0.02, 0.98, 25)))
    below = (drawn[:, None] <= at).mean(0)
    error = (law.cdf(at) * law.sf(at) / SAMPLES) ** 0.5
    assert (abs(below - law.cdf(at)) <= 5 * error + 1e-12).all()


@pytest.mark.slow
def test_a_kernel_monte_carlo_filter_of_counts_exports(tmp_path):
    memory = recording(80)
    rates = memory.states.exp()
    counts = torch.poisson(rates, generator=torch.Generator().manual_seed(3))
    model = KernelMonteCarlo(particles=8, draws=2, rank=6, density="poisson")
    filter = model.fit([memory._replace(obs=counts)])
    assert why_not_exported(filter) is None
    found = written(filter, tmp_path / "a.pt2", "torch_export", memory._replace(obs=counts))
    assert max(found[:2]) < 1e-6


class Constants(torch.nn.Module):
    """Operations with Python numbers that are not floats of single precision."""

    def forward(self, x):
        parts = [x + 0.1, x * 0.1, x.clamp(0.1, 0.7), x.clamp_max(0.3), x.clamp_min(0.3)]
        parts += [torch.where(x > 0.4, 0.1, x), torch.where(x > 0.4, x, 0.1)]
        parts += [x.masked_fill(x > 0.4, 0.1), torch.full_like(x, 0.1), x.new_full((9,), 0.1)]
        return torch.stack([*parts, torch.full((9,), 0.1, dtype=x.dtype), torch.lgamma(9 * x)])


def test_numbers_in_onnx_programs_have_double_precision(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    x = torch.rand(9, dtype=F64, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(Constants(), (x,))
    WRITERS["onnx"](program, {"x": x}, ["y"], tmp_path / "a.onnx", "{}")
    session = onnxruntime.InferenceSession((tmp_path / "a.onnx").read_bytes())
    [found] = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, Constants()(x).numpy(), rtol=0, atol=1e-14)


def test_spelt_out_functions_are_pytorchs():
    g = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-1, 1, 1001, dtype=F64), torch.tensor([0.5, -0.5], dtype=F64)])
    torch.testing.assert_close(onnx_linalg.asin(x), x.asin(), atol=1e-14, rtol=1e-12)
    angle = torch.linspace(-math.pi, math.pi, 4001, dtype=F64)
    radius = torch.logspace(-3, 3, 4001, dtype=F64)
    turned = radius * angle.sin(), radius * angle.cos()
    torch.testing.assert_close(onnx_linalg.atan2(*turned), torch.atan2(*turned), rtol=0, atol=1e-14)
    assert onnx_linalg.atan2(0 * x, 0 * x).eq(0).all()
    torch.testing.assert_close(onnx_linalg.atan(9 * x), torch.atan(9 * x), rtol=0, atol=1e-14)
    a = torch.rand(3, 4, 4, generator=g, dtype=F64) + 2 * torch.eye(4, dtype=F64)
    b = torch.randn(3, 4, 2, generator=g, dtype=F64)
    for upper, own in ((True, a.triu()), (False, a.tril())):
        wanted = torch.linalg.solve_triangular(own, b, upper=upper)
        torch.testing.assert_close(onnx_linalg.solve_triangular(own, b, upper=upper), wanted)
        right = onnx_linalg.solve_triangular(own, b.mT, upper=upper, left=False)
        torch.testing.assert_close(right @ own, b.mT)
    rows = torch.rand(2, 6, generator=g).sort(-1).values
    points = torch.cat([torch.rand(2, 5, generator=g), rows[:, :2]], 1)
    for right in (False, True):
        wanted = torch.searchsorted(rows, points, right=right)
        assert torch.equal(onnx_linalg.searchsorted(rows, points, right=right), wanted)
    y = torch.logspace(-6, 5, 999, dtype=F64)
    torch.testing.assert_close(onnx_linalg.lgamma(y), torch.lgamma(y), rtol=1e-14, atol=1e-14)
    S = a @ a.mT
    torch.testing.assert_close(cholesky_by_column(S), torch.linalg.cholesky(S))
    assert cholesky_by_column(-S).isnan().any()
