"""What every experiment of a paper must do, and the command that runs them."""

from __future__ import annotations

import csv
import importlib
import json
import math

import pytest
import torch

from kbf.cli import main
from kbf.commands.reproduce import hashed
from kbf.experiments import EXPERIMENTS
from kbf.experiments.base import column, means, wilcoxon
from kbf.experiments.posterior_mean import problem

WRITTEN = [name for name in EXPERIMENTS if importlib.util.find_spec(f"kbf.experiments.{name}")]  # pyright: ignore


@pytest.mark.parametrize("name", WRITTEN)
def test_presets_and_jobs(name):
    experiment = importlib.import_module(f"kbf.experiments.{name}")
    assert set(experiment.PRESETS) == {"full", "quick", "smoke"}
    for preset in experiment.PRESETS.values():
        few, more = (experiment.jobs({**preset, "seed": 0, "runs": runs}) for runs in (1, 2))
        names = [hashed(name, job) for job in more]
        assert len(set(names)) == len(names)  # each piece has a file of its own
        assert {hashed(name, job) for job in few} <= set(names)  # more runs go on from fewer
        assert json.loads(json.dumps(more)) == more
    assert len(experiment.NOTES) > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_smoke(name, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["reproduce", name, "preset=smoke", f"run_dir={out}", "workers=0"]
    assert main(words) == 0
    with (out / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert (out / "figure.png").stat().st_size > 5000
    told = json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    assert told["verdicts"]
    assert all(v["finding"] and v["ours"] and v["reproduced"] in (True, False, None) for v in told["verdicts"])
    text = (out / "verdict.md").read_text(encoding="utf-8")
    assert "preset smoke" in text and told["verdicts"][0]["finding"] in text
    before = (out / "results.csv").read_bytes()
    capsys.readouterr()
    assert main(words) == 0  # every piece is there already
    assert "pieces are there already" in capsys.readouterr().out
    assert (out / "results.csv").read_bytes() == before


def test_a_piece_is_made_again_alike():
    experiment = importlib.import_module("kbf.experiments.posterior_mean")
    job = experiment.jobs({**experiment.PRESETS["smoke"], "seed": 0})[0]
    assert experiment.work(job) == experiment.work(job)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reproduce", "nothing"], "no experiment 'nothing'"),
        (["reproduce", "posterior_mean", "preset=tiny"], "preset must be one of full, quick, smoke"),
        (["reproduce", "posterior_mean", "runs=0"], "runs must be at least 1"),
        (["reproduce", "posterior_mean", "runs=two"], "runs must be a whole number"),
        (["reproduce"], "name"),
        (["train", "--list"], "no option --list"),
    ],
)
def test_bad_input(words, told, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_list(capsys):
    assert main(["reproduce", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(EXPERIMENTS)


def test_a_failing_piece_leaves_the_others(tmp_path, monkeypatch, capsys):
    experiment = importlib.import_module("kbf.experiments.posterior_mean")
    whole = experiment.work
    monkeypatch.setattr(experiment, "work", lambda job: 1 / 0 if job["run"] == 1 else whole(job))
    words = ["reproduce", "posterior_mean", "preset=smoke", f"run_dir={tmp_path}", "workers=0"]
    assert main(words) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert len(list((tmp_path / "cells").iterdir())) == 2
    assert not (tmp_path / "verdict.md").exists()
    monkeypatch.undo()
    assert main(words) == 0
    assert "2 of 4 pieces are there already" in capsys.readouterr().out


def test_means():
    rows = [{"n": n, "m": "a", "e": e} for n, e in ((1, 2.0), (1, 6.0), (2, 5.0))]
    assert means(rows, ["n"], "e")[0] == {"n": 1, "e": 4.0, "e_se": 2.0, "runs": 2}
    assert math.isnan(means(rows, ["n"], "e")[1]["e_se"])
    assert column(rows, "e", n=1) == [2.0, 6.0]


def test_wilcoxon_of_rows():
    rows = [{"n": 1, "method": m, "run": r, "e": r + shift} for r in range(8) for m, shift in (("a", 0.0), ("b", 1.0))]
    (pair,) = wilcoxon(rows, "e", ["n"])
    assert (pair["first"], pair["second"], pair["seeds"], pair["n"]) == ("a", "b", 8, 1)
    assert pair["p_value"] == pytest.approx(2 / 2**8)  # all of one sign
    assert pair["mean_difference"] == -1


def test_the_true_posterior_mean_is_bayes():
    """Weighted by its likelihood, a large prior sample has the mean that `problem` tells."""
    p = problem(1, 4, 3, seed=0)
    A = torch.randn(2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    V = A.mT @ A / 2 + 2 * torch.eye(2, dtype=torch.float64)
    z = torch.randn(400_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * (V[1, 1] / 2).sqrt()
    for at, truth in zip(p.queries[:, 0], p.truth[:, 0], strict=True):
        mean, variance = 1 + V[0, 1] / V[1, 1] * z, V[0, 0] - V[0, 1] ** 2 / V[1, 1]
        weights = torch.softmax(-0.5 * (at - mean).square() / variance, 0)
        assert (weights @ z - truth).abs() < 0.01
