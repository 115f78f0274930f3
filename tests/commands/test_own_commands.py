"""Recordings of one's own through the commands: check, train, evaluate, from files to columns."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from reference import TRAINER

from kbf.cli import main
from kbf.commands import train as train_command
from kbf.commands.compare import fingerprints, make_cells, with_shapes
from kbf.config import configure
from kbf.data.dataset import load_data
from kbf.evaluation.score import score
from kbf.fitted.checkpoint import load_filter
from kbf.recording import Recording
from kbf.ssm import OrientationModel, oscillatory, simulate
from kbf.training.filter_stage import FilterTraining
from kbf.training.fit import train

QUICK = ["logger=none", "trainer.enable_progress_bar=false", "particles=50", "calibrate=false"]
SMALL = ["+model.net.points=60", "+model.net.run=800", "+model.net.draws=4"]
COLUMNS = ["data.states=[x,y]", "data.observations=[a,b]"]


@pytest.fixture(scope="module")
def drawn():
    return simulate(
        oscillatory(), torch.tensor([1.0, 0.0]).double(), 220, torch.Generator().manual_seed(0)
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory, drawn):
    """In units that nobody would choose."""
    path = tmp_path_factory.mktemp("own") / "my rec, 1.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["t", "x", "y", "a", "b"])
        for t, (z, x) in enumerate(zip(drawn.states.tolist(), drawn.obs.tolist(), strict=True)):
            seen = "" if t % 40 == 9 else 3000 + 100 * x[0]
            writer.writerow([0.1 * t, 1e6 + 1000 * z[0], 0.01 * z[1], seen, x[1]])
    return path


def path_of(table):
    return f"data.path='{table}'"


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    assert (
        main(
            ["train", "data=own", path_of(table), *COLUMNS, f"run_dir={directory}", *QUICK, *SMALL]
        )
        == 0
    )
    return directory


def metrics(directory):
    return json.loads((directory / "metrics.json").read_text(encoding="utf-8"))


def test_shapes_come_from_the_file(table):
    words = ["data=own", path_of(table), *COLUMNS]
    config = configure("train", [*words, "model=lstm"])
    config = train_command.with_shapes(config, load_data(config["data"]))
    assert (config["data"]["d"], config["data"]["q"], config["n_train"]) == (2, [2], 176)
    assert (config["model"]["net"]["d"], config["model"]["net"]["q"]) == (2, [2])
    assert config["model"]["encoding"] is None
    assert config["data"]["path"] == str(table)
    assert config["data"]["source"]["n_train"] == config["recipe"]["n_train"] == 176
    assert config["recipe"]["data"]["source"]["column_schema"] == "${data.column_schema}"
    config = with_shapes(configure("compare", [*words, "models=[lstm]"]))
    assert config["n_train"] == [176]
    assert config["recipe"]["data"]["d"] == 2
    sized = configure("compare", [*words, "models=[lstm]", "n_train=50,100"])
    assert with_shapes(sized)["n_train"] == [50, 100]
    several = with_shapes(configure("compare", [*words, "models=[lstm]", "n_train=[50,null]"]))
    assert several["n_train"] == [50, 176], "null: all steps there are"
    (lstm, *_) = [cell for cell in make_cells(several, Path("cells")) if cell.model == "lstm"]
    assert (lstm.config["model"]["net"]["q"], lstm.n_train) == ([2], 50)


def test_no_data_is_read_while_a_configuration_is_composed(tmp_path, capsys):
    words = ["data=own", f"data.path={tmp_path / 'none.csv'}", *COLUMNS]
    config = configure("train", [*words, "model=lstm"])
    assert (config["n_train"], config["data"]["d"], config["data"]["column_schema"]) == (None,) * 3
    assert config["model"]["net"]["d"] == "${data.d}", "resolved when the file has been read"
    assert config["trainer"]["max_epochs"] == 60, "the rest is resolved"
    assert config["run_dir"].endswith("-own-nall-lstm-seed0")
    assert configure("data", words)["run_dir"] == "runs/data/own-nall-seed0-none"
    assert configure("data", [*words, "n_train=50"])["run_dir"] == "runs/data/own-n50-seed0-none"
    assert main(["train", *words, "--cfg"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["n_train"] is shown["data"]["d"] is None
    run = tmp_path / "run"
    for command in ("train", "compare"):
        assert main([command, *words, f"run_dir={run}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "data.path: there is no file" in line
        assert not run.exists()


def test_patterns_stand_for_columns(tmp_path, capsys):
    """In the order of the file of the training, whatever the order in a later file."""
    rows = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).tolist()
    for name, header in (("a", ["z", "cell_1", "cell_2"]), ("b", ["cell_2", "z", "cell_1"])):
        table = [dict(zip(("z", "cell_1", "cell_2"), row, strict=True)) for row in rows]
        lines = [
            ",".join(header),
            *(",".join(f"{row[key]:.6f}" for key in header) for row in table),
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    words = [
        "data=own",
        f"data.path={tmp_path / 'a.csv'}",
        "data.states=[z]",
        "data.observations=[cell_*]",
        "model=kalman",
    ]
    assert main(["train", *words, *QUICK, "calibrate=false", f"run_dir={tmp_path / 'run'}"]) == 0
    found = {}
    for name in "ab":
        out = tmp_path / f"{name}.out.csv"
        best = tmp_path / "run" / "checkpoints" / "best.ckpt"
        assert (
            main(["filter", f"checkpoint={best}", f"input={tmp_path / name}.csv", f"output={out}"])
            == 0
        )
        found[name] = out.read_text()
    assert found["a"] == found["b"]
    capsys.readouterr()
    assert (
        main(
            [
                "train",
                *[word.replace("cell_*", "cell_?x") for word in words],
                f"run_dir={tmp_path / 'none'}",
            ]
        )
        == 2
    )
    assert "no column matches 'cell_?x'; it has z, cell_1, cell_2" in capsys.readouterr().err


@pytest.mark.slow
def test_train_and_evaluate(trained, table, drawn, tmp_path, monkeypatch):
    told = metrics(trained)
    scale = drawn.states.std(0) * torch.tensor([1000.0, 0.01])
    assert told["n_train"] == 176
    assert told["test.mse"] < 0.25 * scale[0] ** 2, (
        "much better than the mean, in the units of the data"
    )
    monkeypatch.chdir(tmp_path)
    checkpoint = f"checkpoint='{trained}/checkpoints/best.ckpt'"
    assert main(["evaluate", checkpoint, f"run_dir={tmp_path}/same", "particles=50"]) == 0
    again = metrics(tmp_path / "same")
    assert again["test.mse"] == pytest.approx(told["test.mse"])
    with (tmp_path / "same" / "estimates.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["recording", "step", "x", "y", "x_std", "y_std"] or set(rows[0]) == {
        "recording", "step", "x", "y", "x_std", "y_std"
    }  # fmt: skip
    truth = 1e6 + 1000 * drawn.states[176:, 0]
    found = torch.tensor([float(row["x"]) for row in rows])
    assert (found - truth).square().mean() < 0.25 * scale[0] ** 2
    inside = np.abs(found - truth) < 2.5 * torch.tensor([float(row["x_std"]) for row in rows])
    assert inside.double().mean() > 0.7


@pytest.mark.slow
def test_sensors_of_different_rates_need_no_further_word(table, tmp_path):
    """Column b is read at every third step, and a dies for a while: the default model, then a file
    whose sensors do the same.
    """
    lines = list(csv.reader(table.open(encoding="utf-8")))
    for t, row in enumerate(lines[1:]):
        row[4] = row[4] if t % 3 == 0 else ""
        row[3] = "" if 60 <= t < 80 else row[3]
    with (tmp_path / "slow.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    words = [
        "data=own",
        f"data.path={tmp_path}/slow.csv",
        "data.allow_missing_sensors=true",
        *COLUMNS,
        f"run_dir={tmp_path}/run",
        *SMALL,
    ]
    assert main(["train", *words, "logger=none", "particles=50"]) == 0
    loaded = load_filter(tmp_path / "run" / "checkpoints" / "best.ckpt")
    assert (
        loaded.module.net.main.densities.sensors.columns() == [[0], [1]]
        and loaded.filter.allow_missing_sensors
    )
    masks = [s.mask for s in loaded.module.memory.recordings()]
    assert sum(176 if m is None else int(m.sum()) for m in masks) > 150, "what speaks is heard"
    told = metrics(tmp_path / "run")
    assert told["test.nmse"] < 0.8 and "baseline.window_ridge.nmse" in told
    checkpoint = f"checkpoint='{tmp_path}/run/checkpoints/best.ckpt'"
    assert (
        main(["filter", checkpoint, f"input={tmp_path}/slow.csv", f"output={tmp_path}/out.csv"])
        == 0
    )
    with (tmp_path / "out.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = torch.tensor([[float(row["x"]), float(row["y"])] for row in rows])
    truth = torch.tensor([[float(row[1]), float(row[2])] for row in lines[1:]])
    assert ((found - truth).square().mean(0) < 0.8 * truth.var(0)).all()


@pytest.mark.slow
def test_other_recordings_in_the_units_of_the_checkpoint(trained, table, tmp_path, capsys):
    lines = table.read_text(encoding="utf-8").splitlines()
    (tmp_path / "other.csv").write_text(
        "\n".join([lines[0], *lines[100:160]]) + "\n", encoding="utf-8"
    )
    checkpoint = f"checkpoint='{trained}/checkpoints/best.ckpt'"
    assert (
        main(
            [
                "evaluate",
                checkpoint,
                f"data.path='{tmp_path}/other.csv'",
                f"run_dir={tmp_path}/other",
                "particles=50",
            ]
        )
        == 0
    )
    told = metrics(tmp_path / "other")
    assert (told["n_train"], told["n_test"]) == (0, 60)
    assert "reading" not in capsys.readouterr().out, (
        "the file was named on the command line, not by the checkpoint"
    )
    assert main(["evaluate", checkpoint, f"run_dir={tmp_path}/own", "particles=50"]) == 0
    assert f"reading {table}, which" in capsys.readouterr().out
    assert told["test.mse"] < 0.5 * (1000 * 0.7) ** 2


@pytest.mark.slow
def test_errors_are_one_line_with_the_place(table, tmp_path, capsys, trained):
    lines = table.read_text(encoding="utf-8").splitlines()
    lines[5] = lines[5].replace("0.4,", "0.4,much")
    (tmp_path / "bad.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for words, message in (
        (["train", "data=own"], "data=own needs a file: data.path=FILE"),
        (
            ["train", "data=own", f"data.path={tmp_path}/bad.csv", *COLUMNS],
            "bad.csv, row 6, column x: 'much",
        ),
        (["data", "check", f"{tmp_path}/bad.csv", *COLUMNS], "bad.csv, row 6, column x: 'much"),
        (["data", "check", f"{tmp_path}/none.csv"], "there is no file"),
        (
            ["train", "data=own", path_of(table), *COLUMNS, "data.normalise=max"],
            "data.normalise must be standard or none",
        ),
        (
            ["train", "data=own", path_of(table), *COLUMNS, "n_train=999"],
            "n_train=999: there are 176 training steps",
        ),
        (["train", "data=own", path_of(table), *COLUMNS, "data.test=all"], "no recording"),
        (
            [
                "evaluate",
                f"checkpoint='{trained}/checkpoints/best.ckpt'",
                f"data.path={tmp_path}/gone.csv",
            ],
            "there is no file",
        ),
    ):
        assert main([*words, *([] if words[0] == "data" else [f"run_dir={tmp_path}/run"])]) == 2, (
            words
        )
        told = capsys.readouterr().err
        assert message in told.replace("\n", " "), told
        assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_check(table, tmp_path, capsys):
    settings = [*COLUMNS, "data.time=t", "data.validation=0.1", f"run_dir={tmp_path}"]
    assert main(["data", "check", str(table), *settings]) == 0  # a blank and a comma in its name
    assert "report.md, series.png, states.png" in " ".join(capsys.readouterr().out.split())
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| my rec, 1 | 220 | 154 | 22 | 44 |" in text
    for name in ("series.png", "states.png"):
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("lstm", ["model.training.epochs=2"]),
        (
            "kbf_tuned",
            [
                "model.training.epochs=1",
                "model.training.folds=3",
                "data.cut_missing=true",
                "model.training.window=15",
            ],
        ),
        ("kbf_paper", ["data.cut_missing=true", "model.net.select=median"]),
        ("frame", []),
        ("kalman", []),
        ("particle_learned", ["model.net.particles=50", "n_train=60"]),
    ],
)
def test_all_models_run_and_load(model, more, table, tmp_path):
    words = [
        "train",
        "data=own",
        path_of(table),
        *COLUMNS,
        f"model={model}",
        "data.validation=0.15",
        f"run_dir={tmp_path}",
    ]
    assert main([*words, *QUICK, *more]) == 0
    told = metrics(tmp_path)
    assert told["test.mse"] < 1000**2
    if model in ("lstm", "kbf_tuned"):
        assert told["validation.mse"] > 1000, "in the units of the data"
    assert (
        main(
            [
                "evaluate",
                f"checkpoint='{tmp_path}/checkpoints/best.ckpt'",
                f"run_dir={tmp_path}/again",
                "particles=50",
            ]
        )
        == 0
    )
    assert metrics(tmp_path / "again")["test.mse"] == pytest.approx(told["test.mse"], rel=1e-5)


def test_a_checkpoint_brings_its_units(trained, table):
    loaded = load_filter(trained / "checkpoints" / "best.ckpt")
    data = load_data(loaded.module.config["data"])
    scaling = loaded.module.scaling
    assert scaling is not None
    states = torch.cat([s.states for s in data.train])
    torch.testing.assert_close(scaling.z_mean, states.mean(0))
    torch.testing.assert_close(scaling.z_scale, states.std(0, correction=0))
    inside = torch.cat([s.states for s in loaded.module.memory.recordings()])
    torch.testing.assert_close(inside.mean(0), torch.zeros(2).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(inside.std(0, correction=0), torch.ones(2).double())


def test_other_data_sets_have_no_scaling():
    sequence = Recording(torch.randn(40, 2).double(), torch.randn(40, 2).double())
    for data in ({}, {"normalise": "none"}, {"name": "rotation"}):
        module = FilterTraining(
            {
                "model": {"net": {"_target_": "kbf.FrameRegression"}},
                "seed": 0,
                "data": data,
            },
            [sequence],
        )
        assert module.scaling is None
        assert torch.equal(module.memory.recordings()[0].states, sequence.states)


@pytest.mark.slow
def test_an_angle_comes_back_as_an_angle(tmp_path):
    """A heading in degrees: inside it is a pair on the circle, in the results it is degrees, with a
    standard deviation.
    """
    model = OrientationModel()
    run = simulate(model, torch.tensor([1.0, 0.0]).double(), 150, torch.Generator().manual_seed(1))
    headings = [
        torch.rad2deg(torch.atan2(v[:, 1], v[:, 0])).tolist() for v in (run.states, run.obs)
    ]
    lines = ["heading,seen", *(f"{a},{b}" for a, b in zip(*headings, strict=True))]
    (tmp_path / "rec.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [
        f"data.path={tmp_path}/rec.csv",
        "data.states=[heading]",
        "data.observations=[seen]",
        "data.angle_unit=degrees",
    ]
    assert (
        main(
            [
                "train",
                "data=own",
                *words,
                "data.angles=[heading,seen]",
                f"run_dir={tmp_path}/run",
                *QUICK,
                *SMALL,
            ]
        )
        == 0
    )
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={tmp_path}/run/checkpoints/best.ckpt",
                f"run_dir={tmp_path}/e",
                "particles=50",
            ]
        )
        == 0
    )
    with (tmp_path / "e" / "estimates.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    off = [
        math.radians(float(row["heading"]) - truth)
        for row, truth in zip(rows, headings[0][120:], strict=True)
    ]
    turned = np.degrees(np.arctan2(np.sin(off), np.cos(off)))
    assert np.sqrt(np.mean(turned**2)) < 20
    spread = np.array([float(row["heading_std"]) for row in rows])
    assert 0.5 < np.sqrt(np.mean(turned**2)) / np.sqrt(np.mean(spread**2)) < 2


@pytest.mark.slow
def test_images_are_coded(tmp_path):
    """A bright bar whose place is the state, as images in an npz, with an encoder."""
    walk = np.cumsum(np.random.default_rng(0).normal(size=(120, 1)), 0)
    places = 4 + 8 * (np.sin(walk) + 1) / 2
    images = np.stack(
        [np.tile(200 * np.exp(-((np.arange(16) - p) ** 2) / 3), (16, 1)) for p in places[:, 0]]
    ).astype(np.uint8)
    np.savez(tmp_path / "rec.npz", states=places, observations=images)
    words = [
        "train",
        "data=own",
        f"data.path={tmp_path}/rec.npz",
        f"run_dir={tmp_path}/run",
        *QUICK,
    ]
    encoding = [
        "encoder@data.encoding.encoder=cnn",
        "data.encoding.epochs=15",
        "data.encoding.members=2",
        "model=kalman",
        "animation=false",
    ]
    assert main([*words, *encoding]) == 0
    told = metrics(tmp_path / "run")
    assert told["test.mse"] < 0.5 * places.var()
    loaded = load_filter(tmp_path / "run" / "checkpoints" / "best.ckpt")
    assert loaded.module.observation == (1, 16, 16)
    assert loaded.filter.estimate(loaded.filter.init(1)).item() == pytest.approx(
        places[:96].mean(), abs=1
    )


@pytest.mark.slow
def test_all_of_a_recording_is_learned_from(table, tmp_path, capsys):
    """data.test=0: a filter, its calibration and no score; whoever scores is told that there is
    nothing to score on.
    """
    words = ["data=own", path_of(table), *COLUMNS, "data.test=0"]
    quick = [word for word in QUICK if "calibrate" not in word]
    assert main(["train", *words, "model=kalman", f"run_dir={tmp_path}", *quick]) == 0
    assert "no test part, and no score" in " ".join(capsys.readouterr().out.split())
    told = metrics(tmp_path)
    assert (told["n_train"], told["n_test"]) == (220, 0) and not any(
        name.startswith("test.") for name in told
    )
    best = tmp_path / "checkpoints" / "best.ckpt"
    assert load_filter(best).calibration is not None
    for command in (
        ["evaluate", f"checkpoint={best}"],
        ["compare", *words, "models=kalman", "runs=1", "workers=0"],
    ):
        code = main([*command, f"run_dir={tmp_path / command[0]}"])
        seen = capsys.readouterr()
        assert code != 0 and "there is no test part" in " ".join((seen.out + seen.err).split())
    assert main(["data", "check", *words[1:], f"run_dir={tmp_path / 'check'}"]) == 0
    assert (
        main(["evaluate", f"checkpoint={best}", path_of(table), f"run_dir={tmp_path / 'again'}"])
        == 0
    )


def test_observations_far_from_zero_reach_a_filter_of_single_precision(tmp_path):
    """They are brought to its units before they lose digits."""
    drawn = simulate(
        oscillatory(), torch.tensor([1.0, 0.0]).double(), 60, torch.Generator().manual_seed(0)
    )
    net = {"_target_": "kbf.LSTMFilter", "d": 2, "q": 2}
    model = {"name": "lstm", "net": net, "dtype": "float32", "training": None, "encoding": None}
    found = []
    for away in (0.0, 2.0**27):
        recording = Recording(drawn.states, drawn.obs + away)
        torch.manual_seed(0)
        made = train(
            {"model": model, "data": {"normalise": "standard"}, "trainer": TRAINER, "seed": 0},
            [recording],
            tmp_path,
        )
        found.append(score(made.filter, [recording], dtype=made.module.input_dtype).estimates[0])
        assert made.module.model_dtype == torch.float32
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_appended_recordings_are_cut_at_missing_steps(table, tmp_path, capsys):
    """data.cut_missing=true reaches the steps that the training kept to score on."""
    paper = ["model=kbf_paper", "model.net.rank=8", "data.cut_missing=true"]
    assert (
        main(["train", "data=own", path_of(table), *COLUMNS, *paper, f"run_dir={tmp_path}", *QUICK])
        == 0
    )
    best = tmp_path / "checkpoints" / "best.ckpt"
    other = shutil.copy(table, tmp_path / "other.csv")
    words = [f"checkpoint={best}", path_of(other), f"out={tmp_path / 'more.ckpt'}"]
    assert main(["append", *words, "data.cut_missing=false"]) == 2
    assert "data.cut_missing=true" in capsys.readouterr().err
    assert main(["append", f"checkpoint={best}", words[2]]) == 2
    assert (
        "was trained on these recordings: name new ones with data.path=FILE"
        in capsys.readouterr().err
    )
    assert main(["append", *words[:2], f"out={other}"]) == 2
    assert "would overwrite the recordings" in capsys.readouterr().err
    assert main(["append", *words]) == 0
    more = load_filter(tmp_path / "more.ckpt").module.memory.recordings()
    assert (
        sum(len(s.states) for s in more) == 171 + 214
    )  # of 176 and 220 steps, five and six have no observation


def test_a_changed_recording_is_other_data(tmp_path, monkeypatch):
    """In the key of a comparison's results: a file, one in the home directory, a folder, files with
    one beginning.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("rec.csv", "views/1.png", "run_obs.npy"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("old")
        path = {"views/1.png": tmp_path / "views", "run_obs.npy": tmp_path / "run"}.get(
            name, "~/rec.csv"
        )
        before = fingerprints({"name": "own", "path": str(path), "table": None})
        assert before and before == fingerprints({"name": "own", "path": str(path)})
        file.write_text("newer")
        assert fingerprints({"name": "own", "path": str(path)}) != before
