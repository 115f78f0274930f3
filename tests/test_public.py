"""What people of the language expect: names complete and type-check, arrays go in, filters copy,
objects show what they hold.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import kbf
from kbf.filters.regression.window import WindowRidge
from kbf.runtime import html_repr

ROOT = Path(__file__).resolve().parent.parent
STUBS = sorted((ROOT / "kbf").rglob("__init__.pyi"))


def stub_imports(path: Path) -> dict[str, str]:
    """The names that a stub offers, and the module that each comes from."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    nodes = [
        node
        for node in body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kbf")
    ]
    assert all(alias.asname for node in nodes for alias in node.names), (
        "without 'as' a stub keeps a name for itself"
    )
    return {
        str(alias.asname): f"{node.module}.{alias.name}" for node in nodes for alias in node.names
    }


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_editors_are_told_what_is_there(stub):
    package = ".".join(stub.parent.relative_to(ROOT).parts)
    modules = {
        module.name: f"{package}.{module.name}"
        for module in pkgutil.iter_modules([str(stub.parent)])
        if not module.name.startswith("_")  # __main__ of python -m kbf
    }
    homes = vars(importlib.import_module(package)).get("_HOME", {})
    modules |= {name: f"{home}.{name}" for name, home in homes.items()}
    if package == "kbf":
        modules |= kbf._SHORT
    assert stub_imports(stub) == modules


def test_public_names():
    tree = ast.parse((ROOT / "kbf" / "__init__.pyi").read_text(encoding="utf-8"))
    (named,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(named)) == sorted(kbf.__all__) and len(kbf.__all__) > 25
    assert set(kbf.__all__) | {"smoothing", "filters", "rkhs"} <= set(dir(kbf))
    for name in dir(kbf):
        assert getattr(kbf, name) is not None
    with pytest.raises(AttributeError, match="module 'kbf' has no attribute 'KFB'"):
        _ = kbf.KFB
    assert set(kbf.layers._HOME) | {"rule"} <= set(dir(kbf.layers))
    assert kbf.layers.IWKBR is kbf.layers.rule.IWKBR


@pytest.mark.slow
def test_modules_by_attribute():
    code = (
        "import sys, kbf; assert 'torch' not in sys.modules; "
        "print(kbf.smoothing.smooth.__module__, kbf.filters.smoothing.__name__,"
        "kbf.ssm.rotation.__name__, kbf.filters.kernel.algorithm.__name__, "
        "kbf.rkhs.conditional_means.__name__)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == [
        *("kbf.filters.smoothing", "kbf.filters.smoothing"),
        *("rotation", "kbf.filters.kernel.algorithm", "kbf.rkhs.conditional_means"),
    ]
    with pytest.raises(AttributeError, match=r"module 'kbf\.filters' has no attribute 'smooting'"):
        _ = kbf.filters.smooting


PROGRAM = """import kbf
import numpy as np

recording = kbf.Recording(np.zeros((9, 2)), np.zeros((9, 3)))
kernel_filter = kbf.KBF(rank=3).fit(recording)
reveal_type(kbf.rollout(kernel_filter, recording.obs[None]).estimates)
reveal_type(kbf.smoothing.smooth(kernel_filter, np.zeros((1, 9, 3))).estimates)
reveal_type(kbf.filters.kernel.kbf.KBF)
kbf.KBF(rnak=3)
kbf.KFB
kbf.filters.smooting
kbf.RunningFilter(kernel_filter).stepp
"""
REVEALED = {6: '"Tensor"', 7: '"Tensor"', 8: '"type[KBF]"'}
WRONG = {9: "rnak", 10: "KFB", 11: "smooting", 12: "stepp"}


def pyright(*arguments: str | Path) -> dict:
    """What pyright says of kbf as people have it, installed in the environment that runs."""
    pytest.importorskip("pyright")
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    run = [sys.executable, "-m", "pyright", "--outputjson", *map(str, arguments)]
    environment = os.environ | {"PATH": search, "PYTHONPATH": str(ROOT)}
    return json.loads(
        subprocess.run(run, cwd=ROOT.parent, env=environment, capture_output=True, text=True).stdout
    )


