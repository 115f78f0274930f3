"""Checks of settings that commands share: counts, switches, shares, devices and paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kbf.config.composition import config_dir, short
from kbf.config.data_settings import RECORDED_DATA, has_source

# Settings that are whole numbers, with their lower bounds. Commands that need more check that.
COUNTS = {
    **dict.fromkeys(("runs", "particles", "turns", "recordings", "threads"), 1),
    **dict.fromkeys(
        ("n_train", "seed", "workers", "lag", "horizon", "animation_steps", "steps"), 0
    ),
}

# Settings that are true or false.
SWITCHES = ("smooth", "calibrate", "alarms", "compile", "animation", "trust", "overwrite")

# Settings that name a file or a folder.
PATHS = ("run_dir", "checkpoint", "ckpt_path", "input", "output", "out", "state")

# Settings that may be null although their default is not.
NULLABLE = ("threads", "ckpt_path")


def check(command: str, composed: Any) -> None:
    """Check the settings of a composed configuration; a path that is a number becomes a text.

    Null is allowed where it is the default.

    Raises:
        ValueError: a setting is missing, a count is no whole number or too small, a switch is no
            bool, or a path is empty.
    """
    from omegaconf import OmegaConf

    file = f"{short(command)}.yaml"
    defaults: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / file), resolve=False)
    if missing := [key for key in defaults if key not in {*composed.keys(), "defaults", "hydra"}]:
        raise ValueError(
            f"the configuration lacks {missing[0]}: configs/{file} has all that kbf {command} needs"
        )

    def required(keys: Iterable[str]) -> dict[str, Any]:
        """Returns the settings of ``keys``, without those that are null and may be."""
        given = [k for k in keys if k in composed and not OmegaConf.is_missing(composed, k)]
        nullable = {k for k in given if k in NULLABLE or defaults.get(k) is None}
        return {k: composed[k] for k in given if composed[k] is not None or k not in nullable}

    for key, value in required(COUNTS).items():
        several = command == "compare" and key == "n_train" and OmegaConf.is_list(value)
        check_counts(key, list(value) if several else [value], composed.get("data"))
    for key, value in required(SWITCHES).items():
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
    share = composed.get("hold_out", 0.0)
    if type(share) not in (int, float) or not 0 <= share < 1:
        raise ValueError(f"hold_out must be a share, from 0 to below 1; got {share!r}")
    devices = OmegaConf.select(composed, "trainer.devices")
    named = isinstance(devices, str) and devices != "auto"
    if named and not devices.replace(",", "").lstrip("-").isdigit():
        raise ValueError(
            "trainer.devices must be a number of devices, a list of their numbers, or auto; "
            f"got {devices!r}"
        )
    for key, value in required(PATHS).items():
        if isinstance(value, int | float) and not isinstance(value, bool):  # a folder named 2026
            OmegaConf.update(composed, key, str(value))
        elif not isinstance(value, str) or not value:
            what = "folder" if key == "run_dir" else "file"
            raise ValueError(f"{key} must name a {what}, got {value!r}")


def check_counts(key: str, numbers: list[Any], data: Any) -> None:
    """Raise a ValueError unless all numbers of a setting are whole and at least their bound."""
    if not numbers:
        raise ValueError(f"{key} must be one number or more, got none")
    for number in numbers:
        if number is None and key == "n_train" and has_source(data, RECORDED_DATA):
            # All steps of a recording whose package is missing: loading it raises the error.
            continue
        if type(number) is not int:
            raise ValueError(f"{key} must be a whole number, got {number!r}")
        if number < COUNTS[key]:
            raise ValueError(f"{key} must be at least {COUNTS[key]}, got {number}")
