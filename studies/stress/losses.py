"""Lost and damaged files of a sweep: the same command repairs the sweep, or names the run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from kbf.cli import main
from studies.stress.cases import Outcome, chosen, forked, load_all
from studies.stress.damage import same
from studies.stress.kills import SWEEP, swept


def half(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    """Replace the contents by other bytes."""
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


LOSSES: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "half": half,
    "garbage": garbage,
}
# Each with the files of job 1 that are lost, and those that are missing in addition.
FILES: dict[str, tuple[str, ...]] = {
    "metrics.json": (),
    "about.json": (),
    "config.yaml": (),
    "kbf.log": (),
    "../jobs.json": (),
    "checkpoints/best.ckpt": (),
    "checkpoints/last.ckpt": (),
    # of a run that was cut
    "checkpoints/best.ckpt, cut": ("metrics.json",),
    "checkpoints/last.ckpt, cut": ("metrics.json",),
    "about.json, cut": ("metrics.json",),
    # of a run that was cut before its first checkpoint
    "about.json, started": ("metrics.json", "checkpoints/best.ckpt", "checkpoints/last.ckpt"),
}
# Files without which a run cannot be compared with the command, and is refused by name.
NEEDED = "about.json"


def run(folder: Path, share: float = 1.0) -> Iterator[Outcome]:
    """Lose or damage files of one run of a sweep, and run the command again."""
    load_all()
    whole = folder / "whole"
    whole.mkdir(parents=True)
    code, output = forked(lambda: main(SWEEP), whole)
    if code:
        raise RuntimeError(f"{SWEEP} does not work: {output[-500:]}")
    reference = swept(whole)
    cases = [(file, kind) for file in FILES for kind in LOSSES]
    generator = random.Random("losses")
    for number in chosen(len(cases), max(1, round(share * len(cases))), generator):
        file, kind = cases[number - 1]
        place = folder / str(number)
        shutil.copytree(whole, place)
        yield Outcome("lost files of a sweep", f"{file} {kind}", lost(place, file, kind, reference))


def lost(place: Path, file: str, kind: str, reference: object) -> str:
    """Lose files of job 1, run the sweep again, and return what is wrong, or nothing."""
    job = place / "sweep" / "1"
    for missing in FILES[file]:
        (job / missing).unlink()
    path = job / file.partition(",")[0]
    if path.exists():
        LOSSES[kind](path)
    kept = {k: (place / f"sweep/{k}/checkpoints/best.ckpt").stat().st_mtime_ns for k in (0, 2)}
    code, output = forked(lambda: main(SWEEP), place)
    for k, before in kept.items():
        if (place / f"sweep/{k}/checkpoints/best.ckpt").stat().st_mtime_ns != before:
            return f"job {k} was trained again"
    if path.name == NEEDED and "started" not in file:
        named = "sweep/1 holds" in " ".join(output.split())
        return "" if code and named else f"exit code {code}, not refused by name: {output[-300:]}"
    if code:
        return f"exit code {code}: {output[-300:]}"
    return "" if same(swept(place), reference) else "another result than before the loss"
