"""``make stress``: everything that is done to kbf on purpose, counted: tried, passed, failed. Writes docs/stress.md."""

from __future__ import annotations

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

os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
warnings.simplefilter("ignore")

from studies.stress import bad_inputs, damage, endurance, kills  # noqa: E402
from studies.stress.cases import Outcome, small_checkpoint  # noqa: E402

OTHERS = ["compare in processes", "append", "export", "data", "render"]
SECTIONS = {
    "bad_inputs": bad_inputs.run,
    "damage": damage.run,
    "endurance": endurance.run,
    **{
        f"kills_{name}": functools.partial(kills.run, names=[name])
        for name in ("train", "compare", "filter")
    },
    "kills_of_others": functools.partial(kills.run, names=OTHERS),
}


def everything(folder: Path, share: float, sections: Iterable[str] = SECTIONS) -> Iterator[Outcome]:
    """Outcomes of all sections, each in a process of its own, as they come; ``share`` of the cases of each."""
    readers = selectors.DefaultSelector()
    small_checkpoint()  # all of them have it then
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


def page(outcomes: list, seconds: float) -> str:
    """The counts as Markdown."""
    tried = collections.Counter(outcome.section for outcome in outcomes)
    failed = collections.Counter(outcome.section for outcome in outcomes if outcome.why)
    lines = [
        "# Torture",
        "",
        "What `make stress` does to kbf on purpose, and how it went the last time.",
        "",
    ]
    lines += ["| what | tried | passed | failed |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {count:,} | {count - failed[name]:,} | {failed[name]:,} |"
        for name, count in tried.items()
    ]
    total = sum(tried.values())
    lines += [
        f"| **all** | **{total:,}** | **{total - sum(failed.values()):,}** | **{sum(failed.values()):,}** |",
        "",
    ]
    lines += [f"{seconds / 60:.0f} minutes.", ""]
    if failed:
        lines += [
            "Failed:",
            "",
            *(f"- {o.section}: `{o.name}`: {o.why}" for o in outcomes if o.why),
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    """Run all; exit code 1 if anything failed. An argument is the share of the cases to try; with ``--page`` the page is written, with ``--kills`` and the like only these sections are run."""
    numbers = [float(word) for word in sys.argv[1:] if not word.startswith("-")]
    share, began, outcomes = numbers[0] if numbers else 1.0, time.monotonic(), []
    sections = [
        name
        for name in SECTIONS
        if f"--{name}" in sys.argv or (name.startswith("kills") and "--kills" in sys.argv)
    ] or SECTIONS
    with tempfile.TemporaryDirectory() as folder:
        for outcome in everything(Path(folder).resolve(), share, sections):
            outcomes.append(outcome)
            if outcome.why:
                print(f"FAILED {outcome.section}: {outcome.name}: {outcome.why}", flush=True)
            if len(outcomes) % 50 == 0:
                print(
                    f"{len(outcomes)} tried, {sum(bool(o.why) for o in outcomes)} failed, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    text = page(outcomes, time.monotonic() - began)
    print(text)
    if "--page" in sys.argv:
        (ROOT / "docs" / "stress.md").write_text(text, encoding="utf-8")
    return int(any(outcome.why for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
