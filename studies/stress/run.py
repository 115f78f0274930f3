"""``make stress``: kills, damaged files, bad input and endurance runs, counted by kind of case."""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import selectors
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from studies.stress import ROOT, bad_inputs, damage, endurance, kills, losses
from studies.stress.cases import Outcome, small_checkpoint

OTHER_COMMANDS = ["compare in processes", "append", "export", "data", "render"]
SECTIONS = {
    "bad_inputs": bad_inputs.run,
    "damage": damage.run,
    "endurance": endurance.run,
    "losses": losses.run,
    **{
        f"kills_{name}": functools.partial(kills.run, names=[name])
        for name in ("train", "compare", "filter", "sweep")
    },
    "kills_of_others": functools.partial(kills.run, names=OTHER_COMMANDS),
}


def everything(folder: Path, share: float, sections: Iterable[str] = SECTIONS) -> Iterator[Outcome]:
    """Yield the outcomes of all sections as they arrive; each section runs in its own process.

    ``share`` is the share of the cases of each section that is run.
    """
    readers = selectors.DefaultSelector()
    small_checkpoint()  # cached, so that every forked process has it
    for name in sections:
        reading, writing = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                os.close(reading)
                with open(writing, "w") as pipe:
                    for outcome in SECTIONS[name](folder / name, share):
                        print(json.dumps(outcome), file=pipe, flush=True)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        readers.register(open(reading), selectors.EVENT_READ, name)  # noqa: SIM115
    while readers.get_map():
        for key, _ in readers.select():
            line = key.fileobj.readline()  # pyright: ignore[reportAttributeAccessIssue]
            if line:
                yield Outcome(*json.loads(line))
            else:
                readers.unregister(key.fileobj)
                if os.wait()[1]:
                    yield Outcome("the suite itself", key.data, "a section broke off")


def page(outcomes: list[Outcome], seconds: float) -> str:
    """Return the counts as Markdown."""
    cases = collections.Counter(outcome.section for outcome in outcomes)
    failed = collections.Counter(outcome.section for outcome in outcomes if outcome.why)
    lines = [
        "# Stress tests",
        "",
        "Cases that `make stress` runs, and their results in the last run.",
        "",
        "| kind of case | cases | passed | failed |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {count:,} | {count - failed[name]:,} | {failed[name]:,} |"
        for name, count in cases.items()
    ]
    total, failures = sum(cases.values()), sum(failed.values())
    lines += [f"| **all** | **{total:,}** | **{total - failures:,}** | **{failures:,}** |", ""]
    lines += [f"{seconds / 60:.0f} minutes.", ""]
    if failures:
        lines += ["Failed:", ""]
        lines += [f"- {o.section}: `{o.name}`: {o.why}" for o in outcomes if o.why] + [""]
    return "\n".join(lines)


def arguments(words: list[str]) -> argparse.Namespace:
    """Return the parsed options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies stress", description=__doc__)
    parser.add_argument(
        "share", nargs="?", type=float, default=1.0, help="share of the cases of each section"
    )
    parser.add_argument("--page", action="store_true", help="write docs/stress.md")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="run these sections"
    )
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the sections and print the table; returns 1 if a case failed."""
    options, start, outcomes = arguments(words), time.monotonic(), []
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for outcome in everything(Path(folder).resolve(), options.share, options.only):
            outcomes.append(outcome)
            if outcome.why:
                print(f"FAILED {outcome.section}: {outcome.name}: {outcome.why}", flush=True)
            if len(outcomes) % 50 == 0:
                failures = sum(bool(outcome.why) for outcome in outcomes)
                seconds = time.monotonic() - start
                print(f"{len(outcomes)} cases, {failures} failed, {seconds:.0f} s", flush=True)
    text = page(outcomes, time.monotonic() - start)
    print(text)
    if options.page:
        (ROOT / "docs" / "stress.md").write_text(text, encoding="utf-8")
    return int(any(outcome.why for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
