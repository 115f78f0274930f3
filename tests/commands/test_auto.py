"""model=auto: several models on a validation part, the best of them on everything."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from kbf.cli import main
from kbf.commands import auto
from kbf.commands.common import seconds_of
from kbf.config import configure
from kbf.data.dataset import load_data
from kbf.data.windows import split
from kbf.evaluation.score import score
from kbf.training.checkpoint import load_filter
from kbf.training.filter_stage import FilterTraining
from kbf.training.train import train

FEW = ["~model.candidates.kbf", "~model.candidates.kbf_tuned", "~model.candidates.kbf_paper", "~model.candidates.lstm"]
SETTINGS = ["n_train=80", "data.n_test=20", "particles=50", "logger=none", "trainer.enable_progress_bar=false", "animation=false"]


def config(*words: str) -> dict[str, Any]:
    return configure("train", ["model=auto", *SETTINGS, "run_dir=unused", *words])


def test_the_first_has_the_least_error_on_the_held_out_part(tmp_path):
    """The error of each is what the scoring loop says of the model fitted to the rest, and the choice is refitted to everything."""
    given = config(*FEW)
    given["model"]["candidates"] = {name: given["model"]["candidates"][name] for name in ("frame", "kalman", "kbf_loo")}
    data = load_data(given["data"])
    chosen, rows = auto.choose(given, data)
    assert rows[0]["model"] != "frame", "the first to be tried is not the best"
    errors = [row["validation.mse"] for row in rows]
    assert errors == sorted(errors)
    assert {row["model"] for row in rows} == {"kbf_loo", "kalman", "frame"}
    assert chosen["model"] == given["model"]["candidates"][rows[0]["model"]]
    fit, held = split(data.train, 0.2)
    assert sum(len(s.states) for s in held) == 16
    for row in rows:
        trained = train(auto.with_model(given, given["model"]["candidates"][row["model"]]), fit, tmp_path / row["model"])
        assert trained is not None
        assert score(trained.filter, held).mse.mean().item() == pytest.approx(row["validation.mse"], rel=1e-9)


def test_a_validation_part_of_one_s_own_takes_the_place_of_the_last_steps():
    given = config(*FEW, "~model.candidates.kbf_loo")
    data = load_data(given["data"])
    own = data._replace(validation=[s._replace(states=s.states + 10) for s in data.train])
    rows = auto.choose(given, own)[1]
    assert min(row["validation.mse"] for row in rows) > 100
    assert all(row["validation.mse"] < 10 for row in auto.choose(given, data)[1])


def test_a_budget_ends_the_search_and_is_checked():
    given = config(*FEW, "budget=0.001s")
    rows = auto.choose(given, load_data(given["data"]))[1]
    assert rows[0]["validation.mse"] is not None
    assert all("the budget of 0.001 s is spent" in row["note"] for row in rows[1:]) and len(rows) == 3
    assert [seconds_of(each) for each in ("90s", "10m", "1.5h", 7)] == [90, 600, 5400, 7]
    for wrong in ("soon", "-1m", 0, True, "5d", "", "inf"):
        with pytest.raises(ValueError, match="budget must be a time, as 90s, 10m or 1h"):
            seconds_of(wrong)


def test_models_that_fail_or_are_for_other_sizes_are_noted_and_left_out():
    given = config("~model.candidates.kbf", "~model.candidates.kbf_paper", "~model.candidates.frame", "n_train=40")
    data = load_data(given["data"])
    chosen, rows = auto.choose(given, data)
    notes = {row["model"]: row["note"] for row in rows}
    assert notes["lstm"] == "not tried on 32 training steps"
    assert "no window of 20 steps fits" in notes["kbf_tuned"]
    assert [row["validation.mse"] for row in rows[2:]] == [None, None]
    assert chosen["model"]["name"] in ("kalman", "kbf_loo")
    given["model"]["candidates"] = {"kbf_tuned": given["model"]["candidates"]["kbf_tuned"]}
    with pytest.raises(ValueError, match=r"none of the models works on this data. kbf_tuned: no window"):
        auto.choose(given, data)


def test_the_command_leaves_the_checkpoint_of_the_choice_and_what_was_tried(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=auto", *SETTINGS, *FEW, "run_dir=run"]) == 0
    with Path("run/auto.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert "model=auto" in capsys.readouterr().out
    loaded = load_filter("run/checkpoints/best.ckpt")
    assert loaded.module.config["model"]["name"] == rows[0]["model"]
    assert sum(len(s.states) for s in loaded.module.memory.sequences()) == 80, "fitted to everything"
    assert main(["train", "model=kalman", *SETTINGS, "run_dir=run", "overwrite=true"]) == 0
    assert not Path("run/auto.csv").exists(), "a later run clears it"
    with pytest.raises(ValueError, match="model=auto chooses a model from the data: that is for kbf train"):
        FilterTraining(config())
