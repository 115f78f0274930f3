"""Checkpoints from somebody who means harm: each is one line and exit code 2, and runs nothing."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from kbf.cli import main
from kbf.config import config_dir
from kbf.filters.online import read_leaves
from kbf.fitted.checkpoint import load_filter, read_checkpoint
from kbf.runtime.allowlist import INSIDE, REGISTERED, files_named, without_weights
from kbf.runtime.instantiate import build, locate
from kbf.runtime.interpolation import literal, resolved, settled
from kbf.runtime.memory_limit import check_arguments

EXECUTE = {"_target_": "os.system", "command": "touch HERE"}
THROUGH = {"_target_": "kbf.runtime.instantiate.build", "trust": True, "config": EXECUTE}
LOCATED = {"_target_": "kbf.runtime.instantiate.locate", "name": "os.system"}
OWN = {"_target_": "kbf.FileData", "path": "HERE"}
NESTED: dict = {"_target_": "kbf.KBF"}
for _ in range(150):
    NESTED = {"_target_": "kbf.LSTMFilter", "d": 2, "q": 2, "encoder": NESTED}

NETS = {
    "another package": EXECUTE,
    "builtins": {"_target_": "builtins.eval"},
    "a builder that trusts": THROUGH,
    "a name looked up": LOCATED,
    "a call with arguments": {
        "_target_": "kbf.runtime.instantiate.call",
        "name": "os.system",
        "arguments": {"command": "touch HERE"},
    },
    "a builder of trusted things": {
        "_target_": "kbf.runtime.instantiate.build_trusted",
        "config": EXECUTE,
    },
    "a command": {"_target_": "kbf.cli.main", "argv": ["train"]},
    "a command's worker": {"_target_": "kbf.cli.execute", "command": "train", "config": {}},
    "a loader that trusts": {
        "_target_": "kbf.fitted.checkpoint.load_filter",
        "path": "HERE",
        "trust": True,
    },
    "the data with trust": {
        "_target_": "kbf.data.dataset.load_data",
        "config": {"source": EXECUTE},
        "trust": True,
    },
    "training with trust": {"_target_": "kbf.training.fit.train", "config": {}, "trust": True},
    "a writer of files": {
        "_target_": "kbf.runtime.atomic_files.write_text",
        "path": "HERE",
        "text": "x",
    },
    "a copier of files": {
        "_target_": "kbf.runtime.atomic_files.copy",
        "source": "/etc/passwd",
        "path": "HERE",
    },
    "a download": {
        "_target_": "kbf.data.cache.download",
        "url": "http://127.0.0.1:1/",
        "path": "HERE",
    },
    "something imported into kbf": {"_target_": "kbf.training.fit.Path", "x": "HERE"},
    "an attribute of it": {"_target_": "kbf.training.fit.torch.load", "f": "HERE"},
    "work over all pieces": {
        "_target_": "kbf.commands.support.resumable_jobs.finish_all",
        "work": LOCATED,
        "pieces": ["touch HERE"],
    },
    "a class that is not registered": {
        "_target_": "kbf.filters.particle.bootstrap.BootstrapFilter",
        "resample": LOCATED,
    },
    "a function": {"_target_": "kbf.ssm.simulate"},
    "a source of data": OWN,
    "a problem": {"_target_": "kbf.rotation"},
    "code as an argument": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "encoder": EXECUTE,
        "features": 3,
    },
    "a builder as an argument": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "encoder": THROUGH,
        "features": 3,
    },
    "code in a list": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "sizes": [64, EXECUTE],
    },
    "code in a problem": {
        "_target_": "kbf.EKF",
        "model": {"_target_": "kbf.rotation", "dtype": EXECUTE},
    },
    "a source as an argument": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "encoder": OWN,
        "features": 3,
    },
    "a model in a model": {
        "_target_": "kbf.EKF",
        "model": {"_target_": "kbf.LearnedKalman"},
    },
    "code without a class": {"encoder": EXECUTE},
    "a list of code": {"_target_": [EXECUTE, EXECUTE]},
    "a target that is code": {"_target_": EXECUTE},
    "no name": {"_target_": None},
    "a wrong argument": {"_target_": "kbf.KBF", "bogus": 1},
    "arguments of wrong types": {
        "_target_": "kbf.KBF",
        "factors": "abc",
        "tol": {},
    },
    "a problem that is none": {"_target_": "kbf.EKF", "model": {"f": 1}},
    "far too deep": NESTED,
    "an object": {"_target_": "kbf.KBF", "rank": torch.zeros(3)},
    "a transform that is code": {"_target_": "kbf.Augment", "transforms": [EXECUTE]},
}
SOURCES = {
    "another package": EXECUTE,
    "a builder that trusts": THROUGH,
    "a name looked up": LOCATED,
    "a model": {"_target_": "kbf.LearnedKalman"},
    "code as the problem": {
        "_target_": "kbf.SyntheticData",
        "n_train": 9,
        "problem": EXECUTE,
    },
    "a builder as the problem": {
        "_target_": "kbf.SyntheticData",
        "n_train": 9,
        "problem": THROUGH,
    },
    "code as a number": {
        "_target_": "kbf.SyntheticData",
        "n_train": EXECUTE,
        "problem": {"_target_": "kbf.rotation"},
    },
    "a problem that is none": {
        "_target_": "kbf.SyntheticData",
        "n_train": 9,
        "problem": {"f": 2},
    },
    "nothing": None,
    "a text": "os.system",
    "the environment as a file": {
        "_target_": "kbf.FileData",
        "path": "/${oc.env:HOME}/none.csv",
    },
    "an endless reference": {
        "_target_": "kbf.FileData",
        "path": "${data.source.path}",
    },
}


LSTM = {"_target_": "kbf.LSTMFilter", "d": 2, "q": 2}
LARGE_NETS = {
    "hidden units": LSTM | {"hidden": 100_000},
    "layers": LSTM | {"sizes": [2000] * 1000},
    "a wide layer": LSTM | {"sizes": [10**9]},
    "observations": LSTM | {"q": [3, 10**5, 10**5], "features": 8},
    "a fraction": LSTM | {"hidden": 1e18},
    "rank": {"_target_": "kbf.KBF", "rank": 10**12},
    "points": {"_target_": "kbf.SimulatedKBF", "points": 10**9},
    "particles": {
        "_target_": "kbf.LearnedParticleFilter",
        "particles": 10**11,
    },
    "channels": {"_target_": "kbf.CNN", "q": [3, 36, 48], "channels": [10**6]},
    "a number beyond all": LSTM | {"hidden": 10**400},
}
SYNTHETIC = {
    "_target_": "kbf.SyntheticData",
    "problem": {"_target_": "kbf.rotation"},
}
LARGE_SOURCES = {
    "training steps": SYNTHETIC | {"n_train": 10**9},
    "test steps": SYNTHETIC | {"n_train": 100, "n_test": 10**9},
    "images": {"_target_": "kbf.Pendulum", "n_train": 50_000},
    "pixels": {
        "_target_": "kbf.OrientationImages",
        "n_train": 9,
        "frames": "none.npz",
        "size": [2000, 2000],
    },
}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Makes a copy of the shipped checkpoint with other contents, and tells whether
    something ran.
    """
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace"
    (tmp_path / "obs.csv").write_text("observation_1,observation_2\n0.1,0.2\n", encoding="utf-8")
    original = read_checkpoint("example:rotation")

    def put(value):
        if isinstance(value, dict):
            return {key: put(each) for key, each in value.items()}
        if isinstance(value, list):
            return [put(each) for each in value]
        return value.replace("HERE", str(trace)) if isinstance(value, str) else value

    def make(change):
        contents = copy.deepcopy(original)
        change(contents["hyper_parameters"]["config"], put)
        torch.save(contents, tmp_path / "last.ckpt")
        return "last.ckpt"

    make.trace = trace
    return make


