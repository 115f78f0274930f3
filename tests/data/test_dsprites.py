"""dSprites: the pictures against the true ones and a naive renderer, the published file, its
download, and the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import threading
import warnings
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

from kbf.cli import main
from kbf.config import configure
from kbf.data import dsprites
from kbf.data.cache import cache_dir, download
from kbf.data.dataset import load_data
from kbf.data.dsprites import DSprites, frame_index, log_interval, open_dsprites, position_model
from kbf.data.sprites import SIZES, render_sprites
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.floors import data_floor
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.ssm import StateSpace, oscillatory

TRUE_FRAMES = (
    Path(__file__).resolve().parents[3] / "shared" / "data" / "dsprites" / "true_frames.npz"
)
SMALL = (3, 2, 3, 4, 5)  # of the synthetic file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KBF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache"


def naive(shape: int, scale: int, orientation: int, x: int, y: int) -> list[list[bool]]:
    """One picture, pixel by pixel: the outline as a polygon on the screen, and how often it winds
    around the pixel's centre.
    """
    t = [2 * math.pi * k / 72 for k in range(72)]
    if shape == 0:
        corners = [(9.6, 9.6), (9.6, -9.6), (-9.6, -9.6), (-9.6, 9.6)]
    elif shape == 1:
        t = [2 * math.pi * k / 3000 for k in range(3000)]
        corners = [(12.76 * math.cos(a), 7.22 * math.sin(a)) for a in t]
    else:
        corners = [
            (
                9.62 * math.sin(a) ** 3,
                -0.662
                * (13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a))
                - 1.45,
            )
            for a in t
        ]
    size, angle = (
        0.5 + scale / 10,
        -2 * math.pi * orientation / 39,
    )  # y is down: counter-clockwise on the screen is negative
    centre = 16 + 32 * x / 31, 16 + 32 * y / 31
    c, s = size * math.cos(angle), size * math.sin(angle)
    placed = [complex(centre[0] + c * u - s * v, centre[1] + s * u + c * v) for u, v in corners]
    picture = [[False] * 64 for _ in range(64)]
    reach = 13 * size
    for row in range(int(centre[1] - reach), int(centre[1] + reach) + 1):
        for column in range(int(centre[0] - reach), int(centre[0] + reach) + 1):
            around = np.array(placed) - complex(column + 0.5, row + 0.5)
            picture[row][column] = bool(abs(np.angle(np.roll(around, -1) / around).sum()) > math.pi)
    return picture


@pytest.mark.skipif(not TRUE_FRAMES.exists(), reason="the true frames are not here")
def test_pictures_are_those_of_dsprites():
    with np.load(TRUE_FRAMES, allow_pickle=False) as true:
        values, images = true["factors"], true["images"]
    steps = np.array([1, 0.1, 2 * np.pi / 39, 1 / 31, 1 / 31])
    factors = ((values - [0, 0.5, 0, 0, 0]) / steps).round().astype(int)
    wrong = (render_sprites(torch.from_numpy(factors)).numpy() != images).sum((1, 2))
    assert (wrong == 0).sum() >= 284
    assert wrong.sum() <= 72
    assert wrong.max() <= 4


@pytest.mark.parametrize(
    "factors", [(0, 3, 5, 7, 30), (1, 5, 11, 20, 3), (2, 0, 0, 31, 0), (2, 4, 17, 9, 14)]
)
def test_pictures_against_a_naive_renderer(factors):
    assert render_sprites(torch.tensor([factors]))[0].tolist() == naive(*factors)


def test_pictures_turn_and_move():
    both = torch.tensor(
        [
            [s, k, o, x, x]
            for s in range(3)
            for k in range(6)
            for x in range(0, 32, 2)
            for o in (0, 39)
        ]
    )
    images = render_sprites(both)
    assert torch.equal(images[::2], images[1::2])
    quarter = render_sprites(torch.tensor([[1, 5, 0, 0, 0], [1, 5, 20, 0, 0], [1, 5, 10, 0, 0]]))
    assert (quarter[0] ^ quarter[1]).sum() < 30  # nearly half a turn of an ellipse
    assert quarter[2].any(1).sum() > quarter[2].any(0).sum()  # nearly a quarter: it stands
    positions = torch.cartesian_prod(
        torch.tensor([2]), torch.tensor([0]), torch.tensor([0]), torch.arange(32), torch.arange(32)
    )
    flat = render_sprites(positions).flatten(1).float()
    apart = torch.cdist(flat, flat).square() + 1000 * torch.eye(1024)
    assert (
        apart.min() > 17
    )  # pixels between any two of the 1,024 positions: noise of 0.1 hides none of them
    assert render_sprites(positions[:0]).shape == (0, 64, 64)
    many = torch.tensor([[1, 2, 3, 4, 5]]).expand(300, 5)  # more than one chunk
    assert torch.equal(render_sprites(many), render_sprites(many[:1]).expand(300, 64, 64))


@pytest.mark.parametrize(
    ("column", "name"), [*enumerate(["shape", "scale", "orientation", "posX", "posY"])]
)
def test_factors_out_of_range(column, name):
    for wrong in (-1, SIZES[column]):
        factors = torch.zeros(2, 5, dtype=torch.long)
        factors[1, column] = wrong
        with pytest.raises(
            ValueError, match=f"{name} is an index from 0 to {SIZES[column] - 1}, got {wrong}"
        ):
            render_sprites(factors)


class Bomb:
    """What would show that something was unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def write_file(path: Path, **changes) -> Path:
    """A small file of the published format; ``changes`` replace members, None leaves one out."""
    factors = np.indices(SMALL).reshape(5, -1).T
    members = {
        "imgs": render_sprites(torch.from_numpy(factors)).numpy().astype(np.uint8),
        "latents_classes": np.hstack([np.zeros((len(factors), 1), int), factors]),
        "latents_values": np.zeros((len(factors), 6)),
        "metadata": np.array({"bomb": Bomb()}, dtype=object),
    } | changes
    np.savez_compressed(
        path, **{name: value for name, value in members.items() if value is not None}
    )
    return path


