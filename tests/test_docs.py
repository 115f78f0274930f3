"""README and docs/: links have targets, figures equal data/results/, the site builds."""

from __future__ import annotations

import csv
import json
import re
import runpy
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import page_tables

import kbf
import kbf.layers
import kbf.sklearn
from kbf.cli import COMMANDS
from kbf.config.composition import config_dir, short
from kbf.runtime.optional_dependencies import missing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "data" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MADE = (
    "data.md",
    "commands/",
    "results/",
    "reference/",
    "changelog.md",
    "contributing.md",
    "security.md",
)
"""Pages that docs/hooks/pages.py generates; strict mkdocs checks the links to them."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def outside_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


# Links


def broken(page: Path) -> list[str]:
    """Relative links of a page without a target in the repository or among the generated pages."""
    wrong = []
    for target in LINK.findall(outside_code(page.read_text(encoding="utf-8"))):
        path = unquote(target.partition("#")[0])
        made = page.parent == ROOT / "docs" and path.startswith(MADE)
        if path and "://" not in path and not made and not (page.parent / path).exists():
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_have_targets(page):
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "page.md").write_text(
        "[here](page.md#top) [there](gone.md) ```[no](link)``` [web](https://example.org/x)"
    )
    assert broken(tmp_path / "page.md") == ["gone.md", "link"]


def test_the_readme_of_the_package_index_has_full_links():
    pytest.importorskip("hatchling")
    hook = runpy.run_path(str(ROOT / "scripts" / "readme_hook.py"))
    text = hook["absolute"](text_of("README.md"), "https://host.example/kbf", "v1.0")
    targets = LINK.findall(outside_code(text))
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    assert (
        "![A filter at work: views of a maze, and the heading that the filter estimates]"
        "(https://host.example/kbf/raw/v1.0/docs/" in text
    )
    inside = [
        t.removeprefix("https://host.example/kbf/blob/v1.0/") for t in targets if "/blob/" in t
    ]
    assert all((ROOT / path).exists() for path in inside)


# Figures


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/recordings.md"])
def test_tables_of_pages_show_what_was_measured(page):
    """Every model, every figure to its digits; scripts/page_tables.py writes them."""
    assert page_tables.pages()[page] == text_of(page)


PAGE = (
    "**rotation**\n\n| model | n = 100 |\n|---|---|\n| **`kbf`** | 0.0475 (9.1 ± 1.0 %) |\n| "
    "`ukf` | 0.0437 |\n\n"
)


def in_page(text: str, values: dict[str, list[float]]) -> str:
    return page_tables.filled(
        text,
        page_tables.Table(
            "a page", "**rotation**", lambda model, *_: values.get(model), {"kbf", "ukf"}
        ),
    )


def test_a_wrong_figure_of_a_page_is_corrected():
    values = {"kbf": [0.04752, 9.13, 0.98], "ukf": [0.0437]}
    assert in_page(PAGE, values) == PAGE
    for right, wrong in (("9.1 ±", "9.2 ±"), ("0.0475", "0.0485"), ("0.0437", "1.0000")):
        assert in_page(PAGE.replace(right, wrong), values) == PAGE
    assert in_page(PAGE, values | {"ukf": [-0.04]}) == PAGE.replace("0.0437", "-0.0400")


def test_a_missing_model_or_figure_is_an_error():
    values = {"kbf": [0.04752, 9.13, 0.98], "ukf": [0.0437]}
    with pytest.raises(
        ValueError, match=r"a page, \*\*rotation\*\*: the table has \['ekf', 'kbf'\], required are"
    ):
        in_page(PAGE.replace("ukf", "ekf"), values)
    with pytest.raises(ValueError, match=r"has 2 numbers, measured are"):
        in_page(PAGE.replace("9.1 ± 1.0", "9.1"), values)
    with pytest.raises(ValueError, match=r"nothing was measured for '0.0437'"):
        in_page(PAGE, {"kbf": values["kbf"]})
    with pytest.raises(ValueError, match=r"a page has no \*\*rotation\*\*"):
        in_page(PAGE.replace("rotation", "other"), values)
    with pytest.raises(ValueError, match=r"has no floor of rotation"):
        page_tables.with_floors(text_of("docs/results.md").replace("(floor ", "(least error "))


def test_the_default_is_ahead_of_all_but_the_particle_filter_on_its_own_model():
    """On each noise system and size; the page has a column per system and a table per size."""
    rows = page_tables.measured("noise")
    columns = re.findall(
        r"^\| model \|(.*volatility.*)\|$", text_of("docs/results.md"), re.MULTILINE
    )
    assert len(columns) == 3 and {n for *_, n in rows} == {300, 1000}
    for heads in columns:
        assert {page_tables.system(head.strip()) for head in heads.split("|")} == {
            data for data, *_ in rows
        }
    for (data, model, n), row in rows.items():
        ahead = float(rows[data, "kbf", n]["mse"]) < float(row["mse"])
        assert ahead or model in ("kbf", "particle_learned"), (data, model, n)


def test_the_models_that_the_readme_shows():
    """Noisy images: the best four of nine with 100 sequences; kbf, lstm, rkn lead with 10."""
    known = page_tables.by_model("rkn_pendulum")
    rmse = {
        n: {m: float(row["rmse"]) for (m, size), row in known.items() if size == n}
        for n in (10, 100)
    }
    few, many = ("kbf", "lstm", "rkn"), ["kbf", "lstm", "gru", "rkn"]
    assert len(rmse[10]) == len(rmse[100]) == 9
    assert max(rmse[10][model] for model in few) < min(
        value for model, value in rmse[10].items() if model not in few
    )
    assert sorted(rmse[100], key=lambda model: rmse[100][model])[: len(many)] == many
    table = text_of("README.md").partition("**Noisy images.**")[2].partition("## ")[0]
    assert re.findall(r"^\| \W*`(\w+)`", table, re.MULTILINE) == many


def test_the_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 150


def test_the_default_is_ahead_on_the_field_s_benchmark():
    """Of all models, in error and both log likelihoods, at each size: p < 0.05, ten draws."""
    with (RESULTS / "rkn_pendulum" / "wilcoxon.csv").open(newline="") as file:
        pairs = [row for row in csv.DictReader(file) if row["first"] == "kbf"]
    assert len(pairs) == 3 * (8 + 6 + 6) and {row["n_train"] for row in pairs} == {
        "10",
        "30",
        "100",
    }
    assert all(int(row["seeds"]) == 10 and float(row["p_value"]) < 0.05 for row in pairs)
    assert all((float(row["mean_difference"]) < 0) == (row["score"] == "mse") for row in pairs)


def test_the_verdicts_of_the_experiments():
    """Counts of findings that were reproduced, were not, and are undecided."""
    rows = re.findall(
        r"reproduce/(\w+)/verdict.md\) \| ([^|]*) \| ([^|]*) \|", text_of("docs/experiments.md")
    )
    assert {name for name, *_ in rows} == {
        path.parent.name for path in RESULTS.glob("reproduce/*/verdict.json")
    }
    for name, _, text in rows:
        verdicts = json.loads((RESULTS / "reproduce" / name / "verdict.json").read_text())[
            "verdicts"
        ]
        answers = [verdict["reproduced"] for verdict in verdicts if not verdict.get("asked")]
        counts = [answers.count(value) for value in (True, False, None)]
        match = re.match(r"(\d+), (\d+), (\d+)|none", text)
        assert match and (counts if answers else [None] * 3) == [
            None if v is None else int(v) for v in match.groups()
        ], name


def agree(shown: str, value: float) -> bool:
    """Whether a printed number equals the measured one to its digits."""
    return abs(float(shown) - value) <= 0.5001 * 10.0 ** -len(shown.partition(".")[2])


MEASURED = {
    "step": ["53 times (231", "323 times", "104 times, 633 times (118"],
    "batch": ["1.20 times (96"],
    "end_to_end": ["44 times", "37 times"],
    "online": [
        "0.0609 then 0.0608",
        "222, 423, 534",
        "368, 545, 675",
        "198, 394, 553",
        "1098, 1696, 1824",
    ],
    "local": ["1,000 points keep the error and are 2.4"],
    "cme": ["1/164"],
    "checks": ["4.6 %"],
    "peers": [
        "filterpy 3.1 to 4.5",
        "1 and 3.5",
        "torch-kf 19 to 24",
        "0.48 for one and 0.42 to 0.56",
        "0.8 to 2.9",
    ],
    "filter": [],
    "faster_machine": [
        *(
            "54 times (171",
            "349 times",
            "152 times, 975 times (61",
            "0.92 times (59",
            "80 times, 37 times",
            "172, 274, 379",
        ),
        *("188, 306, 481", "114, 227, 329", "727, 949, 1058", "3.8 %", "1.1; 0.53 to 0.6"),
    ],
}
"""Sentences of docs/speed.md; every number is, rounded, in the claims of data/results/bench/."""


@pytest.mark.parametrize("benchmark", MEASURED)
def test_the_figures_of_speed(benchmark):
    page = " ".join(text_of("docs/speed.md").split())
    file = (
        RESULTS
        / "bench"
        / (f"{benchmark}.md" if benchmark == "faster_machine" else f"{benchmark}/claims.md")
    )
    claims = page_tables.NUMBER.findall(file.read_text(encoding="utf-8").replace(",", ""))
    for words in MEASURED[benchmark]:
        assert words in page
        for number in page_tables.NUMBER.findall(words.replace("1,000", "1000")):
            assert any(agree(number, float(claim)) for claim in claims), (words, number)


@pytest.mark.parametrize(
    ("reproductions", "sentence", "file"),
    [
        (False, "{same} of {all} runs of {count} tables have the scores of the table", "runs.csv"),
        (True, "All {same} of {all} rows of {count} reproductions are equal", "results.csv"),
    ],
)
def test_what_was_checked(reproductions, sentence, file):
    """docs/results.md reports how many repeated runs have equal scores, and how many differ."""
    with (RESULTS / "checked.csv").open(newline="") as lines:
        rows = [
            row
            for row in csv.DictReader(lines)
            if row["table"].startswith("reproduce/") == reproductions
        ]
    runs = sum(int(row["runs"]) for row in rows)
    same = sum(max(int(row["same"]), int(row["same at its commit"] or 0)) for row in rows)
    words, page = (
        sentence.format(same=same, all=runs, count=len(rows)),
        text_of("docs/results.md"),
    )
    # of the tables whose runs all have equal scores
    differences = [
        float(row[f"largest difference{at}"])
        for row in rows
        for at in ("", " at its commit")
        if row[f"same{at}"] == row["runs"]
    ]
    match = re.search(rf"{words}[^-]*?the largest relative difference is (\d\S*e-\d+)", page)
    assert match and match[1] == f"{max(differences):.1e}".replace("e-0", "e-")
    assert all((RESULTS / row["table"] / file).exists() for row in rows)
    assert reproductions or f"The other {runs - same} runs:" in page


def test_the_figures_of_smoothing():
    """The figures of docs/guide.md equal the table of the benchmark."""
    with (RESULTS / "bench" / "smoothing" / "results.csv").open(newline="") as file:
        rows = {(row["data"], row["model"]): row for row in csv.DictReader(file)}
    shares = [
        100 * float(rows[data, "kbf"]["share of the gap"])
        for data in ("rotation", "oscillatory", "dmlab")
    ]
    best = [float(rows["dsprites", "kbf"][key]) for key in ("smoother", "filtering floor")]
    words = (
        r"closes (\d+), (\d+) and (\d+) % of the gap.*?\((0\.\d+) against (0\.\d+)\).*?\((0\.\d+);"
    )
    match = re.search(words, text_of("docs/guide.md"), re.DOTALL)
    true_moves = float(rows["dsprites", "particle_observation"]["smoother"])
    assert match and all(map(agree, match.groups(), [*shares, *best, true_moves]))


@pytest.mark.parametrize(
    "group", ["data", "model", "encoder", "trainer", "callbacks", "logger", "launcher"]
)
def test_the_cheat_sheet_has_every_choice(group):
    words = set(re.findall(r"`(\w+)`", text_of("docs/cheatsheet.md")))
    missing = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")} - words
    assert not missing, f"add {sorted(missing)} to the groups of docs/cheatsheet.md"


CAPABILITIES = runpy.run_path(str(ROOT / "scripts" / "model_capabilities.py"))


@pytest.mark.slow
@pytest.mark.parametrize("model", CAPABILITIES["MODELS"])
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_capabilities(model):
    """The guide has what `FittedFilter.capabilities` reports of each model."""
    lines = text_of("docs/guide.md").splitlines()
    assert lines[CAPABILITIES["place"](lines, model)] == CAPABILITIES["row"](model)


def test_the_table_of_capabilities_has_every_model():
    """Models of images and of known equations have no row; the others have one."""
    lines = text_of("docs/guide.md").splitlines()
    named = " ".join(lines[CAPABILITIES["place"](lines, model)] for model in CAPABILITIES["MODELS"])
    images = {"kbf_features", "kbf_features_e2e", "kbf_nn_paper", "lstm_images", "gru_images"}
    images |= {"rkn", "backprop_kf", "dpf", "particle_observation", "particle_pixels"}
    others = images | {"ekf", "ukf", "kalmannet", "particle", "auto", "mean"}
    models = {path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")}
    assert models - others == set(re.findall(r"`(\w+)`", named))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_cheat_sheet_has_every_command(command):
    assert f"](commands/{command.replace(' ', '_')}.md)" in text_of("docs/cheatsheet.md")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_a_command_has_every_setting(command):
    """Keys and defaults are those of the configuration, each with its comment."""
    pages = runpy.run_path(str(ROOT / "docs" / "hooks" / "command_pages.py"))
    text = (config_dir() / f"{short(command)}.yaml").read_text(encoding="utf-8")
    body = text.partition("\n\n")[2].partition("\nhydra:")[0]
    found = pages["settings_of"](body)
    stated = {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}
    stated.pop("hydra", None)
    assert {each.key: yaml.safe_load(each.default) for each in found} == stated
    comments = [line.partition("# ")[2] for line in body.splitlines() if "# " in line]
    page = pages["command_page"](command)
    for comment in comments:
        assert pages["escaped"](comment.strip()) in page
    for example, meaning in COMMANDS[command][1]:
        assert f"```sh\n{example}\n```" in page and meaning[1:] in page


def test_settings_that_cannot_be_read_are_an_error():
    pages = runpy.run_path(str(ROOT / "docs" / "hooks" / "command_pages.py"))
    assert pages["settings_of"]("a: 1  # one\n       # more\nb: [x]\n") == [
        ("a", "1", "one more"),
        ("b", "[x]", ""),
    ]
    with pytest.raises(ValueError, match="no setting and no comment: '  nested: 1'"):
        pages["settings_of"]("a:\n  nested: 1\n")


INSTALL = re.compile(r"""pip install (?:-e )?["'\\]*(?:kbf|\.)\[[^`\n]*""")
PIP = re.compile(r'pip install "kbf\[(\w+)\]"')
"""Any instruction to install an extra, and the only accepted form, that of error messages."""


