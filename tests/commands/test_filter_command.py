"""``kbf filter``: the same estimates as a rollout, from any input; lines that cannot be read;
states, signals and memory.
"""

from __future__ import annotations

import csv
import io
import json
import math
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from kbf.cli import main
from kbf.commands.support.stream_reader import InputColumns, LineError, Row, RowReader
from kbf.data.files.column_schema import ColumnSchema, Part
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.online_estimator import OnlineEstimator
from kbf.ssm import oscillatory, simulate

TRAIN = [
    "data=oscillatory",
    "n_train=60",
    "particles=50",
    "data.n_test=10",
    "logger=none",
    "trainer.enable_progress_bar=false",
]
F64 = torch.float64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kernel")
    assert (
        main(["train", "model=kbf_paper", "model.net.rank=16", *TRAIN, f"run_dir={directory}"]) == 0
    )
    return directory / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def kalman(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kalman")
    assert main(["train", "model=kalman", *TRAIN, f"run_dir={directory}"]) == 0
    return directory / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="module")
def obs():
    start = torch.tensor([[1.0, 0.0]], dtype=F64)
    return simulate(oscillatory(), start, 12, torch.Generator().manual_seed(3)).obs[0]


def text(obs, header=""):
    return header + "".join(
        ",".join("" if math.isnan(v) else repr(v) for v in row) + "\n" for row in obs.tolist()
    )


