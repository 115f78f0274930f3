"""Names of before 0.1.0 in somebody's configuration: one line that names the new place."""

from __future__ import annotations

import importlib

import pytest

from kbf.cli import main
from kbf.runtime.instantiate import build, locate
from kbf.runtime.moved import MODULES, RENAMED, new_place

OLD = {
    "kbf.nn.kernel_bayes.KBF": "kbf.filters.kernel.kbf.KBF",
    "kbf.nn.kernel_bayes.EnlargedKBF": "kbf.filters.kernel.simulated_memory.SimulatedMemoryKBF",
    "kbf.nn.feature_filter.FeatureKBF": "kbf.filters.kernel.learned_features.FeatureKBF",
    "kbf.filters.recurrent.LSTMFilter": "kbf.filters.lstm.LSTMFilter",
    "kbf.filters.frame.FrameRegression": "kbf.filters.regression.FrameRegression",
    "kbf.filters.kalman_learned.LearnedKalman": "kbf.filters.kalman_fitted.LearnedKalman",
    "kbf.filters.learned.LearnedParticleFilter": "kbf.filters.particle_learned.LearnedParticleFilter",
    "kbf.filters.learned.ObservationParticleFilter": "kbf.filters.particle_learned.ObservationParticleFilter",
    "kbf.filters.learned.PixelParticleFilter": "kbf.filters.particle_learned.PixelParticleFilter",
    "kbf.nn.encoders.CNN": "kbf.images.encoders.CNN",
    "kbf.nn.encoders.Backbone": "kbf.images.encoders.Backbone",
    "kbf.nn.encoders.PaperMLP": "kbf.images.encoders.PaperMLP",
    "kbf.nn.encoders.SoftArgmaxCNN": "kbf.images.encoders.SoftArgmaxCNN",
    "kbf.nn.augment.Augment": "kbf.images.augment.Augment",
    "kbf.nn.augment.PixelNoise": "kbf.images.augment.PixelNoise",
    "kbf.evaluation.score": "kbf.evaluation.score.score",
    "kbf.kernels.gaussian": "kbf.rkhs.kernels.gaussian",
    "kbf.render.maze.carve": "kbf.data.render.maze.carve",
}
"""What configurations named before the move, and some others."""


@pytest.mark.parametrize("old", OLD)
def test_a_moved_name_is_told(old):
    assert new_place(old) == OLD[old] and callable(locate(OLD[old]))
    for trust in (True, False):
        with pytest.raises(ValueError, match=f"'{old}' is now '{OLD[old]}'"):
            build({"_target_": old}, trust=trust)


def test_everything_in_the_table_exists_and_has_moved():
    for old, places in MODULES.items():
        for place in places.split():
            importlib.import_module(place)
        assert old not in places.split()
    assert all(name not in RENAMED for name in RENAMED.values())


@pytest.mark.parametrize("name", ["kbf.nn.kernel_bayes.Nothing", "kbf.ssm.nothing", "os.nothing", "nothing", "", "kbf.rules"])
def test_what_never_moved_has_no_new_place(name):
    assert new_place(name) is None


def test_the_command_line_says_it_in_one_line(capsys):
    assert main(["train", "model=kbf_tuned", "model.net._target_=kbf.nn.kernel_bayes.KBF"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and "is now 'kbf.filters.kernel.kbf.KBF'" in told
