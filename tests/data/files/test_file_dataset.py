"""Parts, gaps, missing values: what becomes of a recording of one's own.

And what `kbf data check` says of it.
"""

import math

import numpy as np
import pytest
import torch

from kbf.data.dataset import load_data
from kbf.data.files import FileData, report
from kbf.data.files.report import examine, markdown
from kbf.evaluation.score import score
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.recording import as_recordings
from kbf.ssm import rotation, simulate


def written(path, steps=(60,), times=None, seed=0, states_missing=(), obs_missing=(), **more):
    """A CSV of turning points; state x of each step is unique, so that steps can be told apart."""
    lines = ["run,t,x,y,a,b," + ",".join(more)]
    for k, n in enumerate(steps):
        drawn = simulate(
            rotation(),
            torch.tensor([1.0, 0.0]).double(),
            n,
            torch.Generator().manual_seed(seed + k),
        )
        for t in range(n):
            stamp = 0.5 * t if times is None else times[t]
            x, y = ("", "") if t in states_missing else drawn.states[t].tolist()
            a, b = ("", 1.0) if t in obs_missing else drawn.obs[t].tolist()
            lines.append(
                f"r{k},{stamp},{x},{y},{a},{b},"
                + ",".join(str(column[t]) for column in more.values())
            )
    path.write_text(
        "\n".join(line.rstrip(",") if not more else line for line in lines) + "\n", encoding="utf-8"
    )
    return path


def own(path, **settings):
    base = {"states": ["x", "y"], "observations": ["a", "b"], "time": "t", "recording": "run"}
    return FileData(path, **{**base, **settings})


def rows(sequences):
    return [tuple(row) for s in sequences for row in s.states.tolist()]


def test_the_last_steps_are_the_test(tmp_path):
    data = own(written(tmp_path / "a.csv", (60, 40)), test=0.2, validation=0.1)
    assert [len(s.states) for s in data.train] == [42, 28]
    assert [len(s.states) for s in data.validation] == [6, 4]
    assert [len(s.states) for s in data.test] == [12, 8]
    parts = [set(rows(part)) for part in (data.train, data.validation, data.test)]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == 100


def test_whole_sequences(tmp_path):
    path = written(tmp_path / "a.csv", (30, 31, 32, 33, 34))
    lengths = lambda part: [len(s.states) for s in part]  # noqa: E731
    data = own(path, split="recording", test=0.2, validation=0.4)
    assert (lengths(data.train), lengths(data.validation), lengths(data.test)) == (
        [30, 31],
        [32, 33],
        [34],
    )
    data = own(path, test=["r0", "r3"], validation=["r1"])
    assert (lengths(data.train), lengths(data.validation), lengths(data.test)) == (
        [32, 34],
        [31],
        [30, 33],
    )
    data = own(path, test=["r1"])
    assert (lengths(data.train), lengths(data.validation)) == ([30, 32, 33, 34], [])
    everything = own(path, test="all")
    assert lengths(everything.test) == [30, 31, 32, 33, 34]
    assert not everything.train


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test": ["r9"]}, "data.test: there is no recording 'r9'; there are r0, r1"),
        ({"test": ["r0"], "validation": ["r0"]}, "both name 'r0'"),
        ({"test": ["r0", "r1"]}, "leaves a part empty"),
        ({"test": 1.5}, r"data.test must be a share in \[0, 1\)"),
        ({"test": 0.0, "split": "recording", "validation": ["r0", "r1"]}, "leaves a part empty"),
        ({"test": 0.6, "validation": 0.4}, "must leave training steps"),
        ({"validation": "some"}, "data.validation must be a share"),
        ({"split": "random"}, "data.split must be time or recording"),
        ({"n_train": 1000}, "n_train=1000: there are 96 training steps"),
        ({"states": ["x", "z"]}, "there is no column 'z'"),
        ({"angles": ["z"]}, "data.angles: 'z' is neither"),
        ({"time": None, "time_as_control": True}, "data.time_as_control needs time stamps"),
        (
            {"recording": None},
            r"a.csv, row 62: time 0 after 29.5; times must increase within a recording",
        ),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        own(written(tmp_path / "a.csv", (60, 60)), **settings)
    with pytest.raises(ValueError, match=r"data=own needs a file: data.path=FILE"):
        FileData(None)


def test_n_train_takes_the_first_steps(tmp_path):
    path = written(tmp_path / "a.csv", (30, 30))
    whole, some = own(path), own(path, n_train=30)
    assert rows(some.train) == rows(whole.train)[:30]
    assert rows(some.test) == rows(whole.test)


