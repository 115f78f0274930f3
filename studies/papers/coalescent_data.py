"""The infinite-sites coalescent with recombination, and seven statistics of a sample.

A data set of the kind of ``coal`` in the R package abctools (Nunes and Prangle 2015), made by
msprime.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kbf.data.cache import cache_dir
from kbf.runtime.atomic_files import replacing
from kbf.runtime.optional_dependencies import need

PRIOR = ((2.0, 10.0), (0.0, 10.0))
"""Uniform, of the scaled mutation rate theta and of the scaled recombination rate rho."""
HAPLOTYPES = 50
SIMULATIONS_PER_PIECE = 2000
"""Simulations in a file."""


def sample(
    theta: float, rho: float, seed: int, *, haplotypes: int = HAPLOTYPES
) -> tuple[np.ndarray, np.ndarray]:
    """One sample: derived alleles ``haplotypes sites`` (booleans) and sites in [0, 1).

    Two haplotypes in a haploid population of size 1/2 have a common ancestor after 1/2 a unit of
    time on average, so that with the mutation rate theta they differ in theta places: the rates of
    msprime are the scaled rates theta and rho themselves.

    Raises:
        ValueError: msprime is not installed.
    """
    msprime = need("msprime", "reproduce", "simulating the coalescent")  # slow to import, too
    shared = {"discrete_genome": False, "random_seed": seed}
    tree = msprime.sim_ancestry(
        haplotypes,
        ploidy=1,
        population_size=0.5,
        sequence_length=1,
        recombination_rate=rho,
        **shared,
    )
    mutated = msprime.sim_mutations(tree, rate=theta, **shared)
    return mutated.genotype_matrix().T > 0, mutated.sites_position


def statistics(alleles: np.ndarray, places: np.ndarray, noise: float) -> list[float]:
    """C1-C7 of the draft's section 5.3.

    Segregating sites; ``noise``, which is uninformative; mean number of differences between two
    haplotypes; mean R^2 of pairs of sites less than a tenth of the region apart (0 if there is
    none); distinct haplotypes; share of the most common; haplotypes seen once.
    """
    n, sites = alleles.shape
    share = alleles.mean(0)
    differences = (2 * share * (1 - share)).sum() * n / (n - 1)
    near = np.triu(np.abs(places[:, None] - places) < 0.1, 1)
    correlation = np.atleast_2d(np.corrcoef(alleles.T)) if near.any() else np.zeros((sites, sites))
    linkage = float(np.square(correlation)[near].mean()) if near.any() else 0.0
    counts = np.unique(alleles, axis=0, return_counts=True)[1] if sites else np.array([n])
    return [
        float(sites),
        noise,
        float(differences),
        linkage,
        float(len(counts)),
        float(counts.max() / n),
        float((counts == 1).sum()),
    ]


def simulate(n: int, key: list[int]) -> Tensor:
    """n simulations ``n 9`` with parameters from the prior: theta, rho, C1-C7.

    ``key`` seeds them.
    """
    generator = np.random.default_rng(key)
    rows = []
    for _ in range(n):
        theta, rho = (generator.uniform(*bounds) for bounds in PRIOR)
        seed = int(generator.integers(1, 2**31))
        rows.append([theta, rho, *statistics(*sample(theta, rho, seed), generator.uniform(0, 25))])
    return torch.tensor(rows, dtype=torch.float64)


def chunk(index: int, n: int, seed: int) -> Tensor:
    """A part of the training simulations, ``n 9``, stored in the user's cache."""
    path = cache_dir() / f"coalescent-{HAPLOTYPES}-{n}-{seed}-{index}.npz"
    if not path.is_file():
        made = simulate(n, [seed, 0, index])
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, simulations=made.numpy())
    with np.load(path) as file:
        return torch.from_numpy(file["simulations"])


def sizes(n: int) -> list[int]:
    """How many simulations each chunk of n holds."""
    return [min(SIMULATIONS_PER_PIECE, n - start) for start in range(0, n, SIMULATIONS_PER_PIECE)]


def simulations(n: int, seed: int) -> Tensor:
    """The n training simulations ``n 9``."""
    return torch.cat([chunk(index, size, seed) for index, size in enumerate(sizes(n))])


def observations(n: int, seed: int, run: int) -> Tensor:
    """n simulations ``n 9`` that stand for what was observed, others in each run."""
    return simulate(n, [seed, 1, run])
