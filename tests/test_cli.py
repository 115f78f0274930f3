"""The commands from end to end, and one clear line for each kind of bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from kbf import __version__
from kbf.cli import COMMANDS, expected, main, one_line
from kbf.commands.support.metric_descriptions import DIAGNOSTICS
from kbf.config import composing, config_dir, configure
from kbf.fitted.checkpoint import read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["n_train=60", "data.n_test=20", "particles=200"]
QUIET = ["trainer.enable_progress_bar=false"]


def learning(model: str, **training) -> list[str]:
    """Overrides that do not depend on how a model's configuration is tuned."""
    training = {
        "epochs": 3,
        "batch_size": 16,
        "window": 8,
        "stride": 2,
        "burn_in": 0,
        "validation": 0.2,
        "patience": None,
    } | training
    values = {key: "null" if value is None else value for key, value in training.items()}
    return [f"model={model}", *(f"++model.training.{key}={value}" for key, value in values.items())]


BRIEF = [*learning("lstm"), "logger=none", *QUIET]


def metrics(directory) -> dict:
    return json.loads((directory / "metrics.json").read_text())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of a model without gradient."""
    directory = tmp_path_factory.mktemp("train")
    assert main(["train", "model=kalman", *QUICK, f"run_dir={directory}"]) == 0
    return directory


def test_train_leaves_a_run_directory(run_dir, capsys):
    names = {path.name for path in run_dir.iterdir()}
    assert {
        "config.yaml",
        "metrics.json",
        "track.png",
        "checkpoints",
    } <= names and "filter.gif" not in names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    told = metrics(run_dir)
    assert told.keys() >= {
        "test.mse",
        "test.excess",
        "test.floor",
        "n_train",
        "seed",
        "seconds",
        "model",
        "data",
    }
    assert told["test.excess"] == pytest.approx(told["test.mse"] / told["test.floor"] - 1)
    assert (told["n_train"], told["seed"], told["n_test"]) == (60, 0, 20)
    assert not list(run_dir.rglob(".*")), "temporary files are left"


@pytest.mark.slow
def test_tensorboard_is_worth_opening(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = learning("kbf_tuned", epochs=2, folds=2, validation=0.3)
    assert main(["train", *model, *QUICK, *QUIET, f"run_dir={tmp_path}"]) == 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()
    assert {
        "train/loss",
        "validation/mse",
        "validation/excess",
        "train/learning_rate",
        "test/mse",
        "test/excess",
    } <= set(tags["scalars"])
    assert {
        f"filter/{name}" for name in ("ess", "weight_sum", "negative_mass", "zero_weight_share")
    } <= set(tags["scalars"])
    assert sum(tag.startswith("hyperparameters/") for tag in tags["scalars"]) >= 6
    assert {"track/validation", "track/test"} <= set(tags["images"])
    moves = [event.value for event in events.Scalars("hyperparameters/reg/rule")]
    assert len(moves) == 2
    assert moves[0] != moves[1]
    groups = {"train", "validation", "filter", "hyperparameters", "test", "seconds"}
    assert {tag.partition("/")[0] for tag in tags["scalars"]} == groups | {
        "epoch"
    }  # the last is Lightning's own
    steps = {events.Scalars(tag)[-1].step for tag in tags["scalars"]} | {
        events.Images("track/test")[-1].step
    }
    assert len(steps) == 1, (
        "the last points of all curves, the results and the last picture lie at one step"
    )
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == steps.pop() + 1
    assert events.Scalars("validation/best_mse")[0].value == pytest.approx(
        metrics(tmp_path)["validation.mse"]
    )
    columns = hparams_of(events)
    assert columns["session_start_info"].hparams["model.name"].string_value == "kbf_tuned"
    assert columns["session_start_info"].hparams["model.training.lr"].number_value == 0.05
    assert {"data.name", "n_train", "seed"} <= set(columns["session_start_info"].hparams)
    assert 5 <= len(columns["session_start_info"].hparams) <= 12
    results = {info.name.tag for info in columns["experiment"].metric_infos}
    assert (
        {"test/mse", "test/excess", "validation/best_mse", "seconds/fit"}
        <= results
        <= set(tags["scalars"])
    )
    kept = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert kept["config"]["model"]["name"] == "kbf_tuned" and kept["config"]["n_train"] == 60


def hparams_of(events) -> dict:
    """What TensorBoard's page HParams is told: of the run, and of all."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    told = {
        name: HParamsPluginData.FromString(
            events.summary_metadata[f"_hparams_/{name}"].plugin_data.content
        )
        for name in ("session_start_info", "experiment")
    }
    return {name: getattr(each, name) for name, each in told.items()}


