"""The front door: `kbf.fit` and the command fit alike, and estimates are in the user's columns."""

from __future__ import annotations

import copy
import pickle
import re

import matplotlib.dates
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import kbf
from kbf.cli import main

ARM = {"states": ["reach_mm", "torque_kNm"], "observations": ["s*"], "recording": "run"}


def arm(runs: int = 4, steps: int = 60, seed: int = 0) -> pd.DataFrame:
    """Runs of a robot arm: reach in mm, torque in kN m, and three sensors with noise."""
    rng = np.random.default_rng(seed)
    frames = []
    for run in range(runs):
        phase = rng.uniform(0, 6) + np.cumsum(rng.normal(0.2, 0.03, steps))
        reach, torque = 400 + 250 * np.cos(phase), 2 + 1.5 * np.sin(phase)
        sensors = np.stack([reach / 100, torque * 10, reach / 250 + torque], 1)
        sensors += 0.05 * rng.normal(size=sensors.shape)
        start = pd.Timestamp("2026-01-05") + pd.Timedelta(hours=run)
        index = pd.date_range(start, periods=steps, freq="100ms", name="time")
        columns = {"run": f"run{run}", "reach_mm": reach, "torque_kNm": torque}
        frame = pd.DataFrame(columns, index=index)
        frame[["s1", "s2", "s3"]] = sensors
        frames.append(frame)
    return pd.concat(frames)


@pytest.fixture(scope="module")
def data() -> pd.DataFrame:
    return arm()


@pytest.fixture(scope="module")
def fitted(data):
    return kbf.fit(data[data.run != "run3"], **ARM, model="kalman", progress=False)


def test_estimates_are_on_the_index_of_the_frame(data, fitted):
    new = data[data.run == "run3"]
    frame = fitted.filter(new).to_frame()
    assert frame.index.equals(new.index)
    names = [f"{c}{end}" for c in ARM["states"] for end in ("", "_std", "_lower", "_upper")]
    assert list(frame)[:8] == names
    truth = new[ARM["states"]].to_numpy()
    found = frame[ARM["states"]].to_numpy()
    assert (((found - truth) ** 2).mean(0) / truth.var(0) < 0.05).all()
    assert (frame.reach_mm_lower < frame.reach_mm).all()


def test_a_saved_filter_returns_equal_numbers(data, fitted, tmp_path):
    fitted.save(tmp_path / "arm.ckpt")
    again = kbf.load(tmp_path / "arm.ckpt")
    new = data[data.run == "run3"]
    one, other = fitted.filter(new), again.filter(new)
    np.testing.assert_allclose(other.mean, one.mean, rtol=1e-12)
    np.testing.assert_allclose(other.interval()[0], one.interval()[0], rtol=1e-12)
    assert repr(again) == repr(fitted)
    pd.testing.assert_frame_equal(again.held_out, fitted.held_out)


@pytest.mark.parametrize("model", ["kalman", "window_ridge"])
def test_a_fitted_filter_can_be_pickled_and_copied(model, data):
    fitted = kbf.fit(data, **ARM, model=model, progress=False)
    new = data[data.run == "run3"]
    expected = fitted.filter(new)
    for again in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        found = again.filter(new)
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(found.interval()[0], expected.interval()[0], rtol=1e-12)
        assert repr(again) == repr(fitted)


@pytest.mark.parametrize(
    "case",
    [
        "numbers",
        "controls",
        "missing",
        "angle",
        "bounds",
        pytest.param("kbf", marks=pytest.mark.slow),
    ],
)
def test_both_doors_fit_equal_filters(case, data, tmp_path, capsys):
    """`kbf train` and then `kbf filter`, and `kbf.fit` and then `filter`: equal to 1e-12."""
    frame, words, settings = data.reset_index(), [], {}
    if case == "kbf":
        frame = frame.groupby("run").head(30)
    if case == "controls":
        frame["u"] = np.sin(np.arange(len(frame)))
        words, settings = ["data.controls=[u]"], {"controls": ["u"]}
    if case == "missing":
        frame.loc[::7, "s2"] = np.nan
        words, settings = ["data.allow_missing_sensors=true"], {}
    if case == "angle":
        frame["reach_mm"] = np.arctan2(frame.torque_kNm - 2, frame.reach_mm - 400)
        words, settings = ["data.angles=[reach_mm]"], {"angles": ["reach_mm"]}
    if case == "bounds":
        words, settings = (
            ["data.bounds={reach_mm:[300,null]}"],
            {"bounds": {"reach_mm": (300, None)}},
        )
    path, run = tmp_path / "arm.csv", tmp_path / "run"
    frame.to_csv(path, index=False)
    frame = pd.read_csv(path, parse_dates=["time"])
    model = "kbf" if case == "kbf" else "kalman"
    columns = ["data.states=[reach_mm,torque_kNm]", "data.observations=[s*]", "data.time=time"]
    code = main(
        [
            *("train", "data=own", f"data.path={path}", "data.recording=run", "data.test=0"),
            *(f"model={model}", f"run_dir={run}", "logger=none", *columns, *words),
        ]
    )
    assert code == 0
    checkpoint, output = run / "checkpoints" / "best.ckpt", tmp_path / "out.npz"
    code = main(["filter", f"checkpoint={checkpoint}", f"input={path}", f"output={output}"])
    assert code == 0
    mine = kbf.fit(frame, **ARM, time="time", **settings, model=model, progress=False)
    estimates = mine.filter(frame)
    theirs = np.load(output)
    for k, name in enumerate(ARM["states"]):
        np.testing.assert_allclose(theirs[name], estimates.mean[:, k], rtol=1e-12, atol=1e-12)
        assert estimates.std is not None
        np.testing.assert_allclose(
            theirs[f"{name}_std"], estimates.std[:, k], rtol=1e-12, atol=1e-12
        )
    both = kbf.load(checkpoint).filter(frame)
    np.testing.assert_allclose(both.mean, estimates.mean, rtol=1e-12, atol=1e-12)
    if case == "bounds":
        assert theirs["reach_mm"].min() == 300
    if case == "missing":
        assert mine.capabilities["missing_sensors"]


