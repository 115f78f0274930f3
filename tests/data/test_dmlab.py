"""The DeepMind Lab problem: frames files, the data made of them, the driver of the engine, and the
command that renders.
"""

from __future__ import annotations

import math
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import kbf.data.render
from kbf.cli import main
from kbf.data.cache import cache_dir
from kbf.data.dataset import load_data
from kbf.data.dmlab import OrientationImages
from kbf.data.frames import (
    Frames,
    as_observations,
    check_frames,
    nearest,
    read_frames,
    write_frames,
)
from kbf.data.render import dmlab
from kbf.ssm import OrientationModel, simulate

ROOT = Path(__file__).resolve().parents[2]
REAL = sorted((ROOT.parent / "shared" / "data" / "dmlab").glob("*.npz"))
real = pytest.mark.skipif(not REAL, reason="no frames of the real engine here")
UNIT = 360 / 65536
SMALL = {"size": (6, 8)}


def encoded(yaw: torch.Tensor, size=(12, 16)) -> torch.Tensor:
    """Images that tell where they look: red and green hold the yaw in steps of UNIT, blue grows
    from left to right.
    """
    units = (yaw.double() / UNIT).round().long() % 65536
    images = torch.zeros(len(yaw), *size, 3, dtype=torch.uint8)
    images[..., 0] = (units // 256).to(torch.uint8)[:, None, None]
    images[..., 1] = (units % 256).to(torch.uint8)[:, None, None]
    images[..., 2] = torch.arange(size[1], dtype=torch.uint8) * 3
    return images


def decoded_yaw(images: torch.Tensor) -> torch.Tensor:
    """Radians, of encoded images in [0, 1], channels first."""
    red, green = (images[:, k].mean((1, 2)) * 255 for k in (0, 1))
    return (red.round() * 256 + green.round()) * UNIT * math.pi / 180


def full_turn(n: int = 720, **changes) -> Frames:
    yaw = (torch.arange(n) * (360 / n) - 180).float()
    about = {"renderer": "test", "level": "hall", "seed": 4}
    return Frames(
        encoded(yaw), yaw, about, torch.tensor([[1.0, 2.0, 3.0]]).double().expand(n, 3)
    )._replace(**changes)


@pytest.fixture
def file(tmp_path):
    write_frames(tmp_path / "turn.npz", full_turn())
    return tmp_path / "turn.npz"


@pytest.fixture
def rendered(tmp_path, monkeypatch):
    """`kbf.data.render.render` and an empty cache; the list of what was asked for."""
    calls = []

    def render(name, yaw_degrees, *, level=None, seed=0, size=(72, 96), progress=None):
        calls.append((name, level, seed, size))
        if name == "vizdoom":
            raise ModuleNotFoundError("vizdoom is not installed")
        if progress is not None:
            progress(len(yaw_degrees))
        about = {"renderer": f"the {name}", "level": level or "own", "seed": seed}
        return Frames(encoded(yaw_degrees, size), yaw_degrees.float(), about)

    monkeypatch.setattr(kbf.data.render, "render", render)
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "cache"))
    return calls


# --- frames files


def test_frames_come_back_as_they_were(file):
    frames, expected = read_frames(str(file)), full_turn()
    assert torch.equal(frames.images, expected.images)
    assert torch.equal(frames.yaw_degrees, expected.yaw_degrees)
    assert frames.about == expected.about
    assert frames.position is not None and expected.position is not None
    assert torch.equal(frames.position, expected.position)
    assert [path.name for path in file.parent.iterdir()] == ["turn.npz"]
    assert check_frames(frames) == (720, 0.5, pytest.approx(0, abs=360))


def arrays(**changes) -> dict:
    frames = full_turn()
    values = {"images": frames.images.numpy(), "yaw_degrees": frames.yaw_degrees.numpy()} | changes
    return {name: value for name, value in values.items() if value is not None}


