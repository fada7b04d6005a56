"""Where tables go."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 150  # columns where no terminal says how many it has


def wide_console() -> Console:
    """One that cuts no table short where the output is a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
