"""A moving heart, observed as a noisy image: dSprites, rendered here or from the published file.

The state is z = (z_1, z_2). z_1 runs to the right of the image (posX), z_2 downwards (posY).
"""

import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from jaxtyping import Float, Int
from torch import Generator, Tensor

from kbf.data.cache import cache_dir, check, download, show_progress
from kbf.data.sprites import PIXELS, SIZES, check_factors, render_sprites
from kbf.data.synthetic import SyntheticData
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing
from kbf.runtime.html_repr import Shown
from kbf.runtime.memory_limit import BYTES_OF_A_PIXEL
from kbf.ssm import gaussian_log_density_of_pairs, gaussian_noise, normal, oscillatory

FILE_NAME = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
URL = f"https://github.com/google-deepmind/dsprites-dataset/raw/master/{FILE_NAME}"

# Of the published file, as many independent projects use it; the authors publish no checksum.
MD5 = "7da33b31b13a06f4b04a70402ce90c2e"

DOWNLOAD_HINT = (
    f"{FILE_NAME} may also be downloaded from {URL} by other means and given as data.images=PATH; "
    "data.images=rendered needs no file"
)

# Images of the published file that are compared with our rendering.
CHECKED_IMAGES = 200

# Smallest share of them that must be equal in every pixel. Of 320 published images 284 are.
MIN_EQUAL_SHARE = 0.8

# Largest number of pixels in which one of them may differ. Of 320 published images none exceeds 4.
MAX_DIFFERENT_PIXELS = 8


class PositionModel(NamedTuple):
    """z' = f(z) + N(0, Q); x is the point of a square grid nearest to z' + N(0, sigma_x^2 I).

    This is the information in a noiseless image.

    Attributes:
        f: ``*b 2`` -> ``*b 2``. Q: ``2 2``, transition noise covariance.
        m0: ``2``. P0: ``2 2``. Mean and covariance before the first move.
        sigma_x: standard deviation of the observed position.
        axis: ``k``, equally spaced positions of the grid, the same on both axes.
        h: the identity. R: ``2 2``, sigma_x^2 + spacing^2 / 12 on the diagonal. Gaussian filters
            use them to approximate the observation by h(z) + N(0, R), which is accurate away from
            the border.
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
        """Draws z' given z."""
        return self.f(z) + gaussian_noise(z.shape[:-1], self.Q.to(z), generator)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws the observed point of the grid (positions beyond it: on its border)."""
        return self.axis.to(z)[self.cell(z + self.sigma_x * normal(z, generator))]

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns log N(z'; f(z), Q); z' and z broadcast."""
        return gaussian_log_density_of_pairs(after, self.f(z), self.Q.to(z))

    def cell(self, x: Float[Tensor, "*b 2"]) -> Int[Tensor, "*b 2"]:
        """Returns the indices of the points of the grid nearest to x."""
        step = self.axis[1] - self.axis[0]
        return ((x - self.axis[0].to(x)) / step.to(x)).round().clamp(0, len(self.axis) - 1).long()

    def log_likelihood(self, x: Tensor, z: Float[Tensor, "*c 2"]) -> Float[Tensor, "*e"]:
        """Sums log(Phi((upper - z) / sigma_x) - Phi((lower - z) / sigma_x)) over the axes.

        It is log P(x | z), where (lower, upper) are the positions nearer to x, ``*b 2``, than to
        any other point of the grid; at the border they extend to infinity.

        Raises:
            ValueError: an observation that is not a position, such as an image.
        """
        if x.shape[-1] != 2:
            raise ValueError(
                f"this model observes positions (..., 2), got {tuple(x.shape)}: "
                "images must be decoded first"
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
    moved_angle: bool = True,
) -> PositionModel:
    """Returns `kbf.ssm.oscillatory` observed on 32 x 32 positions in [-extent, extent]^2.

    ``moved_angle`` is that of `kbf.ssm.oscillatory`: False takes sin(M theta) as equation 5 of the
    paper prints it.

    References: Xu et al. (2022), section 6.2, for the dynamics.
    """
    if not (sigma_x > 0 and extent > 0):
        raise ValueError(f"sigma_x and extent must be positive, got {sigma_x} and {extent}")
    base = oscillatory(
        omega=omega, beta=beta, M=M, sigma_z=sigma_z, sigma_x=sigma_x, moved_angle=moved_angle
    )
    axis = torch.linspace(-extent, extent, SIZES[3], dtype=torch.float64)
    R = base.R + (axis[1] - axis[0]).square() / 12 * torch.eye(2, dtype=torch.float64)
    return PositionModel(**base._replace(R=R)._asdict(), sigma_x=sigma_x, axis=axis)


