"""Recordings of packages: made once, checked, and cut in time."""

from __future__ import annotations

import hashlib
import importlib.util

import numpy as np
import pytest
import torch

from kbf.data import recorded
from kbf.data.dataset import completed, load_data
from kbf.data.recorded import Arrays, RecordedData, Source, kept, package_file

LENGTHS = (40, 30, 30)


@pytest.fixture
def ramps(tmp_path, monkeypatch):
    """Three recordings of a "package": states count the steps, observations are their squares, the
    control is the seed.
    """
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "ramps"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "data.txt").write_bytes(b"as it should be")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    calls = []

    def make(seed, progress):
        package_file("ramps")
        calls.append(seed)
        progress(1.0)
        steps = np.arange(100.0)[:, None]
        return Arrays(steps, steps**2, np.full((100, 1), float(seed)), np.array(LENGTHS))

    checksum = hashlib.sha256(b"as it should be").hexdigest()
    monkeypatch.setitem(
        recorded.RECORDED, "ramps", Source(make, "ramps", "data.txt", checksum, drawn=True)
    )
    return calls


def steps(sequences):
    return torch.cat([s.states[:, 0] for s in sequences]).int().tolist()


def test_parts_follow_each_other_and_do_not_cross_recordings(ramps):
    data = RecordedData("ramps")
    assert steps(data.train) == list(range(80))
    assert steps(data.test) == list(range(80, 100))
    assert [len(s.states) for s in data.train] == [40, 30, 10]
    assert all(torch.equal(s.obs, s.states.square()) for s in [*data.train, *data.test])


def test_rolling_splits_learn_from_what_was_before(ramps):
    for first, last in ((0.5, 0.6), (0.6, 0.75), (0.75, 1.0)):
        data = RecordedData("ramps", test=(first, last))
        assert steps(data.train) == list(range(round(100 * first)))
        assert steps(data.test) == list(range(round(100 * first), round(100 * last)))


def test_whole_recordings_are_left_out(ramps):
    data = RecordedData("ramps", test=(2 / 3, 1.0), by="recording")
    assert [len(s.states) for s in data.train] == [40, 30]
    assert steps(data.test) == list(range(70, 100))


def test_n_train_takes_the_first_steps_and_leaves_the_test_as_it_is(ramps):
    data = RecordedData("ramps", n_train=50)
    assert steps(data.train) == list(range(50))
    assert steps(data.test) == list(range(80, 100))
    recipe = {"data": {"source": {"_target_": "kbf.RecordedData", "name": "ramps"}}}
    data = load_data(recipe["data"])
    assert completed({**recipe, "n_train": None}, data) == {**recipe, "n_train": 80}
    assert completed({**recipe, "n_train": 50}, data) == {**recipe, "n_train": 50}
    with pytest.raises(ValueError, match="has 80 training steps"):
        RecordedData("ramps", n_train=81)


def test_a_recording_is_made_once_for_each_seed(ramps):
    for seed in (0, 0, 3, 0, 3):
        controls = RecordedData("ramps", seed=seed).train[0].controls
        assert controls is not None
        assert (controls == seed).all()
    assert ramps == [0, 3]


def test_a_damaged_file_in_the_cache_is_made_anew(ramps, tmp_path):
    whole = kept("ramps", 0)
    (path,) = (tmp_path / "cache").glob("ramps-*.npz")
    path.write_bytes(path.read_bytes()[:-200])
    assert np.array_equal(kept("ramps", 0).obs, whole.obs)
    with np.load(path) as stored:
        changed = {name: stored[name] for name in stored.files}
    changed["obs"] = changed["obs"] + 1
    np.savez_compressed(path, **changed)
    assert np.array_equal(kept("ramps", 0).obs, whole.obs), "another content than its checksum says"
    assert ramps == [0, 0, 0]


def test_progress_is_told(ramps):
    shares = []
    kept("ramps", 7, shares.append)
    assert shares == [1.0]


def test_a_package_that_is_missing_or_has_another_file_is_named(ramps, tmp_path, monkeypatch):
    for content in (b"as it should bE", b"longer than it should be", b""):
        (tmp_path / "ramps" / "data.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"data\.txt .* of the package ramps is not the file"):
            RecordedData("ramps")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, package in (
        ("rat", "ratinabox"),
        ("ppg", "heartpy"),
        ("watch", "seglearn"),
        ("cartpole", "dm_control"),
    ):
        with pytest.raises(ValueError, match=rf'{package}.*pip install "kbf\[recordings\]"'):
            package_file(name)


def test_settings_that_make_no_sense_are_refused(ramps):
    with pytest.raises(
        ValueError, match="no recording 'mouse'; there are rat, ppg, watch, cartpole"
    ):
        RecordedData("mouse")
    for test in ((0.8,), (0.0, 0.5), (0.8, 0.8), (0.5, 1.2)):
        with pytest.raises(ValueError, match="two shares"):
            RecordedData("ramps", test=test)
    with pytest.raises(ValueError, match="step or recording"):
        RecordedData("ramps", by="person")
    with pytest.raises(ValueError, match="leaves"):
        RecordedData("ramps", test=(0.999, 1.0))


SHAPES = {
    "rat": (2, 40, 0, 4798, 1199),
    "ppg": (3, 1, 0, 27261, 6815),
    "cartpole": (5, 2, 1, 2400, 600),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_recordings_are_what_their_docstrings_say(name, tmp_path, monkeypatch):
    package = recorded.RECORDED[name].package
    if importlib.util.find_spec(package) is None or (
        name == "cartpole" and importlib.util.find_spec("mujoco") is None
    ):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("KBF_CACHE", str(tmp_path))
    d, q, k, n_train, n_test = SHAPES[name]
    data = load_data({"name": name, "source": {"_target_": "kbf.RecordedData", "name": name}})
    (train,), (test,) = data.train, data.test
    assert (train.states.shape, train.obs.shape) == ((n_train, d), (n_train, q))
    assert test.states.shape == (n_test, d)
    assert (0 if train.controls is None else train.controls.shape[1]) == k
    states = torch.cat([train.states, test.states])
    if name == "rat":
        assert (states >= 0).all() and (states <= 1).all()
        assert torch.equal(train.obs, train.obs.round())
        assert 0.09 < train.obs.mean() < 0.16  # 0.03 at rest, and a field covers a part of the box
    else:
        cosine = 0 if name == "ppg" else 1
        torch.testing.assert_close(
            states[:, cosine : cosine + 2].norm(dim=1), torch.ones(len(states), dtype=torch.float64)
        )
    if name == "ppg":  # the phase grows by 2 pi rate / 50 a step
        angle = torch.atan2(states[:, 1], states[:, 0])
        turned = torch.remainder(angle[1:] - angle[:-1], 2 * torch.pi)
        torch.testing.assert_close(turned, 2 * torch.pi * states[:-1, 2] / 50, atol=1e-9, rtol=0)
    if name == "cartpole":
        e = train.obs - torch.stack(
            [train.states[:, 0], train.states[:, 0] + train.states[:, 2]], 1
        )
        torch.testing.assert_close(
            e.std(0), torch.tensor([0.05, 0.1], dtype=torch.float64), rtol=0.06, atol=0
        )
