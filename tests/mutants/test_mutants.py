"""The suite is itself tested: every fault of the catalogue must make the tests that it names fail, by an assertion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rooflight
from tests.mutants.catalogue import MUTANTS, Mutant

SOURCE = Path(rooflight.__file__).parent
TESTS = Path(__file__).parents[1]
# A fault must be found by a wrong value. These say that the mutant or the tests are broken instead.
BROKEN = {"ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "AttributeError", "TypeError", "Crash"}

pytestmark = pytest.mark.mutant

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, str(Path(__file__).with_name("forker.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run(forker: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Copy the source, edit one file of the copy, and run tests on it."""

    def start(tests: str, select: str, file: str = "", old: str = "", new: str = "") -> dict[str, Any]:
        copy = tmp_path / "rooflight"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if file:
            text = (copy / file).read_text()
            assert text.count(old) == 1, (
                f"{file} must hold this text exactly once, holds it {text.count(old)} times: {old}"
            )
            (copy / file).write_text(text.replace(old, new))
        log = tmp_path / "log"
        request = {"source": str(tmp_path), "tests": str(TESTS / tests), "select": select, "log": str(log)}
        assert forker.stdin is not None
        assert forker.stdout is not None
        forker.stdin.write(json.dumps(request) + "\n")
        forker.stdin.flush()
        answer: dict[str, Any] = json.loads(forker.stdout.readline())
        print(log.read_text()[-4000:])  # shown only if this test fails
        return answer

    return start


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_is_caught(mutant: Mutant, run: Run) -> None:
    result = run(mutant.tests, mutant.select, mutant.file, mutant.old, mutant.new)
    assert result["exit"] == pytest.ExitCode.TESTS_FAILED, f"not caught: {mutant.name} (exit code {result['exit']})"
    assert result["failures"]
    for test, exception, message in result["failures"]:
        assert exception not in BROKEN, f"{test} failed by {exception}, not by a wrong value: {message}"


def test_an_unchanged_copy_passes(run: Run) -> None:
    """What fails above fails because of the fault: the same runner on the source as it is."""
    result = run("ops/test_norm.py", "by_hand or wider_than_one")
    assert result == {"exit": pytest.ExitCode.OK, "failures": []}


def test_a_selection_without_tests_is_no_catch(run: Run) -> None:
    assert run("ops/test_norm.py", "there_is_no_such_test")["exit"] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_names_are_unique_and_every_fault_changes_something() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.old != mutant.new for mutant in MUTANTS)
