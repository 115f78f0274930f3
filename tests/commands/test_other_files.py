"""A file meets a filter that was trained on another one: right, or refused, never wrong in silence.

Each kind has an ordinary twin, of which nothing is reported.
"""

import shlex
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main
from kbf.data.files.dataset import FileData
from kbf.data.files.timestamps import moves_in, with_missing_steps

QUICK = ["logger=none", "trainer.enable_progress_bar=false", "particles=50"]
ROLES = ["data.states=[x,y]", "data.observations=[cell_*]", "data.time=t", "data.recording=run"]
COLUMNS = {
    "states": ["x", "y"],
    "observations": ["cell_*"],
    "time": "t",
    "recording": "run",
}


def recorded(steps: int = 200, seed: int = 0, run: str = "a") -> pd.DataFrame:
    """A damped rotation, seen by three cells, at 10 Hz."""
    rng, z = np.random.default_rng(seed), np.zeros((steps, 2))
    turn = 0.99 * np.array([[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]])
    for t in range(1, steps):
        z[t] = turn @ z[t - 1] + 0.1 * rng.normal(size=2)
    cells = z @ np.array([[1.0, 0.2, -0.5], [0.3, -1.0, 0.8]]) + 0.05 * rng.normal(size=(steps, 3))
    frame = pd.DataFrame({"run": run, "t": 0.1 * np.arange(steps), "x": z[:, 0], "y": z[:, 1]})
    return frame.assign(**{f"cell_{k}": cells[:, k] for k in range(3)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def kalman(folder):
    """A checkpoint of ``kbf train`` on a file."""
    recorded(400).to_csv(folder / "train.csv", index=False)
    words = ["data=own", f"data.path={folder}/train.csv", "model=kalman", *ROLES, *QUICK]
    assert main(["train", *words, f"run_dir={folder}/kalman"]) == 0
    return folder / "kalman" / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def fitted():
    """The same from Python."""
    return kbf.fit(recorded(400), **COLUMNS, model="kalman", progress=False)


def estimated(checkpoint, frame, folder, capsys, name="new.csv"):
    """The estimates of ``kbf filter`` on a file with the rows of a frame, and what it reports."""
    frame.to_csv(folder / name, index=False)
    capsys.readouterr()
    words = [f"checkpoint={checkpoint}", f"input={folder / name}", f"output={folder}/out.csv"]
    assert main(["filter", *words]) == 0
    return pd.read_csv(folder / "out.csv"), capsys.readouterr().err


def test_columns_of_patterns_are_found_by_name(kalman, folder, capsys, fitted):
    new = recorded(seed=1)
    shuffled = new[["t", "cell_2", "y", "run", "cell_0", "x", "cell_1"]]
    scores = []
    for frame in (new, shuffled):
        frame.to_csv(folder / "new.csv", index=False)
        words = [
            f"checkpoint={kalman}",
            f"data.path={folder}/new.csv",
            f"run_dir={folder}/score",
            "overwrite=true",
        ]
        assert main(["evaluate", *words]) == 0
        scores.append(np.load(folder / "score" / "predictions.npz")["estimates_0"])
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(fitted.filter(new).mean, fitted.filter(shuffled).mean)


def test_appended_columns_are_found_by_name(fitted):
    new = recorded(seed=1)
    shuffled = new[["t", "cell_2", "y", "run", "cell_0", "x", "cell_1"]]
    memories = [
        fitted.append(frame).trained.module.memory.recordings()[-1] for frame in (new, shuffled)
    ]
    assert torch.equal(memories[0].obs, memories[1].obs)
    assert torch.equal(memories[0].states, memories[1].states)


def test_a_rotation_between_other_states_keeps_its_columns(tmp_path):
    """The schema puts the columns of a rotation next to each other."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(40, 4))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    frame = pd.DataFrame(q, columns=["qw", "qx", "qy", "qz"]).assign(h=5.0 + rng.normal(size=40))
    frame.assign(o=rng.normal(size=40)).to_csv(tmp_path / "a.csv", index=False)
    names = ["qw", "h", "qx", "qy", "qz"]
    data = FileData(
        tmp_path / "a.csv", states=names, observations=["o"], rotations=[["qw", "qx", "qy", "qz"]]
    )
    decoded = data.column_schema.decode(torch.cat([data.train[0].states, data.test[0].states]))
    np.testing.assert_allclose(decoded["h"], frame.h)
    np.testing.assert_allclose(decoded["qz"].abs(), frame.qz.abs())


def test_interleaved_recordings_have_a_state_each(kalman, folder, capsys, fitted):
    runs = [recorded(60, seed, name) for seed, name in ((1, "a"), (2, "b"), (3, "c"))]
    apart = pd.concat(runs, ignore_index=True)
    mixed = apart.sort_values("t", kind="stable")
    one, _ = estimated(kalman, apart, folder, capsys)
    two, _ = estimated(kalman, mixed, folder, capsys)
    order = ["recording", "step"]
    pd.testing.assert_frame_equal(one, two.sort_values(order, ignore_index=True))
    found = fitted.filter(mixed).mean
    np.testing.assert_allclose(found, fitted.filter(apart).mean[mixed.index])


def test_the_states_of_interleaved_recordings_are_saved(kalman, folder, capsys):
    mixed = pd.concat([recorded(30, 1, "a"), recorded(30, 2, "b")]).sort_values("t", kind="stable")
    whole, _ = estimated(kalman, mixed, folder, capsys)
    parts = []
    for frame in (mixed[:33], mixed[33:]):
        frame.to_csv(folder / "part.csv", index=False)
        words = [f"checkpoint={kalman}", f"input={folder}/part.csv", f"output={folder}/out.csv"]
        assert main(["filter", *words, f"state={folder}/state.pt"]) == 0
        parts.append(pd.read_csv(folder / "out.csv"))
    pd.testing.assert_frame_equal(pd.concat(parts, ignore_index=True), whole)


def test_of_too_many_interleaved_recordings_some_are_restarted(kalman, folder, capsys, monkeypatch):
    monkeypatch.setattr("kbf.commands.support.filter_run.MAX_OPEN_RECORDINGS", 1)
    runs = [recorded(4, seed, name) for seed, name in ((1, "a"), (2, "b"), (3, "c"))]
    _, told = estimated(kalman, pd.concat(runs).sort_values("t", kind="stable"), folder, capsys)
    assert "9 restarts" in told
    _, told = estimated(kalman, pd.concat(runs), folder, capsys)
    assert "restarts" not in told


def test_rows_that_are_left_out_are_predicted(kalman, folder, capsys, fitted):
    """As rows without observations."""
    whole = recorded(120, seed=1)
    kept = np.random.default_rng(0).random(120) > 0.3
    kept[[0, 119]] = True
    empty = whole.copy()
    empty.loc[~kept, ["cell_0", "cell_1", "cell_2"]] = np.nan
    expected, told = estimated(kalman, empty, folder, capsys)
    assert "without a row" not in told
    found, told = estimated(kalman, whole[kept], folder, capsys)
    assert f"{(~kept).sum()} without a row predicted" in told
    np.testing.assert_allclose(found.x, expected.x[kept])
    np.testing.assert_allclose(found.x_std, expected.x_std[kept])
    np.testing.assert_allclose(
        fitted.filter(whole[kept]).mean, fitted.filter(empty).mean[kept], atol=1e-12
    )
    scores = fitted.evaluate(whole[kept], horizon=2, baselines=False)
    assert (scores.nmse < 0.05).all() and (scores.nmse_ahead_2 < 0.5).all()
    likelihood = fitted.filter(whole[kept]).log_likelihood
    expected_likelihood = fitted.filter(empty).log_likelihood
    np.testing.assert_allclose(likelihood, expected_likelihood[kept], rtol=1e-9)


def test_missing_steps_of_arrays_and_images():
    images = torch.arange(3 * 4, dtype=torch.uint8).reshape(3, 1, 2, 2)
    times = torch.tensor([0.0, 0.3, 0.4]).double()
    leaves = {"obs": images, "mask": None, "controls": torch.tensor([[1.0], [2], [3]])}
    found, inserted = with_missing_steps({**leaves, "times": times}, times, 0.1)
    assert inserted.tolist() == [False, True, True, False, False]
    assert found["mask"].tolist() == [True, False, False, True, True]
    assert found["controls"].flatten().tolist() == [1, 2, 2, 2, 3]
    np.testing.assert_allclose(found["times"], [0, 0.1, 0.2, 0.3, 0.4])
    same, inserted = with_missing_steps(leaves, times[:2] / 3, 0.1)
    assert inserted is None and same == leaves


@pytest.mark.parametrize(
    ("duration", "moves"),
    [(0.1, 1), (0.104, 1), (0.2, 2), (0.29, 3), (0.15, 1), (0.5, 5), (0.6, 1)],
)
def test_moves_of_a_duration(duration, moves):
    assert moves_in(duration, 0.1) == moves


def test_columns_that_never_vary_are_left_out(folder, capsys):
    frame = recorded(300).assign(cell_k=7.0, u=0.5)
    frame.to_csv(folder / "constant.csv", index=False)
    words = ["data=own", f"data.path={folder}/constant.csv", "model=kalman", *ROLES, *QUICK]
    words += ["data.controls=[u]", f"run_dir={folder}/constant"]
    assert main(["train", *words]) == 0
    assert "these columns never vary and are left out: cell_k, u" in capsys.readouterr().out
    checkpoint = folder / "constant" / "checkpoints" / "best.ckpt"
    with pytest.warns(kbf.DataWarning, match="left out: cell_k, u"):
        found = kbf.fit(frame, **COLUMNS, controls=["u"], model="kalman", progress=False)
    assert found.columns["observations"] == ["cell_0", "cell_1", "cell_2"]
    new = recorded(seed=1)
    lines, _ = estimated(checkpoint, new, folder, capsys)
    mean = found.filter(new.assign(cell_k=7.0, u=0.5)).mean
    assert lines.x.to_numpy() == pytest.approx(mean[:, 0], abs=0.05)
    with pytest.warns(kbf.DataWarning) as caught:
        kbf.fit(
            frame[["t", "x", "cell_0", "cell_k"]],
            states=["x"],
            observations=["cell_*"],
            time="t",
            model="kalman",
            progress=False,
        )
    assert len(caught) == 1


def test_arrays_with_a_constant_column(tmp_path):
    frame = recorded(200)
    obs = frame[["cell_0", "cell_1", "cell_2"]].assign(k=1.0).to_numpy()
    states = frame[["x", "y"]].to_numpy()
    with pytest.warns(kbf.DataWarning, match="left out: x4"):
        found = kbf.fit(states=states, observations=obs, model="kalman", progress=False)
    assert found.filter(observations=obs).mean.shape == (200, 2)


def test_states_that_never_vary_do_not_spoil_the_spread_of_others(folder, capsys):
    new, columns = recorded(seed=1), {"observations": ["cell_*"], "time": "t"}
    usual = kbf.fit(
        recorded(300), **columns, states=["x", "y"], model="kalman", progress=False
    ).filter(new)
    with_constant = kbf.fit(
        recorded(300).assign(c=-2e6),
        **columns,
        states=["x", "c", "y"],
        model="kalman",
        progress=False,
    )
    found = with_constant.filter(new)
    np.testing.assert_allclose(found.std[:, [0, 2]], usual.std, rtol=0.15)
    assert (found.mean[:, 1] == -2e6).all() and (found.std[:, 1] < 10).all()
    scores = with_constant.evaluate(new.assign(c=-2e6), baselines=False)
    assert np.isnan(scores.nmse["c"]) and (scores.nmse[["x", "y"]] < 0.05).all()


def test_rotations_about_a_fixed_axis_have_a_usual_spread():
    rng = np.random.default_rng(0)
    half = np.cumsum(0.2 * rng.normal(size=400)) / 2
    seen = np.stack([np.cos(2 * half), np.sin(2 * half)], 1) + 0.05 * rng.normal(size=(400, 2))
    frame = pd.DataFrame(
        {
            "qw": np.cos(half),
            "qx": 0.0,
            "qy": 0.0,
            "qz": np.sin(half),
            "a": seen[:, 0],
            "b": seen[:, 1],
        }
    )
    names = ["qw", "qx", "qy", "qz"]
    for model in ("kalman", "kbf_tuned"):
        fitted = kbf.fit(
            frame[:300],
            states=names,
            observations=["a", "b"],
            rotations=[names],
            model=model,
            progress=False,
        )
        found = fitted.filter(frame[300:])
        assert (found.std < 0.6).all() and (found.std > 0.005).all(), model
        scores = fitted.evaluate(frame[300:], baselines=False)
        assert scores.rmse.iloc[0] < 0.3, model


@pytest.mark.parametrize(("offset", "digits"), [(3948996.0, 3), (0.0, 3)])
def test_estimates_far_from_zero_have_the_digits_of_their_deviation(folder, capsys, offset, digits):
    frame = recorded(300).assign(x=lambda f: offset + 0.05 * f.x)
    frame.to_csv(folder / "far.csv", index=False)
    words = ["data=own", f"data.path={folder}/far.csv", "model=kalman", *ROLES, *QUICK]
    assert main(["train", *words, f"run_dir={folder}/far", "overwrite=true"]) == 0
    capsys.readouterr()
    checkpoint = folder / "far" / "checkpoints" / "best.ckpt"
    found, _ = estimated(checkpoint, frame, folder, capsys)
    exact = kbf.load(checkpoint).filter(frame)
    assert (abs(found.x - exact.mean[:, 0]) < 10.0**-digits * exact.std[:, 0]).all()
    text = (folder / "out.csv").read_text().splitlines()[5].split(",")
    assert len(text[3].strip("-").replace(".", "").lstrip("0")) in (9, 10, 11, 12, 13, 14)


@pytest.mark.parametrize("model", ["kalman", "kbf_tuned"])
def test_only_innovations_that_are_measured_are_scored(folder, capsys, model):
    recorded(300).to_csv(folder / "train.csv", index=False)
    words = ["data=own", f"data.path={folder}/train.csv", f"model={model}", *ROLES, *QUICK]
    assert main(["train", *words, f"run_dir={folder}/{model}_scored", "overwrite=true"]) == 0
    checkpoint = folder / f"{model}_scored" / "checkpoints" / "best.ckpt"
    capsys.readouterr()
    assert (
        main(["evaluate", f"checkpoint={checkpoint}", f"run_dir={folder}/score", "overwrite=true"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "test.out_of_distribution_alarms" in shown
    assert ("test.innovation_alarms" in shown) == ("test.diverged" in shown) == (model != "kalman")


def test_texts_with_decimal_commas_and_compressed_ones_are_filtered(kalman, folder):
    new = recorded(40, seed=1)
    new.to_csv(folder / "point.csv", index=False)
    new.to_csv(folder / "comma.csv", index=False, sep=";", decimal=",")
    new.to_csv(folder / "small.csv.gz", index=False)
    found = []
    for name in ("point.csv", "comma.csv", "small.csv.gz"):
        words = [f"checkpoint={kalman}", f"input={folder}/{name}", f"output={folder}/out.csv"]
        assert main(["filter", *words]) == 0
        found.append(pd.read_csv(folder / "out.csv")[["x", "y", "x_std"]])
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], rtol=1e-8)


def test_several_files_are_filtered_at_once(kalman, folder, capsys):
    """A folder, a pattern and a list; each file is a recording, as one alone is."""
    several = folder / "several"
    several.mkdir()
    for k in range(2):
        recorded(60, k + 5, run=f"r{k}").to_csv(several / f"r{k}.csv", index=False)
    found = {}
    inputs = [several, f"{several}/r*.csv", f"[{several}/r0.csv,{several}/r1.csv]"]
    for text in [*inputs, f"{several}/r1*.csv"]:
        words = [f"checkpoint={kalman}", f"input={text}", f"output={folder}/all.csv"]
        assert main(["filter", *words]) == 0
        found[str(text)] = pd.read_csv(folder / "all.csv")
    first, *others, last = found.values()
    assert list(first.recording.unique()) == ["r0", "r1"]
    for each in others:
        pd.testing.assert_frame_equal(each, first)
    alone, _ = estimated(kalman, recorded(60, 6, run="r1"), folder, capsys)
    pd.testing.assert_frame_equal(last, alone[last.columns])
    second = first[first.recording == "r1"].reset_index(drop=True)
    pd.testing.assert_frame_equal(second[["x", "y"]], alone[["x", "y"]])
    refused = {
        f"[{several}/r0.csv,{several}/r9.csv]": "there is no file or folder",
        f"[-,{several}/r0.csv]": "standard input cannot be one of several files",
        "[]": "input must name a file, got []",
    }
    for text, message in refused.items():
        assert main(["filter", f"checkpoint={kalman}", f"input={text}"]) == 2
        assert message in capsys.readouterr().err
    words = [f"checkpoint={kalman}", f"input=[{several}/r0.csv]", f"output={several}/r0.csv"]
    assert main(["filter", *words]) == 2
    assert "would overwrite the input" in capsys.readouterr().err


def test_a_folder_of_a_run_is_its_checkpoint(kalman, folder, capsys):
    new, run = recorded(seed=1), kalman.parents[1]
    expected, _ = estimated(kalman, new, folder, capsys)
    for path in (run, kalman.parent):
        found, _ = estimated(path, new, folder, capsys)
        pd.testing.assert_frame_equal(found, expected)
    assert kbf.load(run).model_name == "kalman"
    (folder / "empty").mkdir(exist_ok=True)
    assert main(["evaluate", f"checkpoint={folder / 'empty'}"]) == 2
    assert f"there is no checkpoint in the folder {folder / 'empty'}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--version"], ["data", "check", "FILE", *ROLES, "run_dir=RUN"]])
def test_python_m_kbf_and_a_closed_standard_output(folder, words):
    recorded(120).to_csv(folder / "check.csv", index=False)
    path, run = folder / "check.csv", folder / "check"
    words = [w.replace("FILE", str(path)).replace("RUN", str(run)) for w in words]
    command = " ".join(map(shlex.quote, [sys.executable, "-m", "kbf", *words]))
    for ending in ("", " >&-"):
        found = subprocess.run(
            command + ending, shell=True, capture_output=True, text=True, check=False
        )
        assert (found.returncode, "Traceback" in found.stderr) == (0, False), found.stderr
    assert words == ["--version"] or (run / "report.md").exists()