def test_a_run_that_fails_leaves_an_earlier_one_as_it_was(run_dir, capsys):
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert (
        main(
            ["train", "model=particle_learned", "n_train=5", f"run_dir={run_dir}", "overwrite=true"]
        )
        == 2
    )
    assert "at least 10" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_evaluate_from_the_checkpoint_alone(run_dir, tmp_path):
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    assert (
        main(["evaluate", f"checkpoint={checkpoint}", "particles=200", f"run_dir={tmp_path}"]) == 0
    )
    told = metrics(tmp_path)
    assert told["test.mse"] == pytest.approx(metrics(run_dir)["test.mse"], rel=1e-12)
    assert told["test.floor"] == metrics(run_dir)["test.floor"]
    arrays = np.load(tmp_path / "predictions.npz")
    errors = ((arrays["estimates_0"] - arrays["states_0"]) ** 2).sum(-1)
    assert errors.mean() == pytest.approx(told["test.mse"])
    assert (tmp_path / "track.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "steps", "name"),
    [
        (["data.n_test=33", "seed=5"], 33, "rotation"),
        (["data=oscillatory"], 200, "oscillatory"),
        (["n_train=80"], 20, "rotation"),
    ],
)
def test_evaluate_on_other_data(run_dir, tmp_path, overrides, steps, name):
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={checkpoint}",
                "particles=200",
                f"run_dir={tmp_path}",
                *overrides,
            ]
        )
        == 0
    )
    told = metrics(tmp_path)
    assert (told["n_test"], told["data"]) == (steps, name)
    assert told["test.mse"] != metrics(run_dir)["test.mse"]


@pytest.mark.slow
def test_resume_from_the_command_line(tmp_path, capsys):
    train = ["train", *QUICK, *BRIEF]
    assert main([*train, f"run_dir={tmp_path / 'whole'}"]) == 0
    assert main([*train, "trainer.max_epochs=1", f"run_dir={tmp_path / 'cut'}"]) == 0
    checkpoint = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert main([*train, "seed=1", f"ckpt_path={checkpoint}"]) == 2
    assert "seed: 0 there, 1 here" in capsys.readouterr().err
    elsewhere = tmp_path / "elsewhere"
    plain = ["logger=none", *QUIET, "particles=200"]
    assert main(["train", f"ckpt_path={checkpoint}", f"run_dir={elsewhere}", *plain]) == 0
    assert main(["train", f"ckpt_path={checkpoint}", *plain]) == 0
    for directory in (elsewhere, tmp_path / "cut"):
        told, whole = metrics(directory), metrics(tmp_path / "whole")
        assert told["epochs"] == 3
        assert {k: v for k, v in told.items() if "seconds" not in k} == {
            k: v for k, v in whole.items() if "seconds" not in k
        }


def test_data_and_floor(tmp_path, capsys):
    assert (
        main(["data", "data=orientation", "n_train=12", "data.n_test=5", f"run_dir={tmp_path}"])
        == 0
    )
    arrays = np.load(tmp_path / "data.npz")
    assert arrays["train_states_0"].shape == (12, 2)
    assert arrays["test_obs_0"].shape == (5, 2)
    assert (tmp_path / "data.png").exists()
    capsys.readouterr()
    assert main(["floor", "n_train=30", "runs=2", "particles=100", "data.n_test=10"]) == 0
    assert "standard error" in capsys.readouterr().out


