# %% [markdown]
# # Tutorial: images
#
# A camera in a maze turns about itself; the state is its heading (cos, sin), and the observation is
# what it sees, with noise on every
# pixel. The views come from the ray caster that is part of kbf; DeepMind Lab itself needs a [module
# of its own](../data.md).

# %%
# %matplotlib inline

import kbf
from kbf.plots.frames import frame_grid

data = kbf.OrientationImages(n_train=300, n_test=60, seed=0, size=(12, 16))
data

# %%
frame_grid(data.test[0], steps=8, title="What is seen")

# %% [markdown]
# Here images are small, and a kernel on their pixels will do. The simplest way is a ridge
# regression from each image to the state,
# without a memory of the past. Images are stored in single precision, states in double; here all is
# double:

# %%
train = [sequence._replace(obs=sequence.obs.double()) for sequence in data.train]
regression = kbf.FrameRegression()
regression.prepare(train)
frames = kbf.score(regression.fit(train), data.test)
print(f"each image by itself: {frames.mse.mean():.3f}")

# %% [markdown]
# The Kernel Bayes Filter knows, besides, how headings move. [`KBF`][kbf.filters.kernel.kbf.KBF] is
# the published filter; `prepare` chooses
# its bandwidths and ridges from the training part.

# %%
model = kbf.KBF(select="loo")
model.prepare(train)
kernel_filter = model.fit(train)
result = kbf.score(kernel_filter, data.test)
print(f"with the past: {result.mse.mean():.3f}")

# %%
frame_grid(
    data.test[0], result.estimates[0], steps=8, title="Heading: black is true, orange estimated"
)

# %% [markdown]
# Larger images want an encoder: a net that maps them to a few numbers, fitted crosswise on the
# training part before the filter.
# `kbf train data=dmlab n_train=300` does that, `encoder@data.encoding.encoder=cnn` chooses another
# net, and the
# [table of images](../results.md) says what it gains.
# Next: [your own recordings](recordings.md).
