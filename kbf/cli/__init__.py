"""The command line: ``kbf COMMAND [key=value ...]``."""

from kbf.cli.commands import COMMANDS
from kbf.cli.errors import expected, one_line
from kbf.cli.program import execute, main

__all__ = ["COMMANDS", "execute", "expected", "main", "one_line"]
