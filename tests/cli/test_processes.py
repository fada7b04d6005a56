"""What only a process of its own shows: signals, pipes that close, what is imported, tracebacks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.cli.running import COMMAND, PATIENCE, Terminal, environment, only_line, run
from tests.cli.speller import LETTERS

PROBE = """
import resource, sys
from rooflight.cli.main import app
try:
    app(["info", "random:qwen3-8b"])
except SystemExit as end:
    assert end.code == 0
heavy = ["transformers", "tokenizers", "jinja2", "gguf", "huggingface_hub", "triton", "torch._dynamo"]
imported = [name for name in [*heavy, "rooflight.engine"] if name in sys.modules]
print(imported, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def test_info_of_a_model_imports_and_allocates_little() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert "8,190,735,360" in result.stdout
    imported, kilobytes = re.fullmatch(r"(\[.*\]) (\d+)\n", result.stderr).groups()  # type: ignore[union-attr]
    assert imported == "[]"
    assert int(kilobytes) < 2e6  # the weights would be 16 GB


def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(b"GGUF\3\0\0\0\1")
    result = run(["generate", "hi", "--model", cut])
    assert (result.returncode, result.stdout) == (2, "")
    assert only_line(result.stderr).startswith(f"{cut}: ")


def test_streams_that_are_closed_from_the_start() -> None:
    arguments = " ".join([*COMMAND, "generate"])
    result = subprocess.run(
        ["sh", "-c", f"{arguments} <&- >&-"], env=environment(), stderr=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    assert (result.returncode, only_line(result.stderr)) == (2, "prompt must not be empty")


def test_a_reader_that_leaves_early_ends_the_command_without_a_word(speller: Path) -> None:
    arguments = ["generate", "--raw", "A", "--max-tokens", "8000", "--model", str(speller)]
    with subprocess.Popen(
        [*COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"BCD"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 1


def test_ctrl_c_ends_generate_with_130_and_without_a_word(speller: Path) -> None:
    with Terminal("generate", "--raw", "A", "--max-tokens", "8000", "--model", speller) as terminal:
        terminal.expect("BCDEFGHIJKLMNOPQRSTUVWXYZ")
        terminal.type("\x03")
        assert terminal.leave() == 130
        assert re.fullmatch(r"[A-Z\n]*\^C\n", terminal.shown.rpartition(f"loading {speller.name}")[2][-20:])
        assert "Traceback" not in terminal.shown


def test_a_terminal_gets_statistics_a_pipe_does_not(speller: Path) -> None:
    with Terminal("generate", "hi", "--model", speller) as terminal:
        assert terminal.leave() == 0
        assert re.search(rf"{LETTERS}\n11 tokens in, 27 out \(stop\) · first .* tokens/s\n$", terminal.shown)
        assert "loading" in terminal.shown
    piped = run(["generate", "-", "--raw", "--model", speller, "--json"], input="w")
    assert (piped.returncode, piped.stderr, json.loads(piped.stdout)["text"]) == (0, "", "xyz")
