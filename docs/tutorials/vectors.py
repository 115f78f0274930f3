# %% [markdown]
# # Vectors
#
# A point rotates in the plane by about 0.3 radians a step, and two noisy numbers are observed at
# each step. The filter learns the transition and the observation model from 200 recorded steps,
# without the equations.

# %%
import torch

import kbf
from kbf.plots.tracks import track_figure

data = kbf.SyntheticData(kbf.ssm.rotation(), n_train=200, n_test=60, seed=0)
data

# %% [markdown]
# `fit` turns a recording into a filter.
# [`SimulatedKBF`][kbf.filters.kernel.simulated_kbf.SimulatedKBF] is the
# default model of `kbf train`; a smaller memory than its 1,000 points keeps this page quick.

# %%
kernel_filter = kbf.SimulatedKBF(points=200, run=4000).fit(data.train)
kernel_filter

# %% [markdown]
# `score` evaluates the filter on the test part. `floor` is the error of the Bayes-optimal filter,
# which knows the equations.

# %%
result = kbf.score(kernel_filter, data.test, dtype=torch.float32, covariances=True)
least = kbf.floor(data.problem, data.train, data.test, particles=2000).mse
print(f"error {result.mse.mean():.4f}, least error {least.mean():.4f}")

# %%
track_figure(data.test[0], result.estimates[0], result.covariances[0], title="200 recorded steps")

# %% [markdown]
# ## Smoothing and forecasting
#
# A smoother uses the whole recording and has a smaller error than a filter. Every filter can
# forecast h steps ahead.

# %%
x, states = data.test[0].obs[None], data.test[0].states
smoothed = kbf.smooth(kernel_filter, x.float())
print(f"smoothed: {(smoothed.estimates[0] - states).square().sum(-1).mean():.4f}")
ahead = kbf.predict_ahead(kernel_filter, x.float(), horizon=3)
print(f"three steps ahead: {(ahead[0, 2, :-3] - states[3:]).square().sum(-1).mean():.4f}")

# %% [markdown]
# ## RunningFilter
#
# One observation at a time; `None` is a missing observation. The state has a fixed size.

# %%
live = kbf.RunningFilter(kernel_filter)
for observation in data.test[0].obs[:5]:
    print(live.step(observation[None].float()).numpy().round(3))
print(live.step(None).numpy().round(3), "without an observation")

# %% [markdown]
# The same in the shell, with checkpoints and TensorBoard: `kbf train data=rotation n_train=200`.
# Next: [images](images.md).
