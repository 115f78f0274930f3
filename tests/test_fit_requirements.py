"""`kbf.fit` selects among models by `model="auto"` and `require=`, and says what a model lacks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf import model_choice
from scripts.make_arm import arm

ARM = {"states": ["reach_mm", "torque_kNm"], "observations": ["s*"], "recording": "run"}


@pytest.fixture(scope="module")
def data() -> pd.DataFrame:
    return arm(3, 60)


@pytest.fixture
def few(monkeypatch):
    """Only these candidates of model=auto: all of them take minutes."""
    original = model_choice.choose

    def choose(config, data, **settings):
        some = {name: config["model"]["candidates"][name] for name in ("frame", "lstm", "kalman")}
        config = {**config, "model": {**config["model"], "candidates": some}}
        return original(config, data, **settings)

    monkeypatch.setattr(model_choice, "choose", choose)


def test_auto_selects_the_best_model(few, data, tmp_path):
    fitted = kbf.fit(data, **ARM, model="auto", progress=False)
    table = fitted.candidates
    assert set(table.candidate) == {"frame", "kalman", "lstm"} and (table.seconds > 0).any()
    assert list(table.nmse.isna()) == [False, False, True]
    assert list(table.note == "") == [True, True, False], "why there is no error"
    assert fitted.model_name == table.candidate[0] and table.weight[0] == 1
    fitted.save(tmp_path / "auto.ckpt")
    pd.testing.assert_frame_equal(kbf.load(tmp_path / "auto.ckpt").candidates, table)
    same = kbf.fit(data, **ARM, model=fitted.model_name, progress=False)
    np.testing.assert_allclose(fitted.filter(data).mean, same.filter(data).mean, rtol=1e-12)


def test_auto_selects_among_models_that_meet_what_is_required(few, data):
    fitted = kbf.fit(data, **ARM, model="auto", require=["smooth", "export"], progress=False)
    able = fitted.candidates.dropna(subset="nmse")
    assert fitted.model_name == "kalman" and list(able.candidate) == ["kalman"]
    assert fitted.capabilities["smooth"] and fitted.capabilities["export"]


def test_the_model_selection_leaves_out_what_lacks_a_capability():
    """A drawn memory with controls is not exported."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(120, 1))
    z = np.cumsum(0.3 * u, axis=0)
    x = z + 0.1 * rng.normal(size=z.shape)
    fitted = kbf.fit(
        states=z, observations=x, controls=u, require=["export"], budget=60.0, progress=False
    )
    assert fitted.capabilities["export"]
    names = set(fitted.candidates.dropna(subset="nmse").candidate)
    assert "kalman" in names and "kbf" not in names


def test_a_missing_capability_names_models_that_have_it(data):
    fitted = kbf.fit(data, **ARM, model="window_ridge", progress=False)
    with pytest.raises(ValueError, match="cannot smooth: models that can are kbf, kbf_tuned"):
        fitted.smooth(data)
    with pytest.raises(kbf.FitError, match="window_ridge lacks smooth"):
        kbf.fit(data, **ARM, model="window_ridge", require=["smooth"], progress=False)


def test_a_required_sensor_by_sensor_filter(data):
    fitted = kbf.fit(data, **ARM, model="kalman", require=["missing_sensors"], progress=False)
    assert fitted.capabilities["missing_sensors"] and fitted.capabilities["export"]


@pytest.mark.parametrize("model", ["kbf_paper", "frame", "lstm"])
def test_models_that_require_all_sensors_say_so(model, data):
    gaps = data.assign(s2=data.s2.where(np.arange(len(data)) % 5 > 0))
    with pytest.raises(ValueError, match=f"model={model} requires all sensors, and 36 steps lack"):
        kbf.fit(gaps, **ARM, model=model, progress=False)


def test_without_sensor_by_sensor_use_such_steps_are_unobserved(data):
    gaps = data.assign(s2=data.s2.where(np.arange(len(data)) % 5 > 0))
    fitted = kbf.fit(gaps, **ARM, model="frame", allow_missing_sensors=False, progress=False)
    assert not fitted.capabilities["missing_sensors"]


@pytest.mark.parametrize("model", ["lstm_images", "gru_images", "rkn", "backprop_kf", "dpf"])
def test_models_of_images_say_so(model, data):
    with pytest.raises(ValueError, match=f"model={model} learns from images, and an obs.*3 numb"):
        kbf.fit(data, **ARM, model=model, progress=False)


def test_settings_of_the_training(data):
    fitted = kbf.fit(data, **ARM, model="lstm", training={"epochs": 2}, progress=False)
    assert fitted.config["model"]["training"]["epochs"] == 2
    with pytest.raises(ValueError, match=r"no covariances.*require=.'intervals'"):
        fitted.filter(data).interval()


def test_candidates_of_a_checkpoint_with_errors_alone():
    """The shipped example keeps the errors of its candidates, neither seconds nor notes."""
    table = kbf.load("example:rotation").candidates
    assert len(table) >= 5 and table.nmse.notna().all() and table.weight.sum() == 1
    assert table.seconds.isna().all() and (table.note == "").all()


@pytest.mark.parametrize(
    ("model", "held", "message"),
    [
        (
            "kalman",
            True,
            "data.held=true takes repeats .* model=kalman is fitted without it: leave out",
        ),
        ("kalman", "sometimes", "data.held must be auto, true or false"),
    ],
)
def test_a_single_model_cannot_take_repeats_as_missing(model, held, message, data):
    with pytest.raises(ValueError, match=message):
        kbf.fit(data, **ARM, model=model, config={"data.held": held}, progress=False)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [("controls", "controls needs controls="), ("alarms", "alarms needs calibrate=True")],
)
def test_what_the_arguments_exclude_is_refused_before_the_fit(lacking, message, data):
    with pytest.raises(ValueError, match=message):
        kbf.fit(data, **ARM, model="kalman", require=[lacking], calibrate=False, progress=False)


def test_auto_refuses_repeats_as_missing(few, data):
    with pytest.raises(ValueError, match=r"data\.held=true .*: use model=kbf"):
        kbf.fit(data, **ARM, model="auto", config={"data.held": True}, progress=False)
