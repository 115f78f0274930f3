"""Classes that the configuration of a checkpoint may instantiate, by kind.

A checkpoint is an untrusted file. Its configuration names classes (``_target_``) with arguments;
the public names of `REGISTERED` are built, with plain values or objects of the kinds of `INSIDE` as
arguments. Nothing else is called or imported. The rule: every class of kbf that a configuration
names is public as ``kbf.NAME``, so files can move without breaking checkpoints; a new one gets its
name in ``kbf/__init__.py`` and here. Classes of other packages need none: the commands accept them
in your configuration, and their checkpoints load with ``trust=true``.
"""

import difflib
from typing import Any

# Public names by kind: ``kbf.NAME`` for each. Problems are true models; functions that make one
# from numbers alone are the only functions here.
REGISTERED: dict[str, tuple[str, ...]] = {
    "model": (
        "kbf.EKF",
        "kbf.LearnedKalman",
        "kbf.LearnedUKF",
        "kbf.BackpropKF",
        "kbf.DPF",
        "kbf.GRUFilter",
        "kbf.GRUImages",
        "kbf.RKNFilter",
        "kbf.SimulatedKBF",
        "kbf.KBF",
        "kbf.FeatureKBF",
        "kbf.KernelMonteCarlo",
        "kbf.LSTMFilter",
        "kbf.MambaFilter",
        "kbf.KalmanNet",
        "kbf.ParticleFilter",
        "kbf.LearnedParticleFilter",
        "kbf.ObservationParticleFilter",
        "kbf.PixelParticleFilter",
        "kbf.FrameRegression",
        "kbf.UKF",
        "kbf.FittedGRU",
        "kbf.WindowBoosting",
        "kbf.MeanModel",
        "kbf.WindowRidge",
    ),
    "encoder": (
        "kbf.Augment",
        "kbf.Backbone",
        "kbf.CNN",
        "kbf.PaperMLP",
        "kbf.SoftArgmaxCNN",
    ),
    "transform": ("kbf.PixelNoise",),
    "source": (
        "kbf.OrientationImages",
        "kbf.DSprites",
        "kbf.FileData",
        "kbf.Pendulum",
        "kbf.PendulumRKN",
        "kbf.RecordedData",
        "kbf.SyntheticData",
        "kbf.SystemRecordings",
    ),
    "problem": (
        "kbf.position_model",
        "kbf.Clutter",
        "kbf.Fork",
        "kbf.HeavyTails",
        "kbf.Multiplicative",
        "kbf.Spikes",
        "kbf.Volatility",
        "kbf.PendulumModel",
        "kbf.OrientationModel",
        "kbf.oscillatory",
        "kbf.rotation",
        "kbf.discrete_lorenz",
        "kbf.spherical_lorenz",
        "kbf.lorenz_flow",
        "kbf.lorenz96",
        "kbf.double_pendulum",
        "kbf.turning_target",
    ),
}

# The kinds of objects that the arguments of each kind may contain.
INSIDE: dict[str, tuple[str, ...]] = {
    "model": ("encoder", "problem"),
    "encoder": ("encoder", "transform"),
    "transform": (),
    "source": ("problem",),
    "problem": (),
}

# Bounds of the configuration in a file: its nested levels, and all its entries.
MAX_LEVELS = 50
MAX_ENTRIES = 100_000


def check_registered(name: Any, kinds: tuple[str, ...]) -> str:
    """Returns the kind of a name, which must be registered for one of ``kinds``.

    Raises:
        ValueError: the name is not registered for them.
    """
    for kind in kinds:
        if name in REGISTERED[kind]:
            return kind
    if kind := next((kind for kind, names in REGISTERED.items() if name in names), None):
        raise ValueError(
            f"_target_ {name!r} is of the kind {kind}: "
            f"a file may name {' or '.join(kinds) or 'nothing'} here"
        )
    raise ValueError(
        f"_target_ {name!r} is no class or function that a file may build: it does not exist among "
        f"the public ones of kbf{suggestion(name)}. For a file that you trust: trust=true"
    )


def suggestion(name: Any) -> str:
    """Returns ", did you mean ...?" with the public names nearest to an unknown one, or nothing.

    >>> suggestion("kbf.filters.kernel.KernelMonteCarl")
    ' (did you mean kbf.KernelMonteCarlo?)'
    """
    public = {full.removeprefix("kbf."): full for names in REGISTERED.values() for full in names}
    near = difflib.get_close_matches(str(name).rpartition(".")[2], public, 2, cutoff=0.7)
    return f" (did you mean {' or '.join(public[each] for each in near)}?)" if near else ""


def check_plain(config: Any, what: str = "the configuration") -> None:
    """Raise a ValueError unless ``config`` is nested dicts, lists and plain values."""
    waiting, count = [(config, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MAX_LEVELS or count > MAX_ENTRIES:
            raise ValueError(f"{what} has more than {MAX_LEVELS} levels or {MAX_ENTRIES:,} entries")
        if isinstance(value, dict):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise ValueError(f"{what} has the key {wrong[0]!r:.50}, which is no text")
            waiting += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(each, depth + 1) for each in value]
        elif not (value is None or type(value) in (str, int, float, bool)):
            raise ValueError(
                f"{what} holds a {type(value).__name__}, "
                "where numbers, text, lists and names with values belong"
            )


# Arguments that name files.
FILES: dict[str, tuple[str, ...]] = {
    "kbf.OrientationImages": ("frames",),
    "kbf.DSprites": ("images",),
    "kbf.FileData": ("path", "table"),
    "kbf.Backbone": ("weights",),
}


def files_named(config: Any) -> list[str]:
    """Returns the names of the files in ``config`` that building it would read."""
    if isinstance(config, list | tuple):
        return [path for value in config for path in files_named(value)]
    if not isinstance(config, dict):
        return []
    mine = [config.get(key) for key in FILES.get(str(config.get("_target_")), ())]
    return [str(path) for path in mine if path not in (None, "rendered")] + files_named(
        list(config.values())
    )


def without_weights(config: Any) -> Any:
    """Returns a configuration without files of initial weights: a checkpoint holds all weights."""
    if isinstance(config, list | tuple):
        return [without_weights(value) for value in config]
    if not isinstance(config, dict):
        return config
    named = FILES.get(str(config.get("_target_")), ())
    return {key: None if key in named else without_weights(value) for key, value in config.items()}
