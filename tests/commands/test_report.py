"""``kbf report``: one HTML file with pictures inside, that loads nothing and replaces nothing."""

import re

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf.cli import main
from kbf.commands import report, train
from kbf.config.composition import config_dir


def test_the_report_is_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["report", "checkpoint=example:rotation", "trial_model=kalman"]
    assert main([*words, "out=new/rotation.html"]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "new/rotation.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(re.findall("<img ", page)) >= 4
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "http" not in page
    assert "Trials are made with kalman" in page and "Trials are made with kalman" in printed
    assert "z_0" in page and printed.endswith("in new/rotation.html\n")
    assert main([*words, "out=new/rotation.html"]) == 2
    assert "rotation.html exists: name another out" in capsys.readouterr().err
    assert (tmp_path / "new/rotation.html").read_text() == page


def test_names_of_columns_are_text_and_not_html(tmp_path):
    z = np.cumsum(np.random.default_rng(0).normal(size=300)) * 0.1
    data = pd.DataFrame({"<b>z</b>": z, "<script>": z + np.sin(np.arange(300.0))})
    fitted = kbf.fit(
        data, states=["<b>z</b>"], observations=["<script>"], model="mean", progress=False
    )
    fitted.report(tmp_path / "a.html", trials=False)
    page = (tmp_path / "a.html").read_text()
    assert "&lt;script&gt;" in page and "<script>" not in page and "<b>z" not in page


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trial_model=arima", "trial_model=arima is none of mean, kalman"),
        ("out=a.pdf", "a report is an HTML file"),
        ("checkpoint=absent.ckpt", "absent.ckpt"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, monkeypatch, capsys, word, message):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "checkpoint=example:rotation", word]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_help_lists_all_models():
    meaning = (config_dir() / "report.yaml").read_text()
    assert all(name in meaning for name in report.MODELS)


def test_training_prints_what_the_recordings_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    z = np.zeros(500)
    for t in range(1, 500):
        z[t] = 0.95 * z[t - 1] + 0.3 * rng.normal()
    a = z + 0.2 * rng.normal(size=500)
    for start in (100, 200, 300):
        a[start : start + 10] = a[start]
    data = pd.DataFrame({"place": z, "a": a, "b": z + 0.1 * rng.normal(size=500)})
    data.to_csv("rec.csv", index=False)
    words = ["train", "model=mean", "logger=none", "calibrate=false", "data=own"]
    words += ["data.path=rec.csv", "data.states=[place]", "data.observations=[a,b]"]
    assert main([*words, "run_dir=one"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a sticks in" in printed and "b sticks" not in printed
    assert "the estimate of place is worse than the sensor itself" in printed
    assert main([*words, "run_dir=two", "structure=false"]) == 0
    assert "sticks" not in capsys.readouterr().out


def test_notes_leave_out_what_the_selection_has_found(monkeypatch):
    """Of the same sensor: the name ``a`` is part of the names of others."""
    found = pd.DataFrame(
        [
            ("held", "range", "range repeats its last reading."),
            ("late", "a", "a is late by 2 steps."),
            ("failing", "range", "range fails."),
            ("sensor noise", "a", "the noise of a"),
        ],
        columns=["kind", "column", "sentence"],
    )
    monkeypatch.setattr(train, "structure_of", lambda trained: found)
    monkeypatch.setattr(train.search_report, "held_and_late", lambda net, sensors: (["range"], {}))
    notes = train.structure_notes(kbf.load("example:rotation").trained, ["range", "a"])
    assert notes == ["a is late by 2 steps.", "range fails."]