def left(cache: Path) -> list[str]:
    """Files in the cache, but for locks."""
    return sorted(
        path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


def test_published_file(tmp_path, cache):
    path = write_file(tmp_path / "small.npz")
    with pytest.raises(pytest.fail.Exception, match="unpickled"):  # the trap works
        np.load(path, allow_pickle=True)["metadata"]
    frames = open_dsprites(path, SMALL)
    assert isinstance(frames, np.memmap)
    assert frames.dtype == np.uint8
    factors = torch.tensor([[2, 1, 2, 3, 0], [0, 0, 1, 2, 4], [1, 1, 0, 0, 3]])
    assert np.array_equal(
        frames[frame_index(factors.numpy(), SMALL)], render_sprites(factors).numpy()
    )
    (name,) = left(cache)
    unpacked = next(cache.rglob(name))
    before = unpacked.stat().st_mtime_ns
    open_dsprites(path, SMALL)
    assert unpacked.stat().st_mtime_ns == before, "unpacked again"
    unpacked.unlink()  # cutting it instead would be a bus error: it is mapped
    unpacked.write_bytes(b"cut")
    assert np.array_equal(open_dsprites(path, SMALL), frames)
    assert frame_index(np.array([[2, 0, 0, 0, 0], [0, 0, 0, 1, 1]])).tolist() == [491520, 33]


def test_what_is_not_the_published_file(tmp_path, cache):
    whole = write_file(tmp_path / "whole.npz").read_bytes()
    images = open_dsprites(tmp_path / "whole.npz", SMALL).copy()
    classes = np.hstack([np.zeros((len(images), 1), int), np.indices(SMALL).reshape(5, -1).T])
    for unpacked in cache.rglob("*.npy"):
        unpacked.unlink()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 255  # inside of imgs, which come first
    hidden = np.empty((len(images), 64, 64), dtype=object)
    hidden[0, 0, 0] = Bomb()
    pixel, nine = np.zeros((2, 64, 64), np.uint8)
    pixel[0, 0] = nine[0, :9] = 1
    third, tenth = (np.arange(len(images))[:, None, None] % k == 0 for k in (3, 10))
    cases = {
        "File is not a zip file": b"not a zip file",
        "File is not a zip file ": whole[:-40],
        "Bad CRC-32|invalid|incorrect|Error -3": bytes(flipped),
        "it has no imgs.npy": {"imgs": None},
        "it has no latents_classes.npy": {"latents_classes": None},
        r"its imgs are uint8 \(359, 64, 64\), not uint8 \(360, 64, 64\)": {"imgs": images[1:]},
        "its imgs are int64": {"imgs": images.astype(int)},
        "its imgs are object": {"imgs": hidden},
        "Fortran order": {"imgs": np.asfortranarray(images)},
        "its latents_classes are not those": {"latents_classes": classes[::-1]},
        "allow_pickle=False": {"latents_classes": np.array([Bomb()])},
        r"of 200 images \d+ are as expected": {"imgs": images.transpose(0, 2, 1).copy()},
        r"of 200 images 0 are as expected": {"imgs": 255 * images},
        r"of 200 images \d+ are as expected; one is off by 1 pixels": {
            "imgs": np.where(third, images ^ pixel, images)
        },
        r"of 200 images 1[6-9]\d are as expected; one is off by 9 pixels": {
            "imgs": np.where(tenth, images ^ nine, images)
        },
    }
    for message, content in cases.items():
        path = tmp_path / "wrong.npz"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_file(path, **content)
        with pytest.raises(
            ValueError,
            match=rf"cannot use .*wrong\.npz as the dSprites file: .*({message.strip()})",
        ):
            open_dsprites(path, SMALL)
        assert left(cache) == [], message
    with pytest.raises(
        FileNotFoundError,
        match=r"there is no file none: data\.images must be rendered, download, or",
    ):
        DSprites(2, images="none")


def test_a_few_wrong_pixels_are_accepted(tmp_path):
    factors = np.indices(SMALL).reshape(5, -1).T
    images = render_sprites(torch.from_numpy(factors)).numpy().astype(np.uint8)
    images[::8, 0, :8] ^= 1
    assert np.array_equal(
        open_dsprites(write_file(tmp_path / "rougher.npz", imgs=images), SMALL), images
    )


def test_imgs_shorter_than_they_say(tmp_path, cache):
    path = write_file(tmp_path / "small.npz")
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content[:-1] if name == "imgs.npy" else content)
    with pytest.raises(ValueError, match=r"its imgs are \d+ bytes, not \d+"):
        open_dsprites(path, SMALL)
    assert left(cache) == []


