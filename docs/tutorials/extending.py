# %% [markdown]
# # Extending
#
# This tutorial adds a kernel and a filter without a change of kbf. [Extending kbf](../extending.md)
# describes rules, ratios, encoders, data sets, experiments and callbacks.

# %%
from typing import NamedTuple

import torch

import kbf
from kbf.rkhs.kernels import KERNELS
from kbf.rkhs.linalg import squared_distance

data = kbf.SyntheticData(kbf.ssm.rotation(), n_train=150, n_test=60, seed=0)

# %% [markdown]
# ## A kernel
#
# A kernel is a function from points `(n, q)` and `(m, q)` to their Gram matrix `(n, m)`. With an
# entry in `KERNELS` it is available to every model with an argument `kernel`.


# %%
def rational_quadratic(x, y, *, bandwidth):
    """1 / (1 + ||x - y||^2 / (2 bandwidth^2)): a mixture of Gaussian kernels of many widths."""
    return 1 / (1 + squared_distance(x / bandwidth, y / bandwidth) / 2)


KERNELS["rational_quadratic"] = rational_quadratic
for kernel in ("gaussian", "rational_quadratic"):
    model = kbf.KBF(kernel=kernel, select="loo")
    model.prepare(data.train)
    print(f"{kernel}: {kbf.score(model.fit(data.train), data.test).mse.mean():.4f}")


# %% [markdown]
# ## A filter
#
# A filter has four methods and a state that is a tuple of tensors with the batch dimension first.
# Missing observations, batches of different lengths, `RunningFilter`, saving and scoring then work.


# %%
class Mean(NamedTuple):
    """The estimate ``b d``."""

    z: torch.Tensor


class Smoother:
    """Exponential smoothing: z <- (1 - gain) z + gain x."""

    def __init__(self, gain):
        self.gain = gain

    def init(self, batch, *, generator=None):
        return Mean(torch.zeros(batch, 2, dtype=torch.float64))

    def predict(self, state, *, generator=None):
        return state

    def update(self, state, obs):
        return Mean((1 - self.gain) * state.z + self.gain * obs)

    def estimate(self, state):
        return state.z


for gain in (0.5, 1.0):
    print(f"gain {gain}: {kbf.score(Smoother(gain), data.test).mse.mean():.4f}")
KERNELS.pop("rational_quadratic")
