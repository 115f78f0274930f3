"""Names of files with every sign in them, through hydra and OmegaConf."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kbf.runtime.hydra_quoting import as_text, literal_names, literal_path, quoted

NAMES = [
    "a=b",
    "a$b",
    "a\\b",
    "it's",
    'a"b',
    "a b",
    "a,b",
    "a[b",
    "a#b",
    "a;b",
    "a{b}",
    "${x}",
    "\\${x}",
    "a\\",
    "\\'",
    "a\\\\'b",
    "x\\\\",
]


def composed(word):
    """What a command gets of a word."""
    value = OverridesParser.create().parse_overrides([word])[0].value()
    return OmegaConf.create({"input": value}).input


@pytest.mark.parametrize("name", NAMES)
def test_a_quoted_name_arrives_as_it_is(name):
    assert composed(f"input={quoted(name)}") == name
    assert OmegaConf.create({"input": as_text(name)}).input == name


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_command_line_is_that_of_the_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("")
    assert composed(literal_path(f"input={name}")) == name


@pytest.mark.parametrize(
    "word",
    [
        "input=a.csv",
        "input='a b'",
        'input="a b"',
        "run_dir=runs/${seed}",
        "input=-",
        "state=null",
        "n_train=a=b",
        "data.path=[a,b]",
        "input=",
    ],
)
def test_usual_words_stay(word):
    assert literal_path(word) == word


def test_a_home_that_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~x.csv").write_text("")
    assert composed(literal_path("input=~x.csv")) == str(tmp_path / "~x.csv")
    assert composed(literal_path("input=~/none.csv")) == "~/none.csv"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("[CO(GT),NOx(GT),PT08.S1*]", ["CO(GT)", "NOx(GT)", "PT08.S1*"]),
        ("[Größe (m), 温度, acc[x], a b]", ["Größe (m)", "温度", "acc[x]", "a b"]),
        ("[\"CO(GT)\",'a,b',c]", ["CO(GT)", "a,b", "c"]),
        ("[[q_w,q_x],[R[0],R[1]]]", [["q_w", "q_x"], ["R[0]", "R[1]"]]),
        ("Zeit (s)", "Zeit (s)"),
        ("[Date,Time (UTC)]", ["Date", "Time (UTC)"]),
        ("{CO(GT): [-200, null], a: [0,1]}", {"CO(GT)": [-200, None], "a": [0, 1]}),
        ("{T(K): 0.5}", {"T(K)": 0.5}),
        ("[s*]", ["s*"]),
        ("[a,b]", ["a", "b"]),
        ("null", None),
        ("[-999]", [-999]),
    ],
)
def test_names_of_columns_require_no_quotes(value, read):
    found = OverridesParser.create().parse_overrides([literal_names(f"data.states={value}")])
    assert found[0].value() == read


@pytest.mark.parametrize("word", ["data.states=${names}", "model.states=[a(b)]", "data.states"])
def test_other_words_stay(word):
    assert literal_names(word) == word