class DSprites(Shown):
    """One trajectory of a sprite: ``n_train`` training images, followed by ``n_test`` test images.

    It starts at the model's m0. Each step moves the state and then observes it: the image shows the
    sprite at the point of a grid of 32 x 32 nearest to z + N(0, sigma_x^2 I), with noise on every
    pixel that is not clipped. z_1 is posX, to the right; z_2 is posY, downwards. For one seed, the
    training part for a smaller `n_train` is the beginning of that for a larger one, and states are
    the same for every choice of ``images`` and of the sprite.

    Attributes:
        train: a list of one recording, states float64 ``T 2``, observations float32 ``T 1 64 64``.
            test: likewise.
        problem: the model, whose observation is the position in the image.
        decoded: the test part with these positions ``T 2`` as observations, which a perfect decoder
            of the images would return.
        renderer: origin of the images.
        extent: coordinates of the left, right, bottom and top edge of an image.

    References: Xu et al. (2022), section 6; Matthey et al. (2017) for the images.
    """

    @staticmethod
    def memory_needed(n_train: int = 0, n_test: int = 200, **_: Any) -> int:
        """Returns the bytes of the images at most, for data sets that files describe."""
        return BYTES_OF_A_PIXEL * (n_train + n_test) * 64 * 64

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
        """Simulate the trajectory and render it.

        Args:
            n_train: number of training steps.
            n_test: number of test steps.
            seed: of all random draws.
            problem: a `position_model`; None for the one of Xu et al.
            images: "rendered" renders the images; "download" downloads the published file (26 MB,
                once) into `cache_dir`; anything else is the path of that file. Its images are
                unpacked into the cache once, 3 GB.
            sha256: expected checksum of the published file.
            shape, scale, orientation: of the sprite; the heart of Xu et al. is 2, 0, 0.
            pixel_noise: standard deviation of the noise on a pixel; pixels are 0 or 1.

        Raises:
            ValueError: too few steps, an index out of its range, or a file that cannot be
                downloaded or is not dSprites.
            FileNotFoundError: there is no file ``images``.
        """
        if pixel_noise < 0:
            raise ValueError(f"pixel_noise must not be negative, got {pixel_noise}")
        self.problem: PositionModel = position_model() if problem is None else problem
        shown = SyntheticData(self.problem, n_train, n_test, seed)
        sprite = torch.tensor([shape, scale, orientation])
        check_factors(torch.cat([sprite, sprite.new_zeros(2)])[None])
        source = frames_of(images, sha256)
        # a random stream of its own, so that the states do not depend on the images
        noise_seed = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
        generator = Generator().manual_seed(noise_seed)

        def image_of(position: Tensor) -> Tensor:
            cells = self.problem.cell(position)
            factors, which = torch.cat([sprite.expand(len(cells), 3), cells], 1).unique(
                dim=0, return_inverse=True
            )
            noise = torch.stack([torch.randn(PIXELS, PIXELS, generator=generator) for _ in cells])
            return (source(factors).float()[which] + pixel_noise * noise)[:, None]

        self.train: list[Recording] = [s._replace(obs=image_of(s.obs)) for s in shown.train]
        self.test: list[Recording] = [s._replace(obs=image_of(s.obs)) for s in shown.test]
        self.decoded: list[Recording] = shown.test
        self.renderer = "drawn by kbf" if images == "rendered" else "the published dSprites"
        edge = 2 * float(self.problem.axis[-1])  # positions cover the middle half of an image
        self.extent: tuple[float, float, float, float] = (-edge, edge, edge, -edge)


def frames_of(images: str, sha256: str | None = None) -> Callable[[Tensor], Tensor]:
    """Returns the function from factors ``n 5`` to images ``n 64 64`` of `DSprites`."""
    if images == "rendered":
        return render_sprites
    if images == "download":
        checksums = {"sha256": sha256} if sha256 else {"md5": MD5}
        try:
            path = download(URL, cache_dir() / "dsprites" / FILE_NAME, checksums, report)
        except ValueError as error:
            raise ValueError(f"{error}. {DOWNLOAD_HINT}") from error
    else:
        path = Path(images).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {path}: data.images must be rendered, download, "
                f"or the path of {FILE_NAME}"
            )
        check(path, {"sha256": sha256} if sha256 else None)
    frames = open_dsprites(path)
    return lambda factors: torch.from_numpy(frames[frame_index(factors.numpy())])


def report(done: int, total: int | None) -> None:
    """Shows the progress of a download in the terminal."""
    show_progress("dSprites", done / total if total else 0.0)