def test_rows_of_recordings_may_be_interleaved(data, fitted):
    two = data[data.run.isin(["run2", "run3"])]
    mixed = two.assign(step=two.groupby("run").cumcount()).sort_values("step", kind="stable")
    estimates = fitted.filter(mixed)
    alone = fitted.filter(data[data.run == "run3"])
    np.testing.assert_array_equal(estimates.by_recording()["run3"].mean, alone.mean)
    rows = (mixed.run == "run3").to_numpy()
    np.testing.assert_array_equal(estimates.mean[rows], alone.mean)


def test_data_of_all_kinds_is_equal(data, fitted, tmp_path):
    """A frame, a list and a dict of frames, a file, a pattern, recordings, arrays."""
    new = data[data.run == "run3"]
    expected = fitted.filter(new).mean
    new.reset_index().to_csv(tmp_path / "run3.csv", index=False)
    x = new[["s1", "s2", "s3"]].to_numpy()
    z = new[ARM["states"]].to_numpy()
    for given in (
        [new],
        {"a": new},
        tmp_path / "run3.csv",
        str(tmp_path / "*.csv"),
        kbf.Recording(z, x),
    ):
        np.testing.assert_allclose(fitted.filter(given).mean, expected, rtol=1e-9)
    np.testing.assert_array_equal(fitted.filter(observations=x).mean, expected)
    batch = fitted.filter(observations=np.stack([x, x]))
    np.testing.assert_array_equal(batch.mean, np.concatenate([expected, expected]))


def test_arrays_are_fitted_as_frames_are(data):
    runs = [frame for _, frame in data.groupby("run")]
    states = [frame[ARM["states"]].to_numpy() for frame in runs]
    x = [frame[["s1", "s2", "s3"]].to_numpy() for frame in runs]
    lists = kbf.fit(states=states, observations=x, model="kalman", progress=False)
    batch = kbf.fit(
        states=np.stack(states), observations=np.stack(x), model="kalman", progress=False
    )
    frames = kbf.fit(data, **ARM, model="kalman", progress=False)
    expected = frames.filter(runs[0]).mean
    np.testing.assert_allclose(lists.filter(observations=x[0]).mean, expected, rtol=1e-9)
    np.testing.assert_allclose(batch.filter(observations=x[0]).mean, expected, rtol=1e-9)
    assert lists.columns["states"] == ["z1", "z2"]


def test_states_continue_where_rows_end(data, fitted):
    new = data[data.run == "run3"]
    first = fitted.filter(new.iloc[:25])
    rest = fitted.filter(new.iloc[25:], state=first.state)
    np.testing.assert_allclose(rest.mean, fitted.filter(new).mean[25:], rtol=1e-12)


def test_intervals_of_columns_hold_what_they_say(fitted):
    """On new runs of the same arm, which no fold has seen."""
    new = arm(runs=20, seed=5)
    estimates = fitted.filter(new)
    truth = new[ARM["states"]].to_numpy()
    low, high = estimates.interval(0.95)
    inside = ((truth >= low) & (truth <= high)).mean(0)
    assert (inside > 0.9).all() and (inside < 0.99).all()
    assert 0.88 < estimates.contains(new, 0.95).mean() < 0.99
    np.testing.assert_allclose(estimates.quantile(0.975), high)
    draws = estimates.sample(4000, seed=0)
    assert estimates.std is not None and estimates.covariance is not None
    np.testing.assert_allclose(draws.std(0)[:5], estimates.std[:5], rtol=0.1)
    np.testing.assert_allclose(np.diagonal(estimates.covariance, 0, 1, 2), estimates.std**2)


