"""Names of files with every sign in them, through hydra and OmegaConf."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kbf.runtime.hydra_quoting import as_text, literal_path, quoted

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