def refused(capsys, words):
    code = main(words)
    told = capsys.readouterr().err.strip()
    assert code == 2, (words, told)
    assert len(told.splitlines()) == 1 and told.startswith(f"kbf {words[0]}: "), told
    return told


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_no_net_of_a_checkpoint_runs_anything(hostile, capsys, net):
    path = hostile(lambda config, put: config["model"].update(net=put(net)))
    refused(capsys, ["filter", f"checkpoint={path}", "input=obs.csv"])
    assert not hostile.trace.exists() and sorted(os.listdir()) == ["last.ckpt", "obs.csv"]


@pytest.mark.parametrize("command", ["filter", "export", "report", "append", "evaluate", "train"])
@pytest.mark.parametrize("net", ["another package", "a builder that trusts", "a name looked up"])
def test_no_command_runs_it(hostile, capsys, command, net):
    path = hostile(lambda config, put: config["model"].update(net=put(NETS[net])))
    words = {
        "filter": ["input=obs.csv"],
        "export": ["out=a.onnx"],
        "report": ["out=a.html"],
        "append": ["out=a.ckpt", "seed=3"],
    }.get(command, [])
    key = "ckpt_path" if command == "train" else "checkpoint"
    assert "trust=true" in refused(
        capsys, [command, f"{key}={path}", *words, *(["run_dir=new"] if command == "train" else [])]
    )
    assert not hostile.trace.exists()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("command", ["evaluate", "append", "train"])