def test_multirun(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kbf"])
    overrides = [*QUICK, "model=kalman,frame", "logger=csv", f"hydra.sweep.dir={tmp_path}"]
    assert main(["train", "--multirun", *overrides]) == 0
    assert [metrics(tmp_path / k)["model"] for k in ("0", "1")] == ["kalman", "frame"]
    assert not (tmp_path / "2").exists()


def test_a_launcher_that_is_not_installed_names_its_extra():
    error = ValueError(
        "In 'hydra/config': Could not find 'hydra/launcher/joblib' Available options in "
        "'hydra/launcher': basic"
    )
    assert (
        one_line(error)
        == "this sweep needs the package hydra-joblib-launcher, which is not installed: pip "
        'install "kbf[sweep]"'
    )


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"kbf {__version__}"
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"kbf {command}" in text
        assert "settings" in text
        others = ("reproduce", "bench", "export", "serve", "runs", "runs show")
        assert "rotation" in text or command in others
        with composing(command, ["checkpoint=x"] if command == "evaluate" else []) as composed:
            for key in composed:
                assert str(key) in text or key in ("data", "model", "trainer", "logger"), key


@pytest.mark.slow
def test_what_is_printed_is_explained_and_in_percent(run_dir, tmp_path, capsys):
    capsys.readouterr()
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={checkpoint}",
                "particles=200",
                "smooth=true",
                "horizon=2",
                f"run_dir={tmp_path}",
            ]
        )
        == 0
    )
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    ]
    told = {name: (value, meaning) for name, value, meaning in rows if name}
    without = {name for name, (_, meaning) in told.items() if not meaning}
    assert without <= {"data", "model", "seed", "seconds"}, (
        "say in kbf/commands/support/metric_descriptions.py what these are"
    )
    stored = metrics(tmp_path)
    for name in ("test.excess", "test.rejected", "test.coverage_95_raw"):
        assert told[name][0] == f"{100 * stored[name]:.1f} %" and 0 <= stored[name] < 10
    assert main(["filter", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        f"  {name} " in text for name in ("ess", "negative_mass", "zero_weight_share", "alarm")
    )


def test_every_diagnostic_of_a_filter_is_explained():
    """Those of the classes that have some, read from their dictionaries."""
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "kbf" / "filters").rglob("*.py")
    )
    bodies = re.findall(r"    def diagnostics\(.*?(?=\n    def|\n\n\n|\Z)", text, re.DOTALL)
    names = {name for body in bodies for name in re.findall(r'"(\w+)": ', body)}
    assert {
        "ess",
        "zero_weight_share",
        "negative_mass",
        "negative",
    } <= names and names <= DIAGNOSTICS.keys()


def test_help_answers_at_once():
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kbf.cli", "--help"], check=True, capture_output=True)
    assert time.perf_counter() - began < 1


