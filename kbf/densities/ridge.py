"""Kernel ridge regression with its predictive distribution, a Gaussian p(y | u)."""

import hashlib
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI, Likelihood
from kbf.manifolds import FLAT, Manifold, manifold_of
from kbf.rkhs.features import nystrom_whitening, pivots
from kbf.rkhs.kernels import KERNELS, NETWORK_KERNELS, Kernel, median_distance, own_value
from kbf.rkhs.linalg import cholesky, some_rows, squared_distance
from kbf.runtime.deadline import check_deadline
from kbf.runtime.errors import FitError, fit_errors
from kbf.ssm import normal


class RidgeMap(NamedTuple):
    """Kernel ridge regression, a `ConditionalDensity`: y | u ~ N(m(u), scale(u) S).

    Kernel ridge regression y = A^T phi(u) in r Nystrom features phi of a kernel is Bayesian linear
    regression with noise covariance S and prior variance S / (n reg); its predictive covariance is
    S times scale(u) = 1 + phi(u)^T (Phi^T Phi + n reg I)^-1 phi(u) + (k(u, u) - phi(u)^T phi(u)) /
    (n reg), which grows where there are no training points. With all training points as landmarks
    it is the predictive variance of a Gaussian process whose kernel is k / (n reg), in units of the
    noise. Computed in float64, returned in the type of u.

    On a manifold (`kbf.manifolds`: headings as unit vectors, alone or with other components) the
    mean is projected onto it, and the noise is a displacement along it: y = exp(project(m(u)), e),
    e ~ N(0, scale(u) S).

    Attributes:
        landmarks: ``r d``. whiten: ``r r``, L^-T with L L^T their Gram matrix. kernel: k, all
            filled in.
        coefficients: A ``r q``. offset: ``q``, the mean of y.
        factor: ``r r``, (Phi^T Phi + n reg I)^-1. ridge: n reg.
        noise: S ``k k``, k = q in flat space; or only its diagonal ``k``, where components are
            independent.
        manifold: where y lives.
        selection: the points that kernel and ridge were selected on (`hash_of`), and the positions
            of both among the candidates; empty for a map that was not selected.

    References: Rasmussen and Williams (2006), equations 2.11, 2.25 and 2.26.
    """

    landmarks: Tensor
    whiten: Tensor
    kernel: Kernel
    coefficients: Tensor
    offset: Tensor
    factor: Tensor
    noise: Tensor
    ridge: Tensor
    manifold: Manifold = FLAT
    selection: tuple[int, ...] = ()

    def features(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b r"]:
        """The features phi(u) ``*b r`` of inputs ``*b d``, in float64."""
        rows = u.reshape(-1, u.shape[-1]).to(self.landmarks)
        phi = self.kernel(rows, self.landmarks) @ self.whiten
        return phi.reshape(*u.shape[:-1], -1)

    def predict(
        self, u: Float[Tensor, "*b d"]
    ) -> tuple[Float[Tensor, "*b q"], Float[Tensor, "*b"]]:
        """The mean and the scale of the predictive distribution at u."""
        phi = self.features(u)
        return self.manifold.project(self.offset + phi @ self.coefficients).to(u), self.scale(
            u, phi
        ).to(u)

    def scale(self, u: Float[Tensor, "*b d"], phi: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
        """The scale of the predictive distribution at u, whose features are phi."""
        outside = (own_value(self.kernel, u.to(self.landmarks)) - phi.square().sum(-1)).clamp_min(
            0
        ) / self.ridge
        return 1 + ((phi @ self.factor) * phi).sum(-1) + outside

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y from the predictive distribution at u."""
        mean, scale = self.predict(u)
        return self.displaced(
            mean, scale, normal(mean.new_empty(*mean.shape[:-1], len(self.noise)), generator)
        )

    def displaced(
        self, mean: Float[Tensor, "*b q"], scale: Float[Tensor, "*b"], white: Float[Tensor, "*b k"]
    ) -> Float[Tensor, "*b q"]:
        """The mean with noise: from ``white``, standard normal, to covariance scale S."""
        coloured = (
            white * self.noise.sqrt().to(mean)
            if self.noise.ndim == 1
            else white @ cholesky(self.noise).to(mean).mT
        )
        return self.manifold.exp(mean, scale.sqrt()[..., None] * coloured)

    def expected(
        self, mean: Float[Tensor, "*b q"], scale: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*b q"]:
        """E y of a prediction.

        A pair that is a point of the circle is shortened by exp(-variance of the angle / 2).
        """
        length = torch.ones_like(mean)
        for before, start in enumerate(self.manifold.circles):
            angle = start - before  # of the displacement
            length[..., start : start + 2] = (
                -scale * self.noise[angle, angle].to(scale) / 2
            ).exp()[..., None]
        return mean * length

    def log_density(
        self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log N(y; m(u), scale(u) S); y and u broadcast."""
        return self.log_density_given(y, *self.predict(u)) + self.constant.to(u)

    def at(self, u: Float[Tensor, "m d"]) -> Likelihood:
        """Return y -> `log_density` of every y given every u; predictions are computed once."""
        mean, scale = self.predict(u)
        constant = self.constant.to(u)
        return lambda y: self.log_density_table(y, mean, scale) + constant

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]."""
        return self.expected(*self.predict(u))

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b k k"]:
        """scale(u) S, in flat space."""
        return self.predict(u)[1][..., None, None] * self.covariance_of_noise.to(u)

    @property
    def covariance_of_noise(self) -> Float[Tensor, "k k"]:
        """S as a matrix."""
        return self.noise.diag() if self.noise.ndim == 1 else self.noise

    @property
    def constant(self) -> Float[Tensor, ""]:
        """-1/2 log det(2 pi S)."""
        return -0.5 * (torch.logdet(self.covariance_of_noise) + len(self.noise) * LOG_2PI)

    def log_density_given(
        self, y: Float[Tensor, "*b q"], mean: Float[Tensor, "*c q"], scale: Float[Tensor, "*c"]
    ) -> Float[Tensor, "*e"]:
        """`log_density` without `constant`, from the mean and scale of a prediction."""
        residual = self.manifold.log(mean, y)
        rows = residual.reshape(
            -1, residual.shape[-1]
        )  # one solve for all rows: many small ones take far longer
        white, size = self.whitened(rows), 0.5 * rows.shape[-1] * scale.log()
        if not self.manifold.circles:
            return -0.5 * white.square().sum(-1).reshape(residual.shape[:-1]) / scale - size
        turns = self.whitened(self.manifold.turns(rows.shape[-1]).to(rows))
        # the density is that of all displacements that lead to y
        exponents = torch.stack(
            [
                -0.5 * (white + turn).square().sum(-1).reshape(residual.shape[:-1]) / scale
                for turn in turns
            ]
        )
        return exponents.logsumexp(0) - size

    def whitened(self, rows: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """Displacements in units of the noise, S^-1/2 v."""
        if self.noise.ndim == 1:
            return rows / self.noise.sqrt().to(rows)
        return torch.linalg.solve_triangular(
            cholesky(self.noise).mT.to(rows), rows, upper=True, left=False
        )

    def log_density_table(
        self, y: Float[Tensor, "n q"], mean: Float[Tensor, "m q"], scale: Float[Tensor, " m"]
    ) -> Float[Tensor, "n m"]:
        """`log_density_given` of every y under every prediction.

        In flat space it is one product of matrices, which is ten times faster.
        """
        if self.manifold.circles:
            return self.log_density_given(y[:, None], mean, scale)
        return (
            -0.5 * squared_distance(self.whitened(y), self.whitened(mean)) / scale
            - 0.5 * y.shape[-1] * scale.log()
        )


@fit_errors()
def fit_ridge_map(
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    kernels: tuple[str, ...] = ("gaussian", "arcsine"),
    factors: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-7, 6)),
    slopes: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0),
    biases: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0),
    regs: tuple[float, ...] = tuple(10.0 ** (-k / 2) for k in range(1, 15)),
    rank: int = 128,
    tol: float = 1e-6,
    diagonal: bool = False,
    flat: bool = False,
    candidates: list[Kernel] | None = None,
    points: int | None = None,
    known: Collection[tuple[int, ...]] = (),
) -> RidgeMap:
    """Fit y on u; kernel, settings and ridge minimise the leave-one-out log loss in closed form.

    With H_i = 1 - phi_i^T (Phi^T Phi + n reg I)^-1 phi_i, the mean at point i when it is left out
    is y_i - e_i / H_i and its scale is 1 / H_i (offset, landmarks and the ridge n reg stay as they
    are); with v_i the displacement from that mean to y_i (e_i / H_i in flat space) the noise is S =
    (1/n) sum_i H_i v_i v_i^T, and the score log det S - k mean_i log H_i. Neighbouring components
    of y whose norm is always 1 are taken as points of the circle.

    Args:
        u: inputs ``n d``.
        y: outputs ``n q``. 1e-9 of their mean variance is added to the diagonal of S, so that
            components may be constant.
        kernels: names in `kbf.rkhs.kernels.KERNELS` or `NETWORK_KERNELS` to try.
        factors: bandwidths to try, of kernels that have one, over the median distance of the
            inputs.
        slopes: of network kernels, times the root mean square of the inputs' norms; none tries no
            such kernel.
        biases: of network kernels, for each slope.
        regs: ridges to try.
        rank: most features.
        tol: share of the trace of the Gram matrix that the features leave out, see
            `kbf.rkhs.features.pivots`.
        diagonal: keep only the diagonal of S, as if the components of the noise were independent:
            for outputs by the thousand.
        flat: noise is added to all components; pairs of norm 1 are not taken as points of the
            circle.
        candidates: kernels with their settings, in place of those of the arguments before.
        points: number of drawn inputs among which landmarks are selected; None for all.
        known: `RidgeMap.selection` of earlier fits with the same settings. If one is of the same
            points, its kernel and ridge are taken without a comparison.

    Raises:
        ValueError: fewer than ten points, outputs that are all the same, or an unknown kernel.
    """
    n = len(y)
    u, y = u.double(), y.double()
    if n < 10:
        raise FitError(f"a kernel ridge map needs at least 10 pairs, got {n}")
    offset, manifold = y.mean(0), FLAT if diagonal or flat else manifold_of(y)
    k = manifold.log(y[:1], y[:1]).shape[-1]
    least = 1e-9 * y.var(0).mean()
    if not least > 0:
        raise FitError(
            f"a kernel ridge map needs outputs that vary, got {n} times {offset[:4].tolist()}"
        )
    best: tuple[float, RidgeMap] | None = None
    if candidates is None:
        candidates = kernel_candidates(u, kernels, factors, slopes, biases)
    own = hash_of(u, y)
    only = next((each[1:] for each in known if each[:1] == (own,)), None)
    some = u if points is None else u[some_rows(n, points, u.device)]
    kernels_to_try = list(enumerate(candidates))
    ridges_to_try = list(enumerate(n * reg for reg in regs))
    if only is not None:
        kernels_to_try, ridges_to_try = [kernels_to_try[only[0]]], [ridges_to_try[only[1]]]
    for place, kernel in kernels_to_try:
        check_deadline()
        landmarks = some[pivots(kernel, some, rank=rank, tol=tol)]
        whiten = nystrom_whitening(kernel(landmarks, landmarks))
        phi = kernel(u, landmarks) @ whiten
        values, vectors = torch.linalg.eigh(phi.mT @ phi)
        rotated = phi @ vectors
        squares, target = rotated.square(), rotated.mT @ (y - offset)
        for strength, ridge in ridges_to_try:
            shrunk = 1 / (values.clamp_min(0) + ridge)
            held_out = 1 - (squares @ shrunk)
            error = (y - offset - rotated @ (shrunk[:, None] * target)) / held_out[:, None]
            moved = manifold.log(manifold.project(y - error), y)
            if diagonal:
                noise = (held_out[:, None] * moved.square()).mean(0) + least
                spread = noise.log().sum()
            else:
                noise = noise_covariance(moved, held_out, least)
                spread = torch.logdet(noise)
            score = (spread - k * held_out.log().mean()).item()
            if best is None or score < best[0]:
                inverse = (vectors * shrunk) @ vectors.mT
                coefficients = vectors @ (shrunk[:, None] * target)
                best = (
                    score,
                    RidgeMap(
                        landmarks,
                        whiten,
                        kernel,
                        coefficients,
                        offset,
                        inverse,
                        noise,
                        u.new_tensor(ridge),
                        manifold,
                        (own, place, strength),
                    ),
                )
    assert best is not None
    return best[1]


def hash_of(*points: Tensor) -> int:
    """Return a hash of tensors, below 2^63."""
    hashed = hashlib.blake2b(digest_size=8)
    for each in points:
        hashed.update(each.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(hashed.digest(), "big") >> 1


def leave_one_out_loss(map: RidgeMap, u: Float[Tensor, "n d"]) -> float:
    """Return log det S - k mean_i log H_i (`fit_ridge_map`) of a map fitted to inputs u."""
    phi = map.features(u)
    held_out = 1 - ((phi @ map.factor) * phi).sum(-1)
    spread = torch.logdet(map.covariance_of_noise)
    return (spread - len(map.noise) * held_out.log().mean()).item()


def refitted(map: RidgeMap, u: Float[Tensor, "n d"], y: Float[Tensor, "n q"]) -> RidgeMap:
    """Return the map fitted to other points, with the same kernel, landmarks and ridge."""
    phi, offset = map.features(u), y.mean(0)
    factor = torch.linalg.inv(phi.mT @ phi + map.ridge * torch.eye(phi.shape[1]).to(phi))
    coefficients = factor @ (phi.mT @ (y - offset))
    held_out = 1 - ((phi @ factor) * phi).sum(-1)
    error = (y - offset - phi @ coefficients) / held_out[:, None]
    moved = map.manifold.log(map.manifold.project(y - error), y)
    noise = noise_covariance(moved, held_out, 1e-9 * y.var(0).mean())
    return map._replace(coefficients=coefficients, offset=offset, factor=factor, noise=noise)


def noise_covariance(
    moved: Float[Tensor, "n k"], held_out: Float[Tensor, " n"], least: Float[Tensor, ""]
) -> Float[Tensor, "k k"]:
    """S = (1/n) sum_i H_i v_i v_i^T, plus ``least`` times the identity."""
    return (held_out[:, None] * moved).mT @ moved / len(moved) + least * torch.eye(
        moved.shape[1]
    ).to(moved)


def kernel_candidates(
    u: Float[Tensor, "n d"],
    names: tuple[str, ...],
    factors: tuple[float, ...],
    slopes: tuple[float, ...],
    biases: tuple[float, ...],
) -> list[Kernel]:
    """Return the kernels of these names with every candidate setting of `fit_ridge_map`."""
    median, size = median_distance(u, distinct=True), u.square().sum(-1).mean().sqrt().item()
    candidates: list[Kernel] = []
    for name in names:
        if name in KERNELS:
            candidates += [partial(KERNELS[name], bandwidth=factor * median) for factor in factors]
        elif name in NETWORK_KERNELS:
            settings = [
                {"bias": bias, "slope": slope / size} for slope in slopes for bias in biases
            ]
            candidates += [partial(NETWORK_KERNELS[name], **setting) for setting in settings]
        else:
            raise ValueError(
                f"kernels must be among {', '.join([*KERNELS, *NETWORK_KERNELS])}; got {name!r}"
            )
    if not candidates:
        raise ValueError(
            f"there is no setting to try of the kernels {', '.join(names) or '(none)'}: "
            "give factors, or slopes and biases"
        )
    return candidates


class Join(NamedTuple):
    """(z, u) as one vector, the input of a map; controls are scaled to the spread of the states.

    Attributes:
        shift: ``k``, the mean control. scale: ``k``, states' spread over the control's.
    """

    shift: Tensor
    scale: Tensor

    def __call__(self, z: Float[Tensor, "*b d"], u: Float[Tensor, "*c k"]) -> Float[Tensor, "*e"]:
        """The vector (z, scaled u) ``*b d+k``; u broadcasts."""
        scaled = ((u - self.shift) * self.scale).to(z)
        return torch.cat([z, scaled.expand(*z.shape[:-1], scaled.shape[-1])], -1)


def join_of(z: Float[Tensor, "m d"], u: Float[Tensor, "m k"]) -> Join:
    """Return the `Join` of states z and controls u; a constant control has scale 0."""
    spread, own = z.var(0, correction=0).mean().sqrt(), u.std(0, correction=0)
    return Join(u.mean(0), torch.where(own > 0, spread / own, 0))
