# %% [markdown]
# # Getting started
#
# From a DataFrame to a live filter, in ten minutes. The recordings are six runs of a simulated
# robot arm, 15 seconds each at 10 Hz. The reach in mm and the torque in kN m are the **states**;
# three sensors in other units, with noise, are the **observations**. The file is `data/arm.csv` of
# the repository; next to this page it can be [downloaded](arm.csv).

# %%
import pandas as pd

import kbf

df = pd.read_csv("data/arm.csv", parse_dates=["time"], index_col="time")
df.head(3)

# %% [markdown]
# ## Fit
#
# A row is one time step. `recording` is the column that names the run of each row; without it, six
# runs would be one recording. `"s*"` selects the columns that begin with s. Nothing has to be scaled:
# the filter scales all columns, and its estimates have the units of the data.
#
# Four runs are for training, one is appended later, and the last one is new to the filter.

# %%
train, later, new = df[df.run < "run4"], df[df.run == "run4"], df[df.run == "run5"]
columns = {"states": ["reach_mm", "torque_kNm"], "observations": ["s*"], "recording": "run"}
print(kbf.check(train, **columns))

# %% [markdown]
# `check` reports the ranges of all columns, and warns of outliers, undeclared angles, repeated rows
# and others; its columns train and test are about a split that `fit` does not make. Then the fit:

# %%
arm = kbf.fit(train, **columns, progress=False)
arm

# %% [markdown]
# `fit` uses all rows for training. The figures under *held out* are from blocks of the training
# runs that the filter of a fold has not seen. **NMSE** is the mean squared error divided by the
# variance of the column: the mean of the column has 1.
#
# ## Which model was selected
#
# The default `model="kbf"` compares the kernel Bayes filter with baselines by blocked
# cross-validation. The best model becomes the filter, or an average of the
# three best.

# %%
arm.candidates

# %% [markdown]
# `budget="90s"` limits the time of the comparison, and `model="kalman"` fits one model in seconds.
# What a fitted filter can do depends on the model
# ([table](../guide.md#what-each-model-can-do)):

# %%
arm.capabilities

# %% [markdown]
# ## Filter
#
# `filter` estimates the states of each row from the observations up to it. It needs the columns of
# the observations only. The estimates have the index of the data.

# %%
est = arm.filter(new)
est.to_frame().round(2).tail(3)

# %% [markdown]
# - `reach_mm_std` is the standard deviation.
# - `reach_mm_lower` and `reach_mm_upper` are the ends of an interval of 95 %. Its width is
#   calibrated for each column, on held-out blocks.
# - `est.mean`, `est.std` and `est.covariance` are NumPy arrays.
#
# The states of this run are known, so that the estimates can be scored. `coverage_95` is the share
# of the states in their intervals; the last columns are the NMSE of baselines.

# %%
arm.evaluate(new).round(4)

# %% [markdown]
# The picture has a panel for each column: the truth, the estimates and their intervals.

# %%
est.plot(truth=new)

# %% [markdown]
# ## Alarms
#
# An alarm marks an observation that the estimates should not be trusted with. Here a sensor fails
# in the middle of the run:

# %%
broken = new.copy()
broken.iloc[70:90, broken.columns.get_loc("s1")] = 0.0
alarmed = arm.filter(broken)
print(pd.Series(alarmed.alarms[70:90]).value_counts())
alarmed.plot(truth=new, columns=["reach_mm"])

# %% [markdown]
# [Alarms](../guide.md#alarms) describes the three kinds.
#
# ## Save and load
#
# A saved filter is one file with the model, scaling, columns, calibration and alarms. It is a
# checkpoint, which all commands read as well:
# `kbf filter checkpoint=arm.ckpt input=new.csv output=estimates.csv`. Loading executes nothing that
# the file contains.

# %%
arm.save("arm.ckpt")
arm = kbf.load("arm.ckpt")
assert abs(arm.filter(new).mean - est.mean).max() < 1e-9

# %% [markdown]
# ## A live filter
#
# `online` returns a filter that takes one observation at a time, by the names of the columns. With
# `time` the filter moves by the time that has passed since the last step.

# %%
live = arm.online(max_delay=0.5)
sensors = arm.columns["observations"]
rows = [(now, dict(row)) for now, row in new[sensors].iterrows()]
for now, row in rows[:20]:
    estimate = live.step(row, time=now)
print(estimate)
print(estimate["reach_mm"], estimate.interval(0.95)["reach_mm"], estimate.alarm)

# %% [markdown]
# **No reading.** `predict` moves without an observation; the uncertainty grows.
#
# **A late reading.** A reading of an earlier time is used at its time, and the steps after it are
# repeated, if it is at most `max_delay` seconds late. Later ones are dropped and counted in
# `live.dropped`.

# %%
(late, reading), (now, row) = rows[20:22]
live.step(None, time=late)  # no reading in time ...
print(live.step(row, time=now))
print(live.update(reading, time=late))  # ... it arrives after the next one

# %% [markdown]
# **A restart.** `save` writes the state of the filter; `online(state=...)` continues from it, in
# another process, too.

# %%
live.save("state.pt")
live = kbf.load("arm.ckpt").online(state="state.pt")
for now, row in rows[22:]:
    estimate = live.step(row, time=now)
print(estimate)
# The same estimate, up to the random draws of a particle filter in the average.
assert abs(estimate["reach_mm"] - est.mean[-1, 0]) < 0.3 * est.std[-1, 0]

# %% [markdown]
# The estimates at the end equal those of `filter`.
#
# ## Forecast and smooth
#
# `forecast` continues after the end of the data. The intervals of each horizon have a calibration of
# their own, on held-out blocks.

# %%
arm.forecast(new, horizon=3).to_frame().round(2)

# %% [markdown]
# `smooth` estimates each state from all observations of its run, also from later ones;
# `historical_forecasts` forecasts from every row of a recording. `evaluate` scores both. The first
# call of `smooth` calibrates the smoother, which takes about as long as `fit`; here a linear model is
# smoothed, which takes a second.

# %%
linear = kbf.fit(train, **columns, model="kalman", progress=False)
linear.evaluate(new, smooth=True, horizon=3, baselines=False).T.round(4)

# %% [markdown]
# ## Append
#
# Further recordings of states and observations enter the memory of the filter. The model and its
# settings stay; intervals and alarms are calibrated again, which with the default model takes about
# as long as `fit`. The old filter does not change.

# %%
linear.append(later)

# %% [markdown]
# ## Your own data
#
# | your data | setting of `fit` |
# |---|---|
# | several recordings | `recording="run"`, or a list or dict of DataFrames |
# | files | `kbf.fit("runs/*.csv", states=...)`, or a list of paths |
# | arrays | `kbf.fit(states=z, observations=x)`: `T d`, `B T d`, or a list of `T d` |
# | images | `images="file"`, the column of file names, or an array |
# | times | a DatetimeIndex, or `time="t"` |
# | angles | `angles={"heading": "degrees"}`, or a list for radians |
# | missing sensors | NaN; `allow_missing_sensors=True` where the training rows are complete |
# | controls | `controls=["u"]` |
# | bounds | `bounds={"charge": (0, 1)}` |
# | units | `units={"reach": "mm"}`, for labels |
# | another model | `model="gru"`, settings by `config={"model.training.epochs": 20}` |
#
# Questions: [FAQ](../faq.md). The same in the shell: [from a CSV to a live filter](../tutorial.md).
