# %% [markdown]
# # Tutorial: images
#
# A camera rotates in a maze. The state is its heading (cos, sin), and the observation is its view,
# with noise on every pixel. The embedded ray caster renders the views; DeepMind Lab requires a
# [module of its own](../data.md).

# %%
# %matplotlib inline

import kbf
from kbf.plots.frames import frame_grid

data = kbf.OrientationImages(n_train=300, n_test=60, seed=0, size=(12, 16))
data

# %%
frame_grid(data.test[0], steps=8, title="Observations")

# %% [markdown]
# These images are small, so that a kernel on pixels is sufficient. The simplest model is a ridge
# regression of the state on a single image. Images are stored in single precision, states in
# double; this page uses double precision:

# %%
train = [recording._replace(obs=recording.obs.double()) for recording in data.train]
regression = kbf.FrameRegression()
regression.prepare(train)
frames = kbf.score(regression.fit(train), data.test)
print(f"single images: {frames.mse.mean():.3f}")

# %% [markdown]
# The Kernel Bayes Filter also uses the dynamics of the heading. [`KBF`][kbf.filters.kernel.kbf.KBF]
# is the published filter; `prepare` selects its bandwidths and ridges on the training part.

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
# Larger images require an encoder: a network that predicts the state, cross-fitted on the training
# part before the filter. `kbf train data=dmlab n_train=300` trains one,
# `encoder@data.encoding.encoder=cnn` selects another network, and the
# [results on images](../results.md#images) compare the models.
# Next: [your own recordings](recordings.md).
