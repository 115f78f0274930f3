"""Sweeps that go on: finished jobs are skipped, cut ones continued, failed ones listed."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kbf.cli import main, sweep as sweep_module
from kbf.cli.sweep import folder_of_sweep
from kbf.commands.runs import best_of, metric_of
from kbf.commands.support import sweep_jobs
from kbf.commands.support.run_states import Run, read_run, read_runs
from kbf.runtime.run_folders import CLAIM, LOCK, locked

QUICK = ["n_train=60", "data.n_test=20", "particles=50", "calibrate=false", "logger=none"]
TRAIN = ["train", "-m", *QUICK, "hydra.sweep.dir=sweep"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    files = [p for p in Path(folder).rglob("*") if p.suffix in (".ckpt", ".json")]
    return {path: path.read_bytes() for path in files if path.name != "jobs.json"}


def states(folder="sweep"):
    return [each.state for each in read_runs(Path(folder))]


def test_the_same_sweep_skips_what_is_finished_and_goes_on_where_it_was_cut(here, capsys):
    words = [*TRAIN, "model=kalman", "seed=0,1,2"]
    assert main(words) == 0
    before = contents("sweep")
    (here / "sweep" / "1" / "metrics.json").unlink()  # it was cut before its end
    assert states() == ["finished", "interrupted", "finished"]
    assert main([*words, "overwrite=false"]) == 0
    after = contents("sweep")
    changed = {path.relative_to("sweep").parts[0] for path in before if before[path] != after[path]}
    assert changed == {"1"} and states() == ["finished"] * 3
    error = {"test.mse", "test.floor"}
    first, second = (json.loads(each[Path("sweep/1/metrics.json")]) for each in (before, after))
    assert {key: first[key] for key in error} == {key: second[key] for key in error}
    (here / "sweep" / "2" / "metrics.json").write_text("{")  # damaged
    assert main(words) == 0 and states() == ["finished"] * 3
    assert "3 finished" in capsys.readouterr().out


def test_a_run_that_differs_is_refused_by_name(here, capsys, monkeypatch):
    words = [*TRAIN, "model=kalman"]
    assert main([*words, "seed=0,1"]) == 0
    before = contents("sweep")
    assert main([*words, "seed=1,0"]) == 2
    assert "sweep holds another sweep: its job 0 is" in capsys.readouterr().err
    # The settings behind the same words: of a changed configuration file, for example.
    prepare = sweep_module.prepare

    def changed(*args):
        config = prepare(*args)
        return {**config, "model": {**config["model"], "dtype": "float32"}}

    with monkeypatch.context() as patch:
        patch.setattr(sweep_module, "prepare", changed)
        assert main([*words, "seed=0,1"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "sweep/0 holds a finished run that differs (model.dtype: None there, float32" in output
    with monkeypatch.context() as patch:
        patch.setattr(sweep_jobs, "commit", lambda: "other")
        assert main([*words, "seed=0,1"]) == 1
    assert "other here): name another hydra.sweep.dir" in " ".join(capsys.readouterr().out.split())
    kept = contents("sweep")
    assert {path: kept[path] for path in before} == before
    assert main([*words, "seed=0,1,2"]) == 0  # a longer sweep that begins with these jobs
    kept = contents("sweep")
    assert {path: kept[path] for path in before} == before


def test_all_failed_jobs_are_listed_and_the_others_run(here, capsys):
    words = [word for word in TRAIN if not word.startswith(("n_train", "hydra"))]
    words += ["hydra.sweep.dir=other", "model=particle_learned", "n_train=5,6,60"]
    assert main(words) == 1
    assert states("other") == ["failed", "failed", "finished"]
    output = capsys.readouterr().out
    for job in ("0", "1"):
        failure = json.loads((here / "other" / job / "failed.json").read_text())
        assert f"failed other/{job}: {failure['error']}" in output
        assert not (here / "other" / job / "metrics.json").exists()
        assert failure["error"] in (here / "other" / job / "kbf.log").read_text()
        assert "Traceback" in failure["traceback"]
    assert "2 failed, 1 finished" in output
    # A configuration that cannot be used fails one job as well.
    words = [word for word in TRAIN if not word.startswith(("n_train", "hydra"))]
    assert main([*words, "hydra.sweep.dir=third", "model=kalman", "n_train=60,x"]) == 1
    assert states("third") == ["finished", "failed"]
    assert "n_train must be a whole number, got 'x'" in capsys.readouterr().out


def test_a_job_that_another_process_works_on_is_waited_for(here, monkeypatch, capsys):
    words = [*TRAIN, "model=kalman", "seed=0"]
    assert main(words) == 0
    before = contents("sweep")
    claim = locked(here / "sweep" / "0" / "job", file=True)
    claim.__enter__()
    assert states() == ["finished"]
    waits = []

    def wait(seconds):
        if seconds == sweep_jobs.SECONDS_BETWEEN_ATTEMPTS:
            waits.append(seconds)
            claim.__exit__(None, None, None)

    monkeypatch.setattr(sweep_jobs.time, "sleep", wait)
    assert main(words) == 0 and len(waits) == 1
    assert f"written by process {os.getpid()}" in " ".join(capsys.readouterr().out.split())
    assert contents("sweep") == before


def test_states_are_read_from_files(tmp_path):
    assert read_run(tmp_path / "none").state == "missing"
    folder = tmp_path / "a"
    with locked(folder):
        assert read_run(folder).state == "running"
    with locked(folder / "job", file=True):
        assert (folder / CLAIM).exists() and read_run(folder).state == "running"
        (folder / "failed.json").write_text('{"error": "why"}')
    assert read_run(folder)[1:2] == ("failed",) and read_run(folder).error == "why"
    (folder / LOCK).write_text("process 99999999")  # of a process that was killed
    (folder / "failed.json").unlink()
    assert read_run(folder).state == "interrupted"
    (folder / "metrics.json").write_text('{"test.mse": 1.0}')
    assert read_run(folder).state == "finished"
    assert [each.folder for each in read_runs(tmp_path)] == [folder]
    with pytest.raises(ValueError, match="there is no folder"):
        read_runs(tmp_path / "none")


def test_the_best_run():
    def finished(**metrics):
        named = {key.replace("_", ".", 1): value for key, value in metrics.items()}
        return Run(Path(str(metrics)), "finished", (), named)

    runs = [finished(test_mse=1.0, validation_mse=3.0), finished(test_mse=2.0, validation_mse=0.5)]
    assert metric_of(runs, None) == "validation.mse"
    assert best_of(runs, "validation.mse") is runs[1] and best_of(runs, "test.mse") is runs[0]
    assert best_of(runs, "test.mse", largest=True) is runs[1]
    assert metric_of([*runs, finished(test_mse=1.0)], None) == "test.mse"
    with pytest.raises(ValueError, match=r"metric=test\.msee: .* did you mean 'test\.mse"):
        metric_of(runs, "test.msee")


def test_the_table_as_csv_and_the_command_of_the_best(here, capsys):
    assert main([*TRAIN, "model=kalman", "seed=0,1"]) == 0
    capsys.readouterr()
    assert main(["runs", "sweep", "csv=table.csv", "--watch"]) == 0
    output = capsys.readouterr().out
    rows = list(csv.DictReader((here / "table.csv").open()))
    assert [(row["run"], row["state"], row["seed"]) for row in rows] == [
        ("0", "finished", "0"),
        ("1", "finished", "1"),
    ]
    best = min(rows, key=lambda row: float(row["test.mse"]))
    assert f"kbf train {' '.join(QUICK[:-2])}" in output and f"seed={best['seed']}" in output
    assert main(["runs", "none"]) == 2
    assert "there is no folder none" in capsys.readouterr().err
    assert main(["train", "--watch"]) == 2


def test_default_folders_are_those_of_the_command_line():
    words = ["model=kbf,lstm", "seed=0,1"]
    same = [*words, "launcher=joblib", "hydra.launcher.n_jobs=3", "overwrite=true"]
    assert folder_of_sweep(words) == folder_of_sweep(same)
    assert folder_of_sweep(words) != folder_of_sweep([*words, "n_train=50"])
    assert folder_of_sweep(words).startswith("runs/multirun/model-kbf,lstm_seed-0,1-")


def children(process: int) -> set[int]:
    """Numbers of all processes below one."""
    found, waiting = set(), [process]
    while waiting:
        below = Path(f"/proc/{(each := waiting.pop())}/task/{each}/children")
        more = set(map(int, below.read_text().split())) if below.exists() else set()
        found |= more
        waiting += more
    return found


def ended(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists processes in /proc")
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_a_sweep_whose_parent_is_killed_is_finished_by_the_same_command(here, launcher):
    package = f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher"
    if launcher != "basic" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{launcher} is not installed")
    words = ["train", "-m", *QUICK, "model=lstm", "seed=0,1,2,3,4,5", "hydra.sweep.dir=sweep"]
    words += [
        "model.training.epochs=30",
        *([] if launcher == "basic" else [f"launcher={launcher}"]),
    ]
    command = [sys.executable, "-m", "kbf.cli", *words]
    with open("log.txt", "w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log)
        while len(list(Path("sweep").glob("*/checkpoints/last.ckpt"))) < 2:
            assert first.poll() is None, Path("log.txt").read_text()
            time.sleep(0.05)
        below = children(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    done = {path: path.stat().st_mtime_ns for path in Path("sweep").glob("*/metrics.json")}
    if launcher == "joblib":
        end = time.monotonic() + 30
        while not all(map(ended, below)):
            assert time.monotonic() < end, "workers outlive the process that started them"
            time.sleep(0.1)
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert states() == ["finished"] * 6 and "6 finished" in again.stdout
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    for job in range(6):  # every epoch of every job was trained once, and kept
        about = json.loads(Path(f"sweep/{job}/about.json").read_text())
        assert len(about.get("continued", [])) <= 1
        assert json.loads(Path(f"sweep/{job}/metrics.json").read_text())["epochs"] == 30
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
