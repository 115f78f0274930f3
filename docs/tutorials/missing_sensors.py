# %% [markdown]
# # Missing sensors and rates
#
# A cart moves on a rail. Its position and speed are the states. An encoder measures the speed ten
# times a second, a beacon the position once a second, and a cheap distance sensor fails for some
# seconds at a time. An empty cell (NaN) is a sensor without a reading in this row.

# %%
import numpy as np
import pandas as pd

import kbf

DT = 0.1  # seconds


def drive(steps, seed):
    """One recording: positions and speeds of the cart, and its three sensors."""
    rng = np.random.default_rng(seed)
    speed, position = np.zeros(steps), np.zeros(steps)
    for t in range(1, steps):
        speed[t] = 0.97 * speed[t - 1] + 0.12 * rng.standard_normal()
        position[t] = 0.99 * position[t - 1] + DT * speed[t]
    index = pd.to_timedelta(DT * np.arange(steps), unit="s").rename("time")
    frame = pd.DataFrame({"position": position, "speed": speed}, index=index)
    frame["encoder"] = 50 * speed + 4 * rng.standard_normal(steps)  # pulses a second
    frame["beacon"] = position + 0.1 * rng.standard_normal(steps)
    frame["distance"] = 2 - position + 0.1 * rng.standard_normal(steps)
    frame.loc[np.arange(steps) % 10 > 0, "beacon"] = np.nan  # once a second
    failed = np.repeat(rng.random(-(-steps // 25)) < 0.3, 25)[:steps]
    frame.loc[failed, "distance"] = np.nan
    return frame


train, new = drive(600, seed=0), drive(200, seed=1)
train.head(3)

# %% [markdown]
# ## Different rates
#
# The beacon has a value in every tenth row. The rows between stay empty: a single model
# takes each repeated value as a new reading.
#
# If rows of the training are partly missing, `fit` uses the other sensors of these rows. Each
# sensor has its own conditional density. `model="kalman"` fits one model in seconds; which models
# support missing sensors is in a [table](../guide.md#what-each-model-can-do).

# %%
columns = {"states": ["position", "speed"], "observations": ["encoder", "beacon", "distance"]}
units = {"position": "m", "speed": "m/s"}
cart = kbf.fit(train, **columns, units=units, model="kalman", progress=False)
cart.capabilities["missing_sensors"]

# %%
est = cart.filter(new)
est.plot(truth=new)

# %% [markdown]
# ## What a sensor contributes
#
# A column of NaN removes a sensor without a new fit. The NMSE is the mean squared error divided by
# the variance of the column.

# %%
rows = {"all sensors": cart.evaluate(new, baselines=False).nmse}
for sensor in columns["observations"]:
    rows[f"without {sensor}"] = cart.evaluate(new.assign(**{sensor: np.nan}), baselines=False).nmse
pd.DataFrame(rows).T.round(4)

# %% [markdown]
# ## Rows that are used as a whole
#
# With `allow_missing_sensors=False` a row with any empty cell counts as unobserved. The beacon has
# nine empty cells in ten rows, so that only one row in ten is used:

# %%
whole = kbf.fit(
    train, **columns, model="kalman", allow_missing_sensors=False, calibrate=False, progress=False
)
pd.DataFrame(
    {
        "sensors that are there": cart.evaluate(new, baselines=False).nmse,
        "complete rows": whole.evaluate(new, baselines=False).nmse,
    }
).round(4)

# %% [markdown]
# ## Live
#
# A sensor that is absent from the dictionary, or None, has no reading. The uncertainty of the
# position decreases with a reading of the beacon.

# %%
live = cart.online()
for k, (time, row) in enumerate(new[columns["observations"]].head(41).iterrows()):
    estimate = live.step(row.dropna().to_dict(), time=time.total_seconds())
    if k in (39, 40):
        print(
            f"{time.total_seconds():.1f} s, std of the position: {estimate.std['position']:.3f} m"
        )

# %% [markdown]
# **No row at all.** Irregular time stamps need no rows of NaN: a filter moves by the time between
# two rows, `live.step(..., time=...)` too. [Questions](../faq.md#missing-sensors) has more on
# missing values. Next: [neural spikes](spikes.md).
