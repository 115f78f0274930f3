"""`append(refit=True)` selects again what `kbf.fit` had selected."""

import numpy as np
import pandas as pd
import pytest

import kbf

COLUMNS = {"states": ["z"], "observations": ["x"], "recording": "run"}
# A model whose bandwidths and ridges are selected by cross-validation.
KERNEL = {"model": "kbf_paper", "progress": False, "calibrate": False}


def walk(steps: int, scale: float, seed: int, run: str) -> pd.DataFrame:
    """A state on a stationary walk, seen through a cube with noise of this scale."""
    rng, z = np.random.default_rng(seed), np.zeros(steps)
    for t in range(1, steps):
        z[t] = 0.9 * z[t - 1] + 0.3 * rng.normal()
    return pd.DataFrame({"run": run, "z": z, "x": z + z**3 + scale * rng.normal(size=steps)})


def test_settings_are_selected_again():
    old, new = walk(60, 0.02, 0, "a"), walk(240, 1.0, 1, "b")
    unscaled = {**KERNEL, "config": {"data.normalise": "none"}}
    fitted = kbf.fit(old, **COLUMNS, **unscaled)
    kept, again = (fitted.append(new, refit=refit) for refit in (False, True))
    whole = kbf.fit(pd.concat([old, new]), **COLUMNS, **unscaled)
    models = (fitted, kept, again, whole)
    settings = [each.trained.module.net.hyperparameters() for each in models]
    assert settings[0] == settings[1] != settings[2] == settings[3]
    test = walk(50, 1.0, 2, "c")
    np.testing.assert_allclose(again.filter(test).mean, whole.filter(test).mean, rtol=1e-12)


def test_models_that_are_trained_are_not_refitted():
    data = walk(300, 0.1, 0, "a")
    quick = {"training": {"epochs": 1}, "progress": False, "calibrate": False}
    fitted = kbf.fit(data, **COLUMNS, model="kbf_tuned", **quick)
    with pytest.raises(ValueError, match="trained by gradient"):
        fitted.append(data.assign(run="b"), refit=True)
