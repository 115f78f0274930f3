"""A filter is loaded from its checkpoint without the frameworks that trained it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kbf.cli import main
from kbf.config.prepare import configure
from kbf.data.dataset import load_data
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.model import inner_filter
from kbf.training.fit import train

CODE = """
import sys
import kbf, numpy
filter = kbf.load_filter("example:rotation").filter
print(tuple(kbf.rollout(filter, numpy.zeros((1, 3, 2))).estimates.shape))
print([name for name in ("lightning", "hydra", "omegaconf") if name in sys.modules])
"""


def test_a_filter_is_loaded_without_lightning_and_hydra():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["(1, 3, 2)", "[]"]


SMALL = ["+model.net.points=60", "+model.net.run=800", "+model.net.draws=4"]


def test_a_loaded_filter_equals_the_trained_one(tmp_path):
    """Its float32 operators have the same layout, too, on which their rounding depends."""
    words = ["model=kbf", "~model.model_selection", "n_train=60", "data.n_test=50", *SMALL]
    config = configure("train", [*words, "logger=none", "callbacks=none"])
    data = load_data(config["data"], trust=True)
    trained = train(config, data.train, tmp_path, trust=True)
    loaded = load_filter(tmp_path / "best.ckpt")
    filters = [inner_filter(each.filter) for each in (trained, loaded)]
    leaves = [list(each.buffers()) for each in filters]
    assert any(leaf.dtype == torch.float32 and leaf.ndim == 2 for leaf in leaves[0])
    assert all(leaf.is_contiguous() for each in leaves for leaf in each)
    obs = data.test[0].obs[None]
    first, second = (rollout(each.filter, obs).estimates for each in (trained, loaded))
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_scores_of_training_and_evaluation_are_equal(tmp_path):
    words = ["model=kbf", "n_train=60", "data.n_test=50", "particles=50", "budget=2s", *SMALL]
    assert main(["train", *words, "logger=none", f"run_dir={tmp_path / 'run'}"]) == 0
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    words = [f"checkpoint={best}", f"run_dir={tmp_path / 'scores'}", "particles=50"]
    assert main(["evaluate", *words]) == 0
    first, second = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("run", "scores")
    )
    scores = [key for key in first if key.startswith("test.") and first[key] is not None]
    assert "test.mse" in scores and "test.coverage_95" in scores
    for key in scores:
        assert second[key] == pytest.approx(first[key], rel=1e-12, abs=1e-12), key