IMAGES, YAW = arrays()["images"], arrays()["yaw_degrees"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "the array 'images' is missing"),
        ({"yaw_degrees": None}, "the array 'yaw_degrees' is missing"),
        (
            {"images": IMAGES.astype(np.float32)},
            r"images must be uint8 \[N, H, W, 3\], they are float32",
        ),
        ({"images": IMAGES[..., 0]}, r"they are uint8 \[720, 12, 16\]"),
        ({"images": IMAGES[:, :0]}, r"they are uint8 \[720, 0, 16, 3\]"),
        ({"images": IMAGES.astype(object)}, "Object arrays cannot be loaded"),
        ({"yaw_degrees": YAW.astype(np.int64)}, "yaw_degrees must be float32 .* int64"),
        ({"yaw_degrees": YAW[:, None]}, r"it is float32 \[720, 1\]"),
        ({"yaw_degrees": YAW[:-1]}, "720 images and 719 yaws"),
        ({"yaw_degrees": np.where(YAW > 170, np.float32("nan"), YAW)}, "19 of 720 yaws are NaN"),
        ({"position": np.zeros((2, 3))}, "position must be float"),
        ({"about": np.array("{")}, "about must be a JSON object"),
        ({"about": np.array("[1]")}, "about must be a JSON object"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_wrong_arrays_are_one_clear_error(tmp_path, changes, message):
    path = tmp_path / "wrong.npz"
    np.savez_compressed(path, **arrays(**changes))
    with pytest.raises(ValueError, match=rf"{path}.*{message}.*kbf data render") as told:
        read_frames(path)
    assert "\n" not in str(told.value)


def test_damaged_files_are_one_clear_error(file):
    whole, path = file.read_bytes(), file.with_name("damaged.npz")
    single = file.with_name("single.npy")
    np.save(single, YAW)
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF
    for content in (
        b"",
        b"no zip at all",
        whole[:200],
        whole[:-30],
        whole[: len(whole) // 2],
        bytes(flipped),
        single.read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"{path} is no frames file, or damaged .*kbf data render"
        ):
            read_frames(path)
    with pytest.raises(FileNotFoundError, match="there is no frames file"):
        read_frames(file.with_name("none.npz"))


def half(frames: Frames) -> Frames:
    return Frames(frames.images[180:540], frames.yaw_degrees[180:540], {})


def doubled(frames: Frames, **kwargs) -> Frames:
    """The first view again, a turn further, with another image."""
    images = torch.cat([frames.images, frames.images[300:301]])
    return Frames(images, torch.cat([frames.yaw_degrees, frames.yaw_degrees[:1] + 360]), {})


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (half(full_turn()), r"none between yaw 89\.5 and 270\.0 degrees, a gap of 180\.5"),
        (full_turn(70), r"no full turn.* a gap of 5\.1"),
        (full_turn(1), r"a gap of 360\.0"),
        (doubled(full_turn()), r"1 views have the yaw of another one .*at 180\.00 degrees"),
        (
            full_turn(images=full_turn().images[:1].expand(720, 12, 16, 3)),
            "all 720 images are the same",
        ),
        (
            full_turn(images=full_turn().images[:, :1, :1].expand(720, 12, 16, 3)),
            "one colour all over",
        ),
        (
            full_turn(position=torch.linspace(0, 1, 720)[:, None].expand(720, 3).double()),
            r"the camera moved by 1\.73",
        ),
    ],
    ids=["half", "coarse", "one", "doubled", "same", "flat", "moved"],
)
def test_what_is_no_turn_is_an_error(frames, message):
    with pytest.raises(ValueError, match=message):
        check_frames(frames)


def test_the_same_view_twice_is_no_harm():
    frames = full_turn()
    twice = Frames(
        torch.cat([frames.images] * 2),
        torch.cat([frames.yaw_degrees, frames.yaw_degrees + 360]),
        {},
    )
    assert check_frames(twice).gap == 0.5


def test_the_nearest_view_is_found_around_the_circle(normal):
    yaw, angles = torch.rand(50) * 360 - 180, 9 * normal(40)
    points, views = (
        torch.polar(torch.ones(len(a)).double(), a.double())
        for a in (angles, yaw.double().deg2rad())
    )
    assert torch.equal(nearest(yaw, angles), (points[:, None] - views).abs().argmin(1))