def frame_index(factors: np.ndarray, sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    """Returns the indices ``n`` of images with factors ``n 5`` in the file; posY is fastest."""
    return np.asarray(np.ravel_multi_index(tuple(factors.T), sizes))


def open_dsprites(path: str | os.PathLike[str], sizes: tuple[int, ...] = SIZES) -> np.ndarray:
    """Returns the images of the published file as a memory map, uint8 ``N 64 64`` of 0 and 1.

    Its member ``imgs`` is unpacked into `cache_dir` once. While it is unpacked, its checksum, its
    order and `CHECKED_IMAGES` images are checked. The member ``metadata``, pickled Python objects,
    is never read.

    Args:
        path: the file.
        sizes: numbers of shapes, scales, orientations, posX and posY.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged or has other contents. The cache is unchanged then.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if missing := {"imgs.npy", "latents_classes.npy"} - set(archive.namelist()):
                raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
            member = archive.getinfo("imgs.npy")
            check_header(archive, member, sizes)
            target = cache_dir() / "dsprites" / f"imgs-{member.CRC:08x}-{member.file_size}.npy"
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_name(f".{target.name}.lock")):
                if not (target.exists() and target.stat().st_size == member.file_size):
                    check_order(archive, sizes)
                    unpack(archive, member, target, sizes)
            return np.load(target, mmap_mode="r", allow_pickle=False)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        # RuntimeError: the archive has a password
        raise ValueError(f"cannot use {path} as the dSprites file: {error}") from error


def check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, sizes: tuple[int, ...]) -> None:
    """Raises a ValueError unless header and size of the member are those of uint8 ``N 64 64``."""
    with archive.open(member) as file:
        np.lib.format.read_magic(file)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        length = file.tell() + math.prod(shape)
    expected = (math.prod(sizes), PIXELS, PIXELS)
    if dtype != np.uint8 or fortran or shape != expected:
        raise ValueError(
            f"its imgs are {dtype} {shape}{' in Fortran order' if fortran else ''}, "
            f"not uint8 {expected}"
        )
    if member.file_size != length:
        raise ValueError(f"its imgs are {member.file_size} bytes, not {length}")


def check_order(archive: zipfile.ZipFile, sizes: tuple[int, ...]) -> None:
    """Raises a ValueError unless the images are in the order of `frame_index`."""
    with archive.open("latents_classes.npy") as file:
        classes = np.lib.format.read_array(file, allow_pickle=False)
    expected = np.indices(sizes).reshape(len(sizes), -1).T
    # the first column is the colour, which is always white
    if classes.ndim != 2 or not np.array_equal(classes[:, 1:], expected):
        raise ValueError(
            f"its latents_classes are not those of sizes {sizes}, with the last one fastest"
        )


def unpack(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, sizes: tuple[int, ...]
) -> None:
    """Writes the member to ``target`` atomically, after checking its checksum and its images."""
    if (free := shutil.disk_usage(target.parent).free) < member.file_size:
        raise ValueError(
            f"unpacked it takes {member.file_size / 1e9:.1f} GB, "
            f"{target.parent} has {free / 1e9:.1f} (see KBF_CACHE)"
        )
    with replacing(target) as temporary:
        with archive.open(member) as source, temporary.open("wb") as file:
            while block := source.read(1 << 20):  # the last block checks the checksum
                file.write(block)
        check_frames(np.load(temporary, mmap_mode="r", allow_pickle=False), sizes)


def check_frames(frames: np.ndarray, sizes: tuple[int, ...]) -> None:
    """Raises a ValueError unless random images agree with `render_sprites` (`MIN_EQUAL_SHARE`)."""
    factors = np.random.default_rng(0).integers(sizes, size=(CHECKED_IMAGES, len(sizes)))
    rendered = render_sprites(torch.from_numpy(factors)).numpy()
    wrong = (frames[frame_index(factors, sizes)] != rendered).sum((1, 2))
    if (wrong == 0).mean() < MIN_EQUAL_SHARE or wrong.max() > MAX_DIFFERENT_PIXELS:
        raise ValueError(
            f"of {CHECKED_IMAGES} images {(wrong == 0).sum()} are as expected; "
            f"one is off by {wrong.max()} pixels"
        )


def log_interval(lower: Float[Tensor, "*b"], upper: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Returns log(Phi(upper) - Phi(lower)) for lower < upper, accurate far out in both tails.

    >>> log_interval(torch.tensor([30.0, -31.0]).double(), torch.tensor([31.0, -30.0]).double())
    tensor([-454.3212, -454.3212], dtype=torch.float64)
    """
    turned = lower + upper > 0  # log Phi is accurate in the lower tail only
    low, high = torch.where(turned, -upper, lower), torch.where(turned, -lower, upper)
    log_low, log_high = torch.special.log_ndtr(low), torch.special.log_ndtr(high)
    return log_high + torch.log(-torch.expm1(log_low - log_high))
