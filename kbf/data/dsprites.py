"""A heart that moves, seen as a noisy picture: dSprites, drawn here or from the published file.

The state is z = (z_1, z_2). z_1 runs to the right of the picture (posX), z_2 downwards (posY).
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from kbf.data.download import cache_dir, check, download, one_at_a_time
from kbf.data.sprites import PIXELS, SIZES, check_factors, render_sprites
from kbf.data.synthetic import SyntheticData
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing
from kbf.runtime.html_repr import Shown
from kbf.ssm import gaussian_log_density_of_pairs, gaussian_noise, normal, oscillatory

FILE_NAME = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
URL = f"https://github.com/google-deepmind/dsprites-dataset/raw/master/{FILE_NAME}"
MD5 = "7da33b31b13a06f4b04a70402ce90c2e"  # the authors publish none; this one many independent projects check the file with
DOWNLOAD_HINT = f"{FILE_NAME} can be had from {URL} by any other way: give its path as data.images=PATH; data.images=rendered needs no file"


class PositionModel(NamedTuple):
    """z' = f(z) + N(0, Q), seen as the point of a square grid next to z' + N(0, sigma_x^2 I): what such a picture tells.

    Attributes:
        f: ``*b 2`` -> ``*b 2``. Q: ``2 2``, transition noise covariance.
        m0: ``2``. P0: ``2 2``. Mean and covariance before the first move.
        sigma_x: standard deviation of the position that is shown.
        axis: ``k``, equally spaced positions of the grid, the same on both axes.
        h: the identity. R: ``2 2``, sigma_x^2 + spacing^2 / 12 on the diagonal: with them Gaussian
            filters can use this model as if the observation were h(z) + N(0, R), which is nearly so
            away from the border.
    """

    f: Callable[[Tensor], Tensor]
    h: Callable[[Tensor], Tensor]
    Q: Tensor
    R: Tensor
    m0: Tensor
    P0: Tensor
    sigma_x: float
    axis: Tensor

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw z' given z."""
        return self.f(z) + gaussian_noise(z.shape[:-1], self.Q.to(z), generator)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw the shown position, a point of the grid: one beyond the border is shown on the border."""
        return self.axis.to(z)[self.cell(z + self.sigma_x * normal(z, generator))]

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """log N(z'; f(z), Q); z' and z broadcast."""
        return gaussian_log_density_of_pairs(after, self.f(z), self.Q.to(z))

    def cell(self, x: Float[Tensor, "*b 2"]) -> Int[Tensor, "*b 2"]:
        """Indices of the points of the grid next to x."""
        step = self.axis[1] - self.axis[0]
        return ((x - self.axis[0].to(x)) / step.to(x)).round().clamp(0, len(self.axis) - 1).long()

    def log_likelihood(self, x: Tensor, z: Float[Tensor, "*c 2"]) -> Float[Tensor, "*e"]:
        """log P(x | z) = sum over the axes of log(Phi((upper - z) / sigma_x) - Phi((lower - z) / sigma_x)).

        (lower, upper) is what lies nearer to x, ``*b 2``, than to any other point; at the border it
        goes on to infinity.

        Raises:
            ValueError: an observation that is no position, such as a picture that nobody has
                decoded.
        """
        if x.shape[-1] != 2:
            raise ValueError(
                f"this model sees positions (..., 2), got {tuple(x.shape)}: pictures must be decoded first"
            )
        index, half = self.cell(x), (self.axis[1] - self.axis[0]).to(z) / 2
        centre = self.axis.to(z)[index]
        lower = torch.where(index == 0, -math.inf, centre - half)
        upper = torch.where(index == len(self.axis) - 1, math.inf, centre + half)
        return log_interval((lower - z) / self.sigma_x, (upper - z) / self.sigma_x).sum(-1)


def position_model(
    *,
    omega: float = 0.4,
    beta: float = 0.4,
    M: float = 8.0,
    sigma_z: float = 0.2,
    sigma_x: float = 0.05,
    extent: float = 1.5,
) -> PositionModel:
    """The dynamics of `kbf.ssm.oscillatory`, seen on the grid of 32 x 32 positions in [-extent, extent]^2.

    References: Xu et al. (2022), section 6.2, for the dynamics.
    """
    if not (sigma_x > 0 and extent > 0):
        raise ValueError(f"sigma_x and extent must be positive, got {sigma_x} and {extent}")
    base = oscillatory(omega=omega, beta=beta, M=M, sigma_z=sigma_z, sigma_x=sigma_x)
    axis = torch.linspace(-extent, extent, SIZES[3], dtype=torch.float64)
    R = base.R + (axis[1] - axis[0]).square() / 12 * torch.eye(2, dtype=torch.float64)
    return PositionModel(base.f, base.h, base.Q, R, base.m0, base.P0, sigma_x, axis)


class DSprites(Shown):
    """One trajectory of a sprite: ``n_train`` pictures to learn from, the ``n_test`` pictures after them as the test.

    It starts at the model's m0, moves, and is then shown: at the point of a grid of 32 x 32 next to
    z + N(0, sigma_x^2 I), with noise on every pixel that is not clipped. z_1 is posX, to the right;
    z_2 is posY, downwards. With one seed, a longer training part begins with the shorter, and
    states are the same for every choice of ``images`` and of the sprite.

    Attributes:
        train: a list of one sequence, states float64 ``T 2``, observations float32 ``T 1 64 64``.
            test: likewise.
        problem: the model, which sees the shown position.
        decoded: the test part as the problem sees it, observations ``T 2``: what a perfect decoder
            of the pictures would see.
        renderer: where the pictures are from.
        extent: coordinates of the left, right, bottom and top edge of a picture.

    References: Xu et al. (2022), section 6; Matthey et al. (2017) for the pictures.
    """

    def __init__(
        self,
        n_train: int,
        n_test: int = 200,
        seed: int = 0,
        *,
        problem: PositionModel | None = None,
        images: str = "rendered",
        sha256: str | None = None,
        shape: int = 2,
        scale: int = 0,
        orientation: int = 0,
        pixel_noise: float = 0.1,
    ) -> None:
        """Draw the data.

        Args:
            n_train: steps to learn from.
            n_test: steps to score on.
            seed: of everything that is drawn.
            problem: a `position_model`; None for the one of Xu et al.
            images: "rendered" draws the pictures; "download" fetches the published file (26 MB,
                once) into `cache_dir`; anything else is the path of that file. Its pictures are
                unpacked into the cache once, 3 GB.
            sha256: checksum that the published file must have.
            shape, scale, orientation: of the sprite; the heart of Xu et al. is 2, 0, 0.
            pixel_noise: standard deviation of the noise on a pixel; pixels are 0 or 1.

        Raises:
            ValueError: too few steps, an index out of its range, or a file that cannot be fetched
                or is not dSprites.
            FileNotFoundError: no file at the path ``images``.
        """
        if pixel_noise < 0:
            raise ValueError(f"pixel_noise must not be negative, got {pixel_noise}")
        self.problem: PositionModel = position_model() if problem is None else problem
        shown = SyntheticData(self.problem, n_train, n_test, seed)
        sprite = torch.tensor([shape, scale, orientation])
        check_factors(torch.cat([sprite, sprite.new_zeros(2)])[None])
        source = frames_of(images, sha256)
        generator = Generator().manual_seed(
            int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
        )  # not that of the states

        def seen(position: Tensor) -> Tensor:
            cells = self.problem.cell(position)
            factors, which = torch.cat([sprite.expand(len(cells), 3), cells], 1).unique(
                dim=0, return_inverse=True
            )
            noise = torch.stack([torch.randn(PIXELS, PIXELS, generator=generator) for _ in cells])
            return (source(factors).float()[which] + pixel_noise * noise)[:, None]

        self.train: list[Recording] = [s._replace(obs=seen(s.obs)) for s in shown.train]
        self.test: list[Recording] = [s._replace(obs=seen(s.obs)) for s in shown.test]
        self.decoded: list[Recording] = shown.test
        self.renderer = "drawn by kbf" if images == "rendered" else "the published dSprites"
        edge = 2 * float(
            self.problem.axis[-1]
        )  # the positions take up the middle half of a picture
        self.extent: tuple[float, float, float, float] = (-edge, edge, edge, -edge)


def frames_of(images: str, sha256: str | None = None) -> Callable[[Tensor], Tensor]:
    """The function from factors ``n 5`` to pictures ``n 64 64`` that `DSprites` calls ``images``."""
    if images == "rendered":
        return render_sprites
    if images == "download":
        try:
            path = download(
                URL,
                cache_dir() / "dsprites" / FILE_NAME,
                {"sha256": sha256} if sha256 else {"md5": MD5},
                tell,
            )
        except ValueError as error:
            raise ValueError(f"{error}. {DOWNLOAD_HINT}") from error
    else:
        path = Path(images).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {path}: data.images must be rendered, download, or the path of {FILE_NAME}"
            )
        check(path, {"sha256": sha256} if sha256 else None)
    frames = open_dsprites(path)
    return lambda factors: torch.from_numpy(frames[frame_index(factors.numpy())])


def tell(done: int, total: int | None) -> None:
    """Say how far a download is, to a person."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(
            f"\rdSprites: {done / 1e6:.0f} of {(total or 0) / 1e6:.0f} MB",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def frame_index(factors: np.ndarray, sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    """Where the published file has the pictures with these factors, ``n 5`` -> ``n``: shape, ..., posY, the last one fastest."""
    return np.asarray(np.ravel_multi_index(tuple(factors.T), sizes))


def open_dsprites(path: str | os.PathLike[str], sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    """The pictures of the published file, uint8 ``N 64 64`` with values 0 and 1, mapped into memory from the cache.

    Its member ``imgs`` is unpacked into `cache_dir` once; only then are its checksum, the order,
    and 200 pictures against our own drawing checked. The member ``metadata``, Python objects that
    could run anything, is never read.

    Args:
        path: the file.
        sizes: how many shapes, scales, orientations, posX and posY it has.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, or something else. Nothing is left in the cache then.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            missing = {"imgs.npy", "latents_classes.npy"} - set(archive.namelist())
            if missing:
                raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
            member = archive.getinfo("imgs.npy")
            check_header(archive, member, sizes)
            target = cache_dir() / "dsprites" / f"imgs-{member.CRC:08x}-{member.file_size}.npy"
            target.parent.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(target):
                if not (target.exists() and target.stat().st_size == member.file_size):
                    check_order(archive, sizes)
                    unpack(archive, member, target, sizes)
            frames = np.load(target, mmap_mode="r", allow_pickle=False)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: it has a password
        raise ValueError(f"cannot use {path} as the dSprites file: {error}") from error
    return frames


def check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, sizes: tuple[int, ...]) -> None:
    """Raise unless the member is as large as, and says that it is, uint8 ``N 64 64``."""
    with archive.open(member) as file:
        shape, fortran, dtype = read_header(file)
        length = file.tell() + math.prod(shape)
    expected = (math.prod(sizes), PIXELS, PIXELS)
    if dtype != np.uint8 or fortran or shape != expected:
        raise ValueError(
            f"its imgs are {dtype} {shape}{' in Fortran order' if fortran else ''}, not uint8 {expected}"
        )
    if member.file_size != length:
        raise ValueError(f"its imgs are {member.file_size} bytes, not {length}")


def read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of an npy file, whose data come next."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version}")
    return (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )(file)


def check_order(archive: zipfile.ZipFile, sizes: tuple[int, ...]) -> None:
    """Raise unless the pictures lie in the order that `frame_index` takes them to be in."""
    with archive.open("latents_classes.npy") as file:
        classes = np.lib.format.read_array(file, allow_pickle=False)
    expected = (
        np.indices(sizes).reshape(len(sizes), -1).T
    )  # behind the colour, which is always white
    if classes.shape != (len(expected), len(sizes) + 1) or not np.array_equal(
        classes[:, 1:], expected
    ):
        raise ValueError(
            f"its latents_classes are not those of sizes {sizes}, with the last one fastest"
        )


def unpack(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, sizes: tuple[int, ...]
) -> None:
    """Write the member to ``target`` in one step, once its checksum and its pictures are found to be right."""
    free = shutil.disk_usage(target.parent).free
    if free < member.file_size:
        raise ValueError(
            f"unpacked it takes {member.file_size / 1e9:.1f} GB, {target.parent} has {free / 1e9:.1f} (see KBF_CACHE)"
        )
    with replacing(target) as temporary:
        with archive.open(member) as source, temporary.open("wb") as file:
            while block := source.read(1 << 20):  # the last block compares the checksum
                file.write(block)
        check_frames(np.load(temporary, mmap_mode="r", allow_pickle=False), sizes)


def check_frames(frames: np.ndarray, sizes: tuple[int, ...], count: int = 200) -> None:
    """Raise unless, of ``count`` random pictures, four in five are exactly as drawn here and none is off by more than 8 pixels."""
    factors = np.random.default_rng(0).integers(sizes, size=(count, len(sizes)))
    wrong = (
        frames[frame_index(factors, sizes)] != render_sprites(torch.from_numpy(factors)).numpy()
    ).sum((1, 2))
    if (wrong == 0).mean() < 0.8 or wrong.max() > 8:
        raise ValueError(
            f"of {count} pictures {(wrong == 0).sum()} are as expected; one is off by {wrong.max()} pixels"
        )


def log_interval(lower: Float[Tensor, "*b"], upper: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log(Phi(upper) - Phi(lower)) of the standard normal, lower < upper, exact far out in both tails.

    >>> log_interval(torch.tensor([30.0, -31.0]).double(), torch.tensor([31.0, -30.0]).double())
    tensor([-454.3212, -454.3212], dtype=torch.float64)
    """
    turned = lower + upper > 0  # Phi is exact near 0, not near 1
    low, high = torch.where(turned, -upper, lower), torch.where(turned, -lower, upper)
    log_low, log_high = torch.special.log_ndtr(low), torch.special.log_ndtr(high)
    return log_high + torch.log(-torch.expm1(log_low - log_high))
