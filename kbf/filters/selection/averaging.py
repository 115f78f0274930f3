"""Averages of the best models, weighted by their held-out errors.

Model k has the weight a_jk = e_jk^-4 / sum_l e_jl^-4 for component j of the state, where e_jk is
its mean squared error of this component on held-out steps. Of models with independent errors the
best average has weights e^-1. Errors of filters of the same observations are correlated, and the
best weights of correlated errors differ more. They are not fitted (stacking, Breiman 1996), since
held-out steps may be few.

References: Bates and Granger (1969), for weights by past errors.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.selection.cross_validation import Trial, nmse_of

# Models of an average; its steps take as long as those of all of them.
MAX_MEMBERS = 3
# Power of the error; chosen, as the number of members, on systems that are not scored (seeds below
# 100 of `python -m studies systems`).
POWER = 4
# Models whose largest weight is below this one are left out.
MIN_WEIGHT = 0.15


def averaged(
    found: Mapping[str, Trial], scale: Float[Tensor, " d"]
) -> tuple[dict[str, Float[Tensor, " d"]], Float[Tensor, " s"]]:
    """Return the weights of the best models by name, and the NMSE of their average on each block.

    As the weights of a component sum to 1, the residual of the average is the weighted sum of the
    residuals.

    Args:
        found: results of the models on the same held-out blocks.
        scale: the variance of the states.
    """
    names = sorted(found, key=lambda name: float(found[name].scores.mean()))[:MAX_MEMBERS]
    errors = torch.stack([torch.cat(found[name].residuals).square().mean(0) for name in names])
    weights = weights_of(errors)
    blocks = zip(*(found[name].residuals for name in names), strict=True)
    scores = [nmse_of((weights[:, None] * torch.stack(each)).sum(0), scale) for each in blocks]
    shares = dict(zip(names, weights, strict=True))
    return {name: share for name, share in shares.items() if bool(share.any())}, torch.stack(scores)


def weights_of(errors: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
    """Return weights by mean squared errors of m models; each column has the sum 1.

    >>> weights_of(torch.tensor([[1.0], [2.0], [4.0]]))
    tensor([[1.],
            [0.],
            [0.]])
    >>> weights_of(torch.tensor([[2.0], [2.0]]))
    tensor([[0.5000],
            [0.5000]])
    """
    logs = -POWER * errors.clamp_min(torch.finfo(errors.dtype).tiny).log()
    left_out = logs.softmax(0).amax(1, keepdim=True) < MIN_WEIGHT
    return logs.masked_fill(left_out, -torch.inf).softmax(0)