def test_missing_values(tmp_path):
    path = written(tmp_path / "a.csv", states_missing=(5, 20, 21, 55), obs_missing=(3, 50))
    data = own(path)
    assert [len(s.states) for s in data.train] == [5, 14, 26]  # cut where no state is known
    assert [s.mask is None for s in data.train] == [False, True, True]
    assert data.train[0].mask.tolist() == [t != 3 for t in range(5)]
    assert data.train[0].obs[3].tolist() == [0, 0]
    test = data.test[0]
    assert len(test.states) == 12
    assert test.states.isnan().any(1).nonzero().flatten().tolist() == [7]
    assert (~test.mask).nonzero().flatten().tolist() == [2]
    assert [len(s.states) for s in own(path, cut_missing=True).train] == [3, 1, 14, 26]
    as_recordings(data.train)
    allow_missing_sensors = own(path, allow_missing_sensors=True)
    assert allow_missing_sensors.train[0].mask is None
    assert allow_missing_sensors.train[0].obs[3].isnan().tolist() == [True, False]
    assert any("4 steps without a state" in note for note in data.notes)


def test_steps_without_a_state_are_not_scored(tmp_path):
    path = written(tmp_path / "a.csv", (100,), states_missing=(90,))
    config = {
        "name": "own",
        "source": {
            "_target_": "kbf.FileData",
            "path": str(path),
            "states": ["x", "y"],
            "observations": ["a", "b"],
        },
    }
    data = load_data(config)
    filter = LearnedKalman().fit(data.train)
    found = score(filter, data.test)
    known = torch.arange(20) != 10
    errors = (found.estimates[0] - data.test[0].states).square().sum(1)
    assert found.mse[0].item() == pytest.approx(errors[known].mean().item())
    assert errors[10].isnan()
    assert data.column_schema.columns("states") == ["x", "y"]


def test_gaps_cut_and_times_are_checked(tmp_path):
    times = [0.5 * t + (100 if t >= 20 else 0) for t in range(60)]
    data = own(written(tmp_path / "a.csv", times=times))
    assert [len(s.states) for s in data.train] == [20, 28]
    assert data.time_step == 0.5
    assert "1 gaps in time of more than 5 median steps" in data.notes[0]
    assert "a.csv, row 22" in data.notes[0]
    times[30] = times[29]
    with pytest.raises(
        ValueError, match=r"b.csv, row 32: time 114.5 after 114.5; times must increase"
    ):
        own(written(tmp_path / "b.csv", times=times))
    times[30] = "nan"
    with pytest.raises(ValueError, match=r"c.csv, row 32: the time is missing"):
        own(written(tmp_path / "c.csv", times=times))


def test_irregular_steps_are_told_and_become_a_control(tmp_path):
    times = [0.5 * t + (0.1 if t % 10 == 3 else 0) for t in range(60)]
    path = written(tmp_path / "a.csv", times=times)
    told = own(path).notes[0]
    assert "12 of 59 moves" in told
    assert "row 5: 0.6 instead of 0.5" in told
    assert "data.time_as_control=true" in told
    data = own(path, time_as_control=True)
    assert not data.notes
    taken = [0.5, *np.diff(times)]
    np.testing.assert_allclose(torch.cat([s.controls for s in data.train + data.test])[:, 0], taken)
    assert not own(written(tmp_path / "b.csv")).notes


def test_controls(tmp_path):
    path = written(tmp_path / "a.csv", u=list(range(60)))
    assert torch.cat([s.controls for s in own(path, controls=["u"]).train])[:, 0].tolist() == list(
        range(48)
    )
    path = written(tmp_path / "b.csv", u=[*range(7), "", *range(8, 60)])
    with pytest.raises(ValueError, match=r"b.csv, row 9, column u: a control is missing"):
        own(path, controls=["u"])


def test_too_little_is_left(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"too few steps with known states \(train 0, validation 0, test 12 of 60\)",
    ):
        own(written(tmp_path / "a.csv", states_missing=range(48)))
    with pytest.raises(ValueError, match=r"too few steps .*test 0 of 60"):
        own(written(tmp_path / "b.csv", states_missing=range(48, 60)))


def test_columns_must_be_those_of_the_boundary(tmp_path):
    first = own(written(tmp_path / "a.csv"), angles=["b"])
    again = own(
        tmp_path / "a.csv", column_schema=first.column_schema.to_dict()
    )  # what a checkpoint holds counts
    assert again.train[0].obs.shape[1] == 3
    with pytest.raises(ValueError, match=r"its states are x; those of the training x, y"):
        own(tmp_path / "a.csv", states=["x"], column_schema=first.column_schema.to_dict())


def test_a_file_that_changed_is_read_again(tmp_path):
    path = written(tmp_path / "a.csv")
    before = rows(own(path).train)
    assert rows(own(path).train) == before
    assert rows(own(written(path, (70,), seed=5)).train) != before


