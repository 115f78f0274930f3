"""Nothing that is being written, and no finished result, is replaced by another command."""

import json
import subprocess
import sys

import pytest

from kbf.cli import main
from kbf.commands import compare, evaluate, train as train_command
from kbf.config.prepare import configure
from kbf.fitted.append import points
from kbf.fitted.checkpoint import load_filter
from kbf.runtime.run_folders import FORMER, locked

QUICK = ["n_train=60", "data.n_test=20", "particles=50", "logger=none"]
TRAIN = ["train", "model=window_ridge", *QUICK, "calibrate=false"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run."""
    folder = tmp_path_factory.mktemp("place")
    assert main([*TRAIN, f"run_dir={folder / 'run'}"]) == 0
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


BEST = "checkpoint=run/checkpoints/best.ckpt"
COMMANDS = {
    "append": (["append", BEST, "seed=3", "out=new/a.ckpt"], "new/a.ckpt"),
    "export": (["export", BEST, "out=new/a.onnx"], "new/a.onnx"),
    "report": (["report", BEST, "out=new/a.html"], "new/a.html"),
    "filter": (["filter", BEST, "input=x.csv", "output=new/z.csv"], "new/z.csv"),
    "state": (["filter", BEST, "input=x.csv", "state=new/now.pt"], "new/now.pt"),
    "render": (["data", "render", "maze", "out=new/m.npz"], "new/m.npz"),
    "evaluate": (["evaluate", BEST, "run_dir=new/a"], "new/a"),
    "compare": (["compare", "models=kalman", "run_dir=new/a"], "new/a"),
    "data": (["data", "run_dir=new/a"], "new/a"),
    "train": ([*TRAIN, "run_dir=new/a"], "new/a"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_the_other_writer(here, name, capsys):
    words, written = COMMANDS[name]
    (here / "x.csv").write_text("x_1,x_2\n1,2\n")
    with locked(here / written, file="." in written):
        assert main(words) == 2
        assert f"{written} is being written by process" in capsys.readouterr().err
    assert not (here / "new").exists()


@pytest.mark.slow
def test_of_two_appends_at_once_both_arrive_or_one_is_named(here):
    source = load_filter("run/checkpoints/best.ckpt")
    (here / "c.ckpt").write_bytes((here / "run/checkpoints/best.ckpt").read_bytes())
    words = [sys.executable, "-m", "kbf.cli", "append", "checkpoint=c.ckpt", "out=c.ckpt"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*words, f"seed={seed}"], **pipes) for seed in (3, 4)]
    texts = [process.communicate()[1] for process in both]
    done = [process.returncode for process in both]
    for code, text in zip(done, texts, strict=True):
        assert code == 0 or (code == 2 and "c.ckpt is being written by process" in text)
    before, after = (
        points(each.module.memory.recordings()) for each in (source, load_filter("c.ckpt"))
    )
    assert after - before == 80 * done.count(0) > 0


def test_an_append_replaces_only_what_it_extends_or_has_written(here, capsys):
    append, ours = ["append", BEST, "seed=3"], ["append", BEST, "seed=3", "out=mine.ckpt"]
    assert main(ours) == 0
    first = load_filter("mine.ckpt")
    assert main(["append", BEST, "seed=4", "out=mine.ckpt"]) == 2
    error = capsys.readouterr().err
    assert "mine.ckpt holds the result of kbf append" in error and "seed=3" in error
    assert main([*append, "out=run/checkpoints/last.ckpt"]) == 2
    assert "last.ckpt holds the result of kbf train" in capsys.readouterr().err
    (here / "notes.txt").write_text("mine")
    assert main([*append, "out=notes.txt"]) == 2
    assert "notes.txt exists and is no checkpoint" in capsys.readouterr().err
    assert (here / "notes.txt").read_text() == "mine"
    assert main(ours) == 0  # the same again, as after a kill
    same = points(load_filter("mine.ckpt").module.memory.recordings())
    assert same == points(first.module.memory.recordings())
    assert main(["append", "checkpoint=mine.ckpt", "seed=4", "out=mine.ckpt"]) == 0
    assert points(load_filter("mine.ckpt").module.memory.recordings()) == same + 80
    assert main(["append", BEST, "seed=4", "out=mine.ckpt", "overwrite=true"]) == 0
    assert points(load_filter("mine.ckpt").module.memory.recordings()) == same


def test_a_folder_of_one_command_is_no_folder_of_another(here, capsys):
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    other = {
        "compare": ["compare", "models=kalman", "runs=1"],
        "data": ["data"],
        "data check": ["data", "check", "x.csv", "data.states=[x_1]", "data.observations=[x_2]"],
    }
    for words in other.values():
        assert main([*words, "run_dir=run"]) == 2
        assert "run is the folder of kbf train: name another run_dir" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in (here / "run").rglob("*") if p.is_file()}
    assert main(["data", "data.n_test=10", "run_dir=set"]) == 0
    assert main(["data", "data.n_test=10", "run_dir=set"]) == 0
    arrays = (here / "set" / "data.npz").read_bytes()
    assert main(["data", "data.n_test=20", "run_dir=set"]) == 2
    assert "set holds the data of kbf data data.n_test=10" in capsys.readouterr().err
    assert main([*TRAIN, "run_dir=set", "overwrite=true"]) == 2
    assert "set is the folder of kbf data: name another run_dir" in capsys.readouterr().err
    assert (here / "set" / "data.npz").read_bytes() == arrays
    assert main(["data", "data.n_test=20", "run_dir=set", "overwrite=true"]) == 0
    assert (here / "set" / "data.npz").read_bytes() != arrays
    capsys.readouterr()
    assert main(["runs", "show", "set"]) == 0
    repeat = "kbf data data.n_test=20 run_dir=set-again"
    assert repeat in " ".join(capsys.readouterr().out.split())


def test_default_folders_of_one_second_differ(here):
    first, second = (configure("evaluate", [BEST])["run_dir"] for _ in range(2))
    assert first != second and first.endswith("-run")
    first, second = (configure("train", [f"seed={seed}"])["run_dir"] for seed in (0, 1))
    assert first.endswith("-rotation-n300-kbf-seed0") and second.endswith("-kbf-seed1")
    folders = {configure("compare", [f"models={m}"])["run_dir"] for m in ("kalman", "kalman,lstm")}
    assert folders == {"runs/compare/rotation-kalman", "runs/compare/rotation-kalman+lstm"}
    files = {configure("check", [f"data.path={name}.csv"])["run_dir"] for name in ("a", "b c")}
    assert files == {"runs/check-a", "runs/check-b_c"}
    own = ["data=own", "data.path=a.csv", "data.states=[x]", "data.observations=[y]"]
    assert configure("compare", own)["run_dir"] == "runs/compare/own-a"
    assert configure("compare", [*own, "models=kalman"])["run_dir"] == "runs/compare/own-a+kalman"
    assert configure("compare", [])["run_dir"] == "runs/compare/rotation"


def test_an_evaluation_does_not_replace_a_result(here, capsys):
    before = {path: path.read_bytes() for path in (here / "run").rglob("*") if path.is_file()}
    for more in ([], ["overwrite=true"]):
        assert main(["evaluate", BEST, "run_dir=run", *more]) == 2
        assert "run is the folder of kbf train" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in (here / "run").rglob("*") if p.is_file()}
    assert main(["evaluate", BEST, "run_dir=scores", "seed=1", "horizon=2"]) == 0
    assert (here / "scores" / "ahead.png").exists()
    first = json.loads((here / "scores" / "metrics.json").read_text())
    assert main(["evaluate", BEST, "run_dir=scores", "seed=2"]) == 2
    assert "scores holds a finished run" in capsys.readouterr().err
    assert first == json.loads((here / "scores" / "metrics.json").read_text())
    assert main(["evaluate", BEST, "run_dir=scores", "seed=2", "overwrite=true"]) == 0
    assert first != json.loads((here / "scores" / "metrics.json").read_text())
    assert not (here / "scores" / "ahead.png").exists()  # of the first
    assert not (here / "scores" / FORMER).exists()


def test_an_evaluation_is_replaced_when_the_new_one_is_whole(here, monkeypatch):
    words = ["evaluate", BEST, "run_dir=second", "overwrite=true"]
    assert main(words) == 0
    former = {path.name: path.read_bytes() for path in (here / "second").iterdir()}

    def fail(*_, **__):
        raise ValueError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "write_figures", fail)
        assert main([*words, "seed=1"]) == 2
    assert former == {p.name: p.read_bytes() for p in (here / "second" / FORMER).iterdir()}
    assert main([*words, "seed=2"]) == 0 and not (here / "second" / FORMER).exists()


def test_a_run_is_replaced_when_the_new_one_is_whole(tmp_path, monkeypatch):
    words = [*TRAIN, f"run_dir={tmp_path}", "overwrite=true"]
    assert main(words) == 0
    former = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(*_):
        raise ValueError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(train_command, "finish", fail)
        assert main([*words, "seed=1"]) == 2
    kept = {p.name: p.read_bytes() for p in (tmp_path / FORMER).rglob("*") if p.is_file()}
    assert kept.items() >= {k: v for k, v in former.items() if k != "track.png"}.items()
    assert not (tmp_path / "metrics.json").exists()
    assert main([*words, "seed=2"]) == 0
    assert not (tmp_path / FORMER).exists()
    assert json.loads((tmp_path / "metrics.json").read_text())["seed"] == 2


def test_tables_of_other_models_are_not_replaced(tmp_path, capsys):
    words = ["compare", "data.n_test=10", "n_train=30", "particles=20", "workers=0"]
    words += ["runs=1", f"run_dir={tmp_path}"]
    assert main([*words, "models=kalman"]) == 0
    tables = (tmp_path / "results.csv").read_text()
    assert main([*words, "models=frame"]) == 2
    assert "a comparison with model kalman, which its tables would lose" in capsys.readouterr().err
    assert main([*words, "models=kalman", "seed=1"]) == 2
    assert "with seed 0, which" in capsys.readouterr().err
    assert (tmp_path / "results.csv").read_text() == tables
    assert main([*words, "models=kalman", "data.n_test=11"]) == 2
    assert "a comparison with other settings" in capsys.readouterr().err
    assert (tmp_path / "results.csv").read_text() == tables
    assert main([*words, "models=kalman,frame"]) == 0  # more of them
    assert main([*words, "models=frame", "overwrite=true"]) == 0
    assert "kalman" not in (tmp_path / compare.RUNS).read_text()