@pytest.mark.slow
def test_every_choice_composes():
    directory = config_dir()
    for group in ("data", "model", "trainer", "logger"):
        for path in (directory / group).glob("*.yaml"):
            assert configure("train", [f"{group}={path.stem}"])["run_dir"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["data", "chek"], "'chek' is no setting: write key=value; did you mean 'data check'?"),
        (["show"], "no command 'show'; did you mean 'runs show'?"),
        (["train", "model=kalmann"], "there is no model 'kalmann'; did you mean 'kalman'?"),
        (["train", "data=rotatoin"], "there is no data 'rotatoin'; did you mean 'rotation'?"),
        (
            ["train", "data=own", "data.path=a.csv", "model=ukf"],
            "model ukf requires the equations of the system, and data=own has none",
        ),
        (
            ["compare", "data=own", "data.path=a.csv", "models=[kalman,particle]"],
            "model particle requires the equations of the system, and data=own has none",
        ),
        (["train", "model=[a b(c)]"], """'key=["a (b)"]'"""),
        (["train", "--fast"], "no option --fast"),
        (["train", "n_trian=5"], "there is no setting n_trian; did you mean n_train?"),
        (["train", "modle.name=a"], "there is no setting modle.name; did you mean model.name?"),
        (["train", "+foo=3"], "there is no setting foo; see the --help of the command"),
        (["train", "+model.filter.foo=3"], "there is no setting model.filter.foo; see the --help"),
        (
            ["train", "+data.sorce.q=3"],
            "there is no setting data.sorce.q; did you mean data.source.q?",
        ),
        (["compare", "+modls=kbf"], "there is no setting modls; did you mean models?"),
        (["train", "-m", "n_trian=5,6"], "there is no setting n_trian; did you mean n_train?"),
        (
            ["train", "-m", "+data.foo=3,4", "seed=0"],
            "there is no setting data.foo; see the --help",
        ),
        (
            ["train", "model=lstm", "model.net.hiden=3"],
            "there is no setting model.net.hiden; did you mean +model.net.hidden?",
        ),
        (
            ["train", "data.path=rec.csv"],
            "there is no setting data.path here: recordings of your own are data=own",
        ),
        (["train", "rec.csv"], "'rec.csv' is no setting: write key=value"),
        (["train", "model=[x"], "'model=[x' cannot be read (brackets must close"),
        (["train", "calibrate=maybe"], "calibrate must be true or false, got 'maybe'"),
        (["train", "model=kalman", "run_dir=/dev/null/run", "n_train=20"], "/dev/null/run"),
        (
            ["train", "model=none_such"],
            "there is no model 'none_such'; there are auto, backprop_kf, dpf, ekf",
        ),
        (
            ["train", "model=lstm", "model.training.widow=5"],
            "there is no setting model.training.widow; did you mean model.training.window?",
        ),
        (["train", "model=lstm", "+model.training.speed=5"], "model.training has no 'speed'"),
        (["train", "model=kalman", "+model.net.speed=5"], "unexpected keyword argument 'speed'"),
        (
            ["train", "model=kalman", "model.net._target_=kbf.no.Such"],
            "'kbf.no.Such' does not exist",
        ),
        (["train", "n_train=1"], "n_train 1 and n_test 200"),
        (["train", *learning("lstm"), "n_train=5"], "leaves 4 to fit and 1 to validate"),
        (
            ["train", *learning("lstm", window=20), "n_train=20"],
            "no window of 20 steps fits: 16 steps to fit",
        ),
        (["train", "ckpt_path=none.ckpt"], "there is no checkpoint none.ckpt"),
        (
            ["train", "model=lstm", "model.training.optimiser=best"],
            "one of adam, adamw, sgd; got 'best'",
        ),
        (["evaluate"], "Missing mandatory value: checkpoint"),
        (["evaluate", "checkpoint=none.ckpt"], "there is no checkpoint none.ckpt"),
        (["evaluate", "checkpoint=none.ckpt", "data=none_such"], "there is no data 'none_such'"),
        (["compare", "models=[none_such]"], "there is no model 'none_such'"),
        (["data", "n_train=abc"], "n_train must be a whole number, got 'abc'"),
        (["compare", "n_train=100,-5"], "n_train must be at least 0, got -5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert "Traceback" not in told.out + told.err
    assert list(tmp_path.iterdir()) == [], "something half-written is left"


def test_damaged_and_foreign_checkpoints(run_dir, tmp_path, capsys):
    whole = (run_dir / "checkpoints" / "best.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[:1000])
    torch.save({"weights": torch.zeros(2)}, tmp_path / "foreign.ckpt")
    for name, message in (
        ("cut", "is no checkpoint, or damaged"),
        ("foreign", "was not written by kbf"),
    ):
        assert (
            main(["evaluate", f"checkpoint={tmp_path / name}.ckpt", f"run_dir={tmp_path / 'out'}"])
            == 2
        )
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_data_of_another_shape(run_dir, tmp_path, capsys, monkeypatch):
    from kbf.data.synthetic import SyntheticData

    original = SyntheticData.__init__

    def wider(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.test = [s._replace(obs=torch.cat([s.obs, s.obs], 1)) for s in self.test]

    monkeypatch.setattr(SyntheticData, "__init__", wider)
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    assert main(["evaluate", f"checkpoint={checkpoint}", f"run_dir={tmp_path / 'out'}"]) == 2
    assert "observations have the shape (4,), those that" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="n_train 1"):
        main(["train", "n_train=1", "--debug"])


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["--version"], ["bench", "--list"]]
)
@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_cannot_be_written_is_one_line(words, buffered):
    """A full disk, and a reader that has gone: also what Python itself says of it when it ends."""
    if not Path("/dev/full").exists():
        pytest.skip("no device that is always full")
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    reading, gone = os.pipe()
    os.close(reading)
    for file in (os.open("/dev/full", os.O_WRONLY), gone):
        program = [sys.executable, "-m", "kbf.cli", *words]
        done = subprocess.run(
            program, stdout=file, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(file)
        assert done.returncode == 2 and done.stderr.startswith("kbf: standard output: "), (
            done.stderr
        )
        assert len(done.stderr.splitlines()) == 1


def test_a_package_that_is_missing_or_broken_is_no_traceback():
    assert expected(ImportError("libGL.so.1: cannot open shared object file", name="av"))
    assert expected(ModuleNotFoundError("No module named 'h5py'", name="h5py"))
    assert not expected(ModuleNotFoundError("No module named 'kbf.nothing'", name="kbf.nothing"))


def test_a_nearly_full_disk_ends_a_run_before_its_fit(tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=10 * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr("kbf.commands.train.check", lambda *_, **__: pytest.fail("it went on"))
    assert main(["train", "model=kalman", *QUICK, f"run_dir={tmp_path / 'run'}"]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "run") in message and "10 mib are free" in message.lower()
    assert len(message.strip().splitlines()) == 1 and not (tmp_path / "run").exists()


def test_threads_do_not_wait_in_a_loop():
    """OpenMP reads its policy once, when PyTorch is loaded: the program sets it before."""
    code = "import os, sys; from kbf.cli import main; main(['--version']); "
    code += "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    for given, policy in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == f"False {policy}"
