"""Bad inputs by a table: each is one line and exit code 2."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from studies.stress.cases import CHECKPOINT, Outcome, give_checkpoint, refused, standing_in

NEEDED = {
    "train": [],
    "evaluate": [f"checkpoint={CHECKPOINT}"],
    "filter": [f"checkpoint={CHECKPOINT}", "input=obs.csv"],
    "append": [f"checkpoint={CHECKPOINT}", "out=new.ckpt"],
    "export": [f"checkpoint={CHECKPOINT}", "out=step.onnx"],
    "compare": [],
    "floor": [],
    "data": [],
    "data check": ["data.path=good.csv", "data.states=[x]", "data.observations=[a]"],
    "data render": ["renderer=maze", "out=lab.npz"],
    "reproduce": ["name=posterior_mean"],
    "bench": ["name=step"],
    "serve": ["checkpoint=none.ckpt"],
}
COUNTS = {
    "train": ["n_train", "seed", "animation_steps", "particles", "threads"],
    "evaluate": ["n_train", "seed", "animation_steps", "particles", "threads", "horizon", "lag"],
    "filter": ["save_every", "threads", "seed"],
    "append": ["n_train", "seed", "threads", "budget"],
    "export": ["steps"],
    "compare": ["runs", "workers", "particles", "seed"],
    "floor": ["n_train", "seed", "runs", "particles"],
    "data": ["n_train", "seed"],
    "serve": ["port", "threads", "sessions", "expiry", "largest_body", "seconds"],
}
NO_COUNTS = ["x", "-5", "1.5", "[1,2]", "true", "{a:1}", "'1_0'"]
SWITCHES = {
    "train": ["calibrate", "trust", "overwrite"],
    "evaluate": ["smooth", "trust"],
    "filter": ["alarms", "compile", "trust"],
    "export": ["trust"],
}
NO_SWITCHES = ["x", "3", "[]", "{}", "yes please"]
SYNTAX = [
    "n_train=[",
    "n_train={",
    "a=b=c]",
    "n_train='",
    'n_train="',
    "=3",
    "n_train=(",
    "!!",
    "...=1",
    "n_train=${",
    "n_train=${none}",
]
NOTHING = [
    "no_such=1",
    "n_trian=3",
    "data.nothing=1",
    "trainer.nothing.x=2",
    "+=",
    "model.nte.rank=3",
]
TRAINING = [
    "epochs=x",
    "epochs=null",
    "lr=x",
    "lr=-1",
    "lr=0",
    "clip=-1",
    "batch_size=0",
    "burn_in=-1",
    "window=0",
    "window=x",
    "stride=0",
]
TRAINING += [
    "folds=0",
    "folds=x",
    "validation=2",
    "validation=-1",
    "validation=x",
    "patience=-1",
    "schedule=x",
    "optimiser=x",
    "weight_decay=-1",
]
NETS = [
    "rule=x",
    "ratio=x",
    "kernel=x",
    "rank=x",
    "rank=0",
    "rank=-1",
    "tol=2",
    "select=x",
    "factors=x",
    "factors=[1,2,-3]",
    "regs=[0,0,0]",
]
NETS += [
    "dtype=x",
    "dtype=float16",
    "_target_=none",
    "_target_=os.getcwd",
    "_target_=kbf.nothing.X",
    "_target_=kbf.nn.kernel_bayes.KBF",
]
OTHERS = [
    *(
        ["data", "check", "good.csv", "data.states=[x]", "data.observations=[a]", f"data.{x}"]
        for x in (
            *("date_format=3", "decimal=x", "thousands=;", "skip_lines=-1", "units_row=3"),
            *("header=x", "sort_by_time=true", "sort_by_time=x", "time=[x,y]", "latency={b:1}"),
            *("latency={a:-1}", "latency=3", "header=false", "path=[good.csv,none.csv]"),
            *("path=none*.csv", "mask=a"),
        )
    ),
    *(
        ["train", "data=own", "data.path=good.csv", "data.states=[x]", "data.observations=[a]", x]
        for x in ("data.bounds={a:[0,1]}", "data.bounds={x:[1,0]}", "data.bounds={x:3}")
    ),
    *(
        ["train", f"{group}=no_such"]
        for group in ("data", "model", "trainer", "logger", "launcher", "experiment")
    ),
    *(["train", f"model.dtype={x}"] for x in ("x", "int8", "float16", "load", "3")),
    *(
        ["train", f"trainer.{x}"]
        for x in ("accelerator=tpu", "max_epochs=-5", "accelerator=x", "devices=-9", "precision=x")
    ),
    *(
        ["train", f"data.{x}"]
        for x in (
            "n_test=0",
            "n_test=x",
            "n_test=-1",
            "problem=3",
            "source=3",
            "source=null",
            "problem._target_=x",
        )
    ),
    *(["train", f"run_dir={x}"] for x in ("", "null", "/proc/x", "/dev/null/x", "[]")),
    *(
        ["train", f"ckpt_path={x}"]
        for x in ("none.ckpt", ".", "/", "obs.csv", "/dev/null", "good.csv")
    ),
    *(
        ["filter", f"checkpoint={x}", "input=obs.csv"]
        for x in ("none", ".", "obs.csv", "/dev/null", "example:none", "''", "[]", "/dev/full")
    ),
    *(
        ["evaluate", f"checkpoint={x}"]
        for x in ("none", ".", "obs.csv", "/dev/null", "example:none", "''", "[]", "null")
    ),
    *(
        ["append", f"checkpoint={x}", "out=a.ckpt"]
        for x in ("none", ".", "obs.csv", "/dev/null", "example:none")
    ),
    *(
        ["export", f"checkpoint={x}", "out=a.onnx"]
        for x in ("none", ".", "obs.csv", "/dev/null", "example:none")
    ),
    *(
        ["filter", *NEEDED["filter"], x]
        for x in (
            "covariance=x",
            "on_error=x",
            "device=x",
            "device=tpu",
            "output=a.txt",
            "output=.",
            "state=.",
        )
    ),
    *(
        ["filter", *NEEDED["filter"], x]
        for x in (
            "output=obs.csv",
            "state=/proc/x",
            "output=/proc/x.csv",
            "output=/dev/null/x.npz",
            "input=.",
        )
    ),
    *(
        ["export", *NEEDED["export"], x]
        for x in ("format=x", "out=/proc/x.onnx", "out=.", "steps=0", "format=null")
    ),
    *(
        ["data", "check", x, "data.states=[x]", "data.observations=[a]"]
        for x in ("none.csv", ".", "/dev/null", "~no_such_user/a.csv")
    ),
    *(
        ["data", "check", "good.csv", f"data.states={x}", "data.observations=[a]"]
        for x in ("[]", "null", "[y]", "[x,x2]", "3", "[[x]]")
    ),
    *(
        ["data", "check", "good.csv", "data.states=[x]", "data.observations=[a]", x]
        for x in ("data.split=x", "data.test=2", "data.test=-1")
    ),
    *(
        ["data", "check", "good.csv", "data.states=[x]", "data.observations=[a]", x]
        for x in ("data.time=none", "data.recording=none")
    ),
    *(
        ["data", "check", "good.csv", "data.states=[x]", "data.observations=[a]", x]
        for x in ("data.angles=[none]", "data.angle_unit=x")
    ),
    *(
        ["data", "check", "good.csv", "data.states=[x]", "data.observations=[a]", x]
        for x in ("data.rotations=[[a]]",)
    ),
    *(
        ["data", "check", "good.csv", "data.states=[x]", "data.observations=[a]", x]
        for x in ("data.allow_missing_sensors=3", "data.images=none")
    ),
    *(
        ["data", "render", x, "out=lab.npz"]
        for x in ("none", "dmlab", "maze turns=0", "maze level=none")
    ),
    *(
        ["compare", x]
        for x in (
            "models=[none]",
            "models=[]",
            "n_train=[]",
            "runs=0",
            "models=[kalman,kalman]",
            "workers=-1",
            "data=none",
        )
    ),
    *(
        ["reproduce", x]
        for x in ("none", "preset=x", "posterior_mean preset=x", "posterior_mean runs=0")
    ),
    *(["bench", x] for x in ("none", "step threads=-1", "step threads=x")),
    *(
        [x]
        for x in (
            "none",
            "train2",
            "data2",
            "--no-such",
            "filter",
            "export",
            "append",
            "evaluate",
            "serve",
        )
    ),
]
CONTENTS = {
    "empty": b"",
    "words": b"hello world\nthis is no data\n",
    "zeros": bytes(4096),
    "noise": random.Random(0).randbytes(4096),
    "a zip": b"PK\x03\x04" + bytes(100),
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x07touch x\x85R.",
    "an array": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999,), }",
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(200),
    "Parquet": b"PAR1" + bytes(50) + b"PAR1",
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
}
KINDS = (
    *("csv", "tsv", "txt", "parquet", "npz", "h5", "npy", "mp4", "gif", "avi", "xyz"),
    *("mat", "nc", "csv.gz", "csv.zip"),
)
TABLES = {
    "no rows": "x,a\n",
    "one row": "x,a\n1,2\n",
    "no header": "1,2\n3,4\n",
    "double header": "x,x\n1,2\n3,4\n",
    "ragged": "x,a\n1,2\n3\n",
    "wide": "x,a\n1,2\n3,4,5\n",
    "text": "x,a\n1,2\n3,four\n",
    "infinite": "x,a\n1,2\n3,inf\n",
    "too large": "x,a\n1,2\n3,1e308\n",
    "larger still": "x,a\n1,2\n3,1e999\n",
    "underscore": "x,a\n1,2\n3,1_0\n",
    "comma": "x;a\n1;2\n3;1,5\n",
    "hexadecimal": "x,a\n1,2\n3,0x10\n",
    "nothing known": "x,a\n,2\n,3\n,4\n",
    "a quote": 'x,a\n1,2\n"3,4\n',
    "null": "x,a\n1,2\n3,\0\n",
    "Latin": "x,a\n1,2\n3,\xe4\n",
    "thousands": 'x,a\n1,2\n3,"1,234,567"\n',
    "doubtful": "x;a\n" + "1;1,234\n2;999\n" * 9,
    "a comment": "# by a logger\nx,a\n1,2\n3,4\n",
    "units": "x,a\nm,V\n1,2\n3,4\n",
    "other columns": "sep=;\nx;b\n1;2\n3;4\n",
}
LINES = {
    "text": b"x_0,x_1\n1,2\na,b\n",
    "narrow": b"x_0,x_1\n1,2\n1\n",
    "wide": b"x_0,x_1\n1,2\n1,2,3\n",
    "underscore": b"x_0,x_1\n1_0,2\n",
    "other names": b"u,v\n1,2\n",
    "one name": b"x_0,v\n1,2\n",
    "twice": b"x_0,x_0,x_1\n1,2,3\n",
    "nothing": b"",
    "blank": b"\n\n\n",
    "header": b"x_0,x_1\n",
    "noise": random.Random(1).randbytes(3000) + b"\n1,2\n",
    "UTF-16": "x_0,x_1\n1,2\n".encode("utf-16"),
    "long": b"1" * 2_000_000,
    "JSON cut": b"[1, 2]\n[1, \n",
    "JSON short": b"[1]\n",
    "JSON text": b'["a", "b"]\n',
    "JSON true": b"[true, false]\n",
    "JSON object": b'{"x_0": 1}\n',
    "JSON deep": b"[" * 100_000 + b"\n",
    "JSON number": b"[1, 1" + b"0" * 5000 + b"]\n",
    "JSON alone": b"[1, 2]\n3\n",
    "semicolons": b"x_0;x_1\n1,5;2,5\n",
}


def table() -> Iterator[tuple[str, list[str], bytes | None]]:
    """Name, words and standard input of every case."""
    for command, keys in COUNTS.items():
        for key in keys:
            for value in NO_COUNTS:
                if not (command == "evaluate" and (key, value) in {("horizon", "0"), ("lag", "0")}):
                    yield (
                        f"{command} {key}={value}",
                        [*command.split(), *NEEDED[command], f"{key}={value}"],
                        None,
                    )
    for command, keys in SWITCHES.items():
        for key in keys:
            for value in NO_SWITCHES:
                yield (
                    f"{command} {key}={value}",
                    [command, *NEEDED[command], f"{key}={value}"],
                    None,
                )
    for command in ("train", "evaluate", "filter", "compare", "floor", "export"):
        for word in (*SYNTAX, *NOTHING):
            yield f"{command} {word}", [command, *NEEDED[command], word], None
    for setting in TRAINING:
        yield (
            f"training {setting}",
            ["train", "model=lstm", "n_train=60", "logger=none", f"model.training.{setting}"],
            None,
        )
    for setting in NETS:
        yield (
            f"net {setting}",
            ["train", "model=kbf_tuned", "n_train=60", "logger=none", f"model.net.{setting}"],
            None,
        )
    for words in OTHERS:
        yield (
            " ".join(words),
            [part for word in words for part in (word.split() if " " in word else [word])],
            None,
        )
    for content in CONTENTS:
        for kind in KINDS:
            words = [
                "data",
                "check",
                f"{content.replace(' ', '_')}.{kind}",
                "data.states=[x]",
                "data.observations=[a]",
            ]
            yield f"{content} as {kind}", words, None
        yield (
            f"{content} as checkpoint",
            ["filter", f"checkpoint='{content.replace(' ', '_')}.csv'", "input=obs.csv"],
            None,
        )
        yield (
            f"{content} as served checkpoint",
            ["serve", f"checkpoint={content.replace(' ', '_')}.csv"],
            None,
        )
        yield (
            f"{content} as state",
            ["filter", *NEEDED["filter"], f"state={content.replace(' ', '_')}.csv"],
            None,
        )
    for name in TABLES:
        yield (
            f"table: {name}",
            [
                "data",
                "check",
                f"table_{name.replace(' ', '_')}.csv",
                "data.states=[x]",
                "data.observations=[a]",
            ],
            None,
        )
    for name, text in LINES.items():
        yield (
            f"lines: {name}",
            ["filter", f"checkpoint={CHECKPOINT}", f"input=lines_{name.replace(' ', '_')}.csv"],
            None,
        )
        if name not in ("nothing", "blank", "header"):
            yield (
                f"stream: {name}",
                ["filter", f"checkpoint={CHECKPOINT}", "input=-", "output=out.csv"],
                text,
            )


def files(folder: Path) -> None:
    """The files that the cases name."""
    give_checkpoint(folder)
    (folder / "obs.csv").write_text("x_0,x_1\n0.5,0.2\n")
    (folder / "good.csv").write_text(
        "x,a\n" + "".join(f"{np.sin(t)},{np.cos(t)}\n" for t in range(60))
    )
    for content, data in CONTENTS.items():
        for kind in KINDS:
            (folder / f"{content.replace(' ', '_')}.{kind}").write_bytes(data)
    for name, text in TABLES.items():
        (folder / f"table_{name.replace(' ', '_')}.csv").write_bytes(text.encode("latin-1"))
    for name, data in LINES.items():
        (folder / f"lines_{name.replace(' ', '_')}.csv").write_bytes(data)


def run(folder: Path, share: float = 1.0) -> Iterator[Outcome]:
    """Try the table, or a random share of it."""
    cases = list(table())
    if share < 1:
        cases = random.Random(0).sample(cases, round(share * len(cases)))
    with standing_in(folder):
        files(folder)
        for name, words, stdin in cases:
            yield Outcome("bad inputs", name, refused(words, stdin))
            if os.path.exists("x"):
                yield Outcome("bad inputs", name, "a pickle was executed")
