"""``python -m studies``, and ``kbf reproduce`` and ``kbf bench`` with and without a clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kbf.cli import main as kbf_main
from studies.__main__ import main
from studies.benchmarks import BENCHMARKS
from studies.papers import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
RUN = ["posterior_mean", "preset=smoke", "workers=0"]


@pytest.mark.parametrize("command", ["papers", "benchmark", "systems", "structure", "stress"])
def test_help(command, capsys):
    if command in ("systems", "structure", "stress"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
    else:
        assert main([command, "--help"]) == 0
    assert main(["--help"]) == 0
    assert f"python -m studies {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "names"), [("papers", EXPERIMENTS), ("benchmark", BENCHMARKS)], ids=str
)
def test_the_names_are_listed(command, names, capsys):
    assert main([command, "--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(names)
    assert kbf_main(["reproduce" if command == "papers" else "bench", "--list"]) == 0
    assert capsys.readouterr().out == listed


def test_bad_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main([]) == 2
    assert main(["paper"]) == 2
    assert "there is no command 'paper'" in capsys.readouterr().err
    assert main(["benchmark", "nothing"]) == 2
    assert "there is no benchmark 'nothing'" in capsys.readouterr().err


def test_both_commands_run_the_same_study(tmp_path, monkeypatch):
    """Equal rows; about.json of either has the command of kbf."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(["papers", *RUN, f"run_dir={tmp_path / 'one'}"]) == 0
    about = json.loads((tmp_path / "one" / "about.json").read_text())
    assert about["command"].startswith("kbf reproduce posterior_mean preset=smoke")
    assert kbf_main(["reproduce", *RUN, f"run_dir={tmp_path / 'two'}"]) == 0
    one, two = ((tmp_path / name / "results.csv").read_bytes() for name in ("one", "two"))
    assert one == two


def without_studies(package: Path, words: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run kbf from another folder, with `package` as the only place for kbf and for studies."""
    code = (
        f"import pathlib, sys; sys.path = [{str(package)!r}, *(place for place in sys.path "
        "if place and not (pathlib.Path(place) / 'studies').exists())]\n"
        f"from kbf.cli import main; sys.exit(main({words!r}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_clone_finds_its_studies_from_another_folder(tmp_path):
    """`kbf.commands.support.workshop` adds the folder next to the package to the import path."""
    (tmp_path / "clone").mkdir()
    for name in ("kbf", "studies", "configs"):
        (tmp_path / "clone" / name).symlink_to(ROOT / name, target_is_directory=True)
    done = without_studies(tmp_path / "clone", ["bench", "--list"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step ")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A folder with the contents of the wheel."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(*folder.glob("*.whl")) as archive:
        archive.extractall(folder / "contents")
    return folder / "contents"


@pytest.mark.parametrize(
    "words",
    [["bench", "step", "size=smoke"], ["bench", "--list"], ["reproduce", "all"]],
    ids=" ".join,
)
def test_an_installed_package_reports_what_is_missing(wheel, words, tmp_path):
    done = without_studies(wheel, words, tmp_path)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kbf {words[0]}: the folder studies/ is missing") and "clone" in line
    assert not list(tmp_path.iterdir())
