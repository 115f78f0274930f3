"""What every experiment of a paper must do, and the command that runs them."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import reference
import torch

from kbf.cli import main
from kbf.rkhs.kernels import median_distance
from studies.papers import EXPERIMENTS, command, posterior_mean
from studies.papers.base import Verdict, all_of, column, counted, means, wilcoxon
from studies.papers.command import hashed, verdict_text
from studies.papers.gaussian_model import gaussian_model

WRITTEN = [name for name in EXPERIMENTS if importlib.util.find_spec(f"studies.papers.{name}")]  # pyright: ignore


@pytest.mark.parametrize("name", WRITTEN)
def test_presets_and_jobs(name):
    experiment = importlib.import_module(f"studies.papers.{name}")
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
    assert told["verdicts"] and len(told["commits"]) == len(told["dates"]) == 1
    assert all(
        v["finding"] and v["ours"] and v["reproduced"] in (True, False, None)
        for v in told["verdicts"]
    )
    text = (out / "verdict.md").read_text(encoding="utf-8")
    assert "preset smoke" in text and told["verdicts"][0]["finding"] in text
    before = (out / "results.csv").read_bytes()
    capsys.readouterr()
    assert main(words) == 0  # every piece is there already
    assert "pieces are finished already" in capsys.readouterr().out
    assert (out / "results.csv").read_bytes() == before


def test_a_piece_is_made_again_alike():
    experiment = importlib.import_module("studies.papers.posterior_mean")
    job = experiment.jobs({**experiment.PRESETS["smoke"], "seed": 0})[0]
    assert experiment.work(job) == experiment.work(job)


def test_long_tables_are_compressed(tmp_path, monkeypatch):
    rows = [{"method": "a, b", "mse": 0.1 * k} for k in range(4)]
    plain = command.write_rows(tmp_path, rows)
    assert plain.name == "results.csv"
    text = plain.read_bytes()
    monkeypatch.setattr(command, "MAX_PLAIN_ROWS", 3)
    packed = command.write_rows(tmp_path, rows)
    assert packed.name == "results.csv.gz" and not plain.exists()
    content = packed.read_bytes()
    assert gzip.decompress(content) == text
    assert command.write_rows(tmp_path, rows).read_bytes() == content
    assert command.write_rows(tmp_path, rows[:3]).name == "results.csv" and not packed.exists()


def test_what_is_written_for_a_while_lies_beside_its_target(tmp_path, monkeypatch):
    places: list[Path] = []

    def work(job):
        with tempfile.TemporaryDirectory() as folder:
            places.append(Path(folder))
        return [{"n": 1}]

    monkeypatch.setattr(posterior_mean, "work", work)
    before = tempfile.gettempdir()
    command.work(command.Piece("posterior_mean", {}, tmp_path / "cells" / "piece.json"))
    assert places[0].parents[1] == tmp_path / "cells" and tempfile.gettempdir() == before
    assert not (tmp_path / "cells").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["reproduce", "nothing"], "no experiment 'nothing'"),
        (
            ["reproduce", "posterior_mean", "preset=tiny"],
            "preset must be one of full, quick, smoke",
        ),
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
    experiment = importlib.import_module("studies.papers.posterior_mean")
    whole = experiment.work
    monkeypatch.setattr(experiment, "work", lambda job: 1 / 0 if job["run"] == 1 else whole(job))
    words = ["reproduce", "posterior_mean", "preset=smoke", f"run_dir={tmp_path}", "workers=0"]
    assert main(words) == 1
    assert "ZeroDivisionError" in "".join(capsys.readouterr())
    assert len(list((tmp_path / "cells").iterdir())) == 2
    assert not (tmp_path / "verdict.md").exists()
    monkeypatch.undo()
    assert main(words) == 0
    assert "2 of 4 pieces are finished already" in capsys.readouterr().out


def test_means():
    rows = [{"n": n, "m": "a", "e": e} for n, e in ((1, 2.0), (1, 6.0), (2, 5.0))]
    assert means(rows, ["n"], "e")[0] == {"n": 1, "e": 4.0, "e_se": 2.0, "runs": 2}
    assert math.isnan(means(rows, ["n"], "e")[1]["e_se"])
    assert column(rows, "e", n=1) == [2.0, 6.0]


def test_wilcoxon_of_rows():
    rows = [
        {"n": 1, "method": m, "run": r, "e": r + shift}
        for r in range(8)
        for m, shift in (("a", 0.0), ("b", 1.0))
    ]
    (pair,) = wilcoxon(rows, "e", ["n"])
    assert (pair["first"], pair["second"], pair["seeds"], pair["n"]) == ("a", "b", 8, 1)
    assert pair["p_value"] == pytest.approx(2 / 2**8)  # all of one sign
    assert pair["mean_difference"] == -1


def test_answers_and_counts():
    paper = [Verdict("a", "1", answer) for answer in (True, False, None)]
    assert [v.answer for v in paper] == ["reproduced", "not reproduced", "undecided"]
    asked = Verdict("b", "2", True, asked=True)
    assert (asked.text, asked.answer) == ("asked here: b", "yes")
    assert counted([*paper, asked]).endswith(
        "1 reproduced, 1 not, 1 undecided; asked here: 1 yes, 0 no, 0 undecided"
    )
    assert counted([asked]) == "asked here: 1 yes, 0 no, 0 undecided"
    assert [all_of(answers) for answers in ([True, True], [True, None], [None, False], [])] == [
        True,
        None,
        False,
        True,
    ]


def test_the_verdict_file_says_how_it_was_made():
    about = {
        "experiment": "posterior_mean",
        "preset": "full",
        "runs": 30,
        "commits": ["aa"],
        "dates": ["2026-11-26"],
        "command": "kbf reproduce",
    }
    experiment = importlib.import_module("studies.papers.posterior_mean")
    text = verdict_text(experiment, [Verdict("a | b", "1", None)], about)
    assert (
        "figure 1" in text
        and "(preset full; 30 runs; commit aa; 2026-11-26)" in text
        and "| a \\| b | 1 | undecided |" in text
    )
    mixed = verdict_text(
        experiment, [], about | {"commits": ["aa", "bb"], "preset": "quick", "runs": 1}
    )
    assert "smaller than in the paper; 1 run; commits aa, bb; 2026-11-26" in mixed


def posterior_rows(**error):
    """Eight runs at two dimensions; methods err by 1 times the dimension unless told, IW by half of
    it.
    """
    methods = {
        "original": 1.0,
        "original, n^2 delta": 0.8,
        "IW": 0.5,
        "IW, true ratio": 0.9,
        "the prior's mean": 3.0,
    } | error
    return [
        {"d": d, "run": run, "method": m, "mse": d * e + 0.001 * run}
        for m, e in methods.items()
        for d in (2, 4)
        for run in range(8)
    ]


@pytest.mark.slow
def test_verdicts_on_the_posterior_mean():
    def answers(rows):
        return [v.reproduced for v in posterior_mean.judge(rows)[:5]]

    assert answers(posterior_rows()) == [True] * 5
    assert answers([row for row in posterior_rows() if row["run"] < 4]) == [
        None,
        None,
        True,
        None,
        None,
    ]  # p is 1/8 at the least
    assert answers(posterior_rows(original=0.4)) == [False, True, True, True, True]
    assert answers(posterior_rows(**{"original, n^2 delta": 0.4, "IW, true ratio": 0.4})) == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert answers([row | {"d": 6 - row["d"]} for row in posterior_rows()])[2] is False
    assert answers(posterior_rows(**{"the prior's mean": 0.4}))[4] is False
    assert "in 8 of 8 runs" in posterior_mean.judge(posterior_rows())[0].ours
    rows = posterior_rows()
    steep = [row | {"mse": row["mse"] * row["d"]} if row["method"] == "IW" else row for row in rows]
    assert [posterior_mean.judge(each)[5].reproduced for each in (rows, steep)] == [False, True]


def test_the_errors_of_the_posterior_mean():
    """Each method again by NumPy: rules of Xu et al., equations 2 and 4, and the truth from the
    joint covariance.
    """
    d, n, q, seed = 2, 12, 5, 3
    model = gaussian_model(d, generator := torch.Generator().manual_seed(seed), scale=1 / (2 * d))
    A = torch.randn(
        2 * d, 2 * d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).numpy()
    np.testing.assert_allclose(model.V, A.T @ A / (2 * d) + 2 * np.eye(2 * d))
    z, x = model.pairs(n, generator)
    drawn, queries = model.prior(n, generator), model.queries(q, generator)
    truth = model.posterior_mean(queries).numpy()
    length_z, length_x = median_distance(z).item(), median_distance(x).item()
    z, x, drawn, queries = (t.numpy() for t in (z, x, drawn, queries))
    G_Z, G_X = reference.gaussian_gram(z, z, length_z), reference.gaussian_gram(x, x, length_x)
    gamma = reference.tikhonov(G_Z, reference.gaussian_gram(z, drawn, length_z).mean(1), 0.2)
    P = model.P.numpy()  # half of the covariance of z
    known = np.sqrt(2**d) * np.exp(-0.25 * np.einsum("ni,ij,nj->n", z, np.linalg.inv(P), z))
    found = {
        row["method"]: row["mse"]
        for row in posterior_mean.work({"d": d, "n": n, "queries": q, "run": seed})
    }
    assert set(found) == {
        "original",
        "original, n^2 delta",
        "IW",
        "IW, true ratio",
        "IW, relative ratio",
        "the prior's mean",
    }
    g = reference.gaussian_gram(x, queries, length_x).T
    ways = {
        "original": [reference.original_rule(gamma, G_X, row, 0.2) for row in g],
        "original, n^2 delta": [reference.original_rule(gamma, G_X, row, 0.2 * n**2) for row in g],
        "IW": [
            reference.importance_weighted_rule(np.maximum(gamma, 0), G_X, row, 0.2) for row in g
        ],
        "IW, true ratio": [reference.importance_weighted_rule(known, G_X, row, 0.2) for row in g],
        "the prior's mean": np.zeros((q, n)),
    }
    for method, weights in ways.items():
        assert found[method] == pytest.approx(
            ((np.array(weights) @ z - truth) ** 2).sum(1).mean(), rel=1e-6
        ), method
