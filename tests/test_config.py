"""One way from words to a configuration: single runs, sweeps, comparisons and experiments agree;
Hydra's habits work.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml

from kbf.cli import main
from kbf.config import choices_of, config_dir, configure

SMALL = ["n_train=40", "data.n_test=15", "particles=200", "calibrate=false"]
QUIET = ["logger=none", "trainer.enable_progress_bar=false"]
KALMAN = ["train", "model=kalman", *SMALL, *QUIET]


def metrics(directory: Path) -> dict:
    told = json.loads((directory / "metrics.json").read_text(encoding="utf-8"))
    return {key: value for key, value in told.items() if "seconds" not in key}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("train") / "run"
    assert main([*KALMAN, f"run_dir={directory}"]) == 0
    return directory


# Sweeps


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_the_single_runs(run_dir, tmp_path):
    assert main([*KALMAN, "seed=0,1", "--multirun", f"hydra.sweep.dir={tmp_path}"]) == 0
    assert metrics(tmp_path / "0") == metrics(run_dir)
    assert metrics(tmp_path / "1")["seed"] == 1
    swept, single = (
        yaml.safe_load((path / "config.yaml").read_text()) for path in (tmp_path / "0", run_dir)
    )
    assert swept.pop("run_dir") == str(tmp_path / "0") and single.pop("run_dir") == str(run_dir)
    assert swept == single


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "n_train=-5"], "n_train must be at least 0, got -5"),
        (["train", "calibrate=maybe"], "calibrate must be true or false, got 'maybe'"),
        (["compare", "n_train=[]"], "n_train must be one number or more"),
        (["compare", "models=[kalman,kalman]"], "two of them have the name 'kalman'"),
        (["evaluate", "checkpoint=none.ckpt"], "there is no checkpoint none.ckpt"),
        (["floor", "runs=0"], "runs must be at least 1, got 0"),
    ],
)
def test_what_is_refused_of_one_run_is_refused_of_a_sweep(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    told = []
    for more in ([], ["--multirun", "hydra.sweep.dir=sweep"]):
        assert main([*words, *more]) == 2
        told.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert told[0] == told[1] and message in told[0]


@pytest.mark.slow
def test_a_sweep_over_comparisons(tmp_path):
    words = ["compare", "models=[kalman]", "data.n_test=15", "particles=200", "runs=1", "workers=0"]
    assert main([*words, "n_train=40,50", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    assert main([*words, "n_train=40", f"run_dir={tmp_path / 'one'}"]) == 0
    swept, single = (
        (path / "runs.csv").read_text().splitlines()
        for path in (tmp_path / "sweep" / "0", tmp_path / "one")
    )
    assert [line.rpartition(",")[0] for line in swept] == [
        line.rpartition(",")[0] for line in single
    ]
    assert "rotation,50,0,kalman" in (tmp_path / "sweep" / "1" / "runs.csv").read_text()


@pytest.mark.slow
def test_a_sweep_over_evaluations(run_dir, tmp_path):
    best = f"checkpoint={run_dir / 'checkpoints' / 'best.ckpt'}"
    words = ["evaluate", best, "particles=200"]
    assert main([*words, "data.n_test=20,30", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    assert main([*words, "data.n_test=20", f"run_dir={tmp_path / 'one'}"]) == 0
    assert metrics(tmp_path / "sweep" / "0") == metrics(tmp_path / "one")
    assert metrics(tmp_path / "sweep" / "1")["n_test"] == 30
    assert main([*words, "data=oscillatory", "-m", f"hydra.sweep.dir={tmp_path / 'other'}"]) == 0
    assert metrics(tmp_path / "other" / "0")["data"] == "oscillatory"


def test_a_sweep_that_goes_on_with_a_run_does_so_in_its_folder(run_dir, tmp_path):
    last = run_dir / "checkpoints" / "last.ckpt"
    before = metrics(run_dir)
    assert (
        main(
            [
                "train",
                f"ckpt_path={last}",
                *QUIET,
                "particles=200",
                "calibrate=false",
                "-m",
                f"hydra.sweep.dir={tmp_path}",
            ]
        )
        == 0
    )
    assert metrics(run_dir) == before
    assert not (tmp_path / "0" / "metrics.json").exists()


@pytest.mark.slow
def test_a_sweep_with_recordings_of_one_s_own(tmp_path):
    rows = "\n".join(f"{t % 7},{t % 7 + 0.1}" for t in range(60))
    (tmp_path / "rec.csv").write_text(f"x,a\n{rows}\n")
    words = [
        "train",
        "data=own",
        f"data.path={tmp_path / 'rec.csv'}",
        "data.states=[x]",
        "data.observations=[a]",
        "model=kalman,frame",
    ]
    assert (
        main([*words, *QUIET, "calibrate=false", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}"])
        == 0
    )
    assert [metrics(tmp_path / "sweep" / str(k))["n_train"] for k in range(2)] == [48, 48]


# Settings that a model has on one data set

LSTM = {"epochs": 60, "lr": 0.003, "weight_decay": 3.0}
PAPER = {"lr": 0.001, "weight_decay": 0.0, "reg": 0.001}
TUNED = {
    ("lstm", "rotation"): LSTM,
    ("lstm", "own"): LSTM,
    ("lstm", "dmlab"): {"epochs": 60, "lr": 0.003, "weight_decay": 1.0},
    ("lstm", "dsprites"): {"epochs": 200, "lr": 0.01, "weight_decay": 1.0},
    ("lstm", "pendulum"): {"epochs": 60, "lr": 0.01, "weight_decay": 1.0},
    ("lstm_feedback", "dsprites"): LSTM,
    ("kbf_nn_paper", "rotation"): PAPER | {"encoder": None},
    ("kbf_nn_paper", "pendulum"): PAPER | {"encoder": None},
    ("kbf_nn_paper", "dmlab"): PAPER | {"encoder": ([3, 36, 48], 0.5)},
    ("kbf_nn_paper", "dsprites"): {
        "lr": 0.01,
        "weight_decay": 0.01,
        "reg": 0.001,
        "encoder": ([1, 64, 64], 0.0),
    },
}
"""As they were when data sets brought them; results in data/results are made with these."""


def settings_of(model: dict) -> dict:
    if model["name"] == "kbf_nn_paper":
        encoder = model["net"]["encoder"]
        told = {key: model["encoding"][key] for key in ("lr", "weight_decay", "reg")}
        return told | {"encoder": encoder and (encoder["q"], encoder["dropout"])}
    return {key: model["training"][key] for key in LSTM}


@pytest.mark.parametrize(("model", "data"), TUNED)
def test_models_keep_the_settings_that_they_have_on_a_data_set(model, data):
    assert (
        settings_of(configure("train", [f"model={model}", f"data={data}"])["model"])
        == TUNED[model, data]
    )


def test_settings_on_a_data_set_reach_comparisons_and_the_choice_of_a_model():
    from kbf.runtime.interpolation import resolved

    config = configure("compare", ["data=dsprites", "models=[lstm,kbf_nn_paper]"])
    for name, base in config["bases"].items():
        assert settings_of(resolved(base, n_train=40, seed=0)["model"]) == TUNED[name, "dsprites"]
    auto = configure("train", ["model=auto", "data=dsprites"])
    assert settings_of(auto["model"]["candidates"]["lstm"]) == TUNED["lstm", "dsprites"]


@pytest.mark.slow
def test_data_sets_say_nothing_of_models():
    names = set(choices_of("train", "model"))
    for data in choices_of("train", "data"):
        assert not names & configure("train", [f"data={data}"])["data"].keys()
    tuned = {path.parent.name: path.stem for path in (config_dir() / "tuned").glob("*/*.yaml")}
    assert tuned.keys() <= names and set(tuned.values()) <= set(choices_of("train", "data"))


# Values that cannot be


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "n_train=null"], "n_train must be a whole number, got None"),
        (["train", "n_train=ten"], "n_train must be a whole number, got 'ten'"),
        (["train", "n_train=true"], "n_train must be a whole number, got True"),
        (["train", "n_train=2.5"], "n_train must be a whole number, got 2.5"),
        (["train", "seed=null"], "seed must be a whole number, got None"),
        (["train", "seed=-1"], "seed must be at least 0, got -1"),
        (["train", "particles=0"], "particles must be at least 1, got 0"),
        (["train", "threads=0"], "threads must be at least 1, got 0"),
        (["train", "threads=two"], "threads must be a whole number, got 'two'"),
        (["train", "calibrate=null"], "calibrate must be true or false, got None"),
        (["train", "hold_out=1"], "hold_out must be a share"),
        (["train", "run_dir="], "run_dir must name a folder, got ''"),
        (["train", "run_dir=null"], "run_dir must name a folder, got None"),
        (["train", "ckpt_path="], "ckpt_path must name a file, got ''"),
        (["train", "data.d=3"], "data.d=3: the states of data rotation have 2 components"),
        (
            ["train", "model=lstm", "model.training.epochs=x"],
            "model.training.epochs must be a whole number, at least 1; got 'x'",
        ),
        (
            ["train", "model=lstm", "model.training.epochs=null"],
            "model.training.epochs must be a whole number, at least 1; got None",
        ),
        (
            ["train", "model=lstm", "model.training.batch_size=0"],
            "model.training.batch_size must be a whole number, at least 1; got 0",
        ),
        (
            ["train", "model=lstm", "model.training.clip=-1"],
            "model.training.clip must be a number > 0; got -1",
        ),
        (
            ["train", "model=lstm", "model.training.burn_in=-1"],
            "model.training.burn_in must be a whole number, at least 0; got -1",
        ),
        (
            ["train", "model=lstm", "model.training.lr=0"],
            "model.training.lr must be a number > 0; got 0",
        ),
        (
            ["train", "model=lstm", "model.training.lr=nan"],
            "model.training.lr must be a number > 0; got nan",
        ),
        (
            ["train", "model=lstm", "model.training.window=0"],
            "model.training.window must be a whole number, at least 1; got 0",
        ),
        (
            ["train", "model=lstm", "model.training.validation=-0.1"],
            "model.training.validation must be a number >= 0; got -0.1",
        ),
        (
            ["train", "data=dsprites", "data.encoding.lr=fast"],
            "data.encoding.lr must be a number > 0; got 'fast'",
        ),
        (["train", "model=kalman", "trainer.accelerator=tpu"], "torch_xla"),
        (["train", "model=kalman", "trainer.accelerator=abacus"], "abacus"),
        (
            ["train", "model=kalman", "trainer.max_epochs=-5"],
            "`max_epochs` must be a non-negative integer or -1. You passed in -5",
        ),
        (["train", "model=kalman", "trainer=gpu"], "gpu"),
        (
            ["train", "model=kalman", "trainer.devices=x"],
            "trainer.devices must be a number of devices",
        ),
        (["train", "logger=wandb"], "wandb"),
        (
            ["train", "model.net._target_=kbf.filters.none.Such"],
            "'kbf.filters.none.Such' does not exist",
        ),
        (["train", "--config-dir", "none"], "--config-dir: there is no folder none"),
        (
            ["train", "--cfg", "job", "--package", "none"],
            "--package: there is no none in this configuration",
        ),
        (["compare", "runs=0"], "runs must be at least 1, got 0"),
        (["compare", "runs=null"], "runs must be a whole number, got None"),
        (["compare", "n_train=[]"], "n_train must be one number or more, got none"),
        (["compare", "n_train=[10,null]"], "n_train must be a whole number, got None"),
        (["compare", "models=[]"], "models must be one or more, got none"),
        (["compare", "workers=-1"], "workers must be at least 0, got -1"),
        (["floor", "runs=0"], "runs must be at least 1, got 0"),
        (["floor", "smooth=yes"], "smooth must be true or false, got 'yes'"),
        (["data", "run_dir="], "run_dir must name a folder, got ''"),
        (["evaluate", "checkpoint="], "checkpoint must name a file, got ''"),
        (
            ["evaluate", "checkpoint=example:rotation", "data.n_tset=5"],
            "there is no setting data.n_tset; did you mean data.n_test?",
        ),
        (
            ["evaluate", "checkpoint=example:rotation", "horizon=-1"],
            "horizon must be at least 0, got -1",
        ),
        (["reproduce", "posterior_mean", "runs=0"], "runs must be at least 1"),
        (["data", "render", "maze", "out="], "out must name a file, got ''"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_cannot_be_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    if words == ["train", "model=kalman", "trainer=gpu"] and torch.cuda.is_available():
        pytest.skip("there is one")
    if words[-1] == "logger=wandb" and importlib.util.find_spec("wandb"):
        pytest.skip("it is installed")
    monkeypatch.chdir(tmp_path)
    small = ["data.n_test=15", "logger=none"] if words[:2] != ["train", "logger=wandb"] else []
    assert main([words[0], *(small if words[0] == "train" else []), *words[1:]]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [], "something half-written is left"


@pytest.mark.parametrize(
    "words",
    [["train", "n_train=null"], ["train"], ["compare", "n_train=[100,null]", "models=mean"]],
)
def test_a_recording_whose_package_is_missing(words, tmp_path, monkeypatch, capsys):
    """Its configuration can be seen; what a run says is the package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "cache"))
    shown = printed([*words, "data=rat", "--cfg"], capsys)["n_train"]
    assert shown == {"train": None, "compare": [100, None]}[words[0]] or words == ["train"]
    if words[0] == "train":
        assert main([*words, "data=rat", "model=mean", f"run_dir={tmp_path / 'run'}"]) == 2
        assert (
            "data=rat needs the package ratinabox, which is not installed"
            in capsys.readouterr().err
        )


