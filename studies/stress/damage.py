"""Hostile and damaged files: untrusted code, flipped bits, wrong types, full disks."""

from __future__ import annotations

import copy
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from commands.test_hostile_checkpoints import NETS  # pyright: ignore[reportMissingImports]

from kbf.cli import main
from kbf.filters.online import load_state, save_state
from kbf.fitted.checkpoint import load_filter, read_checkpoint
from studies.stress.cases import CHECKPOINT, Outcome, forked, give_checkpoint, load_all

WRONG = [
    None,
    0,
    -1,
    1e308,
    float("nan"),
    "x",
    "",
    [],
    {},
    [1, 2],
    {"a": 1},
    True,
    torch.zeros(3),
    {"_target_": "os.system", "command": "touch trace"},
]


def nodes(value, path=()):
    """Paths of all entries of nested dicts and lists."""
    for key, each in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    ):
        yield (*path, key)
        yield from nodes(each, (*path, key))


def put(contents, path, value):
    """Replace an entry; parts of tuples are left alone."""
    for key in path[:-1]:
        contents = contents[key]
    if isinstance(contents, dict | list):
        contents[path[-1]] = value


def hostile(folder: Path, share: float) -> Iterator[Outcome]:
    """Checkpoints that name code where a net belongs: refused with one line, and nothing runs."""
    original, trace = read_checkpoint(give_checkpoint(folder)), folder / "trace"

    def named(value):
        if isinstance(value, dict):
            return {key: named(each) for key, each in value.items()}
        if isinstance(value, list):
            return [named(each) for each in value]
        return value.replace("HERE", str(trace)) if isinstance(value, str) else value

    for name, net in list(NETS.items())[: max(3, round(share * len(NETS)))]:
        contents = copy.deepcopy(original)
        contents["hyper_parameters"]["config"]["model"]["net"] = named(net)
        torch.save(contents, folder / "bad.ckpt")
        yield Outcome(
            "hostile checkpoints",
            name,
            judged(folder / "bad.ckpt", must_refuse=True) or "it ran" * trace.exists(),
        )
    generator, places = random.Random(1), list(nodes(original))
    for k in range(round(120 * share)):
        place, wrong = generator.choice(places), generator.choice(WRONG)
        contents = copy.deepcopy(original)
        put(contents, place, wrong)
        torch.save(contents, folder / "bad.ckpt")
        why = judged(folder / "bad.ckpt", must_refuse=False) or "it ran" * Path("trace").exists()
        yield Outcome(
            "wrong types in checkpoints",
            f"{k}: {'.'.join(map(str, place))} = {str(wrong)[:30]}",
            why,
        )


def judged(path: Path, *, must_refuse: bool) -> str:
    """Return the fault in how a checkpoint is loaded, or an empty string.

    It must be refused with one line, or load and give finite estimates.
    """
    try:
        filter = load_filter(path).filter
        estimate = filter.estimate(filter.predict(filter.init(1)))
    except (ValueError, OSError) as error:
        return "" if str(error) else "no message"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return (
        "it loads"
        if must_refuse
        else ""
        if bool(estimate.isfinite().all())
        else "it loads and makes NaN"
    )