def test_a_full_disk_is_one_error(tmp_path, cache, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(dsprites.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"unpacked it takes 0\.0 GB, .*KBF_CACHE"):
        open_dsprites(write_file(tmp_path / "small.npz"), SMALL)
    assert left(cache) == []


CONTENT = bytes(range(256)) * 2000


class Handler(BaseHTTPRequestHandler):
    """``/whole`` ignores Range; ``/range`` follows it; ``/broken`` also breaks off after 1,000
    bytes; anything else is a 404.
    """

    def do_GET(self):
        asked = self.headers["Range"]
        self.server.asked.append(asked)  # pyright: ignore[reportAttributeAccessIssue]
        start = int(asked[6:-1]) if asked and self.path != "/whole" else 0
        if self.path not in ("/whole", "/range", "/broken"):
            return self.send_error(404)
        if start >= len(CONTENT):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(
            CONTENT[start : start + 1000] if self.path == "/broken" else CONTENT[start:]
        )

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = []  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_download_goes_on_where_it_broke_off(tmp_path, server):
    url = f"http://127.0.0.1:{server.server_port}"
    path, part = tmp_path / "new" / "file", tmp_path / "new" / "file.part"
    sums = {
        "sha256": hashlib.sha256(CONTENT).hexdigest().upper(),
        "md5": hashlib.md5(CONTENT).hexdigest(),
    }
    with pytest.raises(ValueError, match=f"interrupted after 1000 of {len(CONTENT)} bytes"):
        download(f"{url}/broken", path, sums)
    assert not path.exists()
    assert part.read_bytes() == CONTENT[:1000]
    told = []
    assert download(f"{url}/range", path, sums, lambda *args: told.append(args)) == path
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert server.asked == [None, "bytes=1000-"]
    assert not part.exists()
    download(f"{url}/range", path, sums)
    assert len(server.asked) == 2, "fetched although it was there"


@pytest.mark.parametrize("way", ["whole", "range"])
@pytest.mark.parametrize("have", [1000, len(CONTENT)])
def test_download_over_an_older_part(tmp_path, server, way, have):
    (tmp_path / "file.part").write_bytes(CONTENT[:have])
    told = []
    download(
        f"http://127.0.0.1:{server.server_port}/{way}",
        tmp_path / "file",
        progress=lambda *args: told.append(args),
    )
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))