def test_bounds_and_units(data):
    train = data[data.run != "run3"]
    made = kbf.fit(
        train,
        **ARM,
        model="kalman",
        bounds={"reach_mm": (200, None)},
        units={"reach_mm": "mm"},
        progress=False,
    )
    estimates = made.filter(data)
    assert estimates.mean[:, 0].min() >= 200
    assert estimates.interval()[0][:, 0].min() >= 200
    assert estimates.sample(3, seed=0)[..., 0].min() >= 200
    assert "reach_mm [mm]" in repr(made) and "reach_mm [mm]" in made._repr_html_()
    below = data.loc[data.run == "run3", ["s1", "s2", "s3"]].iloc[
        made.filter(data).mean[-60:, 0].argmin()
    ]
    live = made.online()
    for _ in range(3):
        estimate = live.step(dict(below))
    assert estimate["reach_mm"] == 200 == estimate.interval()["reach_mm"][0]
    assert live.forecast(3).mean[:, 0].min() >= 200
    assert made.forecast(data, 3).mean[:, 0].min() >= 200
    assert made.historical_forecasts(data, 2).mean[:, 0].min() >= 200


def test_a_step_at_a_time(data, fitted, tmp_path):
    new = data[data.run == "run3"]
    expected = fitted.filter(new).mean
    live = fitted.online()
    for k, (now, row) in enumerate(new[["s1", "s2", "s3"]].iterrows()):
        estimate = live.step(dict(row), time=now)
        np.testing.assert_allclose(list(estimate.values()), expected[k], rtol=1e-12)
        if k == 30:
            live.save(tmp_path / "state.pt")
            live = fitted.online(state=tmp_path / "state.pt")
    assert set(estimate.std) == set(ARM["states"])
    low, high = estimate.interval()["reach_mm"]
    assert low < estimate["reach_mm"] < high
    ahead = live.forecast(3)
    np.testing.assert_allclose(ahead.mean, fitted.forecast(new, 3).mean, rtol=1e-12)
    with pytest.raises(KeyError, match="did you mean 's1'"):
        live.step({"s_1": 0.0})
    with pytest.raises(kbf.DataError, match="no multiple of the time step"):
        live.step(dict(row), dt=0.05)
    other = kbf.fit(data, **ARM, model="kalman", progress=False)
    with pytest.raises(ValueError, match="not written by this filter"):
        other.online(state=tmp_path / "state.pt")


def test_a_late_reading_is_taken_in_at_its_time(data, fitted):
    rows = list(data[data.run == "run3"][["s1", "s2", "s3"]].iterrows())[:20]
    expected = [fitted.online(), fitted.online(max_delay=1.0)]
    for k, (now, row) in enumerate(rows):
        expected[0].step(dict(row), time=now)
        if k != 15:
            expected[1].step(dict(row), time=now)
    late = expected[1].step(dict(rows[15][1]), time=rows[15][0])
    assert expected[0].estimate is not None
    np.testing.assert_allclose(list(late.values()), list(expected[0].estimate.values()), rtol=1e-9)
    expected[1].update(dict(rows[2][1]), time=rows[2][0])
    assert expected[1].dropped == 1


def test_two_steps_without_readings_are_one_of_double_duration(data, fitted):
    row = dict(data.iloc[0][["s1", "s2", "s3"]])
    one, two = fitted.online(), fitted.online()
    one.step(row)
    two.step(row)
    one.predict()
    np.testing.assert_allclose(
        list(one.predict().values()), list(two.step(None, dt=0.2).values()), rtol=1e-12
    )


def test_forecasts_continue_the_index(data, fitted):
    new = data[data.run == "run3"]
    frame = fitted.forecast(new, 5).to_frame()
    step = pd.Timedelta("100ms")
    assert list(frame.index) == [new.index[-1] + k * step for k in range(1, 6)]
    past = fitted.historical_forecasts(new, 2, stride=10).to_frame()
    assert list(past.index[:3]) == [(0, 1), (0, 2), (10, 1)]
    at_end = fitted.historical_forecasts(new, 5, stride=59).mean[-5:]
    np.testing.assert_allclose(at_end, frame[ARM["states"]].to_numpy(), rtol=1e-9)


def test_smoothing_is_better_than_filtering(data, fitted):
    new = data[data.run == "run3"]
    truth = new[ARM["states"]].to_numpy()
    smoothed, filtered = fitted.smooth(new), fitted.filter(new)
    errors = [((each.mean - truth) ** 2).mean(0) for each in (smoothed, filtered)]
    assert (errors[0] < errors[1]).all()


