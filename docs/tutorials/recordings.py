# %% [markdown]
# # Files and commands
#
# An arm rotates. Two sensors measure distances to its end, and a motion-capture system measures its
# position. This recording is simulated; yours is a CSV, npz or HDF5 file or a folder of images.

# %%
from pathlib import Path

import numpy as np

import kbf
from kbf.cli import main

rng = np.random.default_rng(0)
angle = np.cumsum(0.3 + 0.1 * rng.standard_normal(400))
x, y = np.cos(angle), np.sin(angle)
left, right = np.hypot(x + 2, y - 2), np.hypot(x - 2, y - 2)
columns = np.stack(
    [x, y, left + 0.1 * rng.standard_normal(400), right + 0.1 * rng.standard_normal(400)], axis=1
)
np.savetxt("arm.csv", columns, delimiter=",", header="x,y,left,right", comments="")

# %% [markdown]
# ## Arrays
#
# A [`Recording`][kbf.recording.Recording] accepts NumPy arrays. Several recordings are a list.

# %%
train = kbf.Recording(states=columns[:300, :2], obs=columns[:300, 2:])
test = kbf.Recording(states=columns[300:, :2], obs=columns[300:, 2:])
arm_filter = kbf.SimulatedKBF(points=200, run=4000, dtype="float64").fit(train)
kbf.score(arm_filter, [test])

# %% [markdown]
# ## Files
#
# The commands read the file, estimate units, store them in the checkpoint, and return estimates in
# your columns. `main` is the command `kbf`: in a shell the first line is
# `kbf data check arm.csv data.states=[x,y] data.observations=[left,right]`.

# %%
what = ["data.states=[x,y]", "data.observations=[left,right]"]
code = main(["data", "check", "arm.csv", *what])

# %% [markdown]
# This page uses a fast model instead of the default: `model=kalman` fits a linear model to the
# recording.

# %%
quick = ["model=kalman", "trainer.enable_progress_bar=false", "logger=none"]
code = main(["train", "data=own", "data.path=arm.csv", *what, *quick, "run_dir=run"])

# %%
code = main(
    ["filter", "checkpoint=run/checkpoints/best.ckpt", "input=arm.csv", "output=estimates.csv"]
)
print("".join(Path("estimates.csv").read_text().splitlines(keepends=True)[:3]))

# %% [markdown]
# Missing values, several recordings, time stamps, controls, angles and units: [tutorial of the
# commands](../tutorial.md) and
# [data](../data.md). Next: [extending](extending.md).
