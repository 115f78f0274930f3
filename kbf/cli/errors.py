"""Errors as one line on standard error: which ones are expected, and their text."""

import difflib
import re
import sys
from collections.abc import Iterable

from kbf.runtime.optional_dependencies import missing

# Hydra's message about a launcher or sweeper that is not installed.
NO_PLUGIN = re.compile(r"Could not find 'hydra/(?:launcher|sweeper)/(\w+)'")

# Launchers and sweepers: their packages, and the extras of kbf that install these.
PLUGINS = {
    "joblib": ("hydra-joblib-launcher", "sweep"),
    "ray": ("hydra-ray-launcher", "cluster"),
    "submitit_local": ("hydra-submitit-launcher", "cluster"),
    "submitit_slurm": ("hydra-submitit-launcher", "cluster"),
    "optuna": ("hydra-optuna-sweeper", "optuna"),
}

# Hydra's messages end with its search path, its name of a key, or a link to its manual.
ENDINGS = re.compile(r"Config search path|full_key:|See https://hydra.cc")


# Hydra's message about a name that no file of a group has.
NO_CHOICE = re.compile(
    r"Could not find '([\w/]+)/([^/']+)'\s+Available options in '[^']+':\s+(.*)", re.DOTALL
)


def similar(word: str, known: Iterable[str]) -> str:
    """Returns a hint at the most similar of several words; nothing without one."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def refuse(reason: str, command: str = "") -> int:
    """Print on one line why a command does not run; returns the exit code."""
    print(f"kbf{command and ' '}{command}: {reason}", file=sys.stderr)
    return 2


def expected(error: Exception) -> bool:
    """Whether an error is caused by the input or a missing package, rather than by kbf."""
    # Packages of an extra may be missing or broken; Lightning's errors name no module.
    if isinstance(error, ImportError):
        return (error.name or "").split(".")[0] != "kbf"
    if type(error) is RuntimeError and "home directory" in str(error):  # of an unknown ~user
        return True
    package = type(error).__module__.split(".")[0]
    return isinstance(error, ValueError | OSError) or package in ("hydra", "omegaconf", "lightning")


def one_line(error: Exception) -> str:
    """Returns the message of an error, and of its cause, on one line."""
    texts = [str(error)]
    if isinstance(error, OSError) and error.strerror:  # of the system: the file, and the reason
        file = error.filename2 or error.filename
        texts = [*([str(file)] if file else []), error.strerror.lower()]
    if override := getattr(error, "override", None):
        advice = (
            "brackets must close, other signs need quotes: \"key='a b'\", in lists "
            "'key=[\"a (b)\"]'"
        )
        texts.insert(0, f"{override!r} cannot be read ({advice})")
    if (absent := NO_PLUGIN.search(texts[0])) and absent[1] in PLUGINS:
        return missing(*PLUGINS[absent[1]], "this sweep")
    if type(error).__module__.startswith("hydra") and error.__cause__ is not None:
        texts.append(str(error.__cause__))
    if choice := NO_CHOICE.search(texts[0]):
        group, name, choices = choice[1], choice[2], ENDINGS.split(choice[3])[0].split()
        hint = similar(name, choices) or f"; there are {', '.join(choices)}"
        return f"there is no {group} {name!r}{hint}"
    shown = [" ".join(ENDINGS.split(text)[0].split()) for text in texts]
    return ": ".join(text for text in shown if text)