def test_download_of_something_else(tmp_path, server):
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(
        ValueError, match=r"was removed: .* has the sha256 checksum .*, expected 1234"
    ):
        download(f"{url}/whole", tmp_path / "file", {"sha256": "1234"})
    assert left(tmp_path) == []
    with pytest.raises(ValueError, match=r"cannot download .*/nothing: the server answers 404"):
        download(f"{url}/nothing", tmp_path / "file")
    assert left(tmp_path) == []
    (tmp_path / "file").write_bytes(b"older")
    with pytest.raises(ValueError, match=r"checksum .* delete it to fetch it again"):
        download(f"{url}/whole", tmp_path / "file", {"sha256": "1234"})
    assert (tmp_path / "file").read_bytes() == b"older"


def test_downloads_at_once_fetch_once(tmp_path, server):
    url = f"http://127.0.0.1:{server.server_port}/range"
    threads = [threading.Thread(target=download, args=(url, tmp_path / "file")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None]


def test_no_network_is_one_line(cache, server, monkeypatch):
    server.shutdown()
    server.server_close()
    monkeypatch.setattr(dsprites, "URL", f"http://127.0.0.1:{server.server_port}/file")
    with pytest.raises(
        ValueError,
        match=r"^cannot download http://127\.0\.0\.1:.* data\.images=rendered needs no file$",
    ):
        DSprites(5, images="download")
    assert left(cache) == []


def test_images_download_checks_what_it_fetches(cache, server, monkeypatch):
    monkeypatch.setattr(dsprites, "URL", f"http://127.0.0.1:{server.server_port}/range")
    opened = []
    monkeypatch.setattr(dsprites, "open_dsprites", lambda path: opened.append(path))
    with pytest.raises(
        ValueError,
        match=rf"was removed: .* the md5 checksum .*, expected {dsprites.MD5}.* needs no file",
    ):
        dsprites.frames_of("download")
    assert left(cache) == opened == []
    dsprites.frames_of("download", hashlib.sha256(CONTENT).hexdigest())
    assert opened == [cache / "dsprites" / "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"]
    with pytest.raises(ValueError, match="delete it to fetch it again"):
        dsprites.frames_of("download", "12")
    assert opened[0].exists()


def test_cache_dir(monkeypatch):
    assert cache_dir().name == "cache"
    monkeypatch.delenv("KBF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/kbf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "kbf"


def test_data_from_the_file_are_those_that_are_drawn(tmp_path, monkeypatch):
    def small(path):  # a file of all positions of one heart
        assert path == tmp_path / "file.npz"
        positions = torch.cartesian_prod(
            *[torch.tensor([k]) for k in (2, 0, 0)], torch.arange(32), torch.arange(32)
        )
        images = np.zeros(
            (2 * 6 * 40 * 1024 + 1024, 64, 64), dtype=np.uint8
        )  # the system makes pages of it only where we write
        images[-1024:] = render_sprites(positions).numpy()
        return images

    monkeypatch.setattr(dsprites, "open_dsprites", small)
    (tmp_path / "file.npz").write_bytes(b"stands for the file")
    drawn, read = (
        DSprites(30, 20, seed=1),
        DSprites(30, 20, seed=1, images=str(tmp_path / "file.npz")),
    )
    assert torch.equal(read.train[0].obs, drawn.train[0].obs)
    assert torch.equal(read.test[0].obs, drawn.test[0].obs)
    DSprites(
        5,
        images=str(tmp_path / "file.npz"),
        sha256=hashlib.sha256(b"stands for the file").hexdigest(),
    )
    with pytest.raises(ValueError, match="sha256 checksum"):
        DSprites(5, images=str(tmp_path / "file.npz"), sha256="12")
    assert (tmp_path / "file.npz").exists()


def test_a_longer_training_part_begins_with_the_shorter():
    short, long = DSprites(20, 10, seed=3), DSprites(30, 10, seed=3)
    assert torch.equal(long.train[0].states[:20], short.train[0].states)
    assert torch.equal(long.train[0].obs[:20], short.train[0].obs)
    assert torch.equal(long.train[0].obs[20:], short.test[0].obs)
    assert torch.equal(long.train[0].states[20:], short.test[0].states)
    assert torch.equal(DSprites(20, 10, seed=3).test[0].obs, short.test[0].obs)
    corners = torch.stack(
        [DSprites(20, 10, seed=k).train[0].obs[:, 0, :4, :4].flatten() for k in range(6)]
    )  # never of the sprite
    assert torch.corrcoef(corners).fill_diagonal_(0).abs().max() < 0.3, (
        "noise is the same for other seeds"
    )
    other = DSprites(20, 10, seed=3, shape=0, scale=5, orientation=7)
    assert torch.equal(other.train[0].states, short.train[0].states)
    assert not torch.equal(other.train[0].obs, short.train[0].obs)


def test_data_are_what_they_should_be():
    data = DSprites(60, 200, seed=2)
    (train,), (test,), (decoded,) = data.train, data.test, data.decoded
    assert (train.states.shape, train.obs.shape) == ((60, 2), (60, 1, 64, 64))
    assert (test.states.shape, test.obs.shape, decoded.obs.shape) == (
        (200, 2),
        (200, 1, 64, 64),
        (200, 2),
    )
    assert (test.states.dtype, test.obs.dtype, decoded.obs.dtype) == (
        torch.float64,
        torch.float32,
        torch.float64,
    )
    assert torch.equal(decoded.states, test.states)
    plain = SyntheticData(
        oscillatory(sigma_x=0.05), 60, 200, seed=2
    )  # the same moves, and the position before the grid
    assert torch.equal(test.states, plain.test[0].states)
    seen = plain.test[0].obs.clamp(-1.5, 1.5)
    assert ((seen - decoded.obs).abs() <= 1.5 / 31 + 1e-12).all()
    axis = torch.linspace(-1.5, 1.5, 32, dtype=torch.float64)
    assert (decoded.obs[..., None] - axis).abs().min(-1).values.max() < 1e-12

    cells = (31 * (decoded.obs + 1.5) / 3).round().long()  # z_1 to the right, z_2 down
    clean = render_sprites(torch.cat([torch.tensor([2, 0, 0]).expand(200, 3), cells], 1)).float()
    noise = test.obs[:, 0] - clean
    count = noise.numel()
    assert noise.std().item() == pytest.approx(0.1, abs=5 * 0.1 / math.sqrt(2 * count))
    assert abs(noise.mean().item()) < 5 * 0.1 / math.sqrt(count)
    assert test.obs.min() < -0.3 and test.obs.max() > 1.3, "clipped"
    lag = (noise[1:] * noise[:-1]).mean() / 0.01
    assert abs(lag) < 5 / math.sqrt(count), "noise repeats from step to step"

    pixel = torch.arange(64) + 0.5
    column = (clean.sum(1) * pixel).sum(1) / clean.sum((1, 2))
    row = (clean.sum(2) * pixel).sum(1) / clean.sum((1, 2))
    assert (column - (16 + 32 * (decoded.obs[:, 0] + 1.5) / 3)).abs().max() < 0.6
    assert (
        row - (16 + 32 * (decoded.obs[:, 1] + 1.5) / 3) + 0.88
    ).abs().max() < 0.6  # the heart's centre of mass lies higher


def test_pictures_can_be_decoded_without_an_error():
    data = DSprites(2, 200, seed=5)
    cells = torch.cartesian_prod(torch.arange(32), torch.arange(32))
    clean = (
        render_sprites(torch.cat([torch.tensor([2, 0, 0]).expand(1024, 3), cells], 1))
        .flatten(1)
        .float()
    )
    fit = data.test[0].obs.flatten(1) @ clean.T - clean.square().sum(1) / 2
    found = -1.5 + 3 * cells[fit.argmax(1)].double() / 31
    assert (found - data.decoded[0].obs).abs().max() < 1e-12


def test_likelihood_is_the_probability_of_the_cell():
    model = position_model()
    axis = model.axis
    grid = torch.cartesian_prod(axis, axis)
    z = torch.tensor(
        [[0.0, 0.0], [0.31, -1.02], [1.5, -1.49], [1.9, 0.02], [-4.0, 7.0]], dtype=torch.float64
    )
    total = model.log_likelihood(grid[:, None], z).logsumexp(0)
    assert total.abs().max() < 1e-9
    edges = np.concatenate([[-np.inf], (axis[1:] + axis[:-1]).numpy() / 2, [np.inf]])
    for k in range(len(z)):
        across, down = (np.diff(norm.cdf(edges, loc=float(c), scale=0.05)) for c in z[k])
        truth = across[:, None] * down[None]
        got = model.log_likelihood(grid, z[k]).exp().reshape(32, 32).numpy()
        assert np.abs(got - truth).max() < 1e-12
    draws = model.observe(z[1].expand(20_000, 2), torch.Generator().manual_seed(0))
    share = (draws[:, None] == grid).all(-1).double().mean(0)
    expected = model.log_likelihood(grid, z[1]).exp()
    assert ((share - expected).abs() <= 5 * (expected / 20_000).sqrt() + 1e-9).all()


def test_likelihood_far_out():
    low, high = (
        torch.tensor([8.0, 30.0, -31.0, -math.inf, 5.0]).double(),
        torch.tensor([9.0, 31.0, -30.0, -50.0, math.inf]).double(),
    )
    truth = [
        norm.logsf(8) + math.log1p(-math.exp(norm.logsf(9) - norm.logsf(8))),
        norm.logsf(30),
        norm.logcdf(-30),
    ]
    truth += [norm.logcdf(-50), norm.logsf(5)]
    assert log_interval(low, high).numpy() == pytest.approx(np.array(truth), rel=1e-12)
    for dtype in (torch.float32, torch.float64):
        far = position_model().log_likelihood(
            torch.zeros(1, 2, dtype=dtype), torch.tensor([[9.0, -20.0], [0.0, 0.0]], dtype=dtype)
        )
        assert torch.isfinite(far).all()
        assert far.dtype == dtype
        assert far[0] < far[1]
    with pytest.raises(
        ValueError, match=r"observes positions .* got \(4, 1, 1, 64, 64\): images must be decoded"
    ):
        position_model().log_likelihood(torch.zeros(4, 1, 1, 64, 64), torch.zeros(4, 10, 2))


def test_problem_is_a_model_for_filters():
    model = position_model()
    assert isinstance(model, StateSpace)
    z = torch.tensor([[2.0, -0.04], [-9.0, 0.049]], dtype=torch.float64)
    assert model.cell(z).tolist() == [[31, 15], [0, 16]]
    draws = model.observe(
        torch.zeros(20_000, 2, dtype=torch.float64), torch.Generator().manual_seed(0)
    )
    assert draws.var(0).numpy() == pytest.approx(model.R.diagonal().numpy(), rel=0.05)
    single = model.move(torch.zeros(4, 3, 2))
    assert single.dtype == torch.float32
    assert model.observe(single).dtype == torch.float32
    memory = SyntheticData(model, 20, 5).train[0]
    filter = ParticleFilter(model, 50).fit(
        memory._replace(states=memory.states.float(), obs=memory.obs.float())
    )
    state = filter.update(filter.predict(filter.init(3)), torch.zeros(3, 2))
    assert filter.estimate(state).dtype == torch.float32
    assert model._replace(P0=torch.eye(2)).f is model.f
    wide = position_model(extent=3.0, sigma_x=0.1)
    assert (wide.axis[-1].item(), wide.sigma_x) == (3.0, 0.1)


def test_floor_is_below_reading_the_picture_alone():
    data = load_data(configure("floor", ["data=dsprites", "n_train=50", "seed=1"])["data"])
    assert data.decoded is not data.test
    least = data_floor(data, particles=1000)
    assert least is not None
    alone = (data.decoded[0].obs - data.test[0].states).square().sum(-1).mean()
    assert 0.004 < least.mse.item() < min(alone.item(), 0.009)


def test_command_writes_the_data(tmp_path, capsys):
    assert (
        main(
            ["data", "data=dsprites", "n_train=20", "data.n_test=5", f"run_dir={tmp_path / 'out'}"]
        )
        == 0
    )
    with np.load(tmp_path / "out" / "data.npz") as arrays:
        assert arrays["train_obs_0"].shape == (20, 1, 64, 64)
        assert arrays["test_states_0"].shape == (5, 2)
        assert np.array_equal(arrays["train_obs_0"], DSprites(20, 5, seed=0).train[0].obs.numpy())
    assert "(1, 64, 64)" in capsys.readouterr().out
    assert json.loads(json.dumps(configure("data", ["data=dsprites"])["data"]["image"])) == [
        1,
        64,
        64,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["n_train=1"], "n_train 1 and n_test 200"),
        (["+data.source.shape=3"], "shape is an index from 0 to 2, got 3"),
        (["data.source.pixel_noise=-0.1"], "pixel_noise must not be negative, got -0.1"),
        (["data.problem.sigma_x=0.0"], "sigma_x and extent must be positive"),
        (
            ["data.images=none.npz"],
            "there is no file none.npz: data.images must be rendered, download, or the path of "
            "dsprites_",
        ),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "data=dsprites", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert left(tmp_path) == []


def test_nothing_warns_and_nothing_is_pickled(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frames = open_dsprites(write_file(tmp_path / "small.npz"), SMALL)
        torch.from_numpy(frames[np.array([3, 5])])
