"""Examples of README.md and docs/: Python blocks run, commands compose their configuration."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

import kbf
from kbf.cli import main
from kbf.data.synthetic import SyntheticData
from kbf.data.windows import piece
from kbf.recording import Recording
from kbf.rkhs.kernels import KERNELS
from kbf.rkhs.ratios import RATIOS
from kbf.rkhs.rules import RULES
from kbf.ssm import rotation

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
PAGES = [
    README,
    *(
        page.read_text(encoding="utf-8")
        for page in sorted(DOCS.glob("*.md"))
        if page.stem not in ("tutorial", "extending")
    ),
]
"""All pages except those whose commands are run in order."""
PLACEHOLDER = re.compile(r"\b(NAME|COMMAND|PATH|RUN)\b|…|\.\.\.")
ELSEWHERE = ("launcher", "run_dir")
"""Settings that need a plugin or a running Hydra."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Every ``kbf ...`` of shell blocks and inline code, without comments and placeholders."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    lines += re.findall(
        r"`(kbf [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    found = [line.partition("#")[0].strip() for line in lines if line.startswith("kbf ")]
    return sorted(
        {line for line in found if len(line.split()) > 2 and not PLACEHOLDER.search(line)}
    )


def words(line: str) -> list[str]:
    """Arguments of a command; missing checkpoints become the example's, a sweep its first run."""
    given = shlex.split(line)[1:]
    if given[0] == "evaluate":
        given = [
            "checkpoint=example:rotation" if re.match("checkpoint=(?!runs/arm/)", word) else word
            for word in given
        ]
    if "--multirun" in given:
        given = [
            word.partition(",")[0]
            for word in given
            if word != "--multirun" and word.partition("=")[0] not in ELSEWHERE
        ]
    return given


def run_python(text: str, directory: Path, monkeypatch) -> dict:
    """Runs the Python blocks of a page in order in a directory; returns their names."""
    monkeypatch.chdir(directory)
    names: dict = {}
    for block in blocks(text, "python"):
        exec(compile(block, "page", "exec"), names)
    return names


def test_the_commands_are_found():
    found = commands("\n\n".join(PAGES))
    assert len(found) > 60 and "kbf compare data=rotation runs=30" in found
    assert not any("#" in line or "`" in line for line in found)


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """A directory with the recordings and the checkpoint that the README uses."""
    directory = tmp_path_factory.mktemp("arm")
    data = SyntheticData(rotation(), n_train=60, n_test=2).train[0]
    rows = [",".join(map(str, row)) for row in torch.cat([data.states, data.obs], 1).tolist()]
    (directory / "views").mkdir()
    for k in range(len(rows)):
        Image.new("L", (48, 36), 40 + 3 * k).save(directory / "views" / f"{k}.png")
    for name in ("rec", "other", "more", "new", "views/states"):
        (directory / f"{name}.csv").write_text("\n".join(["x,y,a,b", *rows]))
    headings = torch.atan2(data.states[:, 1], data.states[:, 0])[:, None]
    runs = [
        f"{k // 20},{k}," + ",".join(map(str, row))
        for k, row in enumerate(torch.cat([headings, data.obs], 1).tolist())
    ]
    (directory / "runs.csv").write_text("\n".join(["run,t,heading,a,b", *runs]))
    columns = [
        "data=own",
        f"data.path={directory / 'rec.csv'}",
        "data.states=[x,y]",
        "data.observations=[a,b]",
    ]
    cheap = ["model=kalman", "logger=none", "calibrate=false", "trainer.enable_progress_bar=false"]
    assert main(["train", *columns, *cheap, f"run_dir={directory / 'runs' / 'arm'}"]) == 0
    return directory


@pytest.mark.parametrize("line", commands("\n\n".join(PAGES)))
def test_the_commands_can_be_typed(line, arm, monkeypatch, capsys):
    monkeypatch.chdir(arm)
    shown = any(flag in line.split() for flag in ("--list", "--cfg", "--info"))
    code = main([*words(line), *([] if shown else ["--cfg"])])
    assert code == 0, capsys.readouterr().err


@pytest.mark.slow
def test_python_of_the_readme(tmp_path, monkeypatch, capsys):
    """The estimates are accurate, their intervals calibrated; the page has what is printed."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    names = run_python(README, tmp_path, monkeypatch)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    (shown,) = blocks(README, "text")
    first = printed.index(shown.splitlines()[0])
    number = re.compile(r"\d+\.\d+|\d+")
    for line, found in zip(shown.splitlines(), printed[first:], strict=False):
        assert number.sub("#", line) == number.sub("#", found)
        expected = [float(each) for each in number.findall(line)]
        assert [float(each) for each in number.findall(found)] == pytest.approx(expected, rel=0.1)
    new, est = names["new"], names["est"]
    truth = new[est.columns].to_numpy()
    assert (((est.mean - truth) ** 2).mean(0) / truth.var(0) < 0.0025).all()
    low, high = est.interval(0.95)
    inside = ((low <= truth) & (truth <= high)).mean(0)
    assert (inside >= 0.92).all() and (inside <= 0.98).all()
    assert Path("arm.png").stat().st_size > 10_000
    loaded = kbf.load("arm.ckpt").filter(new)
    assert loaded.mean == pytest.approx(est.mean, rel=1e-12)
    assert 150 < names["live"].estimate["reach_mm"] < 400


def test_the_arm_is_written_by_its_script(tmp_path):
    table = runpy.run_path(str(ROOT / "scripts" / "make_arm.py"))
    drawn = table["arm"]().round(table["DECIMALS"]).reset_index()
    stored = pd.read_csv(ROOT / "data" / "arm.csv", parse_dates=["time"])
    pd.testing.assert_frame_equal(stored, drawn, check_dtype=False)


@pytest.mark.slow
def test_python_of_the_library_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    names = run_python((DOCS / "library.md").read_text(encoding="utf-8"), tmp_path, monkeypatch)
    assert ((names["est"].mean - names["states"][300:]) ** 2).sum(1).mean() < 0.05
    assert names["error"] < 0.02 and names["result"].mse < 0.06
    assert names["regression"].score(names["observations"], names["states"]) > 0.8
    assert names["ratio"].ratio([[0.5]]) > 1.5
    assert "0.0" in capsys.readouterr().out


@pytest.mark.slow
def test_python_of_the_layers_page(tmp_path, monkeypatch, capsys):
    """Trained encoders are better than untrained ones and the mean; the table has such numbers."""
    page = (DOCS / "layers.md").read_text(encoding="utf-8")
    names = run_python(page, tmp_path, monkeypatch)
    assert names["rule_trained"] < 0.3 * names["rule_untrained"] < 0.4 * names["mean_error"]
    assert names["filter_trained"] < 0.2 * names["filter_untrained"]
    assert names["filter_trained"] < names["rule_trained"]
    assert max(names["filter_trained"], names["lightning_trained"]) < names["pixels_error"]
    assert names["smoothed_error"] < names["filter_trained"]
    measured = (
        *("mean_error", "pixels_error", "rule_untrained", "rule_trained"),
        *("filter_untrained", "filter_trained", "filter_untrained", "lightning_trained"),
        "smoothed_error",
    )
    table = page.partition("## Results")[2].partition("The Bayes-optimal")[0]
    shown = [float(number) for number in re.findall(r"\b\d\.\d{3}\b", table)]
    assert shown == pytest.approx([names[name] for name in measured], rel=0.3)
    assert "Lightning" in capsys.readouterr().out


@pytest.mark.slow
def test_python_of_the_page_on_operators(tmp_path, monkeypatch, capsys):
    """A learned law is not rejected, a wrong one is; labels correct; ratios are near the truth."""
    page = (DOCS / "operators.md").read_text(encoding="utf-8")
    names = run_python(page, tmp_path, monkeypatch)
    learned, wrong = names["p_values"].values()
    assert learned > 0.2 and wrong <= 0.05
    assert names["estimate"] == pytest.approx(0.7, abs=0.15)  # of the last strength; 1.5 without
    assert names["by_kliep"].item() == pytest.approx(1.62, abs=0.25)
    assert names["by_classifier"].item() == pytest.approx(1.62, abs=0.25)
    assert "strength 0: 1.50" in capsys.readouterr().out


class Rat:
    """Replaces the recording of a package: a walk in a box, and counts by position."""

    def __init__(self, name: str, *, n_train: int) -> None:
        assert name == "rat"
        generator = torch.Generator().manual_seed(0)
        places = (
            torch.randn(n_train + 300, 2, generator=generator).cumsum(0).mul(0.1).sin().double()
        )
        centres = 2 * torch.rand(40, 2, generator=generator).double() - 1
        rates = 0.03 + 1.2 * (-torch.cdist(places, centres).square() / 0.1).exp()
        walk = Recording(places, torch.poisson(rates, generator=generator))
        self.train, self.test = [piece(walk, 0, n_train)], [piece(walk, n_train, n_train + 300)]


@pytest.mark.slow
def test_the_tutorial(tmp_path, monkeypatch, capsys):
    """Every command in order, with a cheap model, on a recording of the same shape."""
    monkeypatch.setattr("kbf.data.recorded.RecordedData", Rat)
    run_python(TUTORIAL, tmp_path, monkeypatch)
    lines = [line for block in blocks(TUTORIAL, "sh") for line in block.splitlines()]
    assert [line.split()[1] for line in lines] == ["data", "train", "compare", "evaluate", "filter"]
    quick = {
        "train": [
            "model=kalman",
            "logger=none",
            "calibrate=false",
            "trainer.enable_progress_bar=false",
        ],
        "compare": ["--cfg"],
    }
    for line in lines:
        given = shlex.split(line)[1:]
        assert main([*given, *quick.get(given[0], [])]) == 0, capsys.readouterr().err
    assert len((tmp_path / "runs" / "estimates.csv").read_text().splitlines()) == 301


@pytest.fixture
def extending(tmp_path, monkeypatch):
    """The module of the page, with its configurations on disk; restores the tables."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    (tmp_path / "my_kbf.py").write_text("\n\n".join(blocks(page, "python")))
    for text in blocks(page, "yaml"):
        path = tmp_path / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield (
        importlib.import_module("my_kbf"),
        [line for block in blocks(page, "sh") for line in block.splitlines()],
    )
    sys.modules.pop("my_kbf")
    for table, name in (
        (KERNELS, "rational_quadratic"),
        (RULES, "nadaraya_watson"),
        (RATIOS, "bounded"),
    ):
        table.pop(name)


@pytest.mark.slow
def test_the_page_on_extending(extending, capsys):
    page, lines = extending
    raw = (
        (page.recording.test[0].obs - page.recording.test[0].states).square().sum(-1).mean().item()
    )
    assert max(page.kernel_error, page.rule_error, page.ratio_error, page.filter_error) < 0.85 * raw
    for unfit in ({"rule": "nadaraya_watson"}, {"ratio": "bounded"}):
        with pytest.raises(ValueError, match="set rank to null"):
            page.kbf.KBF(**unfit)
    assert page.features.shape == (5, 16) and page.first.shape == (1, 2)
    assert page.drift_error < 0.5 * page.drift.test[0].states.var().item()
    assert page.verdicts[0].reproduced is True and len(page.rows) == 12
    quick = [
        "n_train=60",
        "particles=100",
        "logger=none",
        "calibrate=false",
        "trainer.enable_progress_bar=false",
    ]
    more = {
        "data=dsprites": ["model=kalman", "data.encoding.epochs=1", "data.encoding.members=2"],
        "data=drift": ["model=kalman"],
    }
    for line in lines:
        given = shlex.split(line)[1:]
        words = [word for key, added in more.items() if key in given for word in added]
        words += ["model.training.epochs=2"] if "model=lstm" in given else []
        assert (
            main([*given, *words, *(quick if given[0] == "train" else ["particles=100"])]) == 0
        ), capsys.readouterr().err
    assert len(Path("epochs.txt").read_text().splitlines()) == 2
