"""``python -m kbf``: the same as ``kbf``."""

import sys

from kbf.cli import main

if __name__ == "__main__":
    sys.exit(main())
