"""README and docs/ in step with the repository: links lead somewhere, figures are those of data/results/, the pages are built."""

from __future__ import annotations

import csv
import fcntl
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean, stdev
from urllib.parse import unquote

import pytest

from kbf.cli import COMMANDS
from kbf.runtime.extras import missing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "data" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MADE = ("data.md", "commands/", "results/", "reference/", "changelog.md", "contributing.md", "security.md")
"""Pages that docs/hooks/pages.py makes; strict mkdocs checks the links to them."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


# Links


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere, in the repository or among the pages that are made."""
    wrong = []
    for target in LINK.findall(outside_code(page.read_text(encoding="utf-8"))):
        path = unquote(target.partition("#")[0])
        made = page.parent == ROOT / "docs" and path.startswith(MADE)
        if path and "://" not in path and not made and not (page.parent / path).exists():
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "page.md").write_text("[here](page.md#top) [there](gone.md) ```[no](link)``` [web](https://example.org/x)")
    assert broken(tmp_path / "page.md") == ["gone.md", "link"]


def test_the_readme_of_the_package_index_has_full_links():
    pytest.importorskip("hatchling")
    hook = runpy.run_path(str(ROOT / "scripts" / "readme_hook.py"))
    text = hook["absolute"](text_of("README.md"), "https://host.example/kbf", "v1.0")
    targets = LINK.findall(outside_code(text))
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    assert (
        "![A filter at work: views of a maze, and the heading that the filter estimates](https://host.example/kbf/raw/v1.0/docs/"
        in text
    )
    inside = [t.removeprefix("https://host.example/kbf/blob/v1.0/") for t in targets if "/blob/" in t]
    assert all((ROOT / path).exists() for path in inside)


# Figures

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
TABLES = {
    "rotation": "rotation",
    "oscillatory": "oscillatory",
    "dsprites": "dsprites",
    "dmlab, DeepMind Lab": "dmlab",
    "dmlab, embedded renderer": "maze",
}
"""Headings of the tables of docs/results.md, and the folders that they are of."""