# the check


def warnings_of(path, **settings):
    return " | ".join(examine(own(path, **settings)).warnings)


def test_nothing_to_warn_of(tmp_path):
    report = examine(own(written(tmp_path / "a.csv", (300,))))
    assert not report.warnings
    assert report.recordings[0] | {"duration": 149.5} == report.recordings[0]
    column = next(row for row in report.columns if row["column"] == "a")
    obs = own(tmp_path / "a.csv").recordings[0].obs[:, 0]
    assert column["max"] == obs.max().item()
    assert column["std"] == pytest.approx(obs.std(correction=0).item())
    text = markdown("a.csv", report)
    assert "## Columns" in text
    assert "| r0 | 300 | 240 | 0 | 60 | 149.5 | 0.5 | 0.5 | 0.5 |" in text


def test_too_few_constant_and_empty(tmp_path):
    path = written(tmp_path / "a.csv", flat=[3] * 60)
    told = warnings_of(path, observations=["a", "flat"])
    assert "only 48 training steps" in told
    assert "only 12 test steps" in told
    assert "these columns never vary and are left out: flat" in told
    assert "column flat: it is constant (3)" in warnings_of(path, states=["flat"])


def test_outliers_have_their_place(tmp_path):
    spikes = np.random.default_rng(0).normal(size=300)
    spikes[77] = 1e4
    told = warnings_of(written(tmp_path / "a.csv", (300,), c=list(spikes)), observations=["a", "c"])
    assert "column c: 1 outliers (first: 10000 at" in told
    assert "a.csv, row 79" in told


@pytest.mark.parametrize(("unit", "period"), [("radians", 2 * math.pi), ("degrees", 360.0)])
def test_an_angle_that_nobody_declared(tmp_path, unit, period):
    heading = [(0.03 * period * t) % period for t in range(300)]
    path = written(tmp_path / "a.csv", (300,), h=heading)
    told = warnings_of(path, observations=["a", "h"])
    assert (
        f"column h: it jumps by {period:.4g}, as an angle in {unit} does: data.angles=[h] "
        f"data.angle_unit={unit}" in told
    )
    assert "jumps" not in warnings_of(path, observations=["a", "h"], angles=["h"], angle_unit=unit)
    joined = [
        (v + 0.6 * period) % period if t >= 150 else v for t, v in enumerate(heading)
    ]  # two recordings, not told apart
    assert "jumps" in warnings_of(
        written(tmp_path / "c.csv", (300,), h=joined), observations=["a", "h"]
    )
    uniform = np.random.default_rng(0).uniform(0, period, 300)  # any moves: no angle that turns
    assert "jumps" not in warnings_of(
        written(tmp_path / "b.csv", (300,), h=list(uniform)), observations=["a", "h"]
    )


def test_copies_and_overlap(tmp_path):
    path = written(tmp_path / "a.csv", (300,))
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    cells = [line.split(",") for line in lines]
    for t in range(0, 300, 2):
        cells[t + 1][2:] = cells[t][2:]  # each step twice
    path.write_text("\n".join([header, *map(",".join, cells)]) + "\n", encoding="utf-8")
    assert "150 of 298 steps are copies of the step before" in warnings_of(path)
    cells = [line.split(",") for line in lines]
    for t in range(7):
        cells[290 + t][2:] = cells[100 + t][2:]
    path.write_text("\n".join([header, *map(",".join, cells)]) + "\n", encoding="utf-8")
    told = warnings_of(path)
    assert "7 test steps are in the training part too" in told
    assert "copies" not in told


def test_test_steps_outside_of_the_training(tmp_path):
    drift = np.concatenate(
        [np.random.default_rng(0).normal(size=240), 30 + np.random.default_rng(1).normal(size=60)]
    )
    path = written(tmp_path / "a.csv", (300,), c=list(drift))
    assert "60 of 60 test observations lie outside" in warnings_of(path, observations=["a", "c"])
    told = warnings_of(path, states=["x", "c"])
    assert "60 of 60 test states lie outside" in told
    assert "100 % of the test steps have c outside of the training part's range" in told
    assert "outside" not in warnings_of(path)


def test_of_many_points_evenly_spaced_ones_are_looked_at(tmp_path, monkeypatch):
    """The count is then that of all, estimated from those."""
    monkeypatch.setattr(report, "MAX_POINTS", 40)
    drift = np.concatenate(
        [np.random.default_rng(0).normal(size=240), 30 + np.random.default_rng(1).normal(size=60)]
    )
    path = written(tmp_path / "a.csv", (300,), c=list(drift))
    assert "60 of 60 test states lie outside" in warnings_of(path, states=["x", "c"])