def test_no_source_of_data_runs_anything(hostile, capsys, command, source):
    def change(config, put):
        config["data"]["source"] = put(source)
        config["recipe"]["data"]["source"] = put(source)

    path = hostile(change)
    words = {
        "evaluate": [f"checkpoint={path}"],
        "append": [f"checkpoint={path}", "out=a.ckpt", "seed=3"],
    }
    told = refused(capsys, [command, *words.get(command, [f"ckpt_path={path}", "run_dir=new"])])
    assert os.environ["HOME"] not in told
    assert (
        not hostile.trace.exists()
        and not os.path.exists("a.ckpt")
        and not os.path.exists("new/checkpoints")
    )


@pytest.mark.parametrize("net", LARGE_NETS.values(), ids=LARGE_NETS)
def test_no_net_fills_the_memory(hostile, capsys, net):
    path = hostile(lambda config, put: config["model"].update(net=net))
    told = refused(capsys, ["filter", f"checkpoint={path}", "input=obs.csv"])
    assert ("at most" in told and "trust=true" in told) or "is of the kind" in told


@pytest.mark.slow
@pytest.mark.parametrize("source", LARGE_SOURCES.values(), ids=LARGE_SOURCES)
def test_no_data_fills_the_memory(hostile, capsys, source):
    path = hostile(lambda config, put: config["recipe"]["data"].update(source=source))
    assert "at most" in refused(capsys, ["evaluate", f"checkpoint={path}", "run_dir=out"])


def test_neither_encoders_nor_windows_are_too_many(hostile, capsys):
    encoder = {"_target_": "kbf.CNN", "q": [3, 36, 48]}
    for part in (
        {"encoding": {"epochs": 1, "lr": 0.1, "members": 10**6, "encoder": encoder}},
        {"training": {"window": 10**9}},
    ):
        path = hostile(lambda config, put, part=part: config["model"].update(part))
        refused(capsys, ["filter", f"checkpoint={path}", "input=obs.csv"])


@pytest.mark.parametrize(
    "leaf",
    [torch.zeros(1).expand(10**6, 10**6), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()],
)
def test_no_tensor_is_larger_than_the_file(hostile, capsys, leaf):
    contents = read_checkpoint("example:rotation")
    contents["state_dict"]["net.more"] = leaf
    torch.save(contents, "last.ckpt")
    assert "is no checkpoint, or damaged" in refused(
        capsys, ["filter", "checkpoint=last.ckpt", "input=obs.csv"]
    )
    torch.save({"mean": leaf}, "state.pt")
    with pytest.raises(ValueError, match="damaged, or not the state"):
        read_leaves("state.pt")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another shape", "infinite estimates"])
