"""`kbf.load_onnx`: a program in the columns of the filter that it was exported from."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kbf

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def data() -> pd.DataFrame:
    """A heading in degrees and a speed, driven by a control; 10 rows a second."""
    rng = np.random.default_rng(0)
    turn = rng.normal(size=240)
    heading = np.cumsum(5 * turn) + rng.normal(size=240)
    speed = 1 + 0.4 * np.sin(np.arange(240) / 10)
    seen = np.deg2rad(heading)
    frame = pd.DataFrame({"turn": turn, "heading": (heading + 180) % 360 - 180, "speed": speed})
    frame["east"] = speed * np.cos(seen) + 0.05 * rng.normal(size=240)
    frame["north"] = speed * np.sin(seen) + 0.05 * rng.normal(size=240)
    frame.index = pd.date_range("2026-01-05", periods=240, freq="100ms", name="time")
    return frame


@pytest.fixture(scope="module")
def fitted(data):
    return kbf.fit(
        data,
        states=["heading", "speed"],
        observations=["east", "north"],
        controls=["turn"],
        angles={"heading": "degrees"},
        bounds={"speed": [0.9, None]},
        missing=[-999],
        model="kalman",
        progress=False,
    )


@pytest.fixture(scope="module")
def program(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "step.onnx"
    fitted.export(path)
    return path


def rows(data: pd.DataFrame) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Observations and controls; one reading is missing, and one has the code of a missing one."""
    new = data.iloc[:30].copy()
    new.iloc[3, new.columns.get_loc("east")] = np.nan
    new.iloc[5, new.columns.get_loc("north")] = -999
    sides = (new[["east", "north"]], new[["turn"]])
    return list(zip(*(side.to_dict("records") for side in sides), strict=True))


def test_a_program_steps_as_the_filter_does(data, fitted, program):
    live, loaded = fitted.online(), kbf.load_onnx(program)
    assert loaded.columns == fitted.columns
    for obs, control in rows(data):
        ours, theirs = live.step(obs, control=control), loaded.step(obs, control=control)
        assert theirs.to_dict() == pytest.approx(ours.to_dict(), abs=1e-8)
        assert theirs.std == pytest.approx(ours.std, rel=1e-8)
        assert theirs.rejected == ours.rejected
        for level in (0.5, 0.95, 0.9999):
            for name, ends in ours.interval(level).items():
                assert theirs.interval(level)[name] == pytest.approx(ends, abs=1e-3)
    ours = live.predict(0.3, control={"turn": 1.0})
    assert loaded.predict(0.3, control={"turn": 1.0})["heading"] == pytest.approx(ours["heading"])


def test_a_sensor_that_lacks_a_column_is_missing_as_a_whole(data, tmp_path):
    """By column or by sensor, with absent columns, as of `FittedFilter.online`."""
    data = data.assign(wheel=data["speed"] + 0.1 * np.cos(np.arange(240)))
    fitted = kbf.fit(
        data,
        states=["heading", "speed"],
        observations={"gps": ["east", "north"], "odometer": ["wheel"]},
        angles={"heading": "degrees"},
        allow_missing_sensors=True,
        model="kalman",
        progress=False,
    )
    fitted.export(tmp_path / "step.onnx")
    live, loaded = fitted.online(), kbf.load_onnx(tmp_path / "step.onnx")
    for obs in (
        {"gps": (0.5, 0.8), "odometer": (1.0,)},
        {"east": 0.9, "north": None, "wheel": 1.1},
        {"gps": None, "odometer": (1.2,)},
        {"wheel": 0.9},
        {"east": 0.2, "wheel": None},
    ):
        ours, theirs = live.step(obs), loaded.step(obs)
        assert theirs.to_dict() == pytest.approx(ours.to_dict(), abs=1e-8), obs
        assert theirs.std == pytest.approx(ours.std, rel=1e-8)
    with pytest.raises(kbf.DataError, match=r"gps must be 2 numbers \(east, north\), got 3"):
        loaded.step({"gps": (1, 2, 3)})


def test_a_state_is_saved_and_a_forecast_leaves_it(data, program, tmp_path):
    first, second = kbf.load_onnx(program), kbf.load_onnx(program)
    for obs, control in rows(data):
        first.step(obs, control=control)
    first.save(tmp_path / "state.npz")
    second.load(tmp_path / "state.npz")
    controls = [{"turn": 0.1}, {"turn": 0.2}]
    ahead = first.forecast(2, controls=controls)
    assert [dict(each) for each in second.forecast(2, controls=controls)] == list(map(dict, ahead))
    assert dict(first.predict(control=controls[0])) == dict(ahead[0])
    with np.load(tmp_path / "state.npz") as stored:
        np.savez(tmp_path / "another.npz", **(dict(stored) | {"program": "0" * 64}))
    with pytest.raises(ValueError, match="written by another program"):
        second.load(tmp_path / "another.npz")
    np.savez(tmp_path / "other.npz", state_mean=np.zeros(3))
    with pytest.raises(ValueError, match="no state of a program, or damaged"):
        second.load(tmp_path / "other.npz")


