"""Stacking weights by non-negative least squares on held-out blocks.

For each component j of the state the weights a_jk of the models k minimise sum_t (z_tj - sum_k a_jk
m_tkj)^2, a_jk >= 0 and sum_k a_jk = 1, over held-out steps t.

References: Wolpert (1992); Breiman (1996), for stacking with non-negative weights.
"""

from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.selection.cross_validation import Trial, nmse_of


def stacked(
    trials: list[Trial], scale: Float[Tensor, " d"]
) -> tuple[Float[Tensor, "m d"], Float[Tensor, " s"]]:
    """Return the stacking weights ``m d``, and the ensemble's NMSE on each block ``s``.

    The weights that a block is scored with are fitted without the blocks of its fold. As the
    weights of a component sum to 1, the residual of the ensemble is the weighted sum of the
    residuals.
    """
    residuals = zip(*(trial.residuals for trial in trials), strict=True)
    blocks = [torch.stack(each) for each in residuals]  # m t d
    folds, scores = trials[0].folds, []
    for fold in dict.fromkeys(folds):
        rest = [each for k, each in zip(folds, blocks, strict=True) if k != fold]
        weights = simplex_weights(torch.cat(rest, 1))
        held = [each for k, each in zip(folds, blocks, strict=True) if k == fold]
        scores += [nmse_of((weights[:, None] * block).sum(0), scale) for block in held]
    return simplex_weights(torch.cat(blocks, 1)), torch.stack(scores)


def simplex_weights(residuals: Float[Tensor, "m t d"]) -> Float[Tensor, "m d"]:
    """Return the weights that minimise the squared weighted residuals, for each component.

    Weights are non-negative and have sum 1.

    With R = sum_t r_t r_t^T, the minimiser of a^T R a under 1^T a = 1 is R^-1 1 / (1^T R^-1 1). The
    constrained minimum is the best of these solutions over all subsets of the models whose weights
    are non-negative. All subsets are enumerated, since m is small.

    >>> simplex_weights(torch.tensor([[[1.0], [1.0]], [[-1.0], [-1.0]]]))
    tensor([[0.5000],
            [0.5000]], dtype=torch.float64)
    """
    m, _, d = residuals.shape
    found = torch.zeros(m, d, dtype=torch.float64, device=residuals.device)
    for j in range(d):
        rows = residuals[..., j].double()
        R = rows @ rows.mT
        R = R + 1e-9 * R.diagonal().mean().clamp_min(torch.finfo(R.dtype).tiny) * torch.eye(m).to(R)
        best = torch.inf
        for size in range(1, m + 1):
            for subset in map(list, combinations(range(m), size)):
                part = R[subset][:, subset]
                solved = torch.linalg.solve(part, torch.ones_like(part[0]))
                a = solved / solved.sum()
                error = float(a @ part @ a)
                if bool((a >= 0).all()) and error < best:
                    best = error
                    found[:, j] = 0
                    found[subset, j] = a
    return found
