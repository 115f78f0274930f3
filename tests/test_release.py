"""What is published: the archives hold all that is needed, versions agree, and a checkpoint of
another version is told apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kbf
from kbf.cli import main
from kbf.fitted import checkpoint as checkpoints
from kbf.fitted.checkpoint import CheckpointError, load_filter, read_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """A folder with the wheel and the source archive."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", directory],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return directory


def test_the_wheel_holds_all_that_runs(archives):
    (file,) = archives.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"kbf-{PROJECT['version']}.dist-info/METADATA").decode()
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kbf").rglob("*.py")}
    expected |= {
        f"kbf/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert len(expected) > 150 and expected <= names
    assert {"kbf/py.typed", "kbf/checkpoints/rotation.ckpt"} <= names
    assert not [name for name in names if not name.startswith(("kbf/", "kbf-"))]
    assert all(
        f"Provides-Extra: {extra}\n" in metadata for extra in PROJECT["optional-dependencies"]
    )
    assert (
        "Classifier: Typing :: Typed\n" in metadata
        and metadata.count("Project-URL: ") == len(PROJECT["urls"]) >= 5
    )
    assert (
        f"({PROJECT['urls']['Source']}/blob/v{kbf.__version__}/docs/tutorial.md)" in metadata
        and "](docs/" not in metadata
    )
    assert file.stat().st_size < 5e6


def test_the_wheel_finds_its_configurations(archives, tmp_path):
    (file,) = archives.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import kbf.cli, kbf.config; print(kbf.config.config_dir()); "
        "raise SystemExit(kbf.cli.main(['train', 'model=lstm', '--cfg']))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.splitlines()[0] == str(tmp_path / "kbf" / "configs")
    assert "name: lstm" in told.stdout


def test_the_source_archive_makes_the_wheel_and_runs_the_tests(archives, tmp_path):
    (file,) = archives.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    needed = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*.py")}
    needed |= {
        path.relative_to(ROOT).as_posix()
        for folder in ("scripts", "docs")
        for path in (ROOT / folder).rglob("*")
    }
    needed = {name for name in needed if (ROOT / name).is_file()}
    needed |= {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "Makefile",
        "mkdocs.yml",
        "data/README.md",
        "data/arm.csv",
    }
    needed = {name for name in needed if "__pycache__" not in name}
    assert needed <= names, needed - names
    assert not [
        name
        for name in names
        if name.startswith((".venv", ".git/", "runs", "dist")) or "__pycache__" in name
    ]
    (source,) = tmp_path.iterdir()
    out = tmp_path / "again"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out],
        cwd=source,
        check=True,
        capture_output=True,
    )
    with (
        zipfile.ZipFile(*out.glob("*.whl")) as again,
        zipfile.ZipFile(*archives.glob("*.whl")) as direct,
    ):
        assert sorted(again.namelist()) == sorted(direct.namelist())


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert kbf.__version__ == PROJECT["version"] == citation["version"]
    assert f"## [{kbf.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        assert all(
            person.keys() == {"family-names", "given-names"} for person in reference["authors"]
        )


def test_the_versions_of_the_constraints_are_allowed():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line[0] != "#")
    }
    extras = (PROJECT["optional-dependencies"][extra] for extra in ("dev", "docs"))
    wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *chain(*extras))]
    for requirement in wanted:
        assert requirement.specifier.contains(
            pinned[canonicalize_name(requirement.name)], prereleases=True
        ), requirement
    assert (
        "-c constraints.txt" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
        and len(wanted) > 25
    )


# The checkpoint that comes with kbf


@pytest.mark.slow
def test_the_example_evaluates_at_once(tmp_path, capsys):
    assert (
        main(["evaluate", "checkpoint=example:rotation", "particles=500", f"run_dir={tmp_path}"])
        == 0
    )
    told = json.loads((tmp_path / "metrics.json").read_text())
    assert told["test.mse"] == pytest.approx(0.0402, abs=2e-4)
    assert (told["model"], told["data"], told["n_train"]) == ("kbf", "rotation", 300)
    assert checkpoints.checkpoint_file("example:rotation").stat().st_size < 1e6


@pytest.mark.parametrize("name", ["example:nothing", "example:", "example:../checkpoints/rotation"])
def test_an_example_that_is_not_there(name, capsys):
    with pytest.raises(CheckpointError, match=r"kbf comes with example:rotation"):
        load_filter(name)
    assert main(["evaluate", f"checkpoint='{name}'"]) == 2
    assert "kbf comes with example:rotation" in capsys.readouterr().err


# Checkpoints of other versions


@pytest.fixture
def written(tmp_path):
    """The example, as if another version had written it."""

    def write(version: str | None) -> Path:
        checkpoint = torch.load(checkpoints.checkpoint_file("example:rotation"), weights_only=True)
        checkpoint["kbf"]["version"] = version
        torch.save(checkpoint, tmp_path / "other.ckpt")
        return tmp_path / "other.ckpt"

    return write


@pytest.mark.parametrize("version", ["0.1.0", "0.1.7", "0.1.3.dev1"])
def test_the_same_minor_version_is_read(version, written):
    assert read_checkpoint(written(version))["kbf"]["version"] == version


@pytest.mark.parametrize("version", ["0.2.0", "1.0", "0.10.0rc1"])
def test_a_newer_version_asks_for_an_upgrade(version, written, capsys):
    message = (
        rf"other.ckpt was written by kbf {version}, this is kbf {kbf.__version__}: pip install -U "
        r"kbf"
    )
    with pytest.raises(CheckpointError, match=message):
        load_filter(written(version))
    assert main(["evaluate", f"checkpoint={written(version)}"]) == 2
    assert "pip install -U kbf" in capsys.readouterr().err


def test_a_version_that_is_no_longer_read(written, monkeypatch):
    monkeypatch.setattr(checkpoints, "OLDEST", (0, 5))
    monkeypatch.setattr(checkpoints, "__version__", "0.7.0")
    assert read_checkpoint(written("0.5.0"))
    with pytest.raises(
        CheckpointError, match=r"kbf 0.4.9, which kbf 0.7.0 no longer reads: train it again"
    ):
        read_checkpoint(written("0.4.9"))


@pytest.mark.parametrize("version", [None, "", "new"])
def test_a_checkpoint_without_a_version(version, written):
    with pytest.raises(CheckpointError, match="does not contain the version of kbf that wrote it"):
        read_checkpoint(written(version))
