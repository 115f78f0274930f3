"""What a file describes needs a limited memory, estimated before it is built."""

from __future__ import annotations

import json

import pytest
import torch

from kbf.cli import main
from kbf.runtime.instantiate import build
from kbf.runtime.memory_limit import LARGEST_MEMORY, check_arguments, check_module

CNN = {"_target_": "kbf.CNN", "q": [3, 36, 48]}


def test_parameters_are_counted_without_their_memory():
    wide = torch.nn.Linear
    check_module(lambda: wide(2**14, 2**14), copies=3)  # 3 GiB and three vectors
    with pytest.raises(ValueError, match="Linear needs 4 GiB, of at most 4 GiB"):
        check_module(lambda: wide(2**14, 2**14), copies=4)


def test_copies_count_and_no_random_numbers_are_drawn():
    torch.manual_seed(0)
    expected = build(CNN, trust=True).state_dict()
    torch.manual_seed(0)
    found = build(CNN, kinds=("encoder",)).state_dict()
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())
    with pytest.raises(ValueError, match=r"CNN needs .* GiB, of at most 4 GiB.*trust=true"):
        build(CNN, kinds=("encoder",), copies=10**6)


@pytest.mark.parametrize("name", ["Pendulum", "DSprites", "OrientationImages", "PendulumRKN"])
def test_data_sets_of_images_estimate_an_upper_bound(name):
    import kbf

    source = getattr(kbf, name)
    numbers = {"Pendulum": 3 * 32 * 32, "DSprites": 64 * 64, "PendulumRKN": 150 * 24 * 24}
    number = numbers.get(name, 3 * 36 * 48)
    needed = source.memory_needed(n_train=50, n_test=50)
    assert 4 * 100 * number <= needed <= 40 * 100 * number
    check_arguments(source, {"n_train": 300})
    with pytest.raises(ValueError, match="at most 4 GiB"):
        check_arguments(source, {"n_train": LARGEST_MEMORY // (8 * number)})


@pytest.mark.slow
def test_what_was_trained_on_long_recordings_is_evaluated(tmp_path):
    words = ["n_train=3", "data.n_test=2", "particles=50"]
    train = ["train", "data=pendulum_rkn", "model=mean", "data.source.steps=600", *words]
    train += ["data.encoding.epochs=1", "data.encoding.members=2", "logger=none"]
    train += ["calibrate=false", "animation=false", "trainer.enable_progress_bar=false"]
    assert main([*train, f"run_dir={tmp_path / 'run'}"]) == 0
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    evaluate = ["evaluate", f"checkpoint={best}", "animation=false", f"run_dir={tmp_path / 'e'}"]
    assert main(evaluate) == 0
    trained, again = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("run", "e")
    )
    assert again["test.mse"] == pytest.approx(trained["test.mse"], rel=1e-6)