def flips(folder: Path, share: float) -> Iterator[Outcome]:
    """One flipped bit in a checkpoint or a state: refused, or equal to the whole file."""
    original = give_checkpoint(folder)
    filter = load_filter(original).filter
    save_state(filter.predict(filter.init(1)), folder / "state.pt")
    whole = {"checkpoint": original.read_bytes(), "state": (folder / "state.pt").read_bytes()}
    generator = random.Random(2)
    reference = {
        "checkpoint": read_checkpoint(original),
        "state": load_state(filter, folder / "state.pt")._asdict(),
    }
    for kind, count in (("checkpoint", 150), ("state", 100)):
        for _ in range(round(count * share)):
            bit = generator.randrange(8 * len(whole[kind]))
            data = bytearray(whole[kind])
            data[bit // 8] ^= 1 << bit % 8
            (folder / "flipped").write_bytes(data)
            try:
                found = (
                    read_checkpoint(folder / "flipped")
                    if kind == "checkpoint"
                    else load_state(filter, folder / "flipped")._asdict()
                )
                why = "" if same(found, reference[kind]) else "other numbers are loaded"
            except (ValueError, OSError):
                why = ""
            except BaseException as error:
                why = f"{type(error).__name__}: {str(error)[:100]}"
            yield Outcome(f"flipped bits of a {kind}", f"bit {bit}", why)


def same(one, other) -> bool:
    """Whether nested contents are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(one) == len(other)
            and all(map(same, one, other))
        )
    return one == other


COMMANDS = {
    "train": [
        "train",
        "model=kalman",
        "n_train=40",
        "logger=none",
        "calibrate=false",
        "particles=50",
        "run_dir=OUT",
    ],
    "filter": ["filter", f"checkpoint={CHECKPOINT}", "input=obs.csv", "output=OUT/estimates.csv"],
    "state": ["filter", f"checkpoint={CHECKPOINT}", "input=obs.csv", "state=OUT/state.pt"],
    "npz": ["filter", f"checkpoint={CHECKPOINT}", "input=obs.csv", "output=OUT/estimates.npz"],
    "append": ["append", f"checkpoint={CHECKPOINT}", "seed=5", "out=OUT/new.ckpt"],
    "data": ["data", "n_train=50", "run_dir=OUT"],
    "check": [
        "data",
        "check",
        "good.csv",
        "data.states=[x]",
        "data.observations=[a]",
        "run_dir=OUT",
    ],
    "export": [
        "export",
        f"checkpoint={CHECKPOINT}",
        "format=torchscript",
        "steps=2",
        "out=OUT/step.pt",
    ],
}


def prepared(home: Path) -> Path:
    """A folder with the files that the commands name."""
    home.mkdir()
    give_checkpoint(home)
    (home / "obs.csv").write_text("x_0,x_1\n" + "0.5,0.2\n" * 50)
    (home / "good.csv").write_text("x,a\n" + "".join(f"{k % 7},{k % 5}\n" for k in range(60)))
    return home


def disks(folder: Path, share: float) -> Iterator[Outcome]:
    """A full disk and a read-only one (/proc): one line, exit code 2, no partial file."""
    load_all()
    for name, words in list(COMMANDS.items())[: max(2, round(share * len(COMMANDS)))]:
        for size in (0, 100, 1000)[: max(1, round(3 * share))]:
            home = prepared(folder / f"{name}-{size}")

            def limit(size: int = size) -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                log = (
                    2**16
                )  # what the case prints goes to a file as well: it is written below the limit
                resource.setrlimit(resource.RLIMIT_FSIZE, (size or 1, log))

            code, output = forked(
                lambda words=words: main([word.replace("OUT", "out") for word in words]),
                home,
                limit,
            )
            left = [
                path.name
                for path in home.rglob("*")
                if path.is_file() and path.name.startswith(".")
            ]
            why = (
                f"exit code {code}: {output[-150:]}"
                if code != 2 and not (code == 0 and size)
                else ""
            )
            yield Outcome(
                "full disk",
                f"{name}, {size} bytes",
                why or ("litter: " + ", ".join(left) if left else ""),
            )
        home = prepared(folder / f"{name}-readonly")
        code, output = forked(
            lambda words=words: main([word.replace("OUT", "/proc/kbf") for word in words]), home
        )
        yield Outcome(
            "read-only disk",
            name,
            "" if code == 2 and "Traceback" not in output else f"exit code {code}: {output[-150:]}",
        )


def run(folder: Path, share: float = 1.0) -> Iterator[Outcome]:
    """All of these."""
    folder.mkdir(parents=True)
    yield from hostile(folder, share)
    yield from flips(folder, share)
    yield from disks(folder, share)
