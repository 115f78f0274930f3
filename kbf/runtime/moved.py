"""What had another name before 0.1.0: an old ``_target_`` in somebody's configuration gets one line with the new one."""

from __future__ import annotations

import importlib

MODULES = {
    "kbf.build": "kbf.runtime.instantiate",
    "kbf.charts": "kbf.plots.charts",
    "kbf.checkpoint": "kbf.training.checkpoint",
    "kbf.cme": "kbf.rkhs.conditional_means.low_rank kbf.rkhs.conditional_means.all_points kbf.rkhs.conditional_means.parts "
    "kbf.rkhs.conditional_means.local kbf.rkhs.conditional_means.base",
    "kbf.data.module": "kbf.training.datamodule kbf.training.settings",
    "kbf.data.own.images": "kbf.data.own.pixels",
    "kbf.data.own.recordings": "kbf.data.own.read",
    "kbf.data.own.tables": "kbf.data.own.cells",
    "kbf.data.source": "kbf.data.dataset",
    "kbf.distributed": "kbf.runtime.distributed",
    "kbf.embeddings": "kbf.rkhs.embeddings",
    "kbf.evaluation": "kbf.evaluation.score kbf.evaluation.floors kbf.evaluation.statistics",
    "kbf.export": "kbf.export.step",
    "kbf.export_ops": "kbf.export.onnx_linalg",
    "kbf.features": "kbf.rkhs.features",
    "kbf.files": "kbf.runtime.files",
    "kbf.filters.backwards": "kbf.filters.kernel.backward kbf.filters.particle",
    "kbf.filters.base": "kbf.filters.state_file",
    "kbf.filters.frame": "kbf.filters.regression",
    "kbf.filters.kalman_learned": "kbf.filters.kalman_fitted",
    "kbf.filters.kernel": "kbf.filters.kernel.filter",
    "kbf.filters.learned": "kbf.filters.particle_learned kbf.filters.ridge_map kbf.filters.learned_model",
    "kbf.filters.moments": "kbf.filters.kernel.moment_matching",
    "kbf.filters.operators": "kbf.filters.kernel.operators kbf.filters.kernel.updates kbf.rkhs.features",
    "kbf.filters.recurrent": "kbf.filters.lstm",
    "kbf.filters.turning": "kbf.filters.polar",
    "kbf.frame_plots": "kbf.plots.frames kbf.plots.animation kbf.training.log_pictures",
    "kbf.held_out": "kbf.training.held_out_calibration",
    "kbf.kernels": "kbf.rkhs.kernels",
    "kbf.linalg": "kbf.rkhs.linalg",
    "kbf.memory": "kbf.training.append",
    "kbf.metrics": "kbf.evaluation.metrics kbf.rkhs.weights",
    "kbf.module": "kbf.training.filter_stage kbf.training.buffers kbf.training.settings",
    "kbf.monitor": "kbf.evaluation.monitor",
    "kbf.nn.augment": "kbf.images.augment",
    "kbf.nn.coding": "kbf.images.codes",
    "kbf.nn.controlled": "kbf.filters.kernel.controls",
    "kbf.nn.encoders": "kbf.images.encoders",
    "kbf.nn.feature_filter": "kbf.filters.kernel.learned_features",
    "kbf.nn.kernel_bayes": "kbf.filters.kernel.kbf kbf.filters.kernel.simulated_memory kbf.filters.kernel.operators "
    "kbf.rkhs.features",
    "kbf.nn.losses": "kbf.images.losses",
    "kbf.nn.scaling": "kbf.filters.scaling",
    "kbf.nn.sensors": "kbf.filters.kernel.sensors",
    "kbf.pictures": "kbf.training.log_pictures",
    "kbf.plots": "kbf.plots.tracks",
    "kbf.pretraining": "kbf.training.encoder_stage kbf.training.encoder_data kbf.training.settings",
    "kbf.process": "kbf.runtime.process",
    "kbf.ratios": "kbf.rkhs.ratios",
    "kbf.reliability": "kbf.evaluation.scoring_rules",
    "kbf.render": "kbf.data.render kbf.data.render.rendered",
    "kbf.render.dmlab": "kbf.data.render.dmlab",
    "kbf.render.maze": "kbf.data.render.maze",
    "kbf.render.raycast": "kbf.data.render.raycast",
    "kbf.render.textures": "kbf.data.render.textures",
    "kbf.render.vizdoom": "kbf.data.render.vizdoom",
    "kbf.rules": "kbf.rkhs.rules",
    "kbf.selection": "kbf.filters.kernel.selection",
    "kbf.smoothing": "kbf.filters.smoothing",
    "kbf.training": "kbf.training.train kbf.training.checkpoint",
    "kbf.uncertainty": "kbf.evaluation.calibration",
}
"""Former files, and the files that now hold what was in them."""

RENAMED = {
    "EnlargedKBF": "SimulatedMemoryKBF",
    "One": "UnitRatio",
}
"""Former names of classes and functions."""


def new_place(name: str) -> str | None:
    """The full name now of what had the full ``name`` before; None for what never had it.

    >>> new_place("kbf.nn.kernel_bayes.EnlargedKBF")
    'kbf.filters.kernel.simulated_memory.SimulatedMemoryKBF'
    """
    module, _, attribute = name.rpartition(".")
    for place in MODULES.get(module, "").split():  # nothing else is imported: the name may be a checkpoint's
        attribute = RENAMED.get(attribute, attribute)
        found = getattr(importlib.import_module(place), attribute, None)
        if callable(found) and getattr(found, "__module__", None) == place:
            return f"{place}.{attribute}"
    return None
