"""Runs parts of the suite on copies of the source, each in a child forked from one process with PyTorch loaded.

Importing PyTorch takes longer than most of these runs. The parent imports it once and nothing of Rooflight; a child
puts its copy in front of the import path and runs pytest. One JSON object a line: {"source", "tests", "select", "log"}
in, {"exit", "failures": [[test, exception, message], …]} out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


class Recorder:
    """Which tests failed, and with which exception."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str, str]] = []

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        self.failures.append((report.nodeid, call.excinfo.typename, str(call.excinfo.value)[:300]))


def run(request: dict[str, str]) -> dict[str, Any]:
    """In the child: the tests of one request on its copy of the source."""
    # An editable install may find the package by an import hook, which comes before the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, request["source"])
    import rooflight

    assert Path(rooflight.__file__).is_relative_to(request["source"]), "the tests would run on the real source"
    recorder = Recorder()
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    code = pytest.main([*options, "-k", request["select"], *request["tests"].split()], plugins=[recorder])
    return {"exit": int(code), "failures": recorder.failures}


def child(request: dict[str, str], answer: int) -> None:
    with open(request["log"], "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            result = run(request)
        except BaseException as error:
            result = {"exit": -1, "failures": [["", type(error).__name__, str(error)]]}
    os.write(answer, json.dumps(result).encode())
    os._exit(0)


def main() -> None:
    os.chdir(ROOT)
    torch.set_num_threads(1)  # before the fork: a pool of threads does not survive one
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read)
            child(request, write)
        os.close(write)
        with os.fdopen(read) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(process, 0)
        print(answer or json.dumps({"exit": -1, "failures": [["", "Crash", f"status {status}"]]}), flush=True)


if __name__ == "__main__":
    main()
