"""model=auto: several models on a validation part, the best of them on everything."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kbf import model_choice as auto
from kbf.cli import main
from kbf.commands.support import search_report
from kbf.config import configure
from kbf.config.run_settings import seconds_of
from kbf.data.dataset import load_data
from kbf.data.windows import split
from kbf.evaluation.score import score
from kbf.fitted.checkpoint import load_filter
from kbf.training.filter_stage import FilterTraining
from kbf.training.fit import train

FEW = [
    "~model.candidates.kbf",
    "~model.candidates.kbf_tuned",
    "~model.candidates.kbf_paper",
    "~model.candidates.lstm",
]
SETTINGS = [
    "n_train=80",
    "data.n_test=20",
    "particles=50",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "animation=false",
]


def config(*words: str) -> dict[str, Any]:
    return configure("train", ["model=auto", *SETTINGS, "run_dir=unused", *words])


def test_the_first_has_the_least_error_on_the_held_out_part(tmp_path):
    """The error of each is what the scoring loop says of the model fitted to the rest, and the
    choice is refitted to everything.
    """
    given = config(*FEW)
    given["model"]["candidates"] = {
        name: given["model"]["candidates"][name] for name in ("frame", "kalman", "kbf_loo")
    }
    data = load_data(given["data"])
    chosen, rows = auto.choose(given, data)
    assert rows[0].model != "frame", "the first to be tried is not the best"
    errors = [row.nmse for row in rows if row.nmse is not None]
    assert errors == sorted(errors)
    assert {row.model for row in rows} == {"kbf_loo", "kalman", "frame"}
    assert chosen["model"] == given["model"]["candidates"][rows[0].model]
    fit, held = split(data.train, 0.2)
    assert sum(len(s.states) for s in held) == 16
    variances = torch.cat([s.states for s in fit]).double().var(0, correction=0)
    for row in rows:
        trained = train(
            auto.with_model(given, given["model"]["candidates"][row.model]),
            fit,
            tmp_path / row.model,
        )
        assert trained is not None
        residuals = held[0].states.double() - score(trained.filter, held).estimates[0]
        assert row.nmse == pytest.approx(
            float((residuals.square().mean(0) / variances).mean()), rel=1e-6
        )
        pairs = (
            (residuals.square() / variances).mean(1).reshape(8, 2).mean(1)
        )  # 8 stretches of 2 steps
        assert row.error == pytest.approx(float(pairs.std() / 8**0.5), rel=1e-6)


def test_a_validation_part_of_one_s_own_takes_the_place_of_the_last_steps():
    given = config(*FEW, "~model.candidates.kbf_loo")
    data = load_data(given["data"])
    own = data._replace(validation=[s._replace(states=s.states + 10) for s in data.train])
    rows = auto.choose(given, own)[1]
    assert min(row.nmse or 0 for row in rows) > 100
    assert all(row.nmse is not None and row.nmse < 10 for row in auto.choose(given, data)[1])


def test_a_budget_ends_the_search_and_is_checked():
    given = config(*FEW, "budget=0.001s")
    rows = auto.choose(given, load_data(given["data"]))[1]
    assert rows[0].nmse is not None
    assert all("the budget of 0.001 s is spent" in row.note for row in rows[1:]) and len(rows) == 3
    assert [seconds_of(each) for each in ("90s", "10m", "1.5h", 7)] == [90, 600, 5400, 7]
    for wrong in ("soon", "-1m", 0, True, "5d", "", "inf"):
        with pytest.raises(ValueError, match="budget must be a time, as 90s, 10m or 1h"):
            seconds_of(wrong)


def test_models_that_fail_or_are_for_other_sizes_are_noted_and_left_out():
    given = config(
        "~model.candidates.kbf",
        "~model.candidates.kbf_paper",
        "~model.candidates.frame",
        "n_train=40",
    )
    data = load_data(given["data"])
    chosen, rows = auto.choose(given, data)
    notes = {row.model: row.note for row in rows}
    assert notes["lstm"] == "not a candidate on 32 training steps"
    assert "no window of 20 steps fits" in notes["kbf_tuned"]
    assert [row.nmse for row in rows[2:]] == [None, None]
    assert chosen["model"]["name"] in ("kalman", "kbf_loo")
    given["model"]["candidates"] = {"kbf_tuned": given["model"]["candidates"]["kbf_tuned"]}
    with pytest.raises(
        ValueError, match=r"none of the models works on this data. kbf_tuned: no window"
    ):
        auto.choose(given, data)


@pytest.mark.slow
def test_the_command_leaves_the_checkpoint_of_the_choice_and_what_was_tried(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "model=auto", *SETTINGS, *FEW, "run_dir=run"]) == 0
    with Path("run/candidates.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert {row["search"] for row in rows} == {"auto"} and [row["weight"] for row in rows] == [
        "1.0",
        "",
        "",
    ]
    assert f"selected by held-out error: {rows[0]['candidate']}" in capsys.readouterr().out
    loaded = load_filter("run/checkpoints/best.ckpt")
    assert loaded.module.config["model"]["name"] == rows[0]["candidate"]
    assert sum(len(s.states) for s in loaded.module.memory.recordings()) == 80, (
        "fitted to everything"
    )
    assert main(["train", "model=kalman", *SETTINGS, "run_dir=run", "overwrite=true"]) == 0
    assert not Path("run/candidates.csv").exists(), "a later run clears it"
    with pytest.raises(
        ValueError, match="model=auto selects a model by the data: it is for kbf train"
    ):
        FilterTraining(config())


@pytest.mark.slow
def test_what_the_net_under_a_model_tried_is_in_the_table_the_file_and_tensorboard(
    tmp_path, capsys
):
    """One table for both searches, the same columns."""
    few = [
        "n_train=100",
        "data.n_test=20",
        "particles=50",
        "trainer.enable_progress_bar=false",
        "animation=false",
    ]
    assert main(["train", *few, f"run_dir={tmp_path}"]) == 0
    with (tmp_path / search_report.FILE).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["search"] for row in rows} == {"model_selection"} and {
        "kbf",
        "window_ridge",
        "kalman",
        "mean",
    } <= {row["candidate"] for row in rows}
    taken = [row["candidate"] for row in rows if row["weight"]]
    assert sum(float(row["weight"]) for row in rows if row["weight"]) == pytest.approx(1)
    assert f"selected by held-out error: {', '.join(taken)}" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path)).Reload()
    for row in rows:
        if row["nmse"]:
            assert events.Scalars(f"candidates/{row['candidate']}")[0].value == pytest.approx(
                float(row["nmse"]), rel=1e-5
            )
    (text,) = events.Tensors("candidates/text_summary")
    assert "| search | candidate | NMSE |" in text.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize(
    ("nmse", "weights", "how"),
    [
        ((0.1, 0.2, 0.05), (1.0, None, None), "selected by held-out error: kbf"),
        ((0.2, 0.1, 0.05), (None, 1.0, None), "selected by held-out error: kalman"),
        ((0.2, 0.1, 0.05), (0.3, 0.7, None), "selected by held-out error: kbf, kalman"),
        ((0.1, None, None), (1.0, None, None), "selected by held-out error: kbf"),
    ],
)
def test_selected_candidates_are_named_below_the_table(capsys, nmse, weights, how):
    names = ("kbf", "kalman", "average")
    rows = [
        dict(zip(search_report.HEADINGS, ("", name, error, 0.1, 1.0, weight, ""), strict=True))
        for name, error, weight in zip(names, nmse, weights, strict=True)
    ]
    search_report.print_candidates(
        [{"nmse" if key == "NMSE" else key: value for key, value in row.items()} for row in rows]
    )
    assert how in capsys.readouterr().out