@pytest.mark.slow
def test_a_misspelt_argument_is_an_error(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(ROOT)]})
    )
    found = pyright("--project", tmp_path, "--pythonpath", sys.executable)["generalDiagnostics"]
    lines = {
        entry["range"]["start"]["line"] + 1: entry
        for entry in found
        if entry["severity"] in ("error", "information")
    }
    assert {line for line, entry in lines.items() if entry["severity"] == "error"} == set(WRONG), (
        found
    )
    assert all(word in lines[line]["message"] for line, word in (WRONG | REVEALED).items())


@pytest.mark.slow
def test_types_are_complete():
    complete = pyright("--verifytypes", "kbf", "--ignoreexternal")["typeCompleteness"]
    counts = complete["exportedSymbolCounts"]
    assert complete["completenessScore"] >= 0.95 and counts["withKnownType"] > 3000


# Arrays


@pytest.fixture(scope="module")
def data() -> kbf.SyntheticData:
    return kbf.SyntheticData(kbf.ssm.rotation(), n_train=60, n_test=12, seed=0)


def test_numpy_arrays_go_in(data):
    (train,), (test,) = data.train, data.test
    with_arrays = kbf.Recording(train.states.numpy(), obs=train.obs.numpy())
    assert isinstance(with_arrays.obs, torch.Tensor)
    model, x = kbf.KBF(rank=8, dtype="float64"), test.obs[None]
    model.prepare([with_arrays])
    kernel_filter = model.fit(with_arrays)
    expected = kbf.rollout(model.fit(train), x).estimates
    mask = np.ones((1, 12), dtype=bool)
    assert torch.equal(kbf.rollout(kernel_filter, x.numpy(), mask=mask).estimates, expected)
    assert torch.equal(kbf.smooth(kernel_filter, x.numpy(), lag=0).estimates, expected)
    assert torch.equal(
        kbf.predict_ahead(kernel_filter, x.numpy(), 1), kbf.predict_ahead(kernel_filter, x, 1)
    )
    live = kbf.RunningFilter(kernel_filter)
    assert torch.equal(torch.stack([live.step(x[:, t].numpy()) for t in range(12)], 1), expected)
    state = kbf.step(kernel_filter, kernel_filter.init(1), x[:, 0].numpy())
    assert torch.equal(kernel_filter.estimate(state), expected[:, 0])
    assert torch.equal(
        kbf.score(kernel_filter, [kbf.Recording(test.states.numpy(), test.obs.numpy())]).estimates[
            0
        ],
        expected[0],
    )


@pytest.mark.parametrize(
    "change",
    [lambda x: x[::-1], lambda x: x.astype(">f8"), lambda x: np.broadcast_to(x[:1], x.shape)],
)
def test_any_array_is_read(change):
    array = change(np.arange(6.0).reshape(3, 2))
    assert torch.equal(
        kbf.Recording(array, np.zeros((3, 1))).states,
        torch.tensor(array.tolist(), dtype=torch.float64),
    )


UNREADABLE = {
    "kbf.Recording([[1.0, 2.0]], np.zeros((1, 1)))": (
        "states must be a tensor or a NumPy array, got a list: numpy.asarray(states)"
    ),
    "kbf.Recording(np.zeros((1, 1)), np.array([['a']]))": (
        "obs must be numbers, got an array of <U1: obs.astype(float) turns"
    ),
    "kbf.KBF().fit((np.zeros((9, 2)), np.zeros((9, 2))))": (
        "recordings are kbf.Recording(states, observations)"
    ),
    "kbf.KBF().fit([kbf.Recording(np.zeros(9), np.zeros((9, 2)))])": (
        "states must be (T, d) and observations (T, ...)"
    ),
}


@pytest.mark.slow
def test_what_cannot_go_in_gets_one_line():
    """In a process of its own: in this one every annotation is checked before the function is
    called.
    """
    tries = "".join(
        f"try:\n    {code}\nexcept ValueError as error:\n    print(error)\n" for code in UNREADABLE
    )
    code = f"import kbf\nimport numpy as np\n{tries}"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(told) == len(UNREADABLE)
    assert all(message in line for message, line in zip(UNREADABLE.values(), told, strict=True)), (
        told
    )


# Copies


MODELS = [
    lambda: kbf.KBF(rank=8, dtype="float64"),
    lambda: kbf.KBF(rank=None, rule="original", dtype="float64"),
    lambda: kbf.SimulatedKBF(points=40, run=400, dtype="float64"),
    kbf.LearnedKalman,
    lambda: kbf.LearnedUKF(ranks=(20,), factors=(1.0,), kinds=("linear", "kernel")),
    lambda: kbf.ParticleFilter(kbf.ssm.rotation(), particles=50),
    lambda: kbf.UKF(kbf.ssm.rotation()),
    WindowRidge,
]


