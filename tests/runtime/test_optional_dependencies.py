"""Packages that only some commands need: where one is missing, or there but broken, the command
says so in one line.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

import pytest

from kbf.cli import main
from kbf.runtime.optional_dependencies import need

COMMANDS = {
    "starlette": ("serve", ["serve", "checkpoint=example:rotation"]),
    "uvicorn": ("serve", ["serve", "checkpoint=example:rotation"]),
    "prometheus_client": ("serve", ["serve", "checkpoint=example:rotation"]),
    "bokeh": ("serve", ["serve", "checkpoint=example:rotation"]),
    "onnxruntime": (
        "export",
        ["export", "checkpoint=example:rotation", "format=onnx", "out=step"],
    ),
    "onnx": ("export", ["export", "checkpoint=example:rotation", "format=onnx", "out=step"]),
    "onnxscript": ("export", ["export", "checkpoint=example:rotation", "format=onnx", "out=step"]),
    "sklearn": (
        "sklearn",
        ["train", "model=window_boosting", "n_train=100", "data.n_test=20", "logger=none"],
    ),
    "pyarrow": ("own", ["data", "check", "data=own", "data.path=a.parquet"]),
    "h5py": ("own", ["data", "check", "data=own", "data.path=a.h5"]),
    "zarr": ("own", ["data", "check", "data=own", "data.path=a.zarr"]),
    "av": (
        "own",
        ["data", "check", "data=own", "data.path=a.mp4", "data.table=t.csv", "data.states=[x]"],
    ),
    "vizdoom": ("render", ["data", "render", "vizdoom", "out=frames.npz"]),
    "gymnasium": ("examples", ["data", "render", "pendulum", "steps=2", "out=frames.npz"]),
    "pygame": ("examples", ["data", "render", "pendulum", "steps=2", "out=frames.npz"]),
    "ratinabox": ("recordings", ["data", "data=rat"]),
    "heartpy": ("recordings", ["data", "data=ppg"]),
    "seglearn": ("recordings", ["data", "data=watch"]),
    "mujoco": ("recordings", ["data", "data=cartpole"]),
}

FILES = ("ratinabox", "heartpy", "seglearn")
"""Packages of which a file is read before anything is imported."""


class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package that is there, and whose first line fails as it does where a library of the system
    is not.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == self.package else None

    def exec_module(self, module):
        raise ImportError("libodd.so.7: cannot open shared object file")


@pytest.mark.parametrize(
    ("package", "broken"),
    [
        (package, broken)
        for package in COMMANDS
        for broken in (False, True)
        if not (broken and package in FILES)
    ],
)
def test_one_line_names_the_package_and_how_to_install_it(
    package, broken, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t.csv").write_text("x\n1\n2\n", encoding="utf-8")
    for name in ("a.parquet", "a.h5", "a.mp4"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a.zarr").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    if broken:
        monkeypatch.setattr(sys, "meta_path", [Broken(package), *sys.meta_path])
    else:
        monkeypatch.setitem(sys.modules, package, None)
    extra, words = COMMANDS[package]
    capsys.readouterr()
    assert main(words) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert package in line and line.endswith(f'pip install "kbf[{extra}]"'), line
    assert ("does not load (libodd.so.7" if broken else "which is not installed") in line


def test_what_a_package_itself_lacks_is_told(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import something_else\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"this needs the package lacking, .* does not load \(it lacks something_else\)",
    ):
        need("lacking", "own", "this")