def test_paths_of_smoothed_estimates(data, fitted):
    """Paths have the calibrated moments of each row, and move as the state does."""
    new = data[data.run.isin(["run3", "run2"])]
    mixed = new.iloc[np.random.default_rng(0).permutation(len(new))].sort_index(kind="stable")
    smoothed = fitted.smooth(mixed)
    paths, apart = (smoothed.sample(500, paths=p, seed=0) for p in (True, False))
    assert paths.shape == apart.shape == (500, len(mixed), 2)
    np.testing.assert_array_equal(paths, smoothed.sample(500, paths=True, seed=0))
    off = (paths.mean(0) - smoothed.mean) / smoothed.std
    assert np.abs(off).max() < 6 / np.sqrt(500)
    np.testing.assert_allclose(paths.std(0), smoothed.std, rtol=0.25)
    one = (mixed.run == "run3").to_numpy()
    off_mean = [(draws - smoothed.mean)[:, one] / smoothed.std[one] for draws in (paths, apart)]
    steps = [np.diff(deviations, axis=1).std() for deviations in off_mean]
    assert steps[0] < 0.95 * steps[1]
    single = smoothed.by_recording()["run3"].sample(500, paths=True, seed=0)
    np.testing.assert_array_equal(single, paths[:, one])
    for other in (fitted.filter(mixed), fitted.smooth(mixed, lag=0)):
        with pytest.raises(ValueError, match="given all observations"):
            other.sample(2, paths=True)


def test_scores_of_columns(data, fitted):
    new = data[data.run.isin(["run2", "run3"])]
    found = fitted.evaluate(new, smooth=True, horizon=2)
    truth, estimates = new[ARM["states"]].to_numpy(), fitted.filter(new)
    errors = ((estimates.mean - truth) ** 2).mean(0)
    np.testing.assert_allclose(found.rmse, np.sqrt(errors))
    np.testing.assert_allclose(found.nmse, errors / truth.var(0))
    low, high = estimates.interval()
    inside = ((low <= truth) & (truth <= high)).mean(0)
    np.testing.assert_allclose(found.coverage_95, inside, atol=0.02)
    # The filter is a Kalman filter: the baseline of this name has the errors of its copy.
    np.testing.assert_allclose(found.nmse_kalman, found.nmse, rtol=0.3)
    assert (found.nmse_mean > 0.9).all() and (found.nmse_smoothed < found.nmse).all()
    assert (found.nmse_ahead_2 > found.nmse_ahead_1).all()
    ahead = fitted.historical_forecasts(new[new.run == "run3"], 1).mean[:-1]
    alone = fitted.evaluate(new[new.run == "run3"], horizon=1, baselines=False)
    later = truth[-59:]
    expected = ((ahead - later) ** 2).mean(0) / later.var(0)
    np.testing.assert_allclose(alone.nmse_ahead_1, expected)
    mixed = new.assign(k=new.groupby("run").cumcount()).sort_values("k", kind="stable")
    pd.testing.assert_frame_equal(
        fitted.evaluate(mixed, horizon=2), found[list(fitted.evaluate(mixed, horizon=2))]
    )


@pytest.mark.slow
def test_an_exported_step(data, fitted, tmp_path):
    found = fitted.export(tmp_path / "arm.onnx")
    assert found.estimate < 1e-5 and (tmp_path / "arm.onnx.json").exists()
    with pytest.raises(ValueError, match="the ending must be one of"):
        fitted.export(tmp_path / "arm.bin")


def test_appended_recordings_are_in_the_memory(data, fitted):
    more = fitted.append(data[data.run == "run3"])
    steps = [
        sum(len(r.states) for r in f.trained.module.memory.recordings()) for f in (fitted, more)
    ]
    assert steps == [180, 240]


def test_log_likelihoods_are_those_of_the_rollout(data, fitted):
    new = data[data.run == "run3"]
    found = fitted.filter(new).log_likelihood
    x = torch.tensor(new[["s1", "s2", "s3"]].to_numpy())
    run = kbf.rollout(fitted.trained.filter, x[None], log_likelihood=True)
    assert found is not None and run.log_likelihood is not None
    np.testing.assert_allclose(found, run.log_likelihood[0].numpy())


def test_a_fit_leaves_threads_and_random_numbers_as_they_are(data):
    torch.manual_seed(7)
    np.random.seed(7)
    threads, expected = torch.get_num_threads(), (torch.rand(1), np.random.rand())
    torch.manual_seed(7)
    np.random.seed(7)
    kbf.fit(data, **ARM, model="mean", threads=1, progress=False)
    assert torch.get_num_threads() == threads
    assert torch.rand(1) == expected[0] and np.random.rand() == expected[1]


def test_figures_have_a_panel_for_each_column(data, fitted):
    new = data[data.run == "run3"]
    figure = fitted.filter(new).plot(truth=new)
    assert [axes.get_ylabel() for axes in figure.axes] == ARM["states"]
    assert len(fitted.filter(new).plot(columns=["reach_mm"]).axes) == 1
    with pytest.raises(ValueError, match="there is no column 'reach'"):
        fitted.filter(new).plot(columns=["reach"])