def test_extras_are_installed_in_one_way():
    """``pip install "kbf[EXTRA]"`` with existing extras; two pages add the form for a clone."""
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    files = [*PAGES, *ROOT.glob("configs/**/*.yaml"), *ROOT.glob("kbf/**/*.py")]
    advice = {
        line
        for path in files
        for line in INSTALL.findall(path.read_text(encoding="utf-8"))
        if "{extra}" not in line
    }
    in_clones = {line for line in advice if line.startswith('pip install -e ".[')}
    assert {found[1] for line in advice - in_clones if (found := PIP.match(line))} <= extras.keys()
    assert len(advice) > 10 and all(PIP.match(line) for line in advice - in_clones)
    assert len(in_clones) == 2 and missing("onnx", "export", "it").endswith(
        'pip install "kbf[export]"'
    )


# The pages as they are built


class Links(HTMLParser):
    """Targets of the links of an HTML page, and addresses of the files that it loads."""

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
    """The documentation, built strictly."""
    for package in ("mkdocs", "mkdocstrings", "latex2mathml", "nbclient"):
        pytest.importorskip(package)
    directory = tmp_path_factory.mktemp("documentation") / "site"
    build = [*(sys.executable, "-m", "mkdocs", "build"), *("--strict", "-q", "-d", str(directory))]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return directory


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(site):
    page = (site / "reference" / "kbf.rkhs.conditional_means.html").read_text(encoding="utf-8")
    assert (
        'href="kbf.rkhs.embeddings.html#kbf.rkhs.embeddings.cme_loo"' in page
        and "divide_and_conquer" in page
    )
    example = (site / "reference" / "kbf.densities.base.html").read_text(encoding="utf-8")
    assert '<span class="gp">&gt;&gt;&gt; </span>' in example and "<blockquote>" not in example, (
        "examples are blocks of code"
    )
    assert (site / "results" / "rotation" / "comparison.png").exists()


