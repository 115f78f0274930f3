"""The command line of the workshop: ``python -m studies COMMAND``.

Runs in a clone or in an unpacked source archive. ``papers`` and ``benchmark`` take the settings of
``kbf reproduce`` and ``kbf bench`` and run the same code.
"""

from __future__ import annotations

import os
import sys

COMMANDS = {"papers": "reproduce", "benchmark": "bench"}
"""Commands of this file, and the commands of kbf that run them."""
USAGE = """\
usage: python -m studies papers NAME [key=value ...]      an experiment of a paper, with a verdict
       python -m studies benchmark NAME [key=value ...]   a benchmark, with its claims
       python -m studies systems [options]                models on systems by seed, with floors
       python -m studies structure [options]              are features of such systems named?
       python -m studies stress [options]                 stress tests and fault injection

examples:
  python -m studies papers posterior_mean preset=quick
  python -m studies papers --list
  python -m studies benchmark step size=smoke
  python -m studies benchmark --list
  python -m studies systems --seeds 0-9 --rows 300 --methods kalman window_ridge
  python -m studies structure --seeds 0-9 --dimensions 1 2 3
  python -m studies stress 0.03

--help after papers, benchmark, systems, structure or stress lists the settings."""


def main(words: list[str]) -> int:
    """Run a command; returns its exit code, 2 for input that cannot be used."""
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if command == "stress":
        # before torch is imported; messages are compared as one line of a wide terminal
        os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        from studies.stress import run

        return run.main(rest)
    if command == "systems":
        os.environ |= {"OMP_NUM_THREADS": "1"}
        from studies.systems import command as systems

        return systems.main(rest)
    if command == "structure":
        os.environ |= {"OMP_NUM_THREADS": "1"}
        from studies.systems import structure

        return structure.main(rest)
    if command not in COMMANDS:
        print(f"python -m studies: there is no command {command!r}\n{USAGE}", file=sys.stderr)
        return 2
    from kbf import cli

    sys.argv = ["kbf", COMMANDS[command], *rest]  # the command that about.json records
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