def test_images_are_made_smaller_by_means_over_areas():
    images = torch.randint(
        256, (3, 12, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    x = as_observations(images, (6, 8))
    expected = images.double().reshape(3, 6, 2, 8, 2, 3).mean((2, 4)).permute(0, 3, 1, 2) / 255
    assert torch.allclose(x.double(), expected, atol=1e-6)
    assert torch.equal(as_observations(images, (12, 16)), images.permute(0, 3, 1, 2).float() / 255)
    uneven = as_observations(images, (5, 7))
    assert uneven.shape == (3, 3, 5, 7)
    assert torch.allclose(
        uneven.mean((2, 3)).double(), images.double().mean((1, 2)) / 255, atol=0.02
    )
    stripes = (
        (torch.arange(100) % 2 * 255).to(torch.uint8)[None, :, None, None].expand(1, 100, 100, 3)
    )
    assert (
        as_observations(stripes, (30, 30)) - 0.5
    ).abs().max() < 0.1  # without antialiasing: 0 and 1


# --- the data


def test_the_problem_is_the_published_one(file):
    data = OrientationImages(20, 2000, seed=3, frames=file, size=(2, 2))
    assert data.problem == OrientationModel(0.4, 0.2, 0.2)
    assert data.renderer == "test, level hall, seed 4, frames of turn.npz"
    states, decoded = data.test[0].states, data.decoded[0].obs
    assert states.dtype == torch.float64
    assert torch.allclose(states.norm(dim=1), torch.ones(2000).double())
    assert torch.equal(data.decoded[0].states, states)
    theta, seen = (torch.atan2(a[:, 1], a[:, 0]) for a in (states, decoded))
    steps = (theta[1:] - theta[:-1] + math.pi) % (2 * math.pi) - math.pi
    noise = (seen - theta + math.pi) % (2 * math.pi) - math.pi
    for values, mean, std in ((steps, 0.4, 0.2), (noise, 0.0, 0.2)):
        assert abs(values.mean() - mean) < 4 * std / 2000**0.5
        assert abs(values.std() - std) < 4 * std / 4000**0.5
    start = simulate(
        data.problem, torch.tensor([1.0, 0.0]).double(), 20, torch.Generator().manual_seed(3)
    )
    assert torch.equal(data.train[0].states, start.states)


def test_an_observation_is_the_view_at_the_noisy_heading_plus_pixel_noise(file):
    clean, noisy = (
        OrientationImages(20, 400, seed=1, frames=file, size=(6, 8), pixel_noise=s)
        for s in (0.0, 0.1)
    )
    x, heading = clean.test[0].obs, clean.decoded[0].obs
    assert (x.shape, x.dtype) == ((400, 3, 6, 8), torch.float32)
    assert x.min() >= 0 and x.max() <= 1
    angle = torch.atan2(heading[:, 1], heading[:, 0])
    off = (decoded_yaw(x).double() - angle + math.pi) % (2 * math.pi) - math.pi
    assert off.abs().max() <= math.radians(0.26)  # views are 0.5 degrees apart
    noise = (noisy.test[0].obs - x).double()
    assert abs(noise.std() - 0.1) < 0.001
    assert abs(noise.mean()) < 0.001
    assert noisy.test[0].obs.min() < 0  # not clipped
    assert abs(torch.corrcoef(noise.flatten(1)[:2])[0, 1]) < 0.3  # another one at every step
    assert torch.equal(noisy.test[0].states, clean.test[0].states)


@pytest.mark.parametrize("size", [(6, 8), (3, 5)])
def test_a_longer_training_part_begins_with_the_shorter(file, size):
    short, long = (
        OrientationImages(n, k, seed=5, frames=file, size=size) for n, k in ((30, 7), (90, 50))
    )
    for a, b in zip(short.train[0][:2], long.train[0][:2], strict=True):
        assert torch.equal(a, b[:30])
    assert torch.equal(short.test[0].obs, long.train[0].obs[30:37])
    assert torch.equal(short.test[0].states, long.train[0].states[30:37])
    other = OrientationImages(30, 7, seed=6, frames=file, size=size)
    assert not torch.equal(other.train[0].states, short.train[0].states)
    assert (other.train[0].obs - short.train[0].obs).abs().min() > 0


def test_views_are_rendered_once_and_kept(rendered, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    first, again = (
        OrientationImages(9, 4, renderer="maze", level="a", render_seed=2, **SMALL)
        for _ in range(2)
    )
    assert rendered == [("maze", "a", 2, (12, 16))]
    assert first.renderer == again.renderer == "the maze, level a, seed 2"
    assert torch.equal(first.train[0].obs, again.train[0].obs)
    (kept,) = (tmp_path / "cache").iterdir()
    assert len(read_frames(kept).images) == 1800
    kept.write_bytes(kept.read_bytes()[:900])  # damaged: made again
    assert torch.equal(
        OrientationImages(9, 4, level="a", render_seed=2, **SMALL).train[0].obs, first.train[0].obs
    )
    OrientationImages(9, 4, level="b", render_seed=2, **SMALL)
    OrientationImages(9, 4, level="a", render_seed=3, **SMALL)
    assert rendered[1:] == [
        ("maze", "a", 2, (12, 16)),
        ("maze", "b", 2, (12, 16)),
        ("maze", "a", 3, (12, 16)),
    ]
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_two_processes_may_render_at_once(rendered, monkeypatch):
    render, inner = kbf.data.render.render, []

    def slow(*args, **kwargs):
        monkeypatch.setattr(kbf.data.render, "render", render)
        inner.append(
            OrientationImages(9, 4, **SMALL)
        )  # another process begins later and is done earlier
        return render(*args, **kwargs)

    monkeypatch.setattr(kbf.data.render, "render", slow)
    outer = OrientationImages(9, 4, **SMALL)
    assert len(rendered) == 2
    assert torch.equal(outer.train[0].obs, inner[0].train[0].obs)
    assert len(list(cache_dir().iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_a_warning(rendered, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "taken" / "cache"))
    with pytest.warns(UserWarning, match="cannot be kept .* KBF_CACHE"):
        assert OrientationImages(9, 4, **SMALL).train[0].obs.shape == (9, 3, 6, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_train": 1}, "n_train 1 and n_test 200"),
        ({"renderer": "dmlab"}, "kbf data render dmlab out=FILE"),
        ({"renderer": "vizdoom"}, "renderer vizdoom: vizdoom is not installed"),
        ({"frames": "half.npz"}, r"half.npz: the 360 views are no full turn"),
    ],
)
def test_data_that_cannot_be_is_one_error(rendered, tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    write_frames("half.npz", half(full_turn()))
    with pytest.raises(ValueError, match=message):
        OrientationImages(**{"n_train": 9, **settings})


def test_the_configuration(file, rendered, tmp_path, capsys):
    from kbf.config import configure

    config = configure(
        "train", ["data=dmlab", f"data.frames={file}", "n_train=12", "data.n_test=5", "seed=2"]
    )["data"]
    data = load_data(config)
    expected = OrientationImages(12, 5, seed=2, frames=file)
    assert torch.equal(data.train[0].obs, expected.train[0].obs)
    assert data.problem == expected.problem
    assert torch.equal(data.decoded[0].obs, expected.decoded[0].obs)
    assert list(data.train[0].obs.shape[1:]) == config["image"]
    assert (
        main(
            [
                "data",
                "data=dmlab",
                "data.size=[6,8]",
                "n_train=12",
                "data.n_test=5",
                f"run_dir={tmp_path / 'out'}",
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "the maze, level own, seed 0" in told
    assert "DeepMind" not in told
    assert np.load(tmp_path / "out" / "data.npz")["test_obs_0"].shape == (5, 3, 6, 8)


# --- the driver


class Lab:
    """What ``deepmind_lab.Lab`` does, as measured: see the comments.

    ``process`` holds what is true of one process.
    """

    def __init__(self, process, level, observations, config=None, renderer="software"):
        process.engines += 1
        if (
            process.missing
        ):  # the cause stands on the engine's own stderr, which Python does not see
            os.write(2, f"{process.missing}: cannot open shared object file\n".encode())
            raise RuntimeError("Failed to connect RL API")
        if level not in process.levels:
            os.write(2, b"Level not found\n")
            raise RuntimeError("Failed to init environment.")
        if not all(isinstance(value, str) for value in (config or {}).values()):
            raise TypeError("'config' dict must hold strings")  # numbers are refused
        self.process, self.names, self.renderer = process, observations, renderer
        self.size = int(config["height"]), int(config["width"])
        self.episode = process.levels[level]
        self.config, self.running, self.closed = config, False, False
        self.buffer = encoded(torch.zeros(1), self.size)[0].numpy()

    def reset(self, episode=-1, seed=None):
        if self.episode["turns"] is None:
            os.write(2, b"sh: zip: not found\n")
            raise RuntimeError("Failed to compile map")
        again = (
            1.0 if hasattr(self, "seed") else 0.0
        )  # after a second reset the views are not those of a fresh engine
        self.seed, self.frame, self.running = seed, 0, True
        self.angle = 170.0 + self.process.twist + again

    def step(self, action, num_steps=1):
        assert self.running, "Environment in wrong status for call to step()"
        assert isinstance(action, np.ndarray) and action.dtype == np.intc and action.shape == (7,)
        for _ in range(num_steps):
            self.frame += 1
            self.angle -= (
                float(action[0]) * 0.1056 * (self.episode["turns"])
            )  # positive turns right: yaw falls
            self.running = self.frame < self.episode["frames"]
        return 0.0

    def is_running(self):
        return self.running

    def observations(self):
        if not self.running:
            raise RuntimeError("Environment in wrong status for call to observations()")
        self.process.looks += 1
        if self.process.looks == self.process.interrupt:
            raise KeyboardInterrupt
        units = int(self.angle / UNIT) % 65536  # 16 bits
        yaw = (units * UNIT + 180) % 360 - 180
        self.buffer[..., 0], self.buffer[..., 1] = divmod(units, 256)  # as `encoded`
        self.buffer[0, 0] = self.frame % 256, self.seed, 0  # something moves with the time
        fall = max(0.0, 10.0 - self.frame)  # from the spawn point to the ground
        everything = {
            dmlab.VIEW: self.buffer,  # always the same memory
            "RGB_INTERLEAVED": self.buffer // 2,  # with the heads-up display
            "DEBUG.POS.ROT": np.array([7.0, yaw, 9.0]),
            "DEBUG.POS.TRANS": np.array(
                [516.0, 300.0, 51.0 + fall + self.episode.get("rises", 0.0) * self.frame]
            ),
        }
        return {name: everything[name] for name in self.names}

    def close(self):
        self.closed, self.running = True, False


@pytest.fixture
def process(monkeypatch):
    """Begin a process of its own, with the engine's stand-in in it."""

    def begin(interrupt=None, twist=0.0, missing=None):
        steady = {"frames": 3600, "turns": 1}
        levels = {
            dmlab.DEFAULT_LEVEL: steady,
            "other": steady,
            "short": {"frames": 800, "turns": 1},
            "stuck": {"frames": 3600, "turns": 0},
        }
        levels |= {"tiny": {"frames": 70, "turns": 1}, "packed": {"frames": 3600, "turns": None}}
        levels |= {"lift": {**steady, "rises": 0.1}}
        state = types.SimpleNamespace(
            engines=0, looks=0, interrupt=interrupt, twist=twist, levels=levels, missing=missing
        )
        module = types.ModuleType("deepmind_lab")
        module.__dict__["Lab"] = lambda *args, **kwargs: Lab(state, *args, **kwargs)
        monkeypatch.setitem(sys.modules, "deepmind_lab", module)
        return state

    return begin


def equal(a: Frames, b: Frames) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(("turns", "count", "gap"), [(1, 1705, 0.22), (2, 3410, 0.14)])
def test_an_agent_turns_and_its_yaw_is_read_back(process, tmp_path, turns, count, gap):
    state, ticks = process(), []
    views = dmlab.turn_round(tmp_path / "part", seed=5, turns=turns, progress=ticks.append, **SMALL)
    assert len(views.images) == len(views.yaw_degrees) == count
    assert state.looks == count + 1  # the last one is behind the end of the turn
    assert ticks[-1] == count + 1 and dmlab.expected_views(turns) == count
    yaw = views.yaw_degrees
    assert (yaw[1:] > yaw[:-1]).all() and yaw[0] >= -180 and yaw[-1] < 180
    assert torch.equal((yaw / UNIT).round() * UNIT, yaw)
    expected = encoded(yaw, SMALL["size"])
    assert torch.equal(views.images[:, 1:], expected[:, 1:])  # the image is that of its yaw
    assert (views.images[:, 0, 0, 1] == 5).all()
    assert (views.position == torch.tensor([516.0, 300.0, 51.0])).all()
    assert views.about | {"look": 2} == {
        "renderer": "DeepMind Lab",
        "level": dmlab.DEFAULT_LEVEL,
        "seed": 5,
        "size": [6, 8],
        "look": 2,
    }
    assert check_frames(Frames(*views)).gap < gap


@pytest.mark.parametrize("killed", [False, True], ids=["Ctrl-C", "kill"])
def test_an_interrupted_turn_goes_on(process, tmp_path, monkeypatch, killed):
    part = tmp_path / "part"
    process()
    whole = dmlab.turn_round(tmp_path / "whole", seed=5, **SMALL)
    write = dmlab.write_part
    if killed:  # nothing but the regular writing happened
        monkeypatch.setattr(
            dmlab,
            "write_part",
            lambda path, found, about: len(found) % 300 or write(path, found, about),
        )
    process(interrupt=801)
    with pytest.raises(KeyboardInterrupt):
        dmlab.turn_round(part, seed=5, **SMALL)
    kept = 300 if killed else 800
    assert len(np.load(part)["yaw"]) == kept
    state = process()
    assert equal(dmlab.turn_round(part, seed=5, **SMALL), whole)
    assert (
        state.looks == 1706 - kept + 1
    )  # one to see that it is the same, none of the others again
    state = process()
    assert equal(dmlab.turn_round(part, seed=5, **SMALL), whole)  # all is there
    assert state.looks == 1 or killed


@pytest.mark.parametrize(
    ("settings", "twist"),
    [({"seed": 6}, 0.0), ({"level": "other"}, 0.0), ({"size": (3, 4)}, 0.0), ({}, 10.0)],
    ids=["seed", "level", "size", "engine"],
)
def test_a_part_of_something_else_is_begun_again(process, tmp_path, settings, twist):
    part = tmp_path / "part"
    process(interrupt=401)
    with pytest.raises(KeyboardInterrupt):
        dmlab.turn_round(part, seed=5, **SMALL)
    settings = {"seed": 5, **SMALL, **settings}
    state = process(twist=twist)
    found = dmlab.turn_round(part, **settings)
    assert state.looks == (
        1707 if twist else 1706
    )  # nothing is taken over; another engine shows at the last view
    process(twist=twist)
    assert equal(found, dmlab.turn_round(tmp_path / "whole", **settings))


def test_a_damaged_part_is_begun_again(process, tmp_path):
    part = tmp_path / "part"
    process()
    whole = dmlab.turn_round(part, **SMALL)
    for content in (b"", part.read_bytes()[:5000]):
        part.write_bytes(content)
        state = process()
        assert equal(dmlab.turn_round(part, **SMALL), whole)
        assert state.looks == 1706


def test_more_turns_go_on_behind_those_that_are_there(process, tmp_path):
    part = tmp_path / "part"
    process()
    once = dmlab.turn_round(part, **SMALL)
    process()
    twice = dmlab.turn_round(tmp_path / "twice", turns=2, **SMALL)
    state = process()
    assert equal(dmlab.turn_round(part, turns=2, **SMALL), twice)
    assert state.looks < 1800
    process()
    assert equal(dmlab.turn_round(part, turns=1, **SMALL), once)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"level": "none_such"},
            "does not start level 'none_such' with views of 6 x 8: Failed to init.* / Level not "
            "found.*dmlab30/NAME",
        ),
        (
            {"level": "packed"},
            "does not load level 'packed': Failed to compile map / sh: zip: not found",
        ),
        ({"level": "stuck"}, r"does not let the agent turn: its yaw stays at 170\."),
        (
            {"level": "short"},
            r"episode of level short ended after 740 views, 0\.4 turns: look=5 makes one turn",
        ),
        ({"level": "tiny"}, r"ended after 10 views, 0\.0 turns: take a level with longer episodes"),
        ({"turns": 3}, r"ended after 3540 views, 2\.1 turns: ask for turns=2"),
        ({"turns": 0}, "at least 1, got turns 0"),
        ({"seed": 2**31}, "takes seeds from -2147483648 to 2147483647, got 2147483648"),
        ({"look": 48}, "look must be from 1 to 47 units a frame, got 48"),
    ],
)
def test_a_level_that_does_not_do(process, tmp_path, settings, message, capfd):
    process()
    with pytest.raises(ValueError, match=message) as told:
        dmlab.turn_round(tmp_path / "part", **{**SMALL, **settings})
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == [], "what cannot be gone on with is left behind"
    assert capfd.readouterr().err == "", "the engine's own words are on the terminal"


@pytest.mark.parametrize("library", ["libOSMesa.so.8", "libSDL2-2.0.so.0"])
def test_a_missing_library_is_told(process, tmp_path, library):
    process(missing=library)
    with pytest.raises(
        ValueError,
        match=rf"Failed to connect RL API / {library}: cannot.*apt-get install libosmesa6 libsdl2",
    ):
        dmlab.turn_round(tmp_path / "part", **SMALL)


def test_a_program_that_is_missing_is_told(process, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    process()
    with pytest.raises(
        ValueError, match="packed with the program zip, which is not installed: apt-get install zip"
    ):
        dmlab.turn_round(tmp_path / "part", level="packed", **SMALL)


def test_a_faster_look_makes_a_turn_of_a_short_episode(process, tmp_path):
    process()
    views = dmlab.turn_round(tmp_path / "part", level="short", look=5, **SMALL)
    assert len(views.images) == dmlab.expected_views(1, look=5) == 682
    assert views.about["look"] == 5 and check_frames(Frames(*views)).gap < 0.54


def test_the_module_is_missing_or_broken(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        ValueError,
        match=r"not installed.*Bazel.*dmlab-gym.*Python 3\.13.*lab=DIR.*data\.renderer=maze",
    ):
        dmlab.open_engine("any", (6, 8))
    monkeypatch.delitem(sys.modules, "deepmind_lab")
    for text, message in (
        (
            "raise ImportError('undefined symbol: _Py')",
            "does not load: undefined symbol.*built for",
        ),
        ("import no_such_module", "does not load: No module named 'no_such_module'"),
    ):
        (tmp_path / "deepmind_lab.py").write_text(text)
        with pytest.raises(ValueError, match=message):
            dmlab.open_engine("any", (6, 8))


def test_the_command_renders_with_the_engine(process, tmp_path, capsys):
    process(interrupt=901)
    out = tmp_path / "sub" / "lab.npz"
    words = ["data", "render", "dmlab", "seed=5", "size=[6,8]", f"out={out}"]
    assert main(words) == 130
    assert [path.name for path in out.parent.iterdir()] == ["lab.npz.part"]
    process()
    assert main(words) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in ("DeepMind Lab", dmlab.DEFAULT_LEVEL, "1705", "0.21"))
    assert sorted(path.name for path in out.parent.iterdir()) == ["lab.npz", "lab.png"]
    frames = read_frames(out)
    assert (check_frames(frames).views, frames.about["seed"]) == (1705, 5)
    assert (
        OrientationImages(9, 4, frames=out).renderer
        == f"DeepMind Lab, level {dmlab.DEFAULT_LEVEL}, seed 5, frames of lab.npz"
    )
    assert main(words) == 0  # a second engine in the process does no harm


def test_views_of_several_places_leave_nothing_behind(process, tmp_path, capsys):
    process()
    assert (
        main(["data", "render", "dmlab", "level=lift", "size=[6,8]", f"out={tmp_path}/lab.npz"])
        == 2
    )
    assert "the camera moved by" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "the same command would go on with them, and fail again"


def test_the_command_renders_with_another_renderer(rendered, tmp_path, capsys):
    from PIL import Image

    out = tmp_path / "maze.npz"
    assert (
        main(
            [
                "data",
                "render",
                "maze",
                "seed=3",
                "level=hall",
                "turns=2",
                "size=[6,8]",
                f"out={out}",
            ]
        )
        == 0
    )
    assert rendered == [("maze", "hall", 3, (6, 8))]
    assert check_frames(read_frames(out)) == (
        3600,
        pytest.approx(0.1, abs=1e-4),
        pytest.approx(180, abs=180),
    )
    told = capsys.readouterr().out
    assert "the maze" in told and "DeepMind" not in told
    with Image.open(out.with_suffix(".png")) as sheet:
        assert sheet.size == (6 * 11 + 3, 4 * 9 + 3)
        red = sheet.convert("RGB").getchannel("R")
    units = [
        red.getpixel((3 + 11 * (k % 6), 3 + 9 * (k // 6))) * 256 for k in range(24)
    ]  # top left of each: where it looks
    expected = [-180 + 15 * k for k in range(24)]
    assert all(
        abs((u * UNIT - e + 180) % 360 - 180) < 1.6 for u, e in zip(units, expected, strict=True)
    )


@pytest.mark.parametrize("renderer", ["dmlab", "maze"])
def test_a_sweep_renders_one_file_a_seed(process, rendered, tmp_path, monkeypatch, renderer):
    process()
    monkeypatch.chdir(tmp_path)
    assert main(["data", "render", renderer, "--multirun", "seed=1,2", "size=[6,8]"]) == 0
    written = sorted((tmp_path / "runs" / "frames").glob("*.npz"))
    assert [path.name for path in written] == [f"{renderer}-seed1.npz", f"{renderer}-seed2.npz"]
    assert [read_frames(path).about["seed"] for path in written] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Missing mandatory value: renderer"),
        (["quake"], "no renderer 'quake'; renderers: dmlab, maze, vizdoom"),
        (["vizdoom"], "renderer vizdoom: vizdoom is not installed"),
        (["maze", "size=[6]"], "size must be [height,width]"),
        (["maze", "size=6"], "size must be [height,width]"),
        (["maze", "turns=0"], "turns must be at least 1, got 0"),
        (["maze", "turns=x"], "turns must be a whole number"),
        (["maze", "out=picture.png"], "out must end in .npz"),
        (["maze", "speed=3"], "there is no setting speed; did you mean seed?"),
    ],
)
def test_bad_input_to_the_command_is_one_line(
    rendered, tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "render", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_help_of_the_command(capsys):
    assert main(["data", "render", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(
        word in told for word in ("kbf data render dmlab", "level", "seed", "turns", "size", "out")
    )
    assert main(["--help"]) == 0
    assert "data render" in capsys.readouterr().out


# --- frames of the real engine


@real
def test_real_frames_are_one_turn_at_one_place():
    frames = read_frames(REAL[0])
    turn = check_frames(frames)
    assert turn.views == len(frames.images)
    assert turn.gap < 0.22
    with pytest.raises(ValueError, match="no full turn"):
        check_frames(half(frames))


@real
def test_real_frames_as_data():
    data = OrientationImages(60, 20, frames=REAL[0])
    assert data.train[0].obs.shape == (60, 3, 36, 48)
    table = as_observations(read_frames(REAL[0]).images[::5], (36, 48))
    yaw = read_frames(REAL[0]).yaw_degrees[::5].double().deg2rad()
    best = yaw[
        torch.cdist(data.test[0].obs.flatten(1), table.flatten(1)).argmin(1)
    ]  # the closest view tells the heading
    heading = data.decoded[0].obs
    off = (best - torch.atan2(heading[:, 1], heading[:, 0]) + math.pi) % (2 * math.pi) - math.pi
    assert off.abs().median() < math.radians(1.5)