@pytest.mark.slow
def test_the_reference_has_a_page_for_each_public_name(site):
    """Modules have pages for developers, which are neither in the navigation nor searched."""
    public = (site / "reference" / "index.html").read_text(encoding="utf-8")
    names = {*kbf._HOME, *(f"layers.{name}" for name in kbf.layers._HOME)}
    for name in names | {f"sklearn.{name}" for name in kbf.sklearn._HOME}:
        assert f'href="kbf.{name}.html"' in public
        page = (site / "reference" / f"kbf.{name}.html").read_text(encoding="utf-8")
        assert re.search(rf'<h1 id="kbf[\w.]*\.{name.rpartition(".")[2]}"', page), name
    fitted = (site / "reference" / "kbf.FittedFilter.html").read_text(encoding="utf-8")
    assert 'FittedFilter.candidates"' in fitted, "inherited members"
    module = (site / "reference" / "kbf.filters.kernel.kbf.html").read_text(encoding="utf-8")
    assert 'id="kbf.filters.kernel.kbf.KBF"' not in module and 'href="kbf.KBF.html"' in module
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert (
        "reference/kbf.KBF.html" in found and "reference/kbf.filters.kernel.kbf.html" not in found
    )


@pytest.mark.slow
def test_the_pages_of_commands_are_tables(site):
    train = (site / "commands" / "train.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td><code>(n_train|seed)</code></td>\s*<td><code>(\w+)</code></td>", train)
    assert cells == [("n_train", "300"), ("seed", "0")]
    export = (site / "commands" / "export.html").read_text(encoding="utf-8")
    assert re.search(r"<td><code>checkpoint</code></td>\s*<td>required</td>", export)
    for name in COMMANDS:
        page = (site / "commands" / f"{name.replace(' ', '_')}.html").read_text(encoding="utf-8")
        assert page.count("<table>") >= 2 and "settings (key=value)" not in page


