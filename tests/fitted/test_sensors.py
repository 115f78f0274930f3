"""Sensors of several columns: a sensor that lacks one of its columns is missing as a whole."""

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf.cli import main

SENSORS = {"gps": ["l*"], "imu": ["ax", "ay"]}


@pytest.fixture(scope="module")
def data() -> pd.DataFrame:
    """A walk in the plane; every third row has no position."""
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(2, 200)).cumsum(1)
    noise = rng.normal(size=(4, 200))
    columns = {"z": z, "y": y, "lat": z + 0.3 * noise[0], "lon": y + 0.3 * noise[1]}
    frame = pd.DataFrame({**columns, "ax": z + y + noise[2], "ay": z - y + noise[3]})
    frame.loc[::3, ["lat", "lon"]] = np.nan
    return frame


def fitted_to(data: pd.DataFrame, observations: object) -> kbf.FittedFilter:
    return kbf.fit(
        data, states=["z", "y"], observations=observations, model="kalman", progress=False
    )


def test_a_sensor_that_lacks_a_column_is_missing(data, tmp_path):
    fitted = fitted_to(data, SENSORS)
    whole = data.iloc[100:130, 2:]
    lacks_one, lacks_both = whole.copy(), whole.copy()
    lacks_one.iloc[1, 0] = np.nan
    lacks_both.iloc[1, :2] = np.nan
    found = fitted.filter(lacks_one).mean
    np.testing.assert_array_equal(found, fitted.filter(lacks_both).mean)
    apart = fitted_to(data, ["lat", "lon", "ax", "ay"])
    assert not np.allclose(apart.filter(lacks_one).mean, apart.filter(lacks_both).mean)
    # The command reads the sensors from the checkpoint.
    fitted.save(tmp_path / "a.ckpt")
    lacks_one.to_csv(tmp_path / "new.csv", index=False)
    words = [f"checkpoint={tmp_path}/a.ckpt", f"input={tmp_path}/new.csv"]
    assert main(["filter", *words, f"output={tmp_path}/out.csv"]) == 0
    np.testing.assert_allclose(pd.read_csv(tmp_path / "out.csv")[["z", "y"]], found, rtol=1e-8)


def test_a_step_takes_sensors_by_name(data):
    fitted = fitted_to(data, SENSORS)
    by_column = fitted.online().step({"lat": 1.0, "lon": 2.0})
    assert fitted.online().step({"gps": (1.0, 2.0), "imu": None}) == by_column
    with pytest.raises(ValueError, match=r"gps must be 2 numbers \(lat, lon\), got 1"):
        fitted.online().step({"gps": [1.0]})


def test_the_command_fits_the_same_filter(data, tmp_path):
    data.to_csv(tmp_path / "data.csv", index=False)
    words = ["data.states=[z,y]", "data.observations=[lat,lon,ax,ay]", "data.test=0"]
    words += ["data.sensors={gps:['l*'],imu:[ax,ay]}", "data.allow_missing_sensors=true"]
    words += ["data=own", "model=kalman", "logger=none", f"data.path={tmp_path}/data.csv"]
    assert main(["train", *words, f"run_dir={tmp_path}/run"]) == 0
    trained, fitted = kbf.load(tmp_path / "run/checkpoints/best.ckpt"), fitted_to(data, SENSORS)
    assert trained.schema == fitted.schema
    new = data.iloc[:20, 2:]
    np.testing.assert_allclose(trained.filter(new).mean, fitted.filter(new).mean, rtol=1e-12)


@pytest.mark.parametrize(
    ("sensors", "match"),
    [
        ({"gps": ["l*"], "other": ["lat"]}, "twice|is a column of 'gps' and 'other'"),
        ({"gps": []}, "observations"),
        ({"gps": ["lat", "height"]}, "no column 'height'"),
    ],
)
def test_sensors_that_are_refused(sensors, match, data):
    with pytest.raises(kbf.DataError, match=match):
        fitted_to(data, sensors)


def test_sensors_are_columns_of_data():
    z = np.zeros((20, 1))
    with pytest.raises(kbf.DataError, match="named columns of data"):
        kbf.fit(states=z, observations={"gps": z}, model="kalman", progress=False)
