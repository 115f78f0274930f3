# %% [markdown]
# # Your own network
#
# `kbf.layers` has the parts of the filter as differentiable modules of PyTorch. Here an image
# encoder of one's own is trained through the whole filter: the gradient of the error passes through
# the rule, the density ratio, the transition and all time steps to the encoder.
#
# A lamp circles in a picture of 12 x 12 pixels with noise, at a changing distance from the centre.
# The state is its position.

# %%
import numpy as np
import torch
from torch import nn

import kbf
from kbf.layers import IWKBR, DensityRatio, KernelBayesFilterRollout, KernelTransition
from kbf.plots.frames import frame_grid

torch.manual_seed(0)
SIDE = 12


def film(steps, seed):
    """One recording: positions (T, 2) in -1 to 1, and noisy pictures (T, 1, 12, 12)."""
    rng = np.random.default_rng(seed)
    angle = np.cumsum(0.25 + 0.1 * rng.standard_normal(steps))
    radius = 0.5 + 0.3 * np.sin(0.15 * np.arange(steps) + rng.uniform(0, 6))
    place = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    grid = np.linspace(-1, 1, SIDE)
    across, up = (np.exp(-(((place[:, k, None] - grid) / 0.2) ** 2)) for k in (0, 1))
    pictures = up[:, :, None] * across[:, None, :] + 0.25 * rng.standard_normal((steps, SIDE, SIDE))
    return kbf.Recording(torch.from_numpy(place), torch.from_numpy(pictures[:, None]).float())


train, test = film(300, seed=0), film(150, seed=1)

# %%
frame_grid(test, steps=8, extent=(-1, 1, 1, -1), title="The lamp, and its true position")

# %% [markdown]
# ## The filter as a layer
#
# The encoder is any `nn.Module` from observations to features. `learn_bandwidth` and `learn_reg`
# make bandwidths and ridges parameters.


# %%
def make_layer():
    encoder = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 12)
    )
    layer = KernelBayesFilterRollout(
        encoder,
        transition=KernelTransition(learn_bandwidth=True, learn_reg=True),
        ratio=DensityRatio(learn_bandwidth=True, learn_reg=True),
        rule=IWKBR(learn_reg=True),
    )
    layer.prepare([train])  # bandwidths from the median distance of the states
    return layer


def error(estimates):
    return (estimates - test.states).square().sum(-1).mean().item()


layer = make_layer()
untrained = kbf.rollout(layer.fit([train]), test.obs[None]).estimates[0]
print(f"mean of the training states: {error(train.states.mean(0)):.3f}")
print(f"untrained encoder: {error(untrained):.3f}")

# %% [markdown]
# ## Train
#
# A plain loop of PyTorch. Windows of 30 steps are filtered over a memory that does not contain
# them: a picture that is in the memory would find itself.


# %%
def window(start, length=30):
    """Steps of the training recording, and the memory of the others."""
    stop = start + length
    parts = [(0, start), (stop, len(train.states))]
    memory = [kbf.Recording(train.states[a:b], train.obs[a:b]) for a, b in parts if b > a]
    return kbf.Recording(train.states[start:stop], train.obs[start:stop]), memory


optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
for epoch in range(5):
    losses = []
    for start in range(0, 300, 30):
        part, memory = window(start)
        estimates = layer(part.obs[None], memory).estimates[0]
        loss = (estimates - part.states)[2:].square().sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: loss {np.mean(losses):.3f}")

# %% [markdown]
# ## Use
#
# `layer.fit` returns a filter with a frozen copy of the parameters, which is used as every filter
# of the library.

# %%
deployed = layer.fit([train])
trained = kbf.rollout(deployed, test.obs[None], covariances=True)
print(f"trained through the filter: {error(trained.estimates[0]):.3f}")
frame_grid(
    test,
    trained.estimates[0],
    trained.covariances[0],
    steps=8,
    extent=(-1, 1, 1, -1),
    title="The lamp: black is true, red estimated",
)

# %%
live = kbf.RunningFilter(deployed)
print(live.step(test.obs[:1]))
smoothed = kbf.smooth(deployed, test.obs[None]).estimates[0]
print(f"smoothed: {error(smoothed):.3f}")

# %% [markdown]
# [The rule inside your network](../layers.md) trains an encoder through the rule alone, compares
# the two, and has a LightningModule of ten lines. Next: [files and commands](recordings.md).
