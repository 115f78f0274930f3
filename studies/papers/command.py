"""``kbf reproduce``: the experiments of the papers.

Every finished piece is a file, so that a killed run goes on. Its name depends on the piece and on
the code that makes its rows: other code makes it again.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console
from kbf.commands.support.resumable_jobs import finish_all
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import replacing, scratch, sweep, write_csv, write_json, write_text
from kbf.runtime.provenance import commit, provenance
from kbf.runtime.threads import tune_process
from studies.papers import EXPERIMENTS
from studies.papers.base import Experiment, Verdict, counted
from studies.papers.dependencies import code_hash

# frames=download: dsprites with the published images.
DOWNLOAD = "download"

# Longer tables of rows are compressed: 10,000 rows are about 1 MB of text.
MAX_PLAIN_ROWS = 10_000


class Piece(NamedTuple):
    """A piece of an experiment: its settings, and the file for its rows."""

    name: str
    job: dict[str, Any]
    path: Path


def run(config: dict[str, Any]) -> int:
    """Run one experiment, or all of them; returns 1 if a piece failed.

    Raises:
        ValueError: an unknown experiment or preset, or no runs. FileNotFoundError: a frames file
            that is not there.
    """
    tune_process()
    name = config["name"]
    if name != "all":
        return reproduce(name, config)
    failed = [
        name
        for name in EXPERIMENTS
        if reproduce(name, config | {"name": name, "run_dir": f"{config['run_dir']}/{name}"})
    ]
    overview(Path(config["run_dir"]))
    if failed:
        console.print(
            f"[red]pieces of {', '.join(failed)} failed[/]; the same command tries them again",
            highlight=False,
        )
    return 1 if failed else 0


def reproduce(name: str, config: dict[str, Any]) -> int:
    """One experiment, from its missing pieces to the verdict."""
    began, directory = time.perf_counter(), Path(config["run_dir"])
    experiment, settings = read_settings(name, config)
    pieces = [
        Piece(name, job, directory / "cells" / f"{hashed(name, job)}.json")
        for job in experiment.jobs(settings)
    ]
    sweep(directory / "cells")  # what a killed one left
    console.print(f"\n[bold]{name}[/] {EXPERIMENTS[name]} ({config['preset']})", highlight=False)
    done, failed = finish_all(
        work,
        pieces,
        config["workers"],
        name="pieces",
        label=lambda piece: str(piece.job),
        short_label=lambda piece: piece.name,
    )
    results = [done[piece.path] for piece in pieces if piece.path in done]
    if failed:
        message = f"{failed} of {len(pieces)} pieces failed; the same command tries them again"
        console.print(f"[red]{message}[/]; {directory} keeps what was finished", highlight=False)
        return 1
    message = {"experiment": name, "preset": config["preset"], "runs": settings["runs"]}
    report(experiment, results, message, directory, time.perf_counter() - began)
    return 0


def read_settings(name: str, config: dict[str, Any]) -> tuple[Experiment, dict[str, Any]]:
    """The module of an experiment, and the settings of its preset with the overrides."""
    if name not in EXPERIMENTS:
        raise ValueError(
            f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}, and all"
        )
    experiment: Any = importlib.import_module(f"studies.papers.{name}")
    if config["preset"] not in experiment.PRESETS:
        raise ValueError(
            f"preset must be one of {', '.join(experiment.PRESETS)}, got {config['preset']!r}"
        )
    settings = {**experiment.PRESETS[config["preset"]], "seed": config["seed"]}
    if config["runs"] is not None:
        if config["runs"] < 1:
            raise ValueError("runs must be at least 1")
        settings["runs"] = config["runs"]
    if config["frames"] == DOWNLOAD and name == "dsprites":
        settings["frames"] = DOWNLOAD
    elif config["frames"] is not None and "frames" in settings:
        if not Path(config["frames"]).is_file():
            raise FileNotFoundError(f"frames: there is no file {config['frames']}")
        settings["frames"] = str(Path(config["frames"]).resolve())
    return experiment, settings


def work(piece: Piece) -> dict[str, Any]:
    """One piece, in a worker process.

    Temporary files are written next to their target, not to TMPDIR.
    """
    began, usual = time.perf_counter(), tempfile.tempdir
    with scratch(piece.path.parent) as folder:
        tempfile.tempdir = str(folder)
        try:
            rows = importlib.import_module(f"studies.papers.{piece.name}").work(piece.job)
        finally:
            tempfile.tempdir = usual
    return {
        "job": piece.job,
        "rows": rows,
        "seconds": time.perf_counter() - began,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def hashed(name: str, job: dict[str, Any]) -> str:
    """The name of a piece: what its rows depend on, the code of the experiment included."""
    text = json.dumps([name, job, code_hash(f"studies.papers.{name}")], sort_keys=True)
    files = [
        Path(value) for value in job.values() if isinstance(value, str) and value.startswith("/")
    ]
    prints = [[path.stat().st_size, path.stat().st_mtime_ns] for path in files if path.is_file()]
    return hashlib.sha256((text + json.dumps(prints)).encode()).hexdigest()[:16]


def report(
    experiment: Experiment,
    results: list[Any],
    about_run: dict[str, Any],
    directory: Path,
    seconds: float,
) -> None:
    """Tables, tests, picture and verdicts, on the screen and as files.

    ``about_run`` is experiment, preset and runs.
    """
    rows = [row for result in results for row in result["rows"]]
    verdicts, tests = experiment.judge(rows), experiment.tests(rows)
    table = write_rows(directory, rows)
    (directory / "tests.csv").unlink(missing_ok=True)  # of other settings, perhaps
    if tests:
        write_csv(directory / "tests.csv", tests)
    save(experiment.draw(rows), directory / "figure.png")
    about = {
        **provenance(),
        **about_run,
        "commits": sorted({str(result["commit"]) for result in results}),
        "dates": sorted({result["date"] for result in results}),
        "code": code_hash(f"studies.papers.{about_run['experiment']}"),
        "seconds of work": round(sum(result["seconds"] for result in results), 1),
    }
    write_json(directory / "about.json", about)
    made = {key: about[key] for key in ("commits", "dates")}
    write_json(
        directory / "verdict.json",
        {**about_run, **made, "verdicts": [v._asdict() for v in verdicts]},
    )
    write_text(directory / "verdict.md", verdict_text(experiment, verdicts, about))
    screen = Table()
    for header in ("finding", "here", ""):
        screen.add_column(header)
    for verdict in verdicts:
        style = {True: "green", False: "red", None: "yellow"}[verdict.reproduced]
        screen.add_row(escape(verdict.text), escape(verdict.ours), f"[{style}]{verdict.answer}[/]")
    console.print(screen)
    console.print(counted(verdicts), highlight=False)
    written = [
        table.name,
        *(["tests.csv"] if tests else []),
        "figure.png",
        "verdict.md",
        "about.json",
    ]
    console.print(
        f"in [bold]{directory}[/]: {', '.join(written)} ({seconds:.0f} s)", highlight=False
    )


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the rows as results.csv, or compressed as results.csv.gz; returns the file."""
    plain, packed = directory / "results.csv", directory / "results.csv.gz"
    if len(rows) <= MAX_PLAIN_ROWS:
        packed.unlink(missing_ok=True)  # of other settings, perhaps
        write_csv(plain, rows)
        return plain
    plain.unlink(missing_ok=True)
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        content = gzip.compress(text.getvalue().encode(), mtime=0)  # equal rows, equal files
    with replacing(packed) as temporary:
        temporary.write_bytes(content)
    return packed