def fed(monkeypatch, capsys, lines, *words):
    """Run the command on standard input: exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    capsys.readouterr()
    code = main(["filter", "input=-", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def table(out):
    return list(csv.DictReader(io.StringIO(out)))


def columns(rows, *names):
    return torch.tensor([[float(row[name]) for name in names] for row in rows], dtype=F64)


def expected(checkpoint, obs, mask=None):
    """Estimates, and standard deviations of z_0, by the library alone."""
    trained = load_filter(checkpoint)
    filter, state, found, spread = trained.filter, trained.filter.init(1), [], []
    obs = torch.where(torch.isfinite(obs), obs, 0.0).to(trained.module.model_dtype)
    for t in range(len(obs)):
        state = filter.predict(state)
        state = state if mask is not None and not mask[t] else filter.update(state, obs[t : t + 1])
        C = filter.covariance(state)
        C = C if trained.calibration is None else trained.calibration.covariance(C)
        found.append(filter.estimate(state)[0])
        spread.append(C[0, 0, 0].sqrt())
    return torch.stack(found).to(F64).detach(), torch.stack(spread).to(F64).detach()


@pytest.mark.slow
def test_standard_input_is_the_rollout(checkpoint, obs, monkeypatch, capsys):
    code, out, err = fed(
        monkeypatch,
        capsys,
        text(obs),
        f"checkpoint={checkpoint}",
        "alarms=false",
        "covariance=full",
    )
    rows = table(out)
    assert code == 0 and [row["step"] for row in rows] == [str(t) for t in range(12)]
    run = rollout(load_filter(checkpoint).filter, obs[None])
    torch.testing.assert_close(
        columns(rows, "z_0", "z_1"), run.estimates[0].detach(), rtol=1e-7, atol=1e-8
    )
    torch.testing.assert_close(
        columns(rows, "z_0_std")[:, 0], expected(checkpoint, obs)[1], rtol=1e-7, atol=1e-8
    )
    torch.testing.assert_close(
        columns(rows, "cov_0_0")[:, 0].sqrt(), columns(rows, "z_0_std")[:, 0], rtol=1e-7, atol=1e-8
    )
    torch.testing.assert_close(
        columns(rows, "ess")[:, 0], run.diagnostics["ess"][0].detach(), rtol=1e-7, atol=1e-8
    )
    assert list(rows[0])[-4:] == ["ess", "weight_sum", "negative_mass", "zero_weight_share"]
    assert "12 steps, 0 without observation" in err


@pytest.mark.slow
@pytest.mark.parametrize("header", ["", "x_0,x_1\n", "other,x_1,x_0\n"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_inputs_say_the_same(header, kind, kalman, obs, tmp_path, monkeypatch, capsys):
    wanted, _ = expected(kalman, obs)
    rows = [[1.0, b, a] if "other" in header else [a, b] for a, b in obs.tolist()]
    if kind == "csv":
        lines = header + "".join(",".join(map(repr, row)) + "\r\n" for row in rows)
    else:
        names = header.strip().split(",")
        lines = "".join(
            json.dumps(dict(zip(names, row, strict=True)) if header else row) + "\n" for row in rows
        )
    code, out, _ = fed(monkeypatch, capsys, lines, f"checkpoint={kalman}")
    found = table(out) if kind == "csv" else [json.loads(line) for line in out.splitlines()]
    assert code == 0
    torch.testing.assert_close(columns(found, "z_0", "z_1"), wanted, rtol=1e-7, atol=1e-8)
    (tmp_path / f"rec.{kind}").write_text(lines)
    for target in ("est.csv", "est.jsonl", "est.npz"):
        assert (
            main(
                [
                    "filter",
                    f"checkpoint={kalman}",
                    f"input={tmp_path}/rec.{kind}",
                    f"output={tmp_path}/{target}",
                ]
            )
            == 0
        )
    assert columns(table((tmp_path / "est.csv").read_text()), "z_1").allclose(
        wanted[:, 1:], rtol=1e-8
    )
    assert columns([json.loads(line) for line in (tmp_path / "est.jsonl").open()], "z_1").allclose(
        wanted[:, 1:], rtol=1e-12
    )
    with np.load(tmp_path / "est.npz") as arrays:
        np.testing.assert_allclose(arrays["z_1"], wanted[:, 1], rtol=1e-12)
    assert not list(tmp_path.glob(".*"))


def test_arrays_are_read_too(kalman, obs, tmp_path):
    np.savez(tmp_path / "rec.npz", observations=obs.numpy())
    assert (
        main(
            [
                "filter",
                f"checkpoint={kalman}",
                f"input={tmp_path}/rec.npz",
                f"output={tmp_path}/est.npz",
            ]
        )
        == 0
    )
    with np.load(tmp_path / "est.npz") as arrays:
        np.testing.assert_allclose(arrays["z_0"], expected(kalman, obs)[0][:, 0], rtol=1e-12)
    np.savez(tmp_path / "wide.npz", observations=obs[:, [0, 1, 1]].numpy())
    assert (
        main(
            [
                "filter",
                f"checkpoint={kalman}",
                f"input={tmp_path}/wide.npz",
                f"output={tmp_path}/wide.csv",
            ]
        )
        == 2
    )


@pytest.mark.parametrize("gap", [",", "nan,0.2", ",0.3", "null,null", "0.1,inf"])
def test_missing_observations(gap, checkpoint, obs, monkeypatch, capsys):
    lines = text(obs).splitlines()
    lines[4] = gap
    code, out, err = fed(monkeypatch, capsys, "\n".join(lines), f"checkpoint={checkpoint}")
    mask = torch.arange(12) != 4
    assert code == 0
    torch.testing.assert_close(
        columns(table(out), "z_0", "z_1"), expected(checkpoint, obs, mask)[0], rtol=1e-7, atol=1e-8
    )
    assert "1 without observation" in err or "inf" in gap


def test_json_null_is_missing(kalman, obs, monkeypatch, capsys):
    rows = [json.dumps(row) for row in obs.tolist()]
    rows[0], rows[3], rows[5] = "null", "[null, 0.5]", "[NaN, 0.5]"
    _, out, err = fed(monkeypatch, capsys, "\n".join(rows), f"checkpoint={kalman}")
    mask = torch.tensor([t not in (0, 3, 5) for t in range(12)])
    torch.testing.assert_close(
        columns([json.loads(line) for line in out.splitlines()], "z_0", "z_1"),
        expected(kalman, obs, mask)[0],
        rtol=1e-7,
        atol=1e-8,
    )
    assert "3 without observation" in err


@pytest.mark.parametrize("words", [[], ["alarms=false"]])
def test_what_is_passed_over_is_told(words, kalman, obs, monkeypatch, capsys):
    lines = text(obs).splitlines()
    _, _, err = fed(monkeypatch, capsys, "\n".join(lines), f"checkpoint={kalman}", *words)
    assert "0 rejected as implausible (0.0 %)" in err
    lines[4] = "1e30,-1e30"
    _, _, err = fed(monkeypatch, capsys, "\n".join(lines), f"checkpoint={kalman}", *words)
    assert "1 rejected as implausible (8.3 %)" in err


def test_diagnostics_are_explained_where_a_file_is_written(
    checkpoint, obs, tmp_path, monkeypatch, capsys
):
    words = [f"checkpoint={checkpoint}"]
    _, _, err = fed(monkeypatch, capsys, text(obs), *words)
    assert "effective sample size" not in err
    _, _, err = fed(monkeypatch, capsys, text(obs), *words, f"output={tmp_path}/out.csv")
    assert "effective sample size" in err and "zero_weight_share" in err and "z_0_std" not in err


def test_another_recording_starts_from_the_prior(kalman, obs, monkeypatch, capsys):
    rows = [f"{'ab'[t >= 7]},{a!r},{b!r}" for t, (a, b) in enumerate(obs.tolist())]
    _, out, _ = fed(
        monkeypatch, capsys, "recording,x_0,x_1\n" + "\n".join(rows), f"checkpoint={kalman}"
    )
    wanted = torch.cat([expected(kalman, obs[:7])[0], expected(kalman, obs[7:])[0]])
    torch.testing.assert_close(columns(table(out), "z_0", "z_1"), wanted, rtol=1e-7, atol=1e-8)
    assert [row["step"] for row in table(out)] == [*map(str, range(7)), *map(str, range(5))]
    assert [row["recording"] for row in table(out)] == ["a"] * 7 + ["b"] * 5


BAD = [
    ("0.1,zero", "standard input, line 3, column 'x_1' (2): 'zero' is not a number"),
    ("0.1", "standard input, line 3: it has 1 columns in place of 2"),
    ("0.1,0.2,0.3", "line 3: it has 3 columns in place of 2"),
    ("0.1,\xff\xfe", "line 3, column 'x_1'"),
]


@pytest.mark.parametrize(("line", "told"), BAD)
def test_bad_lines(line, told, kalman, obs, tmp_path, monkeypatch, capsys):
    lines = text(obs).splitlines()
    lines[2] = line
    code, out, err = fed(
        monkeypatch, capsys, "\n".join(lines), f"checkpoint={kalman}", f"state={tmp_path}/now.pt"
    )
    assert code == 2 and told in err and len(table(out)) == 2
    assert (tmp_path / "now.pt").exists(), "what was told is told"
    code, out, err = fed(
        monkeypatch, capsys, "\n".join(lines), f"checkpoint={kalman}", "on_error=skip"
    )
    assert code == 0 and told in err and "1 lines could not be read" in err
    mask = torch.arange(12) != 2
    torch.testing.assert_close(
        columns(table(out), "z_0", "z_1"), expected(kalman, obs, mask)[0], rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"x_0": 1}', "line 2: the object has no 'x_1'"),
        ("[1, 2, 3]", "line 2: it holds 3 entries in place of 2 numbers"),
        ("[1, true]", "line 2, column 'x_1' (2): 'True' is not a number"),
        ("[1, 2", "line 2, column 6: this is no JSON"),
        ("7", "line 2: it holds a int"),
        ("[null, 1e]", "line 2, column"),
        ("[" * 100_000, "line 2: this is no JSON of numbers"),
        ("[1, " + "9" * 5000 + "]", "line 2: this is no JSON of numbers"),
    ],
)
def test_bad_json(line, told, kalman, monkeypatch, capsys):
    code, _, err = fed(monkeypatch, capsys, f"[0.1, 0.2]\n{line}\n", f"checkpoint={kalman}")
    assert code == 2 and told in err


def test_a_header_without_the_columns(kalman, monkeypatch, capsys):
    code, out, err = fed(monkeypatch, capsys, "time,x_0\n1,2\n", f"checkpoint={kalman}")
    assert (
        code == 2
        and "line 1: there is no column 'x_1' in 'time,x_0'; x_0, x_1 are needed" in err
        and out == ""
    )


def test_a_header_that_names_a_column_twice(kalman, monkeypatch, capsys):
    code, _, err = fed(monkeypatch, capsys, "x_0,x_1,x_0\n1,2,3\n", f"checkpoint={kalman}")
    assert code == 2 and "line 1: two columns are called 'x_0'" in err
    code, _, err = fed(monkeypatch, capsys, "x_0,x_1,recording\n1,2,\n", f"checkpoint={kalman}")
    assert code == 2 and "line 2, column 'recording': the name of the recording is missing" in err


def test_nothing_is_overwritten(kalman, tmp_path, capsys):
    (tmp_path / "rec.csv").write_text("0.1,0.2\n")
    (tmp_path / "empty.csv").write_text("x_0,x_1\n")
    (tmp_path / "folder.csv").mkdir()
    for name, more, told in (
        ("rec", f"output={tmp_path}/../{tmp_path.name}/rec.csv", "would overwrite the input"),
        ("rec", f"output={tmp_path}/folder.csv", "folder.csv: is a directory"),
        ("rec", f"state={tmp_path}", "cannot be written"),
        ("empty", f"output={tmp_path}/out.csv", "empty.csv: there is no observation in it"),
    ):
        assert main(["filter", f"checkpoint={kalman}", f"input={tmp_path}/{name}.csv", more]) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1
    assert (tmp_path / "rec.csv").read_text() == "0.1,0.2\n" and not (tmp_path / "out.csv").exists()


def test_an_error_leaves_the_old_output(kalman, tmp_path, capsys):
    (tmp_path / "rec.csv").write_text("0.1,0.2\n0.1,bad\n")
    (tmp_path / "est.csv").write_text("old")
    assert (
        main(
            [
                "filter",
                f"checkpoint={kalman}",
                f"input={tmp_path}/rec.csv",
                f"output={tmp_path}/est.csv",
            ]
        )
        == 2
    )
    assert "rec.csv, line 2, column 'x_1' (2): 'bad'" in capsys.readouterr().err
    assert (tmp_path / "est.csv").read_text() == "old" and {p.name for p in tmp_path.iterdir()} == {
        "rec.csv",
        "est.csv",
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["on_error=ignore"], "on_error must be stop or skip"),
        (["save_every=0"], "save_every must be a whole number"),
        (["output=est.txt"], "output must be - (standard output) or end in"),
        (["output=est.npz"], "standard input may never end"),
        (["input=gone.csv"], "input: there is no file or folder gone.csv"),
        (["covariance=some"], "covariance must be std, full or none"),
        (["checkpoint=gone.ckpt"], "there is no checkpoint gone.ckpt"),
    ],
)
def test_bad_settings(words, told, kalman, monkeypatch, capsys):
    code, _, err = fed(
        monkeypatch,
        capsys,
        "",
        *([] if "checkpoint" in words[0] else [f"checkpoint={kalman}"]),
        *words,
    )
    assert code == 2 and told in err


class OneByOne:
    """A pipe that brings a line at a time."""

    def __init__(self, lines):
        self.lines, self.buffer = iter(lines.splitlines(keepends=True)), self

    def read1(self, size):
        return next(self.lines, "").encode()


def test_lines_that_come_together_are_filtered_as_one_by_one(checkpoint, monkeypatch, capsys):
    """A jump of the hidden state loses the track; what was filtered behind it in the same block is
    done again from the prior.
    """
    start = torch.tensor([[1.0, 0.0]], dtype=F64)
    first, second = (
        simulate(oscillatory(), start, 60, torch.Generator().manual_seed(seed)).obs[0]
        for seed in (3, 4)
    )
    away = torch.cat(
        [first, -second[:, [1, 0]].flip(0), 50 + first[:2], first[5:20]]
    )  # a path that the model does not know
    lines = text(away).splitlines()
    lines[7] = lines[70] = lines[71] = ","
    whole = "\n".join(lines)
    words = [f"checkpoint={checkpoint}", f"state={checkpoint.parent}/block.pt"]
    _, together, _ = fed(monkeypatch, capsys, whole, *words)
    (checkpoint.parent / "block.pt").unlink()
    monkeypatch.setattr(sys, "stdin", OneByOne(whole))
    assert main(["filter", "input=-", *words]) == 0
    single = capsys.readouterr().out
    alarms = [row["alarm"] for row in table(together)]
    assert "diverged" in alarms and alarms[120] == "out_of_distribution" and alarms[7] == ""
    assert [row["alarm"] for row in table(single)] == alarms
    names = ("z_0", "z_1", "z_0_std", "ess")
    torch.testing.assert_close(
        columns(table(single), *names),
        columns(table(together), *names),
        rtol=1e-6,
        atol=1e-7,
        equal_nan=True,
    )
    quiet = [row["step"] for row in table(together)]
    assert quiet == [str(t) for t in range(len(away))]


def test_missing_observations_pass_through_the_window(checkpoint, obs):
    """The verdict "diverged" is of the last steps, whether these come one by one or together."""
    trained = load_filter(checkpoint)
    rows = [Row(x[None]) for x in obs[:5]] + [Row(None)] * 3
    one, together = (OnlineEstimator(trained, trained.module.column_schema()) for _ in range(2))
    together.filter_rows(rows)
    for row in rows:
        one.filter_rows([row])
    torch.testing.assert_close(one.recent, together.recent, equal_nan=True)
    assert one.recent.isnan().tolist() == [False, False, True, True, True]


def test_the_monitor_is_that_of_the_library(checkpoint, obs, monkeypatch, capsys):
    """Step by step with `Monitor.step`: the same alarms and estimates."""
    trained = load_filter(checkpoint)
    jump = torch.cat([obs, -3 * obs.flip(0), obs])
    state, last, words, found = trained.filter.init(1), None, [], []
    for x in jump[:, None]:
        state, last = trained.monitor.step(trained.filter, state, x, last=last)
        outside = last.out_of_distribution < trained.monitor.rate
        words.append(
            "diverged"
            if last.diverged
            else "out_of_distribution"
            if outside
            else "innovation_outlier"
            if last.alarm
            else ""
        )
        found.append(trained.filter.estimate(state)[0].detach())
    _, out, err = fed(monkeypatch, capsys, text(jump), f"checkpoint={checkpoint}")
    assert [row["alarm"] for row in table(out)] == words and any(words)
    assert f"{sum(word != '' for word in words)} alarms" in err
    torch.testing.assert_close(
        columns(table(out), "z_0", "z_1"), torch.stack(found), rtol=1e-6, atol=1e-7
    )


def test_a_state_file_goes_on(checkpoint, obs, tmp_path, monkeypatch, capsys):
    words = [f"checkpoint={checkpoint}", f"state={tmp_path}/now.pt", "save_every=2"]
    _, first, _ = fed(monkeypatch, capsys, text(obs[:5]), *words)
    _, second, _ = fed(monkeypatch, capsys, text(obs[5:]), *words)
    assert second.startswith("5,"), "no second header, and the steps go on"
    torch.testing.assert_close(
        columns(table(first + second), "z_0", "z_1"),
        expected(checkpoint, obs)[0],
        rtol=1e-7,
        atol=1e-8,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["now.pt"]
    (tmp_path / "now.pt").write_bytes(b"nothing")
    code, _, err = fed(monkeypatch, capsys, text(obs), *words)
    assert code == 2 and "damaged, or not the state of a filter" in err


def test_an_outlier_destroys_no_stream(checkpoint, monkeypatch, capsys):
    """Estimates after it are those of a stream without it, an alarm says when, and the last line
    how many were passed over.
    """
    start = torch.tensor([[1.0, 0.0]], dtype=F64)
    obs = simulate(oscillatory(), start, 40, torch.Generator().manual_seed(3)).obs[0]
    _, out, err = fed(monkeypatch, capsys, text(obs), f"checkpoint={checkpoint}")
    plain = columns(table(out), "z_0", "z_1")
    assert "0 rejected" in err
    for size in (30.0, 1e30, 1e140):
        wild = obs.clone()
        wild[10] = size
        for words in ([], ["alarms=false"]):
            code, out, err = fed(
                monkeypatch, capsys, text(wild), f"checkpoint={checkpoint}", *words
            )
            assert code == 0 and "1 rejected" in err
            assert (not words and table(out)[10]["alarm"] == "out_of_distribution") or words
            torch.testing.assert_close(
                columns(table(out), "z_0", "z_1")[30:], plain[30:], rtol=0, atol=0.02
            )


@pytest.mark.slow
def test_a_state_belongs_to_its_checkpoint(checkpoint, kalman, obs, tmp_path, monkeypatch, capsys):
    """Another checkpoint's is refused, and so is one with a flipped bit; the monitor's window goes
    on.
    """
    words = [f"checkpoint={checkpoint}", f"state={tmp_path}/now.pt"]
    jump = torch.cat([obs, -3 * obs.flip(0), obs])
    _, whole, _ = fed(monkeypatch, capsys, text(jump), f"checkpoint={checkpoint}")
    parts = "".join(
        fed(monkeypatch, capsys, text(part), *words)[1]
        for part in (jump[:15], jump[15:26], jump[26:])
    )
    assert [row["alarm"] for row in table(parts)] == [row["alarm"] for row in table(whole)]
    assert "diverged" in parts, "the window matters"
    code, _, err = fed(
        monkeypatch, capsys, text(obs), f"checkpoint={kalman}", f"state={tmp_path}/now.pt"
    )
    assert code == 2 and "was not written with this checkpoint" in err
    stored = bytearray((tmp_path / "now.pt").read_bytes())
    weights = load_filter(checkpoint).filter.init(1).weights.numel()
    assert weights > 8
    for at in range(len(stored) // 3, len(stored), len(stored) // 7):
        broken = bytearray(stored)
        broken[at] ^= 4
        (tmp_path / "now.pt").write_bytes(bytes(broken))
        code, _, err = fed(monkeypatch, capsys, text(obs[:1]), *words)
        assert code == 2 and "state" in err
        (tmp_path / "now.pt").write_bytes(bytes(stored))


@pytest.mark.slow
def test_a_signal_is_the_end(kalman, obs, tmp_path):
    """SIGTERM while it waits for a line: the state is written, and the next start goes
    on from it.
    """
    command = [
        sys.executable,
        "-m",
        "kbf.cli",
        "filter",
        f"checkpoint={kalman}",
        "input=-",
        f"state={tmp_path}/now.pt",
    ]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(command, **pipes) as process:
        process.stdin.write(text(obs[:5]))
        process.stdin.flush()
        first = "".join(
            process.stdout.readline() for _ in range(6)
        )  # each line comes while the input is open
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert "5 steps" in process.stderr.read()
    done = subprocess.run(command, input=text(obs[5:]), capture_output=True, text=True, check=True)
    torch.testing.assert_close(
        columns(table(first + done.stdout), "z_0", "z_1"),
        expected(kalman, obs)[0],
        rtol=1e-7,
        atol=1e-8,
    )


@pytest.mark.slow
def test_a_reader_that_goes_away(kalman, obs):
    command = f"{sys.executable} -m kbf.cli filter checkpoint={kalman} input=- | head -n 2"
    done = subprocess.run(
        ["bash", "-c", command],
        input=text(obs.repeat(2000, 1)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        len(done.stdout.splitlines()) == 2
        and "Traceback" not in done.stderr
        and "Exception" not in done.stderr
    )


@pytest.mark.slow
def test_memory_is_constant(kalman, monkeypatch):
    """50,000 lines, and the process is not larger than after the first 5,000."""
    seen = []

    class Endless:
        count = 0

        def read1(self, size):
            self.count += 100
            if self.count in (5000, 50_000):
                seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            return b"0.5,0.25\n" * 100 if self.count <= 50_000 else b""

    class Input:
        buffer = Endless()

    monkeypatch.setattr(sys, "stdin", Input())
    with open("/dev/null", "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        assert main(["filter", f"checkpoint={kalman}", "input=-"]) == 0
    assert seen[1] - seen[0] < 3 * 1024  # KiB


COLUMN_SCHEMA = ColumnSchema(
    (Part("number", ("z",)),), (Part("number", ("a",)), Part("angle", ("turn",))), ("u",)
)


def read(lines, names, **settings):
    return list(RowReader(["\n".join([*lines, ""]).encode()], names, F64, **settings))


def test_angles_and_controls():
    rows = read(["u,turn,a", f"2,{math.pi / 2},7", "2,0,", "3,0,8"], InputColumns(COLUMN_SCHEMA))
    torch.testing.assert_close(rows[0].obs, torch.tensor([[7.0, 0.0, 1.0]], dtype=F64))
    assert rows[0].control.tolist() == [[2.0]]
    assert rows[1].obs is None and rows[1].control.tolist() == [[2.0]]
    assert rows[2].obs.tolist() == [[8.0, 1.0, 0.0]]
    rows = read(["[7, 0, 2]", "null"], InputColumns(COLUMN_SCHEMA))
    assert rows[1].obs is None and rows[1].control.tolist() == [[2.0]], (
        "the control of the step before"
    )
    with pytest.raises(LineError, match="line 1: the first line must hold u"):
        read(["null"], InputColumns(COLUMN_SCHEMA))
    with pytest.raises(LineError, match="line 2: u must be there at each step"):
        read(["1,2,3", "1,2,"], InputColumns(COLUMN_SCHEMA))


def test_silent_sensors():
    names = InputColumns(
        ColumnSchema((Part("number", ("z",)),), (Part("number", ("a",)), Part("number", ("b",))))
    )
    assert [row.obs is None for row in read(["1,", "1,2", ","], names)] == [True, False, True]
    assert [
        row.obs is None for row in read(["1,", "1,2", ","], names, allow_missing_sensors=True)
    ] == [False, False, True]


def test_elapsed_time_is_a_control():
    names = InputColumns(
        ColumnSchema((Part("number", ("z",)),), (Part("number", ("a",)),)), "t", "run", True, 0.5
    )
    rows = read(["[1, 10]", "[1, 10.25]", "null", "[1, 11.5]", "[1, 20]"], names)
    assert [row.control.item() for row in rows] == [0.5, 0.25, 0.5, 0.75, 0.5]
    assert read(["1,11.5"], names, clocks={None: 11.25})[0].control.item() == 0.25, (
        "a stream that goes on"
    )
    assert [row.gap for row in rows] == [False, False, False, False, True] and rows[-1].clock == 20
    with pytest.raises(LineError, match="line 3, column 't': time 10 does not come after 10"):
        read(["t,a", "10,1", "10,1"], names)
    with pytest.raises(LineError, match="line 2: t must be there at each step"):
        read(["t,a", ",1"], names)
    dated = read(["t,a", "2024-01-01T00:00:00,1", "2024-01-01T00:00:01,1"], names)
    assert dated[1].control.item() == 1.0 and dated[1].time == "2024-01-01T00:00:01"


def test_a_line_that_cannot_be_read_costs_one_step():
    """Its time is guessed, by a usual step; what comes after may be before that, and is read all
    the same.
    """
    names, told = (
        InputColumns(
            ColumnSchema((Part("number", ("z",)),), (Part("number", ("a",)),)),
            "t",
            "run",
            True,
            1.0,
        ),
        [],
    )
    rows = read(
        ["t,a", "10,1", "10.1,1", "10.2,1x", "10.3,1", "10.4,1"], names, on_unreadable=told.append
    )
    assert len(told) == 1 and [row.obs is None for row in rows] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert [row.control.item() for row in rows] == pytest.approx([1, 0.1, 1, 1, 0.1]) and rows[
        -1
    ].clock == 10.4


def test_a_blank_line_is_no_step():
    """As in recordings to learn from; a row of empty cells is a step.

    What is there is told, whatever blank lines follow it.
    """
    names = InputColumns(
        ColumnSchema((Part("number", ("z",)),), (Part("number", ("a",)), Part("number", ("b",))))
    )
    rows = list(RowReader([b"\xef\xbb\xbf\na,b\r\n\r\n1,2\n", b"  \n,\n\n", b"\n3,4"], names, F64))
    assert [row.obs is None for row in rows] == [False, True, False]
    assert [row.next_ready for row in rows] == [False, False, False]
    tabs = read(["a\tb", "1\t", "\t", "5\t6"], names, allow_missing_sensors=True)
    assert [None if row.obs is None else row.obs[0].nan_to_num(0).tolist() for row in tabs] == [
        [1, 0],
        None,
        [5, 6],
    ]
    with pytest.raises(LineError, match="line 4, column 'b'"):
        read(["1,2", "", "", "1,x"], names)


def test_a_stream_goes_on_in_its_recording(kalman, obs, tmp_path, monkeypatch, capsys):
    """The state file knows whose state it is: another recording starts from the prior."""
    words = [f"checkpoint={kalman}", f"state={tmp_path}/now.pt"]
    rows = [f"{a!r},{b!r}" for a, b in obs.tolist()]
    for name, wanted in (
        ("ä 1", expected(kalman, obs)[0][5:]),
        ("other", expected(kalman, obs[5:])[0]),
    ):
        (tmp_path / "now.pt").unlink(missing_ok=True)
        fed(
            monkeypatch,
            capsys,
            "\n".join(["recording,x_0,x_1", *[f"ä 1,{row}" for row in rows[:5]]]),
            *words,
        )
        _, out, _ = fed(
            monkeypatch,
            capsys,
            "\n".join(["recording,x_0,x_1", *[f"{name},{row}" for row in rows[5:]]]),
            *words,
        )
        found = torch.tensor(
            [[float(v) for v in line.split(",")[2:5:2]] for line in out.splitlines()], dtype=F64
        )
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


def test_times_of_arrays_are_told_in_full(kalman, obs):
    """Seconds since 1970 with their fractions."""
    from kbf.commands import filter as command
    from kbf.data.files.layout import Observations

    times = 1_763_733_000 + 0.25 * torch.arange(12, dtype=F64)
    recordings = [Observations(obs, times, None, "it")]
    settings = {"input": "it.npz", "output": "-", "device": "cpu"}
    rows = command.array_rows(settings, recordings, load_filter(kalman))
    assert [float(row.time) for row in rows] == times.tolist()


@pytest.mark.slow
def test_the_benchmark_runs_the_command():
    from studies.benchmarks import filter as bench

    rows = bench.run({**bench.SIZES["smoke"], "device": "cpu"}, lambda text: None)
    assert len(rows) == 10 and all(row["a second"] > 0 and row["memory, MiB"] > 0 for row in rows)
    slow = [{**row, "a second": 999.0} for row in rows]
    assert [claim.reached for claim in bench.claims(slow)] == [False, True]
