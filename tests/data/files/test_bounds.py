"""Estimates and intervals stay inside of what is declared or seen; each kind with its twin."""

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf.cli import main
from kbf.data.files.bounds import checked_bounds
from kbf.data.files.column_schema import column_schema_of

QUICK = ["model=kalman", "logger=none", "trainer.enable_progress_bar=false", "particles=50"]


def battery(steps: int = 400, seed: int = 0) -> pd.DataFrame:
    """Charge between 0 and 1 with its current, and an occupancy with two values."""
    rng = np.random.default_rng(seed)
    current, soc, occupied = np.repeat(rng.normal(size=steps // 20), 20), np.full(steps, 0.5), 0.0
    there = []
    for t in range(steps):
        if t:
            soc[t] = np.clip(soc[t - 1] - 0.03 * current[t], 0, 1)
        occupied = 1 - occupied if rng.random() < 0.1 else occupied
        there.append(occupied)
    frame = pd.DataFrame({"soc": soc, "there": there, "current": current})
    noise = 0.1 * rng.normal(size=(steps, 2))
    return frame.assign(v=3 + soc + noise[:, 0], co2=frame.there + 3 * noise[:, 1])


COLUMNS = {"observations": ["v", "co2"], "controls": ["current"], "model": "kalman"}


def inside(estimates, low, high):
    ends = estimates.interval(0.95)
    for values in (estimates.mean, *ends):
        assert np.all(values >= np.array(low) - 1e-12) and np.all(values <= np.array(high) + 1e-12)
    draws = estimates.sample(20, seed=0)
    assert draws.min(axis=(0, 1)) == pytest.approx(low, abs=0.2)
    assert np.all(draws >= np.array(low) - 1e-12) and np.all(draws <= np.array(high) + 1e-12)


def test_both_doors_keep_estimates_inside_of_bounds(tmp_path, capsys):
    frame, new = battery(), battery(seed=1)
    for name, each in (("train", frame), ("new", new)):
        each.to_csv(tmp_path / f"{name}.csv", index=False)
    bounds = {"soc": [0, 1], "there": [0, 1]}
    fitted = kbf.fit(frame, states=["soc", "there"], bounds=bounds, progress=False, **COLUMNS)
    found = fitted.filter(new)
    inside(found, [0, 0], [1, 1])
    words = ["data.states=[soc,there]", "data.observations=[v,co2]", "data.controls=[current]"]
    words += ["data.bounds={soc:[0,1]}", f"data.path={tmp_path}/train.csv", "data.test=0"]
    assert main(["train", "data=own", *words, *QUICK, f"run_dir={tmp_path}/run"]) == 0
    run = f"checkpoint={tmp_path}/run"
    assert main(["filter", run, f"input={tmp_path}/new.csv", f"output={tmp_path}/out.csv"]) == 0
    out = pd.read_csv(tmp_path / "out.csv")[["soc", "there"]]
    np.testing.assert_allclose(out, found.mean, atol=1e-8)
    words = [f"data.path={tmp_path}/new.csv", f"run_dir={tmp_path}/scored"]
    assert main(["evaluate", run, *words, "animation=false"]) == 0
    scored = pd.read_csv(tmp_path / "scored" / "estimates.csv")[["soc", "there"]]
    np.testing.assert_allclose(scored, found.mean, atol=1e-6)
    assert scored.min().tolist() == [0, 0] and scored.max().max() == 1
    # without bounds they are not: the twin
    plain = kbf.fit(frame, states=["soc"], progress=False, **COLUMNS).filter(new)
    assert plain.mean.min() < 0


def test_states_of_few_values_have_bounds_by_themselves():
    frame, new = battery(), battery(seed=1)
    fitted = kbf.fit(frame, states=["there"], progress=False, **COLUMNS)
    inside(fitted.filter(new), [0], [1])
    forecast = fitted.filter(new[:50]).mean
    assert forecast.min() >= 0
    levels = frame.assign(there=np.round(4 * frame.soc))
    estimates = kbf.fit(levels, states=["there"], progress=False, **COLUMNS).filter(new)
    assert estimates.mean.min() >= 0 and estimates.mean.max() <= 4
    # bounds that are declared replace them; a state of many values has none
    wide = {"there": [None, None]}
    free = kbf.fit(frame, states=["there"], bounds=wide, progress=False, **COLUMNS).filter(new)
    assert free.mean.min() < 0 or free.mean.max() > 1


def test_a_state_that_is_often_at_its_largest_value_is_named():
    frame = battery()
    life = np.minimum(125, 300 - np.arange(400.0) % 300)
    names = {"observations": ["v"], "test": 0.0}
    (text,) = kbf.check(frame.assign(life=life), states=["life"], **names).warnings
    assert text.startswith("column life is 125 in 2") and "bounds={'life': [None, 125]}" in text
    # ordinary: no value is repeated, or a few are
    smooth = battery().assign(life=300 - np.arange(400.0) % 300)
    assert kbf.check(smooth, states=["life"], **names).warnings == []


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"sco": [0, 1]}, "'sco' is no number among the states; did you mean 'soc'"),
        ({"soc": [1, 0]}, "of soc: 1 is not below 0"),
        ({"soc": [0]}, "must be two numbers or null"),
        ({"soc": ["a", 1]}, "must be two numbers or null"),
        ({"turn": [0, 1]}, "'turn' is no number among the states"),
    ],
)
def test_bounds_that_are_wrong(bounds, message):
    schema = column_schema_of(["soc", "turn"], ["v"], [], ["turn"], [])
    with pytest.raises(ValueError, match=message):
        checked_bounds(bounds, schema)


def test_bounds_that_are_right():
    schema = column_schema_of(["soc", "turn"], ["v"], [], ["turn"], [])
    assert checked_bounds({"soc": (0, None)}, schema) == {"soc": [0, None]}
    assert checked_bounds(None, schema) == {}
