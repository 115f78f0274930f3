"""``python -m studies structure``: features are named, cells are kept, and summaries count them."""

import json

import pytest

from kbf.fitted.sensor_findings import Finding
from studies.systems import structure
from studies.systems.grammar import FEATURES, draw_system


def test_a_system_has_the_wanted_feature_alone():
    assert draw_system(0, dimensions=[2], wanted=["late"]).features[2:] == ("late",)
    assert draw_system(0, dimensions=[3], wanted=[]).features[2:] == ()
    assert draw_system(4, wanted=None).features == draw_system(4).features
    assert set(structure.KINDS) - {"none"} < set(FEATURES)


def test_features_are_named_and_cells_are_kept(tmp_path, capsys):
    words = ["--seeds", "9", "--rows", "600", "--file", str(tmp_path / "cells.jsonl")]
    words += ["--features", "none", "late", "sticking"]
    assert structure.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count(" right ") >= 3 and "WRONG" not in printed
    cells = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert [cell["feature"] for cell in cells] == ["none", "late", "sticking"]
    assert structure.main(words) == 0
    assert "system" not in capsys.readouterr().out.replace("systems", "")
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 3


def test_other_findings_are_wrong(monkeypatch):
    monkeypatch.setattr(structure, "sensor_findings", lambda recordings: [])
    monkeypatch.setattr(structure, "move_findings", lambda recordings: [Finding("jumps", 0)])
    verdicts = {
        feature: structure.cell_of(9, feature, 100, [2])["right"]
        for feature in ("none", "jumps", "late")
    }
    assert verdicts == {"none": False, "jumps": True, "late": False}


@pytest.mark.slow
@pytest.mark.parametrize("feature", structure.KINDS)
def test_systems_with_one_feature_are_named(feature):
    found = [structure.cell_of(seed, feature, 1000, [1, 2, 3]) for seed in (0, 3, 9)]
    right = [cell["right"] for cell in found if cell["right"] is not None]
    assert sum(right) >= len(right) - 1, found
