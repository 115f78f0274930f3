"""``kbf export``: programs that do what the filter does, in three formats."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from kbf.cli import main
from kbf.evaluation.calibration import Calibration
from kbf.export import onnx_linalg
from kbf.export.step import WRITERS, compare, export
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.neural.backprop_kf import BackpropKF
from kbf.filters.neural.gru import GRUImages
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.neural.rkn import RKNFilter
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.rollout import rollout
from kbf.fitted.model import cast_all
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.recording import Recording
from kbf.ssm import oscillatory, simulate

F64 = torch.float64
onnxruntime = pytest.importorskip("onnxruntime")


def recording(steps=60, seed=0):
    whole = simulate(
        oscillatory(),
        torch.tensor([[1.0, 0.0]], dtype=F64),
        steps,
        torch.Generator().manual_seed(seed),
    )
    return Recording(whole.states[0], whole.obs[0])


def fitted(model, memory=None):
    memory = memory or recording()
    model.prepare([memory])
    return model.fit([memory])


MODELS = {
    "kbf": lambda: fitted(SimulatedKBF(points=60, run=600, rank=5)),
    "kbf_paper": lambda: fitted(KBF(rank=6, normalise=False)),
    "normalised": lambda: fitted(KBF(rank=6)),
    "dense": lambda: fitted(KBF(rank=None), recording(8)),
    "original": lambda: fitted(KBF(rank=8, rule="original", ratio="tikhonov", normalise=False)),
    "kalman": lambda: fitted(LearnedKalman()),
    "lstm": lambda: fitted(
        LSTMFilter(
            2, 2, hidden=8, sizes=(8, 4), generator=torch.Generator().manual_seed(0)
        ).double()
    ),
    "frame": lambda: fitted(FrameRegression()),
}
NETS = {"rkn": RKNFilter, "backprop_kf": BackpropKF, "gru_images": GRUImages}
"""Trained end to end."""


def written(filter, path, format, **more):
    obs = recording(20, seed=1).obs
    return export(filter, path, format, obs, torch.full((2,), 0.7), **more)


FORMATS = [
    (name, format)
    for name in MODELS
    for format in WRITERS
    if format != "torchscript" or name in ("kbf", "lstm")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [(n, f) for n, f in FORMATS if n in ("original", "kalman", "lstm") or f == "torchscript"],
)
def test_an_outlier_does_not_destroy_a_program(name, format, tmp_path):
    """Wild observations and NaN that are said to be seen: the program passes them over, as the
    filter does.
    """
    filter, path = MODELS[name](), tmp_path / "step"
    written(filter, path, format)
    if format == "onnx":
        session = onnxruntime.InferenceSession(
            path.read_bytes(), providers=["CPUExecutionProvider"]
        )
        names = [entry.name for entry in session.get_inputs()]

        def program(*given):
            return [
                torch.from_numpy(x)
                for x in session.run(
                    None, {k: v.numpy() for k, v in zip(names, given, strict=True)}
                )
            ]
    else:
        program = (
            torch.export.load(path).module() if format == "torch_export" else torch.jit.load(path)
        )
    about = json.loads(path.with_name("step.json").read_text())
    dtypes = [getattr(torch, entry["dtype"]) for entry in about["inputs"]]
    state = [
        torch.tensor(value, dtype=dtype)
        for value, dtype in zip(about["initial"].values(), dtypes, strict=False)
    ]
    obs = recording(30, seed=2).obs[:, None]
    wild, mask = obs.clone(), torch.ones(1, 30, dtype=torch.bool)
    for t, size in ((4, 30.0), (5, 1e30), (6, 1e300), (7, torch.nan)):
        wild[t] *= size
        mask[0, t] = name == "lstm" and size == size  # it can take any number
    at = [entry["name"] for entry in about["outputs"]].index("estimate")
    found = []
    for x in wild:
        out = program(*state, x.to(dtypes[len(state)]), torch.tensor([True]))
        state = list(out[: len(state)])
        found.append(out[at].double())
    assert torch.isfinite(torch.stack(found)).all()
    plain = (
        rollout(filter, torch.where(mask.T[..., None], wild, 0).transpose(0, 1), mask=mask)
        .estimates[0]
        .double()
        .detach()
    )
    torch.testing.assert_close(torch.cat(found), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format"), FORMATS)
def test_program_is_the_filter(name, format, tmp_path):
    filter = MODELS[name]()
    found = written(filter, tmp_path / "step", format)
    rounding = 1e-5 if name == "original" else 1e-12  # its system is squared
    assert max(found[:2]) < (rounding if format == "onnx" else 1e-14)
    assert (found.own is None) == (name != "kbf" or format != "onnx")
    assert found.own is None or 1e-8 < found.own < 1e-3, "the filter itself works in float32"
    assert {path.name for path in tmp_path.iterdir()} == {"step", "step.json"}
    about = json.loads((tmp_path / "step.json").read_text())
    spread = "estimate" if name in ("lstm", "frame") else "covariance"
    assert [entry["name"] for entry in about["outputs"]][-2:] == [spread, "rejected"]
    assert [entry["name"] for entry in about["inputs"]][-2:] == ["obs", "seen"]


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(
    ("format", "dtype"), [("torch_export", torch.float32), ("onnx", torch.float32), ("onnx", F64)]
)
def test_nets_that_are_trained_end_to_end_with_controls_and_without(
    name, k, format, dtype, tmp_path
):
    torch.manual_seed(0)
    both = [recording(), recording(20, seed=1)]
    both = [s._replace(controls=s.obs[:, :1].sin() if k else None) for s in both]
    whole, new = cast_all(both, dtype)
    filter = fitted(NETS[name](2, 2, controls=k).to(dtype), whole)
    found = export(
        filter, tmp_path / "step", format, new.obs, torch.full((2,), 0.7), controls=new.controls
    )
    assert max(found[:2]) < {F64: 1e-11, torch.float32: 1e-5}[dtype]
    about = json.loads((tmp_path / "step.json").read_text())
    assert ("control" in [entry["name"] for entry in about["inputs"]]) == bool(k)


@pytest.mark.slow
def test_onnx_runs_without_us(tmp_path):
    """A rollout by ONNX Runtime alone, from what the file says of itself, against `rollout` with a
    mask.
    """
    filter, obs = MODELS["kbf_paper"](), recording(20, seed=1).obs
    written(filter, tmp_path / "step.onnx", "onnx", about={"model": "mine"})
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"))
    about = json.loads(session.get_modelmeta().custom_metadata_map["kbf"])
    assert about["model"] == "mine" and about["initial"].keys() == {
        "state_weights",
        "state_rejections",
    }
    assert [entry.name for entry in session.get_inputs()] == [
        entry["name"] for entry in about["inputs"]
    ]
    mask = torch.arange(20) % 3 != 1
    weights, rejections, found, spreads = (
        *(np.array(value) for value in about["initial"].values()),
        [],
        [],
    )
    for t in range(20):
        seen = {"obs": obs[t : t + 1].numpy(), "seen": mask[t : t + 1].numpy()}
        given = {"state_weights": weights, "state_rejections": rejections, **seen}
        weights, rejections, estimate, covariance = session.run(
            ["next_weights", "next_rejections", "estimate", "covariance"], given
        )
        found.append(torch.from_numpy(estimate[0]))
        spreads.append(torch.from_numpy(covariance[0]))
    wanted = rollout(filter, obs[None], mask=mask[None])
    torch.testing.assert_close(torch.stack(found), wanted.estimates[0].detach())
    torch.testing.assert_close(spreads[-1], filter.covariance(wanted.state)[0].detach())


def test_covariances_are_calibrated(tmp_path):
    filter, floor = MODELS["kalman"](), torch.tensor([0.1, 0.2], dtype=F64)
    calibration = Calibration(
        torch.tensor(2.0, dtype=F64), floor, torch.ones(3, dtype=F64), torch.tensor(3)
    )
    written(filter, tmp_path / "step.pt2", "torch_export", calibration=calibration)
    run = torch.export.load(tmp_path / "step.pt2").module()
    none = torch.zeros(1, dtype=torch.long)
    mean, cov, _, _, covariance, _ = run(
        *filter.init(1), none, torch.zeros(1, 2, dtype=F64), torch.tensor([True])
    )
    torch.testing.assert_close(covariance, 2 * (cov + floor.diag()))


class Small(nn.Module):
    features = 3

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )

    def forward(self, x):
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "circle"), [*((name, True) for name in WRITERS), ("torch_export", False)]
)
def test_encoders_of_images_are_inside(format, circle, tmp_path):
    torch.manual_seed(0)
    code = Encoding([Small(), Small()], 2)
    states = recording().states
    code.prepare((states / states.norm(dim=1, keepdim=True) if circle else states).float())
    assert bool(code.circle) == circle
    filter = EncodedFilter(code, MODELS["kbf"](), torch.float32).eval()
    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = export(filter, tmp_path / "step", format, images, torch.full((2,), 0.7))
    assert found.estimate < 1e-5 and filter.inner.states.dtype == torch.float32, (
        "the filter itself is left as it was"
    )


@pytest.mark.parametrize(
    ("apart", "told"),
    [(1e-3, "differs from the filter"), (float("nan"), "differs from the filter")],
)
def test_a_program_that_differs_is_not_written(apart, told, tmp_path, monkeypatch):
    honest = WRITERS["torch_export"]

    def wrong(*given):
        read = honest(*given)
        return lambda path: lambda *inputs: tuple(leaf + apart for leaf in read(path)(*inputs))

    monkeypatch.setitem(WRITERS, "torch_export", wrong)
    with pytest.raises(ValueError, match=told):
        written(MODELS["kalman"](), tmp_path / "step.pt2", "torch_export")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_not_exported(tmp_path):
    with pytest.raises(
        ValueError, match="format must be one of torch_export, torchscript, onnx, got 'tflite'"
    ):
        written(MODELS["kalman"](), tmp_path / "step", "tflite")
    with pytest.raises(ValueError, match="ONNX has no operator for this filter"):
        written(
            fitted(KBF(rank=None, rule="pseudo_inverse"), recording(8)), tmp_path / "step", "onnx"
        )
    steered = recording(40)._replace(
        controls=torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None].sin()
    )
    drawn = fitted(SimulatedKBF(points=20, draws=2, run=400, rank=8), steered)
    with pytest.raises(
        ValueError, match="computes its transition in each step, and is not exported; kbf_tuned"
    ):
        written(drawn, tmp_path / "step", "onnx")
    looking = MODELS["normalised"]()
    looking.rule.register_forward_hook(lambda _, inputs, w: w if bool((w > 0).any()) else None)
    with pytest.raises(ValueError, match="the step of this filter cannot be exported"):
        written(looking, tmp_path / "step", "torch_export")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("n", [1, 2, 9, 40])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_elimination_solves(n, dtype, normal):
    a, b = normal(3, n, n + 2), normal(3, n, 2)
    a = (a @ a.mT + 0.01 * n * torch.eye(n, dtype=F64)).to(dtype)
    kept, info = onnx_linalg.keep(a)
    assert kept is a and not info.any()
    solved = onnx_linalg.eliminate(b.to(dtype), a)
    tolerance = {F64: 1e-11, torch.float32: 1e-3}[dtype]
    torch.testing.assert_close(
        solved.double(), torch.linalg.solve(a.double(), b), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_any_regular_system_is_solved(n, normal):
    a, b = normal(3, n, n), normal(3, n, 2)
    a[0] = torch.eye(n, dtype=F64).flip(0)  # no pivot on the diagonal
    torch.testing.assert_close(
        onnx_linalg.solve(a, b), torch.linalg.solve(a, b), rtol=1e-9, atol=1e-9
    )


def test_elimination_of_an_indefinite_matrix_is_nan():
    assert (
        onnx_linalg.eliminate(torch.ones(2, 1), torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        .isnan()
        .any()
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_jacobi_rotations_diagonalise(n, normal):
    a = normal(3, n, n)
    a = a + a.mT
    a[0] = torch.eye(n, dtype=F64)  # equal eigenvalues, zeros beside the diagonal
    values, vectors = onnx_linalg.eigh(a)
    torch.testing.assert_close(values.sort(-1).values, torch.linalg.eigvalsh(a))
    torch.testing.assert_close((vectors * values[:, None]) @ vectors.mT, a)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(n, dtype=F64).expand(3, n, n))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_rounds_hold_every_pair_once(n):
    pairs = [
        tuple(sorted(pair))
        for first, second in onnx_linalg.rounds(n)
        for pair in zip(first, second, strict=True)
    ]
    assert sorted(pairs) == [(i, j) for i in range(n) for j in range(i + 1, n)]
    assert all(len({*first, *second}) == 2 * len(first) for first, second in onnx_linalg.rounds(n))


def test_diagonal_scatter(normal):
    a, values = normal(3, 4, 4), normal(3, 4)
    torch.testing.assert_close(
        onnx_linalg.diagonal_scatter(a, values), torch.diagonal_scatter(a, values, dim1=-2, dim2=-1)
    )


def test_softplus(normal):
    x = torch.cat([20 * normal(50), torch.tensor([0.0, -800.0, 800.0], dtype=torch.float64)])
    for beta in (1.0, 0.3):
        torch.testing.assert_close(
            onnx_linalg.softplus(x, beta),
            torch.logaddexp(torch.zeros_like(x), beta * x) / beta,
            rtol=1e-12,
            atol=1e-15,
        )


def test_elu(normal):
    x = 3 * normal(50)
    torch.testing.assert_close(onnx_linalg.elu(x), nn.functional.elu(x))
    torch.testing.assert_close(
        onnx_linalg.elu(x, 1.7, 1.1, 0.6), torch.ops.aten.elu(x, 1.7, 1.1, 0.6)
    )


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A checkpoint, exported by the command."""
    directory = tmp_path_factory.mktemp("export")
    train = [
        "data=oscillatory",
        "n_train=60",
        "particles=50",
        "data.n_test=10",
        "logger=none",
        "trainer.enable_progress_bar=false",
    ]
    assert main(["train", "model=kalman", *train, f"run_dir={directory}"]) == 0
    checkpoint = directory / "checkpoints" / "best.ckpt"
    assert (
        main(["export", f"checkpoint={checkpoint}", f"out={directory}/step.onnx", "steps=5"]) == 0
    )
    return directory


