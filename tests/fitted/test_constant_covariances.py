"""Filters without covariances have those of their held-out errors, at every entrance."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main
from kbf.evaluation.calibration import calibrate_constant

COLUMNS = {"states": ["x", "y"], "observations": ["a", "b"]}


def recorded(steps: int, seed: int = 0) -> pd.DataFrame:
    """Two autoregressions, seen with errors of unlike sizes."""
    rng, z = np.random.default_rng(seed), np.zeros((steps, 2))
    for t in range(1, steps):
        z[t] = [0.5, 0.8] * z[t - 1] + rng.normal(size=2)
    seen = z + [0.2, 0.6] * rng.normal(size=(steps, 2))
    return pd.DataFrame({"x": 100 + 10 * z[:, 0], "y": z[:, 1], "a": seen[:, 0], "b": seen[:, 1]})


def test_the_covariance_is_that_of_the_errors():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4000, 2, generator=generator).double()
    errors = torch.randn(4000, 2, generator=generator).double() * torch.tensor([1.0, 5.0])
    calibration, zeros = calibrate_constant(states, states + errors)
    C = calibration.covariance(zeros[:1])[0]
    torch.testing.assert_close(C, errors.square().mean(0).diag(), rtol=1e-6, atol=1e-9)
    inside = calibration.contains(states, states + errors, zeros, 0.9)
    assert float(inside.double().mean()) == pytest.approx(0.9, abs=0.005)


def test_intervals_of_a_regression_of_single_rows():
    fitted = kbf.fit(recorded(600), **COLUMNS, model="frame", progress=False)
    assert fitted.capabilities["intervals"]
    new = recorded(2000, seed=1)
    found = fitted.filter(new)
    assert found.std is not None and np.ptp(found.std, axis=0) == pytest.approx(0, abs=1e-12)
    errors = found.mean - new[["x", "y"]].to_numpy()
    assert found.std[0] == pytest.approx(np.sqrt((errors**2).mean(0)), rel=0.15)
    scores = fitted.evaluate(new, baselines=False)
    assert scores.coverage_95.between(0.93, 0.975).all()
    assert fitted.online().step({"a": new.a[0], "b": new.b[0]}).std["x"] == found.std[0, 0]
    without = kbf.fit(recorded(200), **COLUMNS, model="frame", progress=False, calibrate=False)
    assert without.filter(new[:5]).std is None
    with pytest.raises(ValueError, match="there are no intervals"):
        without.filter(new[:5]).interval()


def test_networks_have_them_on_both_doors_and_after_a_checkpoint(tmp_path, capsys):
    recorded(300).to_csv(tmp_path / "a.csv", index=False)
    words = ["data=own", f"data.path={tmp_path}/a.csv", "data.states=[x,y]", "model=lstm"]
    words += ["data.observations=[a,b]", "model.training.epochs=2", "logger=none"]
    words += ["trainer.enable_progress_bar=false", f"run_dir={tmp_path}/run"]
    with pytest.warns(UserWarning, match="no intervals: the network was fitted to all recordings"):
        assert main(["train", *words]) == 0
    assert kbf.load(tmp_path / "run").filter(recorded(20)).std is None
    assert main(["train", *words, "data.validation=0.2", "overwrite=true"]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 0.8 < metrics["test.coverage_95"] <= 1 and "test.coverage_95_raw" not in metrics
    checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
    line = [f"checkpoint={checkpoint}", f"input={tmp_path}/a.csv", f"output={tmp_path}/o.csv"]
    assert main(["filter", *line]) == 0
    fitted = kbf.load(checkpoint)
    found, wanted = pd.read_csv(tmp_path / "o.csv"), fitted.filter(recorded(300))
    assert wanted.std is not None
    assert found.x_std.to_numpy() == pytest.approx(wanted.std[:, 0], rel=1e-3)
    assert wanted.to_frame().x_lower.lt(wanted.mean[:, 0]).all()