def test_a_folder_may_be_named_by_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*KALMAN, "run_dir=2026"]) == 0
    assert (tmp_path / "2026" / "metrics.json").is_file()


# Hydra as people know it


def printed(words: list[str], capsys) -> dict:
    capsys.readouterr()
    assert main(words) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_hydra_run_dir(tmp_path):
    assert main([*KALMAN, f"hydra.run.dir={tmp_path / 'here'}"]) == 0
    assert (tmp_path / "here" / "metrics.json").is_file()
    config = configure("train", [f"hydra.run.dir={tmp_path}", "run_dir=elsewhere"])
    assert config["run_dir"] == "elsewhere", "the more special of the two"
    assert (
        configure("train", ["run_dir='${hydra:runtime.output_dir}'", "hydra.run.dir=/a/b"])[
            "run_dir"
        ]
        == "/a/b"
    )


def test_cfg(capsys):
    job = printed(["train", "model=ekf", "--cfg", "job"], capsys)
    assert job["model"]["net"]["model"] == "${data.problem}" and "hydra" not in job
    words = [
        "train",
        "model=ekf",
        "run_dir=runs/here",
        "--cfg",
    ]  # a folder of its own holds the second it was asked for
    resolved = printed([*words, "job", "--resolve"], capsys)
    assert resolved["model"]["net"]["model"] == {"_target_": "kbf.rotation"}
    assert printed(words, capsys) == resolved
    hydra = printed(["train", "model=ekf", "hydra.run.dir=/a/b", "-c", "hydra"], capsys)
    assert hydra.keys() == {"hydra"} and hydra["hydra"]["run"]["dir"] == "/a/b"
    assert "model=ekf" in hydra["hydra"]["overrides"]["task"]
    assert printed(["train", "--cfg", "all"], capsys).keys() == {"hydra", *job}
    assert (
        printed(["train", "--cfg", "all", "--resolve"], capsys)["hydra"]["runtime"]["choices"][
            "model"
        ]
        == "kbf"
    )
    assert (
        printed(["train", "model=ekf", "--cfg", "job", "--package", "model.net"], capsys)
        == job["model"]["net"]
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("defaults", "model/ekf"),
        ("defaults-tree", "experiment: null"),
        ("config", "_target_: kbf.EKF"),
        ("searchpath", "configs/train"),
        ("plugins", "BasicSweeper"),
        ("all", "Hydra 1.3"),
    ],
)
def test_info(what, message, capsys):
    assert main(["train", "model=ekf", "--info", what]) == 0
    assert message in capsys.readouterr().out