def test_operators_that_fail_at_the_first_step_are_refused_when_they_are_loaded(
    hostile, capsys, change
):
    contents = read_checkpoint("example:rotation")
    operators = contents["kbf"]["operators"]
    if change == "another shape":
        operators["states"] = torch.zeros(3)
    else:
        operators["prior"].fill_(3e38)  # finite; what it weighs is not
    torch.save(contents, "last.ckpt")
    told = refused(capsys, ["filter", "checkpoint=last.ckpt", "input=obs.csv"])
    assert "does not fit kbf" in told or "must be 2 finite numbers" in told


def test_a_file_is_not_shared_by_a_thousand_tensors(tmp_path):
    once = torch.zeros(100_000)
    torch.save({str(k): once for k in range(100)}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="damaged"):
        read_leaves(tmp_path / "state.pt")
    torch.save({str(k): once for k in range(3)}, tmp_path / "state.pt")
    assert len(read_leaves(tmp_path / "state.pt")) == 3


def test_no_number_of_a_recipe_is_code_where_the_data_is_ones_own(hostile, capsys):
    path = hostile(lambda config, put: config["recipe"].update(n_train=put(EXECUTE)))
    assert "recipe" in refused(capsys, ["evaluate", f"checkpoint={path}", "data=oscillatory"])
    path = hostile(lambda config, put: config["recipe"].update(more=put(EXECUTE)))
    assert "recipe" in refused(capsys, ["evaluate", f"checkpoint={path}", "data=oscillatory"])
    assert not hostile.trace.exists()


@pytest.mark.parametrize("key", ["epochs", "clip"])
def test_no_setting_of_the_training_is_code(hostile, capsys, key):
    def change(config, put):
        config["model"]["training"] = {"epochs": 1, "lr": 0.1} | {key: put(EXECUTE)}

    refused(capsys, ["train", f"ckpt_path={hostile(change)}", "run_dir=new"])
    assert not hostile.trace.exists()


@pytest.mark.slow
def test_the_environment_stays_text(hostile, capsys, monkeypatch):
    monkeypatch.setenv("KBF_SECRET", "a-secret")
    secret = [
        "${oc.env:KBF_SECRET}",
        "${oc.decode:${oc.env:KBF_SECRET}}",
        "\\\\${oc.env:KBF_SECRET}",
        "${data.${oc.env:KBF_SECRET}}",
    ]
    for text in secret:
        path = hostile(lambda config, put, text=text: config["recipe"]["data"].update(name=text))
        main(["evaluate", f"checkpoint={path}", "run_dir=out", "particles=10"])
        assert "a-secret" not in "".join(capsys.readouterr())
        assert "a-secret" not in (hostile.trace.parent / "out" / "metrics.json").read_text()


@pytest.mark.slow
def test_files_that_a_checkpoint_names_are_told_and_weights_are_not_read(hostile, capsys, tmp_path):
    def change(config, put):
        config["recipe"]["data"]["source"] = put(OWN)

    main(["evaluate", f"checkpoint={hostile(change)}"])
    assert f"reading {hostile.trace}".replace("\n", "") in capsys.readouterr().out.replace("\n", "")
    backbone = {
        "_target_": "kbf.Backbone",
        "weights": "/etc/passwd",
        "q": [1, 8, 8],
    }
    assert (
        files_named({"net": [backbone]}) == ["/etc/passwd"]
        and files_named(without_weights({"net": [backbone]})) == []
    )


def test_only_a_person_can_trust(hostile):
    path = hostile(
        lambda config, put: config["model"].update(net={"_target_": "collections.OrderedDict"})
    )
    with pytest.raises(
        ValueError, match="must be a module with prepare and fit, got a OrderedDict"
    ):  # it was called
        load_filter(path, trust=True)


