"""Configurations of the commands: composed by Hydra, completed and checked.

Nothing heavy is imported before a configuration is composed.
"""

from kbf.config.composition import choices_of, composing, config_dir, plain, short
from kbf.config.prepare import configure, prepare

__all__ = ["choices_of", "composing", "config_dir", "configure", "plain", "prepare", "short"]
