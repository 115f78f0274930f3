"""Values of environment variables, which may be secrets, are in no file of a run."""

import numpy as np
import pytest

from kbf.cli import main
from kbf.config.prepare import configure
from kbf.fitted.checkpoint import read_checkpoint
from kbf.runtime.instantiate import build
from kbf.runtime.interpolation import from_environment, masked, resolved

SECRET = "hush-8631"
REFERENCE = "${oc.env:KBF_TEST_SECRET}"
TRAIN = [
    "train",
    *("data=own", "data.states=[x]", "data.observations=[a]", "model=kalman", "run_dir=run"),
    f"data.path={REFERENCE}.csv",
    f"model.name={REFERENCE}",
    f"+logger.mine.name={REFERENCE}",
    "+logger.mine.save_dir=logs",
    "+logger.mine._target_=lightning.pytorch.loggers.CSVLogger",
]


@pytest.fixture
def secret(monkeypatch, tmp_path):
    """A variable that names the recordings; the working folder is a temporary one."""
    monkeypatch.setenv("KBF_TEST_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0).normal(size=(80, 2))
    z = draws[:, 0].cumsum()
    rows = np.stack([z, z + draws[:, 1]], 1)
    np.savetxt(f"{SECRET}.csv", rows, delimiter=",", header="x,a", comments="")
    return tmp_path


def files_with(text, folder):
    return [path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def test_no_file_of_a_run_contains_the_value(secret, capsys):
    assert main(TRAIN) == 0
    assert SECRET in [path.name for path in (secret / "logs").iterdir()]  # the logger has it
    assert files_with(SECRET.encode(), secret / "run") == []
    named = files_with(REFERENCE.encode(), secret / "run")
    assert {"config.yaml", "metrics.json", "hparams.yaml", "best.ckpt", "last.ckpt"} <= {*named}
    assert any(name.startswith("events.out") for name in named)
    checkpoint = secret / "run" / "checkpoints" / "best.ckpt"
    stored = read_checkpoint(checkpoint)["hyper_parameters"]["config"]
    assert stored["data"]["path"] == stored["recipe"]["data"]["path"] == f"{REFERENCE}.csv"
    # A checkpoint does not read the environment by itself.
    assert main(["evaluate", f"checkpoint={checkpoint}", "run_dir=scores"]) == 2
    assert "the environment variable KBF_TEST_SECRET" in capsys.readouterr().err
    assert main(["evaluate", f"checkpoint={checkpoint}", "run_dir=scores", "trust=true"]) == 0
    given = [f"data.path={REFERENCE}.csv", "run_dir=others"]
    assert main(["evaluate", f"checkpoint={checkpoint}", *given]) == 0
    for name in ("scores", "others"):
        assert files_with(b'"test.mse"', secret / name) == ["metrics.json"]
        assert files_with(SECRET.encode(), secret / name) == []


def test_a_sweep_contains_references_alone(secret):
    words = [word for word in TRAIN[:-3] if not word.startswith(("run_dir=", "model.name="))]
    assert main([*words, "--multirun", "seed=0", "hydra.sweep.dir=sweep"]) == 0
    assert files_with(b'"test.mse"', secret / "sweep") == ["metrics.json"]
    assert files_with(SECRET.encode(), secret / "sweep") == []


def test_no_file_of_another_command_contains_the_value(secret):
    assert main(TRAIN[:-3]) == 0
    own = [word for word in TRAIN if word.startswith("data")]
    checkpoint = "checkpoint=run/checkpoints/best.ckpt"
    rows = np.loadtxt(f"{SECRET}.csv", delimiter=",", skiprows=1) + 0.5
    np.savetxt(f"more-{SECRET}.csv", rows, delimiter=",", header="x,a", comments="")
    more = f"data.path=more-{REFERENCE}.csv"
    assert main(["data", *own]) == 0
    assert main(["data", "check", *own[1:]]) == 0
    compared = ["models=kalman", "runs=1", "particles=50", "workers=0"]
    assert main(["compare", *own, *compared]) == 0
    assert main(["append", checkpoint, more, "out=new.ckpt", "trust=true"]) == 0
    written = [path for path in secret.rglob("*") if path.is_file() and path.suffix != ".csv"]
    assert {"data.npz", "report.md", "new.ckpt"} <= {path.name for path in written}
    assert sum(path.name == "about.json" for path in written) == 4
    found = [path for path in written if SECRET in str(path.relative_to(secret))]
    assert found == [] and files_with(SECRET.encode(), secret / "runs") == []
    assert SECRET.encode() not in (secret / "new.ckpt").read_bytes()
    assert len(files_with(b'"sha256"', secret / "runs")) == 3


def test_settings_of_a_command_have_the_value_and_files_the_reference(secret):
    config = configure("train", [f"run_dir=/scratch/{REFERENCE}", "seed=${oc.decode:'3'}"])
    assert config["run_dir"] == f"/scratch/{SECRET}"
    assert config["references"] == {"run_dir": f"/scratch/{REFERENCE}"} and config["seed"] == 3
    assert "references" not in configure("train", [])


def test_a_number_from_the_environment_is_a_setting(monkeypatch):
    monkeypatch.setenv("KBF_TEST_EPOCHS", "7")
    words = ["model=lstm", "model.training.epochs='${oc.decode:${oc.env:KBF_TEST_EPOCHS}}'"]
    config = configure("train", words)
    assert config["model"]["training"]["epochs"] == config["trainer"]["max_epochs"] == 7


def test_references_are_read_where_an_object_is_built(secret, monkeypatch):
    config = resolved({"a": REFERENCE, "b": "${a}/x", "c": ["${b}"], "n": 2})
    assert config == {"a": REFERENCE, "b": f"{REFERENCE}/x", "c": [f"{REFERENCE}/x"], "n": 2}
    assert from_environment(config)["c"] == [f"{SECRET}/x"]
    target = {"_target_": "pathlib.PurePosixPath"}
    with pytest.raises(ValueError, match="KBF_TEST_SECRET, which is read for files that you trust"):
        build({**target, "text": REFERENCE})
    assert build({"_target_": "collections.UserString", "seq": REFERENCE}, trust=True) == SECRET
    assert masked(f"no file {SECRET}/x", config) == f"no file {REFERENCE}/x"
    monkeypatch.delenv("KBF_TEST_SECRET")
    with pytest.raises(ValueError, match="the environment variable KBF_TEST_SECRET is not set"):
        from_environment(config)
