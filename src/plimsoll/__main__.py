"""`python -m plimsoll` is the command `plimsoll`."""

from __future__ import annotations

import sys

from plimsoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
