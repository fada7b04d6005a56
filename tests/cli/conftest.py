from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.speller import spell


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on many threads, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose answers are known; see `tests.cli.speller`. Not to be written to."""
    return spell(tmp_path_factory.mktemp("speller"))