@pytest.fixture
def mine(tmp_path):
    """A folder of configurations of one's own."""
    for name, text in {
        "data/slow.yaml": "defaults: [oscillatory, _self_]\nname: slow\nproblem: {omega: 0.1}\n",
        "model/small.yaml": "defaults: [particle, _self_]\nname: small\nnet: {particles: 50}\n",
        "experiment/both.yaml": (
            "# @package _global_\ndefaults: [{override /data: slow}, {override /model: small}]\n"
            "n_train: 44\n"
        ),
        "other.yaml": "defaults: [train, {override data: slow}, _self_]\nn_train: 33\n",
    }.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    return tmp_path / "mine"


def test_configurations_of_one_s_own(mine, capsys):
    for words in (
        ["--config-dir", str(mine)],
        [f"--config-dir={mine}"],
        [f"hydra.searchpath=[file://{mine}]"],
        ["-cd", str(mine)],
    ):
        job = printed(["train", "data=slow", "model=small", *words, "--cfg"], capsys)
        assert (
            job["data"]["name"],
            job["data"]["problem"]["omega"],
            job["model"]["net"]["particles"],
        ) == ("slow", 0.1, 50)
    job = printed(["train", "+experiment=both", "--config-dir", str(mine), "--cfg"], capsys)
    assert (job["data"]["name"], job["model"]["name"], job["n_train"]) == ("slow", "small", 44)
    job = printed(["train", "--config-name", "other", "--config-dir", str(mine), "--cfg"], capsys)
    assert (job["data"]["name"], job["model"]["name"], job["n_train"]) == ("slow", "kbf", 33)
    assert main(["train", "data=slow"]) == 2
    assert "there is no data 'slow'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("where", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_one_s_own_reach_comparisons_and_sweeps(mine, where, tmp_path):
    words = ["data=slow", where.format(mine), "data.n_test=15", "particles=200"]
    assert (
        main(
            [
                "compare",
                "models=[small,kalman]",
                *words,
                "n_train=40",
                "runs=1",
                "workers=0",
                f"run_dir={tmp_path / 'c'}",
            ]
        )
        == 0
    )
    assert "slow,40,0,small" in (tmp_path / "c" / "runs.csv").read_text()
    sweep = ["n_train=40", "calibrate=false", *QUIET, "-m", f"hydra.sweep.dir={tmp_path / 's'}"]
    assert main(["train", "model=small,kalman", *words, *sweep]) == 0
    assert [metrics(tmp_path / "s" / k)["model"] for k in "01"] == ["small", "kalman"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kbf tr", ["train"]),
        ("kbf train experiment=q", ["experiment=quick"]),
        (
            "kbf compare experiment=d",
            [
                "experiment=dmlab",
                "experiment=dmlab_e2e",
                "experiment=dsprites",
                "experiment=dsprites_e2e",
            ],
        ),
        ("kbf train model=kalm", ["model=kalman", "model=kalman_velocity", "model=kalmannet"]),
        ("kbf train model=lstm model.training.we", ["model.training.weight_decay="]),
        ("kbf data check data.norm", ["data.normalise="]),
    ],
)
def test_shell_completion(line, expected, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["--shell-completion", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == expected


def test_shell_completion_is_installed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/kbf"])
    assert main(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("hydra_bash_completion kbf")
    assert main(["-sc", "install=dos"]) == 2
    assert "No completion plugin for 'dos'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "compare"])
def test_experiments_can_be_run_by_the_command_that_lists_them(command, capsys):
    """Composed with and without a plus; a run of each of train's is below."""
    names = choices_of(command, "experiment")
    assert names
    assert main([command, "--help"]) == 0
    assert f"experiment  {', '.join(names)}" in capsys.readouterr().out
    other = {"train": "compare", "compare": "train"}[command]
    for name in names:
        config = configure(command, [f"experiment={name}", "run_dir=here"])
        again = configure(command, [f"+experiment={name}", "run_dir=here"])
        words = [config.pop("command"), again.pop("command")]
        assert config == again and words[0] != words[1], "each with the words that were given"
        assert isinstance(config["n_train"], {"train": int, "compare": list}[command])
    assert not (config_dir() / "experiment").exists(), (
        f"what only {command} or {other} can run is in configs/COMMAND/experiment"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", choices_of("train", "experiment"))
def test_experiments_of_train_can_be_trained(name, tmp_path):
    words = [
        f"experiment={name}",
        "n_train=60",
        "data.n_test=5",
        "particles=50",
        *QUIET,
        "calibrate=false",
        "animation=false",
    ]
    words += ["data.encoding.epochs=1", "data.encoding.members=2"] if name != "quick" else []
    words += ["model.training.epochs=1", "model.training.window=8"] if "e2e" in name else []
    words += (
        ["+model.net.points=60", "+model.net.run=800", "+model.net.draws=4"]
        if "e2e" not in name
        else []
    )
    if name == "pendulum":
        pytest.importorskip("gymnasium")
    assert main(["train", *words, f"run_dir={tmp_path}"]) == 0
    assert metrics(tmp_path)["n_train"] == 60


def test_another_encoder_by_a_plain_override(tmp_path):
    """Arguments that the new class does not take go with the old one; those that are named are
    kept, and refused if it has none.
    """
    swap = [
        "data=dsprites",
        "model=kalman",
        "data.encoding.encoder._target_=kbf.CNN",
    ]
    encoder = configure("train", swap)["model"]["encoding"]["encoder"]
    assert encoder == {
        "_target_": "kbf.CNN",
        "q": [1, 64, 64],
        "channels": [8, 8],
        "kernel": 7,
        "norm": "none",
    }
    words = [
        *swap,
        "data.encoding.encoder.channels=[4,4]",
        "data.encoding.encoder.kernel=3",
        "data.encoding.epochs=1",
        "data.encoding.members=2",
    ]
    words += [
        "n_train=40",
        "data.n_test=5",
        "particles=50",
        *QUIET,
        "calibrate=false",
        "animation=false",
    ]
    assert main(["train", *words, f"run_dir={tmp_path}"]) == 0
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["encoding"]["encoder"]
    assert (stored["channels"], stored["kernel"]) == ([4, 4], 3)
    assert (
        configure("train", [*swap, "data.encoding.encoder.keypoints=3"])["model"]["encoding"][
            "encoder"
        ]["keypoints"]
        == 3
    )


def test_what_is_held_out_is_what_a_fit_to_the_rest_misses(tmp_path):
    from kbf.data.dataset import load_data
    from kbf.data.windows import split
    from kbf.model_choice import held_out_filter, held_out_score

    assert main([*KALMAN, "hold_out=0.25", f"run_dir={tmp_path}"]) == 0
    config = configure("train", KALMAN[1:])
    fit, held = split(load_data(config["data"]).train, 0.25)
    assert sum(len(s.states) for s in held) == 10
    again = held_out_filter(config, fit, tmp_path / "again")
    assert metrics(tmp_path)["held_out.mse"] == held_out_score(again, held).mse.mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [["model=frame"], ["model=lstm", "model.training.epochs=1"]], ids=["frame", "lstm"]
)
def test_optuna_minimises_an_error_that_every_model_has(model, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    words = ["train", *model, *SMALL, *QUIET, "seed=range(0,3)", f"hydra.sweep.dir={tmp_path}"]
    optuna = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=0",
    ]
    assert main([*words, *optuna, "-m"]) == 0
    errors = [metrics(tmp_path / k)["held_out.mse"] for k in "012"]
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert best["name"] == "optuna" and best["best_value"] == min(errors)