@pytest.mark.parametrize("make", MODELS)
def test_filters_can_be_copied(make, data):
    model = make()
    model.prepare(data.train)
    original = model.fit(data.train)
    copied, x = copy.deepcopy(original), data.test[0].obs[None]
    runs = [
        kbf.rollout(each, x, generator=torch.Generator().manual_seed(0)).estimates
        for each in (original, copied)
    ]
    assert torch.equal(*runs) and not runs[1].requires_grad
    if isinstance(copied, torch.nn.Module):
        for one, other in zip(original.buffers(), copied.buffers(), strict=True):
            assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
        for buffer in copied.buffers():
            buffer.zero_()
        assert torch.equal(kbf.rollout(original, x).estimates, runs[0])


# What is shown


def test_objects_say_what_they_hold(data):
    model = kbf.KBF(rank=8)
    model.prepare(data.train)
    kernel_filter = model.fit(data.train)
    run = kbf.rollout(kernel_filter, data.test[0].obs[None])
    result = kbf.score(kernel_filter, data.test)
    said = [
        (data, ("SyntheticData", "1 recording, 60 steps", "1 recording, 12 steps")),
        (data.train[0], ("Recording", "60 x 2 float64")),
        (model, ("KBF", "rank", "8", "importance_weighted")),
        (kernel_filter, ("KernelBayesFilter", "60 x 2")),
        (kbf.LearnedKalman().fit(data.train), ("KalmanFilter",)),
        (run, ("Rollout", "1 x 12 x 2", "rejected")),
        (result, ("Score", f"{result.mse.item():.4g}")),
        (kbf.RunningFilter(kernel_filter), ("RunningFilter", "KernelBayesFilter")),
    ]
    for thing, words in said:
        page = thing._repr_html_()
        assert len(repr(thing)) < 1000 and len(page) < 40_000
        for word in words:
            assert word in repr(thing) and word in page, (word, repr(thing))
    assert (
        "<svg" in run._repr_html_() and "<svg" in data._repr_html_() and "tensor(" not in repr(run)
    )


def test_curves_have_gaps_and_pages_are_escaped():
    drawn = html_repr.lines([[0.0], [1.0], [float("nan")], [2.0], [3.0]], "z < 1")
    assert (
        drawn.count("M") == 2
        and drawn.count("L") == 2
        and "z &lt; 1" in drawn
        and "from 0 to 3" in drawn
    )
    assert (
        html_repr.lines([[float("nan")]] * 3, "nothing") == ""
        and html_repr.lines([[1.0]], "one step") == ""
    )
    assert "&lt;b&gt;" in html_repr.table("<b>", [("n", "<i>")]) and "<i>" not in html_repr.table(
        "", [("n", "<i>")]
    )


# A data module of one's own


class Mine(lightning.LightningDataModule):
    """Windows cut by a loader that knows nothing of kbf but its record."""

    def __init__(self, train: kbf.Recording, test: kbf.Recording) -> None:
        super().__init__()
        self.windows = kbf.Recording(
            train.states.unflatten(0, (-1, 15)), train.obs.unflatten(0, (-1, 15))
        )
        self.new = kbf.Recording(test.states[None], test.obs[None])

    def train_dataloader(self) -> DataLoader:
        return DataLoader([self.windows], batch_size=None)

    def test_dataloader(self) -> DataLoader:
        return DataLoader([self.new], batch_size=None)

    predict_dataloader = test_dataloader


def test_a_data_module_of_ones_own(data):
    net = {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "hidden": 8,
        "sizes": [8],
    }
    config = {
        "model": {
            "name": "lstm",
            "net": net,
            "training": {"epochs": 2, "lr": 0.01},
            "dtype": "float64",
        },
        "seed": 0,
    }
    module = kbf.FilterTraining(config, data.train)
    options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **options)
    mine = Mine(data.train[0], data.test[0])
    trainer.fit(module, mine)
    (told,) = trainer.test(module, mine, verbose=False)
    (estimates,) = trainer.predict(module, mine)
    assert estimates.shape == (1, 12, 2) and torch.equal(module(data.test[0].obs[None]), estimates)
    assert told["test/mse"] == pytest.approx(
        (estimates[0] - data.test[0].states).square().sum(-1).mean().item()
    )