def verdict_text(experiment: Experiment, verdicts: list[Verdict], about: dict[str, Any]) -> str:
    """The verdict file: the paper's findings, the results here, and the choices made."""
    marked = "" if about["preset"] == "full" else ": fewer runs or smaller than in the paper"
    made = (
        f"preset {about['preset']}{marked}; {about['runs']} run{'s' if about['runs'] > 1 else ''}"
    )
    made += f"; {origin(about)}"
    lines = [
        f"# {about['experiment']}",
        "",
        f"{EXPERIMENTS[about['experiment']]} ({made}).",
        "",
        f"`{about['command']}`",
        "",
    ]
    lines += [
        f"{counted(verdicts).capitalize()}.",
        "",
        "| finding | here | verdict |",
        "|---|---|---|",
    ]
    lines += [f"| {cell(v.text)} | {cell(v.ours)} | {v.answer} |" for v in verdicts]
    return "\n".join([*lines, "", " ".join(experiment.NOTES.split()), ""])


def origin(about: dict[str, Any]) -> str:
    """The commits and the dates of the rows.

    >>> origin({"commits": ["1ab", "2cd"], "dates": ["2026-11-25", "2026-11-26"]})
    'commits 1ab, 2cd; 2026-11-25 to 2026-11-26'
    >>> origin({"commits": ["1ab"], "dates": ["2026-11-26"]})
    'commit 1ab; 2026-11-26'
    """
    commits, dates = about["commits"], sorted(about["dates"])
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}; {days}"


def cell(text: str) -> str:
    """Text in a table of Markdown, where a bar would end it."""
    return text.replace("|", "\\|")


def overview(directory: Path) -> None:
    """All verdicts in one table: ``summary.md``."""
    lines = [
        "| experiment | preset, runs | rows of | finding | here | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for name in EXPERIMENTS:
        path = directory / name / "verdict.json"
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            for v in (Verdict(**fields) for fields in stored["verdicts"]):
                words = [
                    f"`{name}`",
                    f"{stored['preset']}, {stored['runs']}",
                    origin(stored) if "dates" in stored else "an older version",
                    cell(v.text),
                    cell(v.ours),
                    v.answer,
                ]
                lines.append(f"| {' | '.join(words)} |")
    write_text(directory / "summary.md", "\n".join([*lines, ""]))
    console.print(f"\nall verdicts are in [bold]{directory / 'summary.md'}[/]", highlight=False)