def rows_below(text: str, heading: str) -> tuple[list[str], dict[str, list[str]]]:
    """Heads and cells, by the model in the first cell, of the first table below a text."""
    lines = iter(text[text.index(heading) :].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            break
    return table[0], {re.findall(r"`(\w+)`", row[0])[0]: row[1:] for row in table[2:]}


def measured(folder: str) -> dict[tuple[str, int], dict[str, str]]:
    with (RESULTS / folder / "results.csv").open(newline="") as file:
        return {(row["model"], int(row["n_train"])): row for row in csv.DictReader(file)}


def agree(cell: str, values: list[float]) -> bool:
    """Whether each number of a cell is the measured one, to the digits that it has."""
    shown = NUMBER.findall(cell)
    return len(shown) == len(values) and all(
        abs(float(number) - value) <= 0.5001 * 10.0 ** -len(number.partition(".")[2])
        for number, value in zip(shown, values, strict=True)
    )


def figures(row: dict[str, str]) -> list[float]:
    return [float(row["mse"]), 100 * float(row["excess"]), 100 * float(row["excess_se"])]


@pytest.mark.parametrize("heading", TABLES)
def test_the_tables_of_results(heading):
    heads, rows = rows_below(text_of("docs/results.md"), f"**{heading}**")
    sizes = [int(head.removeprefix("n = ")) for head in heads[1:]]
    rows_measured = measured(TABLES[heading])
    assert len(rows) >= 5 and {model for model, _ in rows_measured} == set(rows)
    for model, cells in rows.items():
        for n, cell in zip(sizes, cells, strict=True):
            assert agree(cell, figures(rows_measured[model, n])), (model, n, cell)
    floors = NUMBER.findall(re.search(rf"\*\*{heading}\*\* \(.*?floor ([^)]*)\)", text_of("docs/results.md"))[1])
    assert [float(floor) for floor in floors] == [round(float(rows_measured["kbf", n]["floor"]), 4) for n in sizes]


@pytest.mark.parametrize(("column", "folder"), [(0, "dsprites_e2e"), (1, "dmlab_e2e")])
def test_the_table_of_learned_features(column, folder):
    _, rows = rows_below(text_of("docs/results.md"), "Learned features inside the rule")
    for model, cells in rows.items():
        assert agree(cells[column], figures(measured(folder)[model, 300])), (model, cells[column])


def test_the_tables_of_noise():
    """Excesses and energy scores; and that kbf is ahead of all but the particle filter on its own model."""
    text = text_of("docs/results.md")
    with (RESULTS / "noise" / "results.csv").open(newline="") as file:
        known = {(row["data"], int(row["n_train"]), row["model"]): row for row in csv.DictReader(file)}

    def percent(row: dict[str, str], column: str) -> list[float]:
        return [100 * float(row[column]), 100 * float(row[f"{column}_se"])]

    for n, heading in ((300, "**n = 300**, excess"), (1000, "**n = 1,000**, excess")):
        heads, rows = rows_below(text, heading)
        systems = [head.replace(" ", "_") for head in heads[1:]]
        assert {(data, model) for data, size, model in known if size == n} == {
            (data, model) for model, cells in rows.items() for data, cell in zip(systems, cells, strict=True) if cell
        }
        for model, cells in rows.items():
            for data, cell in zip(systems, cells, strict=True):
                assert not cell or agree(cell, percent(known[data, n, model], "excess")), (model, data, cell)
                ahead = float(known[data, n, "kbf"]["mse"]) < float(known[data, n, model]["mse"]) if cell else True
                assert ahead or model in ("kbf", "particle_learned"), (model, data)
    heads, rows = rows_below(text, "**energy**")
    for model, cells in rows.items():
        for data, cell in zip(systems, cells, strict=True):
            both = [value for n in (300, 1000) for value in percent(known[data, n, model], "energy_excess")]
            assert agree(cell, both), (model, data, cell)


def test_the_table_of_the_pendulum():
    _, rows = rows_below(text_of("docs/results.md"), "## A simulator")
    for model, cells in rows.items():
        for n, cell in zip((100, 300, 1000), cells, strict=True):
            assert agree(cell, figures(measured("pendulum")[model, n])[: 3 if "±" in cell else 1]), (model, n, cell)


def test_the_tables_of_the_field_s_benchmark():
    """One for each number of training sequences; models without uncertainty have an error alone."""
    text, known = text_of("docs/results.md"), measured("rkn_pendulum")
    for n in {n for _, n in known}:
        _, rows = rows_below(text, f"**{n} sequences**")
        assert {model for model, size in known if size == n} == rows.keys()
        for model, cells in rows.items():
            row = known[model, n]
            found = {name: float(value) for name, value in row.items() if name not in ("data", "renderer", "model") and value}
            expected = [[found["rmse"]], [found["log_likelihood"], found["log_likelihood_se"]], [found["energy_score"]]]
            expected += [[100 * found["coverage_95"]], [found["seconds.fit"]]]
            told = [[value for value in values if math.isfinite(value)] for values in expected]
            assert all(agree(cell, values) for cell, values in zip(cells, told, strict=True)), (n, model)


def test_the_default_is_ahead_on_the_field_s_benchmark():
    """Of each model, in error and in log likelihood, at each number of sequences: Wilcoxon's test over ten draws, p < 0.05."""
    with (RESULTS / "rkn_pendulum" / "wilcoxon.csv").open(newline="") as file:
        pairs = [row for row in csv.DictReader(file) if row["first"] == "kbf"]
    assert len(pairs) >= 7 + 5 and all(int(row["seeds"]) == 10 and float(row["p_value"]) < 0.05 for row in pairs)
    assert all((float(row["mean_difference"]) < 0) == (row["score"] == "mse") for row in pairs)


def test_the_table_of_the_recordings():
    """NMSE, its standard error where there are several draws or splits, and coverage; empty where a model was not run."""
    heads, rows = rows_below(text_of("docs/recordings.md"), "## What it reaches")
    for k, head in enumerate(heads[1:]):
        known = measured(f"recordings/{re.findall(r'`(.*?)`', head)[0]}")
        sizes = [int(size.replace(",", "")) for size in re.findall(r"\d+,\d+", head)]
        assert {n for _, n in known} >= set(sizes)
        assert {model for model, _ in known} == {model for model, cells in rows.items() if cells[k]}
        for model, cells in rows.items():
            if not cells[k]:
                continue
            some = [known[model, n] for n in sizes]
            errors, covered = ([float(row[name]) for row in some] for name in ("nmse", "coverage_95"))
            se = float(some[0]["nmse_se"]) if len(some) == 1 else stdev(errors) / len(errors) ** 0.5
            expected = [value for value in (mean(errors), se, 100 * mean(covered)) if not math.isnan(value)]
            assert agree(cells[k], expected), (model, head)


def test_the_table_of_the_readme():
    _, rows = rows_below(text_of("README.md"), "## What it reaches")
    assert len(rows) == 6 and len(text_of("README.md").splitlines()) <= 150
    for model, cells in rows.items():
        for folder, cell in zip(("rotation", "oscillatory"), cells[1:], strict=True):
            assert agree(cell, figures(measured(folder)[model, 300])[1:]), (model, folder, cell)


def test_a_wrong_figure_is_found():
    row = {"mse": "0.04752", "excess": "0.0913", "excess_se": "0.0098"}
    assert agree("0.0475 (9.1 ± 1.0 %)", figures(row))
    assert not agree("0.0475 (9.2 ± 1.0 %)", figures(row)) and not agree("0.0476 (9.1 ± 1.0 %)", figures(row))


def test_the_verdicts_of_the_experiments():
    """Findings of the papers that were reproduced, were not, and are undecided."""
    rows = re.findall(r"reproduce/(\w+)/verdict.md\) \| ([^|]*) \| ([^|]*) \|", text_of("docs/experiments.md"))
    assert {name for name, *_ in rows} == {path.parent.name for path in RESULTS.glob("reproduce/*/verdict.json")}
    for name, _, text in rows:
        verdicts = json.loads((RESULTS / "reproduce" / name / "verdict.json").read_text())["verdicts"]
        answers = [verdict["reproduced"] for verdict in verdicts if not verdict.get("asked")]
        counts = [answers.count(value) for value in (True, False, None)]
        told = re.match(r"(\d+), (\d+), (\d+)|none", text)
        assert told and (counts if answers else [None] * 3) == [None if v is None else int(v) for v in told.groups()], name


MEASURED = {
    "step": ["70 times (171", "336 times", "147 times, 704 times (82"],
    "batch": ["1.6 times (71"],
    "end_to_end": ["43 times", "38 times"],
    "online": ["0.0609 then 0.0608", "172, 274, 379", "188, 306, 481", "114, 227, 329", "727, 949, 1058"],
    "local": ["1,000 points keep the error and are 1.8"],
    "cme": ["1/129"],
    "checks": ["3.6 %"],
    "peers": ["filterpy 2.6 to 3.5", "torch-kf 13 to 15", "0.43 for one and 0.55 to 0.68", "0.9 to 3.1"],
    "filter": [],
}
"""What docs/speed.md says of a benchmark; every number of it stands, rounded, in the claims of data/results/bench/."""


@pytest.mark.parametrize("benchmark", MEASURED)
def test_the_figures_of_speed(benchmark):
    page = " ".join(text_of("docs/speed.md").split())
    claims = NUMBER.findall((RESULTS / "bench" / benchmark / "claims.md").read_text(encoding="utf-8").replace(",", ""))
    for words in MEASURED[benchmark]:
        assert words in page
        for number in NUMBER.findall(words.replace("1,000", "1000")):
            assert any(agree(number, [float(claim)]) for claim in claims), (words, number)


@pytest.mark.parametrize("group", ["data", "model", "encoder", "trainer", "callbacks", "logger", "launcher"])
def test_the_cheat_sheet_has_every_choice(group):
    words = set(re.findall(r"`(\w+)`", text_of("docs/cheatsheet.md")))
    missing = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")} - words
    assert not missing, f"add {sorted(missing)} to the groups of docs/cheatsheet.md"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_cheat_sheet_has_every_command(command):
    assert f"](commands/{command.replace(' ', '_')}.md)" in text_of("docs/cheatsheet.md")


INSTALL = re.compile(r"""pip install (?:-e )?["'\\]*(?:kbf|\.)\[[^`\n]*""")
PIP = re.compile(r'pip install "kbf\[(\w+)\]"')
"""How advice begins to install an extra, and its one form; `kbf.runtime.extras.missing` gives it in errors."""


def test_extras_are_installed_in_one_way():
    """``pip install "kbf[EXTRA]"`` everywhere, with an extra that there is; README and tutorial say what it is in a clone."""
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    files = [*PAGES, *ROOT.glob("configs/**/*.yaml"), *ROOT.glob("kbf/**/*.py")]
    advice = {line for path in files for line in INSTALL.findall(path.read_text(encoding="utf-8")) if "{extra}" not in line}
    in_clones = {line for line in advice if line.startswith('pip install -e ".[')}
    assert {found[1] for line in advice - in_clones if (found := PIP.match(line))} <= extras.keys()
    assert len(advice) > 10 and all(PIP.match(line) for line in advice - in_clones)
    assert len(in_clones) == 2 and missing("onnx", "export", "it").endswith('pip install "kbf[export]"')


# The pages as they are built


class Links(HTMLParser):
    """Addresses that a page of HTML leads to, and those that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value for name, value in attrs if value}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script", "iframe") and "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The documentation, built strictly; once, where several workers of pytest-xdist need it."""
    for package in ("mkdocs", "mkdocstrings", "latex2mathml", "nbclient"):
        pytest.importorskip(package)
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "sitemap.xml").exists():
            build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "mkdocs.yml", "-d", directory]
            told = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
            assert told.returncode == 0, told.stderr
    return directory


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(site):
    page = (site / "reference" / "kbf.rkhs.conditional_means.html").read_text(encoding="utf-8")
    assert 'href="kbf.rkhs.embeddings.html#kbf.rkhs.embeddings.cme_loo"' in page and "divide_and_conquer" in page
    example = (site / "reference" / "kbf.filters.laws.base.html").read_text(encoding="utf-8")
    assert '<span class="gp">&gt;&gt;&gt; </span>' in example and "<blockquote>" not in example, "examples are blocks of code"
    assert (site / "results" / "rotation" / "comparison.png").exists()
    public = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert "kbf.filters.kernel.kbf.html#kbf.filters.kernel.kbf.KBF" in public and "kbf.rollout" in public
    assert "n_train: 300" in (site / "commands" / "train.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tutorials_are_run(site):
    for name, printed, pictures in (
        ("vectors", r"error 0\.0\d+, least error 0\.0\d+", 1),
        ("images", r"with the past: 0\.\d+", 2),
        ("recordings", r"Score.*mse", 0),
        ("extending", r"rational_quadratic: 0\.0\d+", 0),
    ):
        page = (site / "tutorials" / f"{name}.html").read_text(encoding="utf-8")
        assert re.search(printed, page, re.DOTALL), name
        assert len(list((site / "tutorials").glob(f"{name}_output_*.png"))) == pictures == page.count(f'src="{name}_output_')
        cells = json.loads((site / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells)
    assert "<table>" in (site / "tutorials" / "vectors.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_equations_are_typeset_without_a_script(site):
    page = (site / "theory.html").read_text(encoding="utf-8")
    assert page.count("<math") > 60 and "arithmatex" not in page and "\\lambda" not in page


@pytest.mark.slow
def test_every_link_of_the_built_pages_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    wrong = []
    for path, page in pages.items():
        wrong += [
            (path.name, source)
            for source in page.loaded
            if "://" in source or not (path.parent / source.partition("?")[0]).exists()
        ]
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            goal = (path.parent / target).resolve() if target else path
            if not goal.exists() or (anchor and goal in pages and anchor not in pages[goal].names):
                wrong.append((path.name, link))
    assert len(pages) > 150 and not wrong