@pytest.mark.slow
def test_command(command, capsys):
    about = json.loads((command / "step.onnx.json").read_text())
    assert (
        about["states"] == ["z_0", "z_1"]
        and about["observations"] == ["x_0", "x_1"]
        and about["model"] == "kalman"
    )
    assert about["difference"]["estimate"] < 1e-12
    for words, told in (
        ["format=tflite", "format must be"],
        ["steps=0", "steps must be a whole number"],
    ):
        checkpoint = command / "checkpoints" / "best.ckpt"
        assert main(["export", f"checkpoint={checkpoint}", f"out={command}/other", words]) == 2
        assert told in capsys.readouterr().err
    assert not (command / "other").exists()


def test_comparison_is_strict(tmp_path):
    """Programs of two filters differ."""
    from kbf.export.step import ExportedStep

    one, other = MODELS["kalman"](), fitted(LearnedKalman(), recording(60, seed=5))
    step, obs = ExportedStep(one), recording(20, seed=1).obs
    assert compare(step, ExportedStep(one), step.inputs(obs[:1]), obs, None, torch.ones(2)) == (
        0.0,
        0.0,
    )
    assert (
        min(compare(step, ExportedStep(other), step.inputs(obs[:1]), obs, None, torch.ones(2)))
        > 1e-4
    )