def test_angles_are_drawn_without_jumps():
    """The truth counts from 0, the estimate from -180; both are drawn on one turn."""
    rng = np.random.default_rng(0)
    turned = np.cumsum(2 + rng.normal(size=300))
    frame = pd.DataFrame({"h": turned % 360, "c": (turned + 5 * rng.normal(size=300)) % 360})
    frame.index = pd.date_range("2026-01-05", periods=300, freq="20ms")
    angles = {"h": "degrees", "c": "degrees"}
    columns = {"states": ["h"], "observations": ["c"], "angles": angles}
    fitted = kbf.fit(frame, **columns, model="kalman", progress=False)
    estimates = fitted.filter(frame)
    (panel,) = estimates.plot(truth=frame).axes
    truth, drawn = (line.get_ydata() for line in panel.lines[:2])
    assert np.abs(np.diff(drawn)).max() < 180 < np.abs(np.diff(estimates.mean[:, 0])).max()
    assert np.abs(truth - drawn).max() < 90
    assert np.allclose(np.mod(truth - frame.h + 180, 360), 180)
    low, high = (end[:, 0] for end in estimates.interval())
    ends = panel.collections[0].get_datalim(panel.transData)
    assert ends.height < (drawn.max() - drawn.min()) + 2 * (high - low).max()
    assert panel.get_xlabel() == "time"


def test_figures_have_units_times_and_given_axes(data):
    units = {"reach_mm": "mm"}
    fitted = kbf.fit(data, **ARM, units=units, model="mean", calibrate=False, progress=False)
    new = data[data.run == "run3"]
    figure = fitted.filter(new).plot(truth=new)
    above, below = figure.axes
    assert (above.get_ylabel(), below.get_ylabel()) == ("reach_mm [mm]", "torque_kNm")
    assert below.get_xlabel() == new.index.name == "time"
    assert (
        matplotlib.dates.num2date(above.lines[0].get_xdata(orig=False)[-1]).replace(tzinfo=None)
        == new.index[-1].to_pydatetime()
    )
    since = new.set_index(new.index - new.index[0])  # durations are in seconds
    axes = fitted.filter(since).plot().axes[-1]
    assert axes.get_xlabel() == "time [s]"
    assert axes.lines[0].get_xdata()[-1] == pytest.approx(0.1 * (len(new) - 1))
    axes = Figure().subplots(2)
    assert fitted.filter(new).plot(truth=new, axes=axes) is axes  # not a second picture
    assert [panel.get_ylabel() for panel in axes] == ["reach_mm [mm]", "torque_kNm"]
    assert {text.get_text() for text in axes[0].get_legend().get_texts()} >= {"truth", "estimate"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.drop(columns="s2"), "there is no column 's2'"),
        (lambda d: d.iloc[:0], "there are no rows"),
        (lambda d: d.assign(s1="a"), "row 0, column s1: 'a' is no number"),
        (lambda d: d.assign(s1=np.inf), "not a finite number"),
        (lambda d: d.iloc[[0, 0, 1]], "times must increase"),
        (lambda d: d.iloc[::-1], "times must increase"),
        (lambda d: 3, "data must be a DataFrame"),
    ],
)
def test_new_data_that_does_not_fit(change, match, data, fitted):
    with pytest.raises(kbf.DataError, match=match):
        fitted.filter(change(data[data.run == "run3"]))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"states": ["reach"]}, "no column 'reach'.*did you mean 'reach_mm'"),
        ({"observations": ["t*x"]}, "no column matches"),
        ({"bounds": {"reach": (0, 1)}}, "did you mean 'reach_mm'"),
        ({"bounds": {"reach_mm": (1, 0)}}, "not below"),
        ({"units": {"x": "m"}}, "units: there is no column 'x'"),
        ({"angles": {"reach_mm": "turns"}}, "radians or all in degrees"),
        ({"states": np.zeros((3, 2))}, "names of columns"),
    ],
)
def test_fits_that_are_refused(settings, match, data):
    with pytest.raises(kbf.DataError, match=match):
        kbf.fit(data, **{**ARM, **settings}, model="mean", progress=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.iloc[:1], "too few steps with known states"),
        (lambda d: d.assign(s2=np.nan), "the column s2 is empty"),
        (lambda d: d.assign(reach_mm=np.nan), "the column reach_mm is empty"),
        (lambda d: d.assign(s2="a"), "row 0, column s2: 'a' is no number"),
        (lambda d: d.rename(columns={"s2": "s1"}), "two columns are called 's1'"),
    ],
)
def test_frames_that_are_refused(change, match, data):
    with pytest.raises(kbf.DataError, match=match):
        kbf.fit(change(data), **ARM, model="mean", progress=False)


