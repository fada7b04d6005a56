"""Set-up of every test run: which device there is, how Triton runs, and what did not run and why."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

# Read when Triton is imported, which nothing has done yet: without a GPU its kernels run in the interpreter on the
# CPU; with one they must be compiled, whatever the environment says.
if GPUS:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores already


# The same examples in every run, so that a red run is about the change at hand; ROOFLIGHT_EXPLORE=1 draws new ones.
# No deadline: on two shared cores an example may wait longer than it runs.
explore = os.environ.get("ROOFLIGHT_EXPLORE", "0") == "1"
hypothesis.settings.register_profile("rooflight", deadline=None, derandomize=not explore, print_blob=explore)
hypothesis.settings.load_profile("rooflight")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=1): needs so many CUDA devices")
    config.addinivalue_line("markers", "mutant: runs part of the suite on a copy of the source with one fault in it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = max((marker.kwargs.get("count", 1) for marker in item.iter_markers("gpu")), default=0)
        if needed > GPUS:
            reason = "no CUDA device" if GPUS == 0 else f"{needed} CUDA devices needed, {GPUS} there"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count what did not run, by reason: a green run on a machine without a GPU has proved less."""
    gpu, other = Counter[str](), Counter[str]()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        counts = gpu if "gpu" in getattr(report, "keywords", ()) else other  # a module may be skipped as a whole
        counts[reason.removeprefix("Skipped: ")] += 1
    deselected = len(terminalreporter.stats.get("deselected", []))
    if not (gpu or other or deselected):
        return
    terminalreporter.section("not run")
    for kind, counts in (("gpu ", gpu), ("", other)):
        for reason, count in counts.most_common():
            terminalreporter.line(f"{count} {kind}test{'' if count == 1 else 's'} not run: {reason}")
    if deselected:
        terminalreporter.line(f"{deselected} tests not run: not selected on the command line")
