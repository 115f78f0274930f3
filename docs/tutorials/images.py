# %% [markdown]
# # Images
#
# A camera rotates in a maze. The state is its heading (cos, sin), and the observation is its view,
# with noise on every pixel. The embedded ray caster draws the views; DeepMind Lab requires a
# [module of its own](../data.md).

# %%
import numpy as np
import torch

import kbf
from kbf.plots.frames import frame_grid

data = kbf.OrientationImages(n_train=300, n_test=100, seed=0, size=(12, 16))
(train,), (test,) = data.train, data.test


def views(recording):
    """Images as bytes, (T, 3, 12, 16)."""
    return (255 * recording.obs.clamp(0, 1)).byte().numpy()


frame_grid(test, steps=8, title="Views, and the true heading")

# %% [markdown]
# ## Fit
#
# `images` is an array of images, or the column of a DataFrame with the names of image files. `fit`
# first trains an encoder, a network that predicts the state from one image, and then fits the
# filter to its estimates, the *encodings*.
#
# The encoder is cross-fitted: the encoding of a training image is from a network that was not
# trained on it, so that the filter learns the errors of encodings of new images. The settings are
# small here: the defaults are four networks of 60 epochs, and `encoder="resnet18"` is a larger
# network. `model="kalman"` saves the comparison of models.

# %%
quick = {"data.encoding.members": 2, "data.encoding.epochs": 15}
camera = kbf.fit(
    states=train.states.numpy(), images=views(train), model="kalman", config=quick, progress=False
)
camera

# %% [markdown]
# ## Filter
#
# `filter` takes new images. The wedge has one and two standard deviations.

# %%
est = camera.filter(observations=views(test))
frame_grid(
    test,
    torch.from_numpy(est.mean),
    torch.from_numpy(est.covariance),
    steps=8,
    title="Heading: black is true, red estimated",
)

# %%
est.plot(truth=test.states.numpy())

# %% [markdown]
# ## Missing images
#
# `mask` is False where there is no image. The filter then predicts the heading from the ones
# before, and its intervals are wider. Here the camera is covered for ten steps:

# %%
seen = np.ones(len(test.states), dtype=bool)
seen[40:50] = False
covered = camera.filter(observations=views(test), mask=seen)
for name, each in (("all images", est), ("covered", covered)):
    error = np.square(each.mean - test.states.numpy()).sum(1)
    std = each.std[40:50].mean()
    print(f"{name}: error {error.mean():.3f}, std while covered {std:.2f}")
covered.plot(truth=test.states.numpy())

# %% [markdown]
# ## Live
#
# `step` takes one image, or None.

# %%
live = camera.online()
for image in views(test)[:5]:
    estimate = live.step(image)
print(estimate)
print(live.step(None))

# %% [markdown]
# - **Files.** `kbf.fit(df, states=["x", "y"], images="file", size=(36, 48))` reads the images that
#   the column `file` names, and resizes them. [Data](../data.md) has folders and videos.
# - **Images of varying quality.** An encoder can predict density ratios in place of states
#   ([guide](../guide.md#images-of-varying-quality)).
# - **An encoder of your own** in a network of your own: [your own network](own_network.md).
# - **Results.** [Images](../results.md#images) compares the models.
#
# Next: [missing sensors and rates](missing_sensors.md).