@pytest.mark.slow
def test_the_gallery_leads_to_the_notebooks(site):
    page = Links((site / "gallery.html").read_text(encoding="utf-8"))
    pictures = [source for source in page.loaded if "_output_" in source]
    assert len(pictures) >= 10
    for source in pictures:
        notebook = re.sub(r"_output_.*", ".html", source)
        assert notebook in page.links and (site / source).exists()


@pytest.mark.slow
def test_the_tutorials_are_run(site):
    for name, printed, pictures in (
        ("getting_started", r"FittedFilter: kbf.*nmse_window_ridge.*out_of_distribution", 2),
        ("vectors", r"error 0\.0\d+, least error 0\.0\d+", 1),
        ("images", r"FittedFilter: kalman.*covered: error 0\.\d+", 4),
        ("missing_sensors", r"without beacon.*complete rows.*std of the position", 1),
        ("spikes", r"FittedFilter: kernel_monte_carlo.*window_ridge.*smoother", 1),
        ("own_network", r"epoch 4: loss 0\.\d+.*trained through the filter: 0\.\d+", 2),
        ("recordings", r"Score.*mse", 0),
        ("extending", r"rational_quadratic: 0\.0\d+", 0),
    ):
        page = (site / "tutorials" / f"{name}.html").read_text(encoding="utf-8")
        assert re.search(printed, page, re.DOTALL), name
        assert (
            len(list((site / "tutorials").glob(f"{name}_output_*.png")))
            == pictures
            == page.count(f'src="{name}_output_')
        )
        cells = json.loads((site / "tutorials" / f"{name}.ipynb").read_text(encoding="utf-8"))[
            "cells"
        ]
        assert any(cell.get("outputs") for cell in cells)
    assert "<table>" in (site / "tutorials" / "vectors.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_equations_are_typeset_without_a_script(site):
    page = (site / "theory.html").read_text(encoding="utf-8")
    assert page.count("<math") > 60 and "arithmatex" not in page and "\\lambda" not in page


@pytest.mark.slow
def test_every_link_of_the_built_pages_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {
        path: Links(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }
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
