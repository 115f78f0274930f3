"""`kbf compare`: the same results however it runs, and nothing lost when it is killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time

import jobs
import pytest
from rich.table import Table

from kbf.cli import main
from kbf.commands import compare
from kbf.commands.support import comparison_report
from kbf.commands.support.console import console, print_table
from kbf.commands.support.resumable_jobs import run_all
from kbf.config import configure

SMALL = ["n_train=40", "data.n_test=15", "particles=200", "models=kalman,frame"]


def cells(directory) -> dict[str, dict]:
    return {
        path.name: json.loads(path.read_text()) for path in (directory / "cells").glob("*.json")
    }


def errors(directory) -> dict[str, float]:
    return {name: cell["test.mse"] for name, cell in cells(directory).items()}


@pytest.mark.slow
def test_tables_and_picture(tmp_path, capsys):
    overrides = [f"run_dir={tmp_path}", *SMALL, "n_train=40,50", "runs=2", "workers=0"]
    assert main(["compare", *overrides]) == 0
    assert len(cells(tmp_path)) == 2 * 2 * 3
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["n_train"], row["model"]) for row in rows] == [
        (n, m) for n in ("40", "50") for m in ("kalman", "frame")
    ]
    by = {(c["model"], c["n_train"], c["seed"]): c["test.mse"] for c in cells(tmp_path).values()}
    mine = [by["kalman", 50, s] for s in (0, 1)]
    floors = [by["floor", 50, s] for s in (0, 1)]
    row = rows[2]
    assert float(row["mse"]) == pytest.approx(sum(mine) / 2)
    assert float(row["excess"]) == pytest.approx(sum(mine) / sum(floors) - 1)
    assert {"se", "excess_se", "seconds", "floor", "runs"} <= row.keys()
    tests = list(csv.DictReader((tmp_path / "wilcoxon.csv").open()))
    assert [(t["n_train"], t["first"], t["second"]) for t in tests] == [
        ("40", "kalman", "frame"),
        ("50", "kalman", "frame"),
    ]
    assert {t["score"] for t in tests} == {"mse"}, "frame has no covariances"
    stated = [c for c in cells(tmp_path).values() if (c["model"], c["n_train"]) == ("kalman", 50)]
    assert float(row["log_likelihood"]) == pytest.approx(
        -sum(c["test.nll_raw"] for c in stated) / 2
    )
    assert float(row["energy_score"]) == pytest.approx(
        sum(c["test.energy_score_raw"] for c in stated) / 2
    )
    assert float(row["rmse"]) == pytest.approx(sum(c["test.mse"] ** 0.5 for c in stated) / 2)
    assert (tmp_path / "comparison.png").stat().st_size > 5000
    runs = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert len(runs) == 2 * 2 * 3
    assert sorted(
        float(r["test.mse"]) for r in runs if (r["model"], r["n_train"]) == ("kalman", "50")
    ) == pytest.approx(sorted(mine))
    likely = [
        float(r["log_likelihood"]) for r in runs if (r["model"], r["n_train"]) == ("kalman", "50")
    ]
    assert sorted(likely) == pytest.approx(sorted(-c["test.nll_raw"] for c in stated))
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["command"].startswith("kbf ")
    assert about["commits"] == sorted({str(c["commit"]) for c in cells(tmp_path).values()})
    told = capsys.readouterr().out
    assert "rotation, 50 training steps" in told
    assert f"{float(row['mse']):.4f}" in told


def test_tests_of_another_comparison_do_not_stay(tmp_path):
    (tmp_path / "wilcoxon.csv").write_text("old")
    assert (
        main(["compare", f"run_dir={tmp_path}", *SMALL[:3], "models=kalman", "runs=1", "workers=0"])
        == 0
    )
    assert not (tmp_path / "wilcoxon.csv").exists()


@pytest.mark.slow
def test_finished_runs_are_not_done_again(tmp_path, monkeypatch):
    overrides = [f"run_dir={tmp_path}", *SMALL, "runs=1", "workers=0"]
    main(["compare", *overrides])
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").iterdir()}
    done = []
    original = compare.run_cell
    monkeypatch.setattr(compare, "run_cell", lambda cell: done.append(cell) or original(cell))
    assert main(["compare", *overrides]) == 0
    assert not done
    assert main(["compare", *overrides, "runs=2"]) == 0
    assert {(cell.model, cell.seed) for cell in done} == {("floor", 1), ("kalman", 1), ("frame", 1)}
    assert {p: p.stat().st_mtime_ns for p in before} == before
    done.clear()
    other = ["compare", *overrides, "data.n_test=16"]  # other data: other results
    assert main(other) == 2 and not done
    assert main([*other, "overwrite=true"]) == 0
    assert len(done) == 3


@pytest.mark.slow
def test_a_failing_run_is_reported_and_the_rest_goes_on(tmp_path, capsys, monkeypatch):
    original = compare.run_cell

    def fail(cell):
        if cell.model == "kalman" and cell.seed == 1:
            raise ValueError("the [reason]")
        return original(cell)

    monkeypatch.setattr(compare, "run_cell", fail)
    overrides = [f"run_dir={tmp_path}", *SMALL, "runs=2", "workers=0"]
    assert main(["compare", *overrides]) == 1
    told = " ".join("".join(capsys.readouterr()).split())
    assert "failed rotation, n 40, seed 1: kalman: ValueError: the [reason]" in told
    assert len(cells(tmp_path)) == 5
    rows = {row["model"]: row for row in csv.DictReader((tmp_path / "results.csv").open())}
    assert (rows["kalman"]["runs"], rows["frame"]["runs"]) == ("1", "2")
    monkeypatch.undo()
    assert main(["compare", *overrides]) == 0
    assert len(cells(tmp_path)) == 6


def alive(session: int) -> list[str]:
    """Processes of a session."""
    return subprocess.run(
        ["ps", "-o", "pid=", "--sid", str(session)], capture_output=True, text=True, check=False
    ).stdout.split()


@pytest.mark.slow
def test_killed_and_in_several_processes(tmp_path):
    """The workers' results are those of a single process, and a kill in the middle loses no
    finished run.
    """
    command = [sys.executable, "-m", "kbf.cli", "compare", *SMALL, "runs=4", "workers=1"]
    process = subprocess.Popen(
        [*command, f"run_dir={tmp_path / 'killed'}"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    limit = time.monotonic() + 600
    while not list((tmp_path / "killed" / "cells").glob("[!.]*.json")) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = errors(tmp_path / "killed")
    assert kept
    main(["compare", *SMALL, "runs=4", "workers=0", f"run_dir={tmp_path / 'whole'}"])
    assert main(["compare", *SMALL, "runs=4", "workers=0", f"run_dir={tmp_path / 'killed'}"]) == 0
    assert kept.items() <= errors(tmp_path / "killed").items()
    assert errors(tmp_path / "killed") == errors(tmp_path / "whole")
    while alive(process.pid) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not alive(process.pid), "the workers outlived their parent"


def test_a_worker_that_dies_does_not_take_the_others_along():
    started = []
    work = run_all(
        jobs.die_or_double, [1, 2, 3, 4, 5, 6], 2, start=jobs.nothing, on_start=started.append
    )
    results = dict(work)
    assert len(results) == 6 and set(started) == set(results)
    assert {job: r["value"] for job, r in results.items() if "value" in r} == {
        1: 2,
        2: 4,
        5: 10,
        6: 12,
    }
    assert results[4]["error"] == "ValueError: no fours"
    assert "died twice" in results[3]["error"]


@pytest.mark.slow
def test_every_model_of_the_default_table_can_be_composed():
    config = configure("compare", [])
    assert set(config["bases"]) >= {"kalman", "lstm", "ekf", "ukf", "particle", "frame"}
    made = compare.make_cells(config, compare.Path("cells"))
    assert len(made) == len({cell.path for cell in made}) == 5 * 4 * (len(config["bases"]) + 1)
    problem = {"_target_": "kbf.rotation"}
    (ekf,) = [cell for cell in made if (cell.model, cell.n_train, cell.seed) == ("ekf", 500, 2)]
    assert ekf.config["model"]["net"]["model"] == problem
    assert (ekf.config["data"]["source"]["n_train"], ekf.config["data"]["source"]["seed"]) == (
        500,
        2,
    )


IMAGES = [
    "data=dsprites",
    "n_train=40",
    "data.n_test=15",
    "particles=200",
    "workers=0",
    "runs=1",
    "data.encoding.epochs=1",
    "data.encoding.members=2",
]


@pytest.mark.slow
def test_models_share_the_codes_of_images_and_each_scores_as_if_alone(tmp_path):
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    assert main(["compare", *IMAGES, "models=kalman,frame", f"run_dir={shared}"]) == 0
    (encodings,) = (shared / "cells").glob("codes-*.pt")
    made = encodings.stat().st_mtime_ns
    assert main(["compare", *IMAGES, "models=frame", f"run_dir={alone}"]) == 0
    mine = [e for name, e in errors(shared).items() if "frame" in name]
    assert mine == [e for name, e in errors(alone).items() if "frame" in name]
    assert main(["compare", *IMAGES, "models=kalman,frame,ukf", f"run_dir={shared}"]) == 0
    assert encodings.stat().st_mtime_ns == made
    by = {cell["model"]: cell for cell in cells(shared).values()}
    assert by["frame"]["seconds"] > by["frame"]["seconds.test"]
    assert by["frame"]["renderer"] == "drawn by kbf"
    rows = list(csv.DictReader((shared / "results.csv").open()))
    assert {row["renderer"] for row in rows} == {"drawn by kbf"}


def test_one_run_for_each_set_of_codes_comes_first(tmp_path):
    config = configure(
        "compare", [*IMAGES, "runs=2", "models=kbf_paper,kalman,frame", f"run_dir={tmp_path}"]
    )
    made = compare.make_cells(config, tmp_path)
    ordered = compare.in_order(made)
    assert sorted(ordered, key=made.index) == made
    assert [(cell.model, cell.seed) for cell in ordered[:2]] == [("kalman", 0), ("kalman", 1)]
    assert compare.encodings_of(made[0]) is None  # the floor
    paths = {(cell.model, cell.seed): compare.encodings_of(cell) for cell in made}
    assert paths["kbf_paper", 0] is None
    assert paths["kalman", 0] == paths["frame", 0] != paths["frame", 1]


@pytest.mark.parametrize("name", ["dsprites", "dmlab", "dsprites_e2e", "dmlab_e2e"])
def test_image_experiments_compose(name):
    config = configure("compare", [f"experiment={name}"])
    assert config["data"]["name"] in name
    assert set(config["models"]) == set(config["bases"])


def test_two_models_of_one_name_are_refused(capsys):
    """Their results would overwrite each other."""
    assert main(["compare", "models=kalman,kalman", "n_train=40"]) == 2
    assert "two of them have the name 'kalman'" in capsys.readouterr().err


def test_models_that_state_covariances_are_compared_by_likelihood(tmp_path, capsys):
    words = [
        f"run_dir={tmp_path}",
        *SMALL[:3],
        "models=kalman,ekf",
        "n_train=40",
        "runs=2",
        "workers=0",
    ]
    assert main(["compare", *words]) == 0
    tests = list(csv.DictReader((tmp_path / "wilcoxon.csv").open()))
    assert [t["score"] for t in tests] == ["mse", "log_likelihood"]
    by = {
        (c["model"], c["seed"]): -c["test.nll_raw"]
        for c in cells(tmp_path).values()
        if c["model"] != "floor"
    }
    apart = [by["kalman", s] - by["ekf", s] for s in (0, 1)]
    assert float(tests[1]["mean_difference"]) == pytest.approx(sum(apart) / 2)
    assert (
        " lik." in capsys.readouterr().out
    )  # the heading is of two lines where there is little room


def test_a_table_wider_than_the_screen_is_printed_in_pieces(monkeypatch, capsys):
    """No number is cut, each piece has the first columns, and rows keep their order."""
    table = Table("model", *(f"score {k}" for k in range(12)))
    for name in ("kalman", "frame"):
        table.add_row(name, *(f"{name}{k}.1234" for k in range(12)))
    monkeypatch.setattr(console, "_width", 80)
    print_table(table)
    told = capsys.readouterr().out
    assert all(f"{name}{k}.1234" in told for name in ("kalman", "frame") for k in range(12))
    assert max(map(len, told.splitlines())) <= 80
    pieces = told.count("model")
    assert pieces > 1 and told.count("kalman0.1234") == 1
    assert all(f"score {k} " in told for k in range(12))
    monkeypatch.setattr(console, "_width", 400)
    print_table(table)
    assert capsys.readouterr().out.count("model") == 1
    monkeypatch.setattr(
        console, "_width", 10
    )  # narrower than a single column: it is cut, and all are there
    print_table(table)
    assert capsys.readouterr().out.count("┏") == 12


def stored(seed, model, mse, nll, **more):
    """A finished run as `kbf compare` keeps it."""
    scores = {"test.mse": mse, "test.nll": nll, "test.nll_raw": nll}
    return (
        {"data": "x", "n_train": 10, "seed": seed, "model": model, "seconds": 1.0} | scores | more
    )


@pytest.mark.parametrize(
    ("more", "unit"),
    [({}, "steps"), ({"recordings": 10}, "recordings"), ({"recordings": 2}, "steps")],
)
def test_what_a_size_counts(tmp_path, capsys, monkeypatch, more, unit):
    """Recordings where there are as many; else steps. The figure has the same unit."""
    units = []
    monkeypatch.setattr(
        comparison_report, "comparison_figure", lambda rows, title, unit: units.append(unit)
    )
    monkeypatch.setattr(comparison_report, "save", lambda figure, path: None)
    comparison_report.report(
        "x", {("a", 10, seed): stored(seed, "a", 0.5, 1.0, **more) for seed in (0, 1)}, tmp_path, {}
    )
    assert f"x, 10 training {unit}" in capsys.readouterr().out and units == [unit]


def test_a_run_without_a_likelihood_is_left_out_of_its_tests_and_its_model_is_not(tmp_path):
    """The row says over how many draws it is."""
    runs = {
        (model, 10, seed): stored(seed, model, 0.1 * seed + k, float(seed * k))
        for k, model in enumerate("ab")
        for seed in (0, 1, 2)
    }
    runs["b", 10, 1] |= {"test.nll": float("nan"), "test.nll_raw": float("nan")}
    comparison_report.report("x", runs, tmp_path, {})
    tests = {
        row["score"]: int(row["seeds"])
        for row in csv.DictReader((tmp_path / "wilcoxon.csv").open())
    }
    assert tests == {"mse": 3, "log_likelihood": 2, "log_likelihood_raw": 2}