def test_steps_that_are_refused(data, program, tmp_path):
    loaded, acted = kbf.load_onnx(program), {"turn": 0.0}
    with pytest.raises(KeyError, match="east"):
        loaded.step({"easst": 1.0, "north": 1.0}, control=acted)
    with pytest.raises(kbf.DataError, match="north is missing"):
        loaded.step({"east": 1.0}, control=acted)
    with pytest.raises(kbf.DataError, match="2 numbers"):
        loaded.step([1.0], control=acted)
    with pytest.raises(kbf.DataError, match="needs controls: turn"):
        loaded.step([1.0, 1.0])
    with pytest.raises(kbf.DataError, match="no multiple of the time step"):
        loaded.step([1.0, 1.0], control=acted, dt=0.15)
    with pytest.raises(ValueError, match="level"):
        loaded.step([1.0, 1.0], control=acted).interval(2.0)
    (tmp_path / "a.onnx").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"no program of FittedFilter\.export"):
        kbf.load_onnx(tmp_path / "a.onnx")
    with pytest.raises(FileNotFoundError):
        kbf.load_onnx(tmp_path / "b.onnx")


def test_a_program_warns_of_late_sensors(data, program, tmp_path, recwarn):
    """It takes readings in the steps of their own time, as the filter was trained; others warn
    of nothing."""
    kbf.load_onnx(program)
    assert not [each for each in recwarn if issubclass(each.category, kbf.DataWarning)]
    columns = {"states": ["speed"], "observations": ["east", "north"], "latency": {"east": 0.2}}
    late = kbf.fit(data, **columns, model="kalman", allow_missing_sensors=False, progress=False)
    late.export(tmp_path / "late.onnx")
    with pytest.warns(kbf.DataWarning, match=r"readings of east are 0.2 s late in the training"):
        loaded = kbf.load_onnx(tmp_path / "late.onnx")
    moved = data.assign(east=data.east.shift(-2)).iloc[:20]
    expected = late.filter(data).mean[:20, 0]
    rows = moved[["east", "north"]].to_dict("records")
    assert [loaded.step(row)["speed"] for row in rows] == pytest.approx(expected, abs=1e-4)


def test_a_program_runs_without_pytorch(program):
    code = (
        "import sys, kbf\n"
        f"f = kbf.load_onnx({str(program)!r})\n"
        "f.step([1.0, 0.2], control=[0.1])\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rotations_are_decoded_as_the_schema_does():
    from scipy.spatial.transform import Rotation
    from torch import from_numpy

    from kbf.data.files.column_schema import from_quaternion, nearest_rotation, to_quaternion
    from kbf.export import onnx_filter

    generator = np.random.default_rng(0)
    for quaternion in Rotation.from_rotvec(generator.normal(size=(5, 3))).as_quat(
        scalar_first=True
    ):
        matrix = from_quaternion(from_numpy(quaternion[None]))
        own = np.reshape(onnx_filter.from_quaternion(quaternion.tolist()), (1, 3, 3))
        np.testing.assert_allclose(own, matrix, atol=1e-12)
        noisy = from_numpy(own + 0.1 * generator.normal(size=(1, 3, 3)))
        near = nearest_rotation(noisy)
        found = onnx_filter.rotation_columns(noisy.numpy().ravel(), 9)
        np.testing.assert_allclose(found, near.numpy().ravel(), atol=1e-6)
        found = onnx_filter.rotation_columns(noisy.numpy().ravel(), 4)
        np.testing.assert_allclose(found, to_quaternion(near).numpy()[0], atol=1e-6)


def test_the_loop_without_kbf_of_the_guide(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import json\n.*?)```", guide, re.DOTALL)
    assert "kbf" not in code
    monkeypatch.chdir(tmp_path)
    fitted = kbf.load("example:rotation")
    fitted.export("step.onnx")
    observations, found = [[0.3, 0.4], [0.1, -0.2], [0.0, 0.5]], []
    exec(code, {"observations": observations, "print": lambda *each: found.append(each)})
    online = fitted.online()
    for (mean, covariance), x in zip(found, observations, strict=True):
        wanted = online.step(x)
        np.testing.assert_allclose(mean, list(wanted.values()), rtol=1e-4)
        assert covariance.shape == (2, 2)
