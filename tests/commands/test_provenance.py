"""Provenance of runs and checkpoints: what is recorded, compared and repeated."""

import hashlib
import json
import os
import shlex
import sys

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf.cli import main
from kbf.fitted.checkpoint import read_checkpoint
from kbf.runtime.provenance import PACKAGES, changes, commit, files_of, provenance

WORDS = ["data=own", "data.states=[x]", "data.observations=[a]", "data.path=rec.csv"]
LSTM = ["model=lstm", "model.training.epochs=1", "model.training.validation=0.2", "logger=none"]


def draw(path, seed):
    z, x = np.random.default_rng(seed).normal(size=(2, 150))
    pd.DataFrame({"x": z.cumsum(), "a": z.cumsum() + x}).to_csv(path, index=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with recordings and two runs on them, which are not to be changed."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        draw("rec.csv", 0)
        assert main(["train", *WORDS, "model=kalman", "logger=none", "run_dir=run"]) == 0
        assert main(["train", *WORDS, *LSTM, "run_dir=lstm", "calibrate=false"]) == 0
    return folder


@pytest.fixture
def changed(place, monkeypatch):
    """The folder with another recording of the same name, until the test ends."""
    monkeypatch.chdir(place)
    draw("rec.csv", 1)
    yield
    draw("rec.csv", 0)


def checkpoint(run):
    return f"{run}/checkpoints/best.ckpt"


def test_runs_and_checkpoints_contain_the_record(place):
    record = json.loads((place / "run" / "about.json").read_text())
    assert record.pop("settings")["model.name"] == "kalman"
    assert read_checkpoint(place / checkpoint("run"))["kbf"]["provenance"] == record
    words = [*WORDS, "model=kalman", "logger=none", "run_dir=run"]
    assert shlex.split(record["command"]) == ["kbf", "train", *words]
    assert record["folder"] == str(place) and record["commit"] == commit()
    assert record["clean"] is (None if commit() is None else not str(commit()).endswith("dirty"))
    assert {"processor", "cores", "python", "kbf", *PACKAGES} <= record.keys()
    assert record["numpy"] == np.__version__ and record["threads"] == 1
    content = (place / "rec.csv").read_bytes()
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert record["files"] == [{"path": str(place / "rec.csv"), **sums}]


def test_a_changed_file_is_a_note_of_evaluate_and_an_error_of_resume(changed, capsys):
    assert main(["evaluate", f"checkpoint={checkpoint('run')}", "run_dir=changed"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rec.csv has changed since the training" in text
    before = read_checkpoint(checkpoint("lstm"))
    assert main(["train", "ckpt_path=lstm/checkpoints/last.ckpt"]) == 2
    assert "rec.csv has changed since the training" in capsys.readouterr().err
    assert read_checkpoint(checkpoint("lstm"))["kbf"] == before["kbf"] or before["epoch"] == 0
    assert main(["runs", "show", "run"]) == 0
    assert " changed " in capsys.readouterr().out


def test_files_that_are_added_or_gone_are_an_error_of_resume(tmp_path, monkeypatch, capsys):
    """Of a folder of recordings, which is read as a whole; without a change the run continues."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    for k in range(2):
        draw(f"many/r{k}.csv", k)
    words = [*WORDS[:-1], "data.path=many", *LSTM, "calibrate=false", "run_dir=run"]
    assert main(["train", *words]) == 0
    resume = ["train", "ckpt_path=run/checkpoints/last.ckpt"]
    draw("many/r2.csv", 2)
    assert main(resume) == 2
    assert "r2.csv is new since the training. A run continues" in capsys.readouterr().err
    (tmp_path / "many" / "r2.csv").unlink()
    assert main(resume) == 0
    (tmp_path / "many" / "r1.csv").unlink()
    assert main(resume) == 2
    assert "r1.csv is gone since the training" in capsys.readouterr().err


def test_the_same_file_brings_no_note(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["evaluate", f"checkpoint={checkpoint('run')}", "run_dir=scores"]) == 0
    assert "has changed" not in capsys.readouterr().out
    record = json.loads((place / "scores" / "about.json").read_text())
    assert record["command"].startswith("kbf evaluate") and len(record["files"]) == 1
    draw("new.csv", 2)  # other recordings are no changed ones
    words = ["data.path=new.csv", "run_dir=new"]
    assert main(["evaluate", f"checkpoint={checkpoint('run')}", *words]) == 0
    assert "has changed" not in capsys.readouterr().out


def test_show_prints_the_command_that_repeats_the_run(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["runs", "show", "run"]) == 0
    shown = capsys.readouterr().out
    assert "unchanged" in shown and hashlib.sha256(b"").hexdigest() not in shown
    folder, command = shown.rstrip().splitlines()[-1].split(" && ")
    assert folder == f"cd {place}"
    words = shlex.split(command)
    assert words[0] == "kbf" and words[-1] == "run_dir=run-again" and main(words[1:]) == 0
    scores = [
        json.loads((place / run / "metrics.json").read_text()) for run in ("run", "run-again")
    ]
    assert scores[0]["test.mse"] == scores[1]["test.mse"]
    assert main(["runs", "show", checkpoint("run")]) == 0
    assert "run_dir=run\n" in capsys.readouterr().out


def test_show_of_something_else_is_one_line(place, capsys):
    assert main(["runs", "show", str(place)]) == 2
    assert "has no record of its provenance" in capsys.readouterr().err


def test_a_resumed_run_and_an_appended_checkpoint_name_both_commands(place, monkeypatch):
    monkeypatch.chdir(place)
    first = json.loads((place / "lstm" / "about.json").read_text())
    assert main(["train", "ckpt_path=lstm/checkpoints/last.ckpt"]) == 0
    record = json.loads((place / "lstm" / "about.json").read_text())
    steps = record.pop("continued")
    assert record == first
    assert [each["command"] for each in steps] == ["kbf train ckpt_path=lstm/checkpoints/last.ckpt"]
    assert main(["train", *WORDS, "model=window_ridge", "logger=none", "run_dir=ridge"]) == 0
    draw("more.csv", 3)
    words = [f"checkpoint={checkpoint('ridge')}", "data.path=more.csv", "out=more.ckpt"]
    assert main(["append", *words]) == 0
    record = read_checkpoint("more.ckpt")["kbf"]["provenance"]
    assert [os.path.basename(file["path"]) for file in record["files"]] == ["rec.csv", "more.csv"]
    assert record["continued"][0]["command"] == f"kbf append {shlex.join(words)}"


def test_a_filter_fitted_in_python_names_the_script_and_its_files(place, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["mine.py", "5"])
    fitted = kbf.fit(str(place / "rec.csv"), states=["x"], observations=["a"], model="kalman")
    fitted.save(tmp_path / "a.ckpt")
    record = read_checkpoint(tmp_path / "a.ckpt")["kbf"]["provenance"]
    assert record["command"] == "mine.py 5"
    assert [file["path"] for file in record["files"]] == [str(place / "rec.csv")]


def test_files_of_a_data_set(tmp_path):
    (tmp_path / "a.x.npy").write_bytes(b"1")
    (tmp_path / "a.z.npy").write_bytes(b"2")
    (tmp_path / "name").write_bytes(b"3")
    source = {"_target_": "kbf.FileData", "path": str(tmp_path / "a")}
    both = [tmp_path / "a.x.npy", tmp_path / "a.z.npy"]
    own = {"path": source["path"], "name": str(tmp_path / "name")}
    assert files_of({**own, "source": source}) == both  # a name is no file of the recordings
    assert files_of({**own, "source": {"_target_": "mine.Data"}}) == [tmp_path / "name", *both]
    before = provenance([], None, both)
    assert changes(before, provenance([], None, both)) == changes(None, before) == []
    both[1].write_bytes(b"4")
    assert len(changes(before, provenance([], None, both))) == 1