def test_recipes_are_settled_when_they_are_written(monkeypatch):
    monkeypatch.setenv("KBF_PLACE", "/here")
    raw = {
        "path": "${oc.env:KBF_PLACE}/x",
        "n": "${d}",
        "d": 3,
        "both": ["a${d}", "${oc.env:KBF_PLACE}${d}"],
    }
    # Calls of resolvers are settled, and the environment remains a reference.
    assert settled(raw, resolved(raw)) == {
        "path": "${oc.env:KBF_PLACE}/x",
        "n": "${d}",
        "d": 3,
        "both": ["a${d}", "${oc.env:KBF_PLACE}3"],
    }
    called = {"a": "${oc.select:d}", "d": 3}
    assert settled(called, resolved(called)) == {"a": 3, "d": 3}
    read = OmegaConf.to_container(OmegaConf.create(literal(raw)), resolve=True)
    assert read == {
        "path": "${oc.env:KBF_PLACE}/x",
        "n": 3,
        "d": 3,
        "both": ["a3", "${oc.env:KBF_PLACE}${d}"],
    }


def targets(config):
    if isinstance(config, list):
        return {name for value in config for name in targets(value)}
    if not isinstance(config, dict):
        return set()
    return {name for value in config.values() for name in targets(value)} | (
        {config["_target_"]} if "_target_" in config else set()
    )


def parts(config):
    values = (
        config.values() if isinstance(config, dict) else config if isinstance(config, list) else []
    )
    return ([config] if isinstance(config, dict) else []) + [
        part for value in values for part in parts(value)
    ]


def test_everything_that_the_configurations_name_is_registered_and_exists():
    named = set()
    for folder in ("model", "data", "encoder", "experiment"):
        for path in sorted((config_dir() / folder).glob("*.yaml")):
            named |= targets(yaml.safe_load(path.read_text(encoding="utf-8")))
    registered = {name for names in REGISTERED.values() for name in names}
    assert named <= registered and len(named) > 15
    assert all(callable(locate(name)) for name in registered)
    for folder in ("model", "data", "encoder", "experiment", "tuned"):
        for path in sorted((config_dir() / folder).rglob("*.yaml")):
            for part in parts(yaml.safe_load(path.read_text(encoding="utf-8"))):
                given = {key: value for key, value in part.items() if "${" not in str(value)}
                if "_target_" in part:
                    check_arguments(locate(part["_target_"]), given)
    assert (
        INSIDE.keys() == REGISTERED.keys()
        and {kind for kinds in INSIDE.values() for kind in kinds} <= REGISTERED.keys()
    )


def test_functions_are_registered_only_as_makers_of_problems():
    functions = {
        name
        for names in REGISTERED.values()
        for name in names
        if not isinstance(locate(name), type)
    }
    assert functions == {
        "kbf.discrete_lorenz",
        "kbf.double_pendulum",
        "kbf.lorenz96",
        "kbf.lorenz_flow",
        "kbf.oscillatory",
        "kbf.position_model",
        "kbf.rotation",
        "kbf.spherical_lorenz",
        "kbf.turning_target",
    }


def test_ones_own_configuration_may_name_anything():
    assert build({"_target_": "fractions.Fraction", "numerator": 3}, trust=True) == 3
    assert build({"a": [THROUGH | {"config": 3}]}, trust=True) == {"a": (3,)}


def test_what_holds_itself_is_refused(hostile, capsys):
    endless: list = [1]
    endless.append(endless)
    wide: list = [1]
    for _ in range(40):
        wide = [wide, wide, wide]  # 3^40 entries that take no room
    for value in (endless, wide):
        path = hostile(lambda config, put, value=value: config["model"].update(more=value))
        assert "is no checkpoint, or damaged" in refused(
            capsys, ["filter", f"checkpoint={path}", "input=obs.csv"]
        )
