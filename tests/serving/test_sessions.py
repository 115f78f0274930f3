"""Sessions of ``kbf serve``: the numbers of the filter, limits, and one error for a bad step."""

from __future__ import annotations

import base64
import contextlib
import io
import math

import numpy as np
import pytest
from PIL import Image

import kbf
from kbf.serving import sessions as module
from kbf.serving.sessions import MAX_MOVES, Sessions
from kbf.serving.values import Refused, image_of, png_of

STEP = {"obs": {"x_0": 0.3, "x_1": 0.4}}


@pytest.fixture(scope="module")
def fitted():
    return kbf.load("example:rotation")


@pytest.fixture
def sessions(fitted):
    return Sessions(fitted, limit=3, expiry=100, settings={})


def test_steps_are_those_of_the_online_filter(sessions, fitted):
    session, online = sessions.create(), fitted.online()
    for obs in ({"x_0": 0.3, "x_1": 0.4}, None, {"x_0": 0.1, "x_1": -0.2}):
        found, wanted = session.step({"obs": obs}), online.step(obs)
        for name, value in wanted.items():
            entry, (lower, upper) = found["estimates"][name], wanted.interval()[name]
            assert (entry["value"], entry["std"]) == (value, wanted.std[name])
            assert (entry["lower"], entry["upper"]) == (lower, upper)
    assert found["step"] == session.steps == 3


def test_rejections_and_alarms_are_reported_and_the_filter_goes_on(sessions):
    calm, wild = sessions.create(), sessions.create()
    for session in (calm, wild):
        session.step(STEP)
    ordinary = calm.step({"obs": None})
    found = wild.step({"obs": {"x_0": 1e30, "x_1": -1e30}})
    assert found["rejected"] and found["alarm"] == "out_of_distribution"
    assert not ordinary["rejected"] and ordinary["alarm"] is None
    assert found["estimates"] == ordinary["estimates"]  # as if nothing had been observed
    assert (wild.about()["rejected"], calm.about()["rejected"]) == (1, 0)


def test_a_saved_state_continues_equally(sessions):
    session = sessions.create()
    session.step(STEP)
    again = sessions.create(state=session.saved())
    assert again.step(STEP)["estimates"] == session.step(STEP)["estimates"]


BAD = {
    "no obs": ({}, "the step has no obs"),
    "another entry": (STEP | {"trust": True}, "there is no 'trust'"),
    "an unknown sensor": ({"obs": {"x_0": 1, "x_2": 1}}, "'x_2' is not among the observations"),
    "a missing sensor": ({"obs": {"x_0": 1}}, "x_1 is missing"),
    "text": ({"obs": {"x_0": "1", "x_1": 1}}, "must be finite numbers"),
    "truth": ({"obs": {"x_0": True, "x_1": 1}}, "must be finite numbers"),
    "infinity": ({"obs": {"x_0": math.inf, "x_1": 1}}, "must be finite numbers"),
    "a list of another length": ({"obs": [1, 2, 3]}, "observations must be 2 numbers"),
    "nested lists": ({"obs": [[1], [2, 3]]}, "in"),
    "more digits than a float": ({"obs": {"x_0": 10**400, "x_1": 1}}, "too large"),
    "a control": (STEP | {"control": {"u": 1}}, "has no controls"),
    "dt and time": (STEP | {"dt": 1, "time": 1}, "not both"),
    "dt of text": (STEP | {"dt": "1"}, "dt must be finite numbers"),
    "a time of text": (STEP | {"time": "yesterday or so"}, ""),
}


@pytest.mark.parametrize("request_, message", BAD.values(), ids=BAD)
def test_a_bad_step_has_one_clear_error_and_changes_nothing(sessions, request_, message):
    session, other = sessions.create(), sessions.create()
    for each in (session, other):
        each.step(STEP)
    with pytest.raises(Refused, match=r".") as caught:
        session.step(request_)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert caught.value.status == 422
    assert session.step(STEP)["estimates"] == other.step(STEP)["estimates"]


def test_the_limit_and_the_expiry_of_sessions(fitted, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    sessions = Sessions(fitted, limit=2, expiry=100, settings={})
    first, second = sessions.create(), sessions.create()
    with pytest.raises(Refused, match="there are 2 sessions") as caught:
        sessions.create()
    assert caught.value.status == 429
    now[0] = 90.0
    sessions.touch(second)
    now[0] = 110.0
    with pytest.raises(Refused, match="no such session"):
        sessions.get(first.name)
    assert sessions.get(second.name) is second and sessions.expired == 1
    sessions.create()
    sessions.delete(second.name)
    assert len(sessions) == 1
    with pytest.raises(Refused, match="no such session"):
        sessions.delete(second.name)


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"observations": ["x_0", "x_3"]}, "'x_3' is not among the sensors"),
        ({"observations": ["x_0"]}, "x_1 are missing"),
        ({"seed": -1}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"units": {"x_3": "m"}}, "units: did you mean"),
        ({"units": "mm"}, "units must be a mapping"),
        ({"time_step": -1}, "positive number"),
        ({"other": 1}, "there is no 'other'"),
    ],
)
def test_a_session_of_other_data_is_refused(sessions, request_, message):
    with pytest.raises(Refused, match=message):
        sessions.create(request_)
    sessions.create({"observations": ["x_1", "x_0"], "seed": 3, "units": {}})  # its ordinary twin


