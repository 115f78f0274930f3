# %% [markdown]
# # Neural spikes
#
# An animal walks in a box of one metre, and thirty of its place cells are recorded: each fires near
# a position of its own. The position is decoded from the numbers of spikes in bins of a tenth of a
# second. Walk and cells are simulated here; [real recordings](../recordings.md) has the path of a
# real rat.

# %%
import numpy as np
import pandas as pd

import kbf

BIN = 0.1  # seconds
CELLS = 30
cells = np.random.default_rng(0)
centres = cells.uniform(0, 1, (CELLS, 2))
peaks = cells.uniform(5, 20, CELLS)  # spikes a second at the centre


def session(bins, seed):
    """One session: positions in metres, and the spike counts of the cells."""
    rng = np.random.default_rng(seed)
    place, velocity, path = np.array([0.5, 0.5]), np.zeros(2), []
    for _ in range(bins):
        velocity = 0.9 * velocity + 0.2 * rng.standard_normal(2)
        place = place + BIN * velocity
        outside = (place < 0) | (place > 1)
        velocity[outside] *= -1
        place = np.clip(place, 0, 1)
        path.append(place)
    path = np.array(path)
    distance = np.linalg.norm(path[:, None] - centres, axis=2)
    counts = rng.poisson(BIN * peaks * np.exp(-((distance / 0.2) ** 2) / 2))
    frame = pd.DataFrame(path, columns=["x", "y"], index=pd.RangeIndex(bins, name="bin"))
    return frame.join(pd.DataFrame(counts, columns=[f"cell_{k}" for k in range(CELLS)]))


train = pd.concat(
    {"monday": session(400, seed=1), "tuesday": session(400, seed=2)}, names=["session"]
)
new = session(300, seed=3)
new.head(3)

# %% [markdown]
# ## Decode
#
# Counts are not scaled, and their conditional density p(counts | position) is selected among
# several by its held-out log score; here it is a Poisson model. `bounds` keeps estimates and
# intervals in the box. The sessions are a level of the index.
#
# The default `model="kbf"` compares several models, in some minutes for these data. The kernel Monte
# Carlo filter, which it selects for the recording of the rat
# ([results](../recordings.md#results)), is fitted by its name. `calibrate=False` saves the fits to
# held-out blocks: intervals are those of the filter itself, and there are no alarms.

# %%
columns = {"states": ["x", "y"], "observations": ["cell_*"], "recording": "session"}
bounds = {"x": (0, 1), "y": (0, 1)}
decoder = kbf.fit(
    train,
    **columns,
    bounds=bounds,
    units={"x": "m", "y": "m"},
    model="kernel_monte_carlo",
    calibrate=False,
    progress=False,
)
decoder

# %%
est = decoder.filter(new)
est.plot(truth=new)

# %% [markdown]
# ## Compare
#
# The classical decoder is a Kalman filter: linear dynamics, and counts that are linear in the
# position. A window of bins with ridge regression is another one.

# %%
found = {"kernel_monte_carlo": decoder.evaluate(new, baselines=False)}
for model in ("kalman", "window_ridge"):
    other = kbf.fit(train, **columns, model=model, calibrate=False, progress=False)
    found[model] = other.evaluate(new, baselines=False)
pd.concat(found)[["rmse", "nmse"]].round(3)

# %% [markdown]
# `kbf.cross_validate` compares models by sessions that are held out in turn, with standard errors.
#
# ## After the session
#
# A smoother uses the later spikes as well:

# %%
smoothed = decoder.smooth(new)
error = {
    name: np.sqrt(((each.mean - new[["x", "y"]]) ** 2).mean())
    for name, each in (("filter", est), ("smoother", smoothed))
}
pd.DataFrame(error).T.round(3)

# %% [markdown]
# A cell that is lost later is NaN in its column ([missing sensors](missing_sensors.md)). A decoder
# that runs with the experiment is [`decoder.online()`](getting_started.md#a-live-filter). Next:
# [your own network](own_network.md).
