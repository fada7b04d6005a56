"""Tables in README are what the generator makes of results/ and of the registry: no figure is typed by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_generated_tables_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_marker_of_the_readme_is_filled() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("request", "operators", "models", "norms"):
        start = f"<!-- generated: {name} -->\n"
        assert text.count(start) == 1
        assert text[text.index(start) + len(start)] == "|"