def test_units_and_time_step_are_compared_with_the_training(monkeypatch):
    fitted = kbf.load("example:rotation")
    config = fitted.config | {
        "data": (fitted.config.get("data") or {}) | {"units": {"x_0": "mm"}, "time_step": 0.1}
    }
    monkeypatch.setattr(fitted.trained.module, "config", config)
    monkeypatch.setattr(fitted, "config", config)
    sessions = Sessions(fitted, limit=9, expiry=100, settings={})
    sessions.create({"units": {"x_0": "mm", "x_1": "V"}, "time_step": 0.1})
    with pytest.raises(Refused, match=r"x_0 is in mm in the training, not in m$"):
        sessions.create({"units": {"x_0": "m"}})
    with pytest.raises(Refused, match=r"the rows are 1 apart in time, those of the training 0\.1"):
        sessions.create({"time_step": 1.0})
    session = sessions.create()
    assert session.step(STEP | {"dt": 0.3})["step"] == 1
    with pytest.raises(Refused, match="no multiple of the time step"):
        session.step(STEP | {"dt": 0.15})
    with pytest.raises(Refused, match="start a new session after such a gap"):
        session.step(STEP | {"dt": 0.1 * MAX_MOVES * 2})


def test_other_ranges_than_those_of_the_training_are_in_a_response(sessions):
    calm, odd = sessions.create(), sessions.create()
    found = {"calm": [], "odd": []}
    for k in range(101):
        x = {"x_0": math.cos(k / 5), "x_1": math.sin(k / 5)}
        with pytest.warns() if k == 99 else contextlib.nullcontext():
            found["odd"] += odd.step({"obs": {k: 1000 * v for k, v in x.items()}}).get(
                "warnings", []
            )
        found["calm"] += calm.step({"obs": x}).get("warnings", [])
    assert found["calm"] == [] and "outside of the training range" in found["odd"][0]


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"png": base64.b64encode(file.getvalue()).decode()}


def test_images_go_out_as_png():
    colour = np.arange(36, dtype="uint8").reshape(3, 3, 4)
    for image in (colour, colour[:1], colour / 255):
        pixels = np.asarray(Image.open(io.BytesIO(png_of(image))))
        wanted = image if image.dtype == np.uint8 else np.round(255 * image)
        wanted = wanted[0] if len(wanted) == 1 else wanted.transpose(1, 2, 0)
        assert np.abs(pixels.astype(float) - wanted).max() <= 1


def test_images_are_png_or_nested_lists():
    grey = np.arange(12, dtype="uint8").reshape(3, 4)
    colour = np.arange(36, dtype="uint8").reshape(3, 4, 3)
    np.testing.assert_array_equal(image_of(png(grey), (1, 3, 4)), grey[None])
    np.testing.assert_array_equal(image_of(png(colour), (3, 3, 4)), colour.transpose(2, 0, 1))
    lists = (colour.transpose(2, 0, 1) / 255).tolist()
    np.testing.assert_allclose(image_of(lists, (3, 3, 4)), colour.transpose(2, 0, 1) / 255)
    for bad, message in (
        (png(grey.T), "must be 4 x 3 pixels"),
        ({"png": "no base64"}, "no PNG image"),
        ({"png": base64.b64encode(b"GIF89a").decode()}, "no PNG image"),
        (grey.tolist(), "in the shape"),
        ([[[None] * 4] * 3], "in the shape"),
        ("x", "nested lists"),
    ):
        with pytest.raises(Refused, match=message):
            image_of(bad, (1, 3, 4))


def test_sessions_share_one_compiled_step(fitted, monkeypatch):
    made = []
    step = module.compiled_step(fitted.trained)

    def counted(trained):
        made.append(trained)
        return step

    monkeypatch.setattr(module, "compiled_step", counted)
    sessions = Sessions(fitted, limit=3, expiry=100, settings={"compile": True})
    one, two, plain = sessions.create(), sessions.create(), fitted.online()
    assert one.online._estimator.live.compiled is two.online._estimator.live.compiled is step
    assert len(made) == 1
    for obs in ({"x_0": 0.3, "x_1": 0.4}, {"x_0": 0.1, "x_1": -0.2}):
        wanted = list(plain.step(obs).values())
        two.step({"obs": {"x_0": -0.5, "x_1": 0.1}})
        found = one.step({"obs": obs})["estimates"]
        np.testing.assert_allclose([each["value"] for each in found.values()], wanted, rtol=1e-4)