BAD = {
    "a column of another name": (
        lambda d: d.rename(columns={"s2": "s_2"}),
        "no column 's2'.*did you mean 's_2'",
    ),
    "texts": (lambda d: d.assign(s2="a"), "row [02], column s2: 'a' is no number"),
    "a repeated time": (lambda d: d.iloc[[0, *range(len(d))]], "row [13]: .*times must increase"),
    "times backwards": (lambda d: d.iloc[::-1], "row [13]: .*times must increase"),
    "no rows": (lambda d: d.iloc[:0], "no rows?"),
    "one row": (lambda d: d.iloc[:1], "too few steps with known states"),
    "an empty sensor": (lambda d: d.assign(s2=np.nan), "the column s2 is empty: leave it out"),
    "an empty state": (lambda d: d.assign(reach_mm=np.nan), "the column reach_mm is empty"),
    "infinite numbers": (lambda d: d.assign(s1=np.inf), "row [02], column s1: .*no.* finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_both_doors_refuse_bad_data_in_one_line(case, data, tmp_path, capsys):
    change, match = BAD[case]
    frame, sensors = change(data).reset_index(), ["s1", "s2", "s3"]
    settings = {**ARM, "observations": sensors, "time": "time"}
    with pytest.raises(kbf.DataError, match=match) as raised:
        kbf.fit(frame, **settings, model="mean", progress=False)
    assert "\n" not in str(raised.value)
    frame.to_csv(tmp_path / "arm.csv", index=False)
    words = ["data.states=[reach_mm,torque_kNm]", "data.observations=[s1,s2,s3]"]
    words += [f"data.path={tmp_path / 'arm.csv'}", "data.recording=run", "data.time=time"]
    capsys.readouterr()
    run = ["model=mean", f"run_dir={tmp_path / 'run'}", "logger=none", "data.test=0"]
    assert main(["train", "data=own", *words, *run]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(match, line), line
    assert not (tmp_path / "run").exists()


def test_the_order_of_columns_does_not_matter(data):
    other = data[["s3", "torque_kNm", "run", "s1", "reach_mm", "s2"]]
    settings = {"model": "kalman", "calibrate": False, "progress": False}
    one, two = (kbf.fit(d, **ARM, **settings) for d in (data, other))
    np.testing.assert_allclose(two.filter(other).mean, one.filter(data).mean, rtol=1e-9)
    np.testing.assert_array_equal(one.filter(other).mean, one.filter(data).mean)


def test_masks_of_integers_are_bool_at_every_entrance():
    rng = np.random.default_rng(0)
    z = np.cumsum(rng.normal(size=(120, 1)), 0)
    x = z + 0.1 * rng.normal(size=(120, 2))
    seen = np.arange(120) % 5 != 0
    hidden = np.ma.masked_array(x, mask=np.repeat(~seen[:, None], 2, 1))
    how = {"model": "kalman", "calibrate": False, "progress": False}
    frame = pd.DataFrame({"z1": z[:, 0], "x1": x[:, 0], "x2": x[:, 1], "seen": seen.astype(int)})
    columns = {"states": "z1", "observations": ["x1", "x2"], "mask": "seen"}
    made = [
        kbf.fit(states=z, observations=x, mask=seen, **how),
        kbf.fit(states=z, observations=x, mask=seen.astype(int), **how),
        kbf.fit(states=z, observations=hidden, **how),
        kbf.fit(frame, **columns, **how),
    ]
    expected = made[0].filter(observations=x, mask=seen).mean
    for each in made:
        for inputs in (
            {"observations": x, "mask": seen.astype(int)},
            {"observations": x, "mask": seen.astype(float)},
            {"observations": hidden},
        ):
            np.testing.assert_allclose(each.filter(**inputs).mean, expected, rtol=1e-9)
    assert not np.allclose(made[0].filter(observations=x).mean, expected)
    smoothed = [made[0].smooth(observations=x, mask=m).mean for m in (seen, seen.astype(int))]
    np.testing.assert_array_equal(*smoothed)
    inner = made[0].trained.filter
    runs = [kbf.rollout(inner, x[None], mask=m[None]).estimates for m in (seen, seen.astype(int))]
    assert torch.equal(*runs)
    live = made[0].online()
    one, other = live.step(hidden[0]), made[0].online().step(None)
    assert dict(one) == dict(other)
    for entrance in (
        lambda: kbf.fit(states=z, observations=x, mask=2 * seen, **how),
        lambda: made[0].filter(observations=x, mask=2 * seen),
        lambda: kbf.rollout(inner, x[None], mask=2 * seen[None]),
    ):
        with pytest.raises(ValueError, match=r"mask must be True where .* it holds 2"):
            entrance()


def test_controls_of_a_filter_are_asked_for():
    rng = np.random.default_rng(0)
    u = rng.normal(size=(150, 1))
    z = np.zeros((150, 1))
    for t in range(1, 150):
        z[t] = 0.9 * z[t - 1] + u[t]
    x = z + 0.1 * rng.normal(size=z.shape)
    fitted = kbf.fit(states=z, observations=x, controls=u, model="kalman", progress=False)
    recording = kbf.Recording(z, x, controls=u)
    whole = kbf.Recording(z[:100], x[:100], controls=u[:100])
    ahead = fitted.forecast(whole, 5, controls=u[100:105])
    named = [{"u1": float(each)} for each in u[100:105, 0]]
    for given in (named, pd.DataFrame(named).assign(other=1.0)):
        np.testing.assert_allclose(fitted.forecast(whole, 5, controls=given).mean, ahead.mean)
    with pytest.raises(KeyError, match="'U1' is not among the controls; did you mean 'u1'"):
        fitted.forecast(whole, 1, controls=[{"U1": 0.0}])
    assert ((ahead.mean - z[100:105]) ** 2).mean() < 0.1 * z.var()
    with pytest.raises(kbf.DataError, match=r"controls must be \(5, 1\).*got none"):
        fitted.forecast(recording, 5)
    with pytest.raises(kbf.DataError, match="0 columns of controls, the training had 1"):
        fitted.filter(observations=x)
    with pytest.raises(kbf.DataError, match="needs controls: u1"):
        fitted.online().step(x[0])
    masked = np.ma.masked_array(x, mask=np.arange(150)[:, None] % 5 == 0)
    seen = (np.arange(150) % 5 != 0).astype(int)
    one = fitted.filter(observations=masked, controls=u)
    other = fitted.filter(observations=x, controls=u, mask=seen)
    np.testing.assert_array_equal(one.mean, other.mean)


def test_intervals_of_short_recordings():
    """The best and the worst fold are the same for the region and for the intervals."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        z = np.cumsum(rng.normal(size=(60, 1)), axis=0)
        x = z + 0.3 * rng.normal(size=z.shape)
        fitted = kbf.fit(states=z, observations=x, model="kalman", progress=False)
        low, high = fitted.filter(observations=x).interval()
        assert (low < high).all()


def test_a_budget_and_no_calibration_reach_the_model_selection(data, monkeypatch):
    """The configuration of the model has both, as that of `kbf train` has."""
    seen = []

    def train(config, *_, **__):
        seen.append(config["model"])
        raise kbf.FitError("enough")

    monkeypatch.setattr("kbf.training.fit.train", train)
    for settings in ({"budget": "90s"}, {"calibrate": False}, {}, {"budget": None}):
        with pytest.raises(kbf.FitError, match="enough"):
            kbf.fit(data, **ARM, **settings, progress=False)
    assert seen[0]["budget"] == 90 and seen[0]["model_selection"] is True
    assert "model_selection" not in seen[1]
    assert seen[2]["budget"] == 480 and seen[2]["model_selection"] is True
    assert "budget" not in seen[3]
    with pytest.raises(ValueError, match="budget must be a time"):
        kbf.fit(data, **ARM, budget="soon", progress=False)


@pytest.mark.parametrize("model", ["kalman", "lstm"])
def test_progress_is_logged_unless_it_is_not_wanted(model, data, capsys, monkeypatch):
    """Which fold or epoch, of how many: on standard error, where that is no terminal."""
    monkeypatch.setattr("kbf.runtime.progress.SECONDS_BETWEEN_LINES", 0.01)
    short = {"model.training.epochs": 2} if model == "lstm" else {}
    for progress in (True, False):
        kbf.fit(data, **ARM, model=model, config=short, progress=progress)
        out, err = capsys.readouterr()
        assert out == ""
        if not progress:
            assert err == ""
            continue
        lines = err.splitlines()
        assert all(line.startswith(f"fitting {model} to 240 steps") for line in lines)
        expected = "epoch 1 of 2" if model == "lstm" else "fold 2 of 5"
        assert any(expected in line for line in lines), lines


def test_required_capabilities(data):
    with pytest.raises(ValueError, match="there is no model 'kalmann'; did you mean 'kalman'"):
        kbf.fit(data, **ARM, model="kalmann", progress=False)
    with pytest.raises(kbf.FitError, match="window_ridge lacks smooth"):
        kbf.fit(data, **ARM, model="window_ridge", require=["smooth"], progress=False)
    with pytest.raises(ValueError, match="'smoothing' is no capability; there are smooth"):
        kbf.fit(data, **ARM, model="kalman", require=["smoothing"], progress=False)
    fitted = kbf.fit(data, **ARM, model="kalman", require=["smooth", "append"], progress=False)
    assert fitted.capabilities["smooth"]


def images_of_a_spot(steps: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Places ``T 2`` of a bright spot, and its images ``T 16 16``, uint8."""
    rng = np.random.default_rng(0)
    place = 7 + 4 * np.sin(np.cumsum(rng.normal(0, 0.3, (steps, 2)), 0))
    y, x = np.mgrid[0:16, 0:16]
    squared = (y - place[:, :1, None]) ** 2 + (x - place[:, 1:, None]) ** 2
    return place, (255 * np.exp(-squared / 4)).astype("uint8")


QUICK_ENCODING = {"data.encoding.epochs": 1, "data.encoding.members": 2}


def test_both_doors_fit_equal_filters_of_images(tmp_path):
    place, images = images_of_a_spot()
    path, run, output = tmp_path / "spot.npz", tmp_path / "run", tmp_path / "out.npz"
    np.savez(path, states=place, observations=images)
    words = [f"{key}={value}" for key, value in QUICK_ENCODING.items()]
    words += ["data=own", f"data.path={path}", "data.test=0", "model=kalman", "logger=none"]
    assert main(["train", *words, f"run_dir={run}"]) == 0
    checkpoint = run / "checkpoints" / "best.ckpt"
    assert main(["filter", f"checkpoint={checkpoint}", f"input={path}", f"output={output}"]) == 0
    settings = {"model": "kalman", "config": QUICK_ENCODING, "progress": False}
    mine = kbf.fit(states=place, images=images, **settings).filter(observations=images)
    theirs, again = np.load(output), kbf.load(checkpoint).filter(observations=images)
    assert mine.std is not None and mine.mean.std(0).min() > 0
    for k, name in enumerate(("z1", "z2")):
        np.testing.assert_allclose(theirs[name], mine.mean[:, k], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(theirs[f"{name}_std"], mine.std[:, k], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(again.mean, mine.mean, rtol=1e-12, atol=1e-12)


def test_errors_on_the_training_are_not_reported_as_held_out(data):
    """No fold can be removed from a network without a memory."""
    quick = {"training": {"epochs": 1}, "progress": False}
    fitted = kbf.fit(data, **ARM, model="lstm", **quick)
    assert fitted.held_out.empty and "held out" not in repr(fitted)
    apart = kbf.fit(data, **ARM, model="lstm", validation=0.25, **quick)
    assert list(apart.held_out.index) == ARM["states"] and "held out, reach_mm" in repr(apart)


def test_images_of_a_frame_are_in_a_folder(tmp_path, monkeypatch):
    from PIL import Image

    place, images = images_of_a_spot(40)
    (tmp_path / "frames").mkdir()
    names = [f"{k}.png" for k in range(len(images))]
    for name, image in zip(names, images, strict=True):
        Image.fromarray(image).save(tmp_path / "frames" / name)
    data = pd.DataFrame({"y": place[:, 0], "x": place[:, 1], "file": names})
    settings = {"model": "kalman", "config": QUICK_ENCODING, "progress": False}
    monkeypatch.chdir(tmp_path)
    fitted = kbf.fit(data, states=["y", "x"], images="file", root="frames", **settings)
    arrays = kbf.fit(states=place, images=images, **settings)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = fitted.filter(data[["file"]])
    np.testing.assert_array_equal(found.mean, arrays.filter(observations=images).mean)
    with pytest.raises(FileNotFoundError, match=r"no image .*nothing.png"):
        fitted.filter(pd.DataFrame({"file": ["nothing.png"]}))


def test_images_are_encoded(tmp_path):
    place, images = images_of_a_spot()
    fitted = kbf.fit(
        states=place, images=images, model="kalman", config=QUICK_ENCODING, progress=False
    )
    estimates = fitted.filter(observations=images)
    assert estimates.mean.shape == (60, 2) and "images" in repr(fitted)
    live = fitted.online()
    for k in range(3):
        np.testing.assert_allclose(
            list(live.step(images[k]).values()), estimates.mean[k], rtol=1e-5
        )
    fitted.save(tmp_path / "images.ckpt")
    again = kbf.load(tmp_path / "images.ckpt").filter(observations=images)
    np.testing.assert_allclose(again.mean, estimates.mean, rtol=1e-12)


@pytest.mark.parametrize("names", [(None, None), ("stamp", None), (None, "stamp")])
def test_times_in_an_index_need_no_name(names, data):
    """Neither at the fit nor afterwards."""
    before, after = (data.rename_axis(index=name) for name in names)
    columns = {"states": ["reach_mm"], "observations": ["s*"], "recording": "run"}
    fitted = kbf.fit(before, **columns, model="kalman", calibrate=False, progress=False)
    estimates = fitted.filter(after[after.run == "run3"])
    assert len(estimates) == 60 and estimates.to_frame().index.equals(after.index[180:])


def test_a_decreasing_time_names_the_column_of_recordings(data):
    frame = data.reset_index()
    frame["time"] = frame.groupby("run").cumcount() / 10
    with pytest.raises(kbf.DataError, match="recording='run' names them"):
        kbf.fit(frame, **{**ARM, "recording": None}, time="time", model="mean", progress=False)


def test_a_check_reports_what_the_command_does(data):
    frame = data.copy()
    frame["s1"] = (frame["s1"] * 100) % 360
    found = kbf.check(frame, **ARM)
    assert [row["recording"] for row in found.recordings] == [f"run{k}" for k in range(4)]
    assert any("undeclared" in each or "jumps by 360" in each for each in found.warnings)
    assert "| reach_mm |" in repr(found)
    with pytest.raises(kbf.DataError, match="did you mean 'reach_mm'"):
        kbf.check(frame, **{**ARM, "states": "reach"})


def test_partly_missing_rows_are_reported(data, fitted):
    new = data[data.run == "run3"].copy()
    new.iloc[3, new.columns.get_loc("s2")] = np.nan
    with pytest.warns(kbf.DataWarning, match="1 rows lack some of their observations"):
        fitted.filter(new)
