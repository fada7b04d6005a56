"""The compiled kernels as built here: their resources, and when the loader takes them or says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.kernels import library
from rooflight.kernels.driver import Driver, visible
from rooflight.kernels.library import Kernel

BUILT = library.build_facts() is not None
needs_build = pytest.mark.skipif(
    not BUILT, reason="no compiled kernels: nvcc is not here, or `make kernels` did not run"
)
H200 = Driver((13, 0), (("NVIDIA H200", (9, 0)),))


def kernel(**changes: Any) -> Kernel:
    facts = {"name": "k", "source": "k.cu", "architecture": "sm_90a", "registers": 32, "shared_memory": 0}
    return Kernel(**{**facts, "stack": 0, "spill_stores": 0, "spill_loads": 0, **changes})


def test_kernels_are_built_where_nvcc_is() -> None:
    """`make test` builds them first; a machine with nvcc and no kernels has skipped the tests below in silence."""
    assert BUILT or shutil.which("nvcc") is None


@needs_build
def test_no_kernel_spills() -> None:
    kernels = library.kernels()
    assert len(kernels) > 100
    wrong = [
        (k.name, k.stack, k.spill_stores, k.spill_loads) for k in kernels if k.stack or k.spill_stores or k.spill_loads
    ]
    assert not wrong, "registers went to memory; hold less at once, or allow the kernel fewer threads"


# Threads of the blocks of what is no norm; those have up to 1024.
BLOCKS = {
    "advance_decode.cu": 128,
    "decode_attention.cu": 128,
    "decode_attention_plain.cu": 128,
    "embedding.cu": 128,
    "few_rows_linear.cu": 256,
    "qk_norm_rope_attention.cu": 128,
    "qk_norm_rope_cache.cu": 128,
    "rope.cu": 256,
    "silu_and_mul.cu": 256,
}


@needs_build
def test_blocks_of_the_declared_size_fit() -> None:
    """A block of 1024 threads needs 64 registers a thread or fewer; the backward's blocks have 256 or 512."""
    for k in library.kernels():
        threads = BLOCKS.get(k.source, 1024)
        if k.source == "prefill_attention.cu":  # warpgroups
            threads = 128 * int(k.name.split(", ")[2])
        if k.source == "skinny_linear.cu":  # warpgroups, and a warp that asks
            threads = 128 * int(k.name.split("Block<")[1].split(">")[0].split(", ")[1]) + 32
        if "backward_in_registers" in k.name:
            packs = int(k.name.split(", ")[3])
            threads = 256 if packs == 1 else 512
        assert k.occupancy(threads) is not None, k.name


@needs_build
def test_the_library_is_one_file_without_python() -> None:
    content = library.LIBRARY.read_bytes()
    assert b"PyObject" not in content
    assert b"libcudart.so" not in content
    assert b"libpython" not in content


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [
        (32, 0, 256, 1.0),
        (33, 0, 1024, 0.5),  # 40 registers are taken: one block of 32 warps
        (64, 0, 1024, 0.5),
        (65, 0, 1024, None),
        (128, 0, 512, 0.25),
        (32, 0, 32, 0.5),  # 32 blocks of one warp
        (32, 100 * 1024, 1024, 1.0),  # two blocks by shared memory
        (32, 120 * 1024, 1024, 0.5),
    ],
)
def test_occupancy_by_hand(registers: int, shared: int, threads: int, expected: float | None) -> None:
    assert kernel(registers=registers, shared_memory=shared).occupancy(threads) == expected


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_90a", (8, 0), False),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_120", (12, 0), True),
        ("sm_100", (10, 3), True),
    ],
)
def test_machine_code_runs_on_its_architecture(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert library._runs_on(architecture, *capability) is runs


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A build of one kernel for sm_90a with CUDA 13, beside a PyTorch for CUDA and an H200."""
    facts = {"cuda": "13.0.88", "kernels": [kernel().__dict__]}
    (tmp_path / "resources.json").write_text(json.dumps(facts))
    (tmp_path / "librooflight.so").write_bytes(b"")
    monkeypatch.setattr(library, "RESOURCES", tmp_path / "resources.json")
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "librooflight.so")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(library, "driver", lambda: H200)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_a_fitting_machine_takes_it(built: Path) -> None:
    assert library.why_not() is None


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (None, "no NVIDIA card is visible"),
        (Driver((13, 0), ()), "no NVIDIA card is visible"),
        (Driver((12, 8), H200.cards), "its CUDA 13 runtime needs a newer driver, this one runs CUDA 12.8"),
        (Driver((13, 0), (("NVIDIA A100", (8, 0)),)), "built for sm_90a, not for NVIDIA A100 (sm_80)"),
    ],
)
def test_another_machine_hears_why_not(
    built: Path, monkeypatch: pytest.MonkeyPatch, driver: Driver | None, words: str
) -> None:
    monkeypatch.setattr(library, "driver", lambda: driver)
    assert words in str(library.why_not())


def test_another_pytorch_hears_why_not(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert "needs PyTorch 2.10 or newer" in str(library.why_not())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "this PyTorch is a CPU build" in str(library.why_not())


def test_a_broken_file_is_a_reason_and_not_a_crash(built: Path) -> None:
    assert "does not load" in str(library.load())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cuda": "13.0", "kernels": [{"name": "k"}]}'])
def test_a_broken_report_counts_as_no_build(built: Path, text: str) -> None:
    """Importing the package reads it: a file cut short must not stop that."""
    (built / "resources.json").write_text(text)
    assert library.why_not() == "not built; `make kernels` builds it"


@pytest.mark.parametrize(
    ("allowed", "seen"),
    [
        (None, [0, 1]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("1, 0", [0, 1]),
        ("GPU-b", [1]),
        ("GPU-aa,7", [0]),
    ],
)
def test_hidden_cards_are_not_asked_for_their_architecture(allowed: str | None, seen: list[int]) -> None:
    uuids = ["GPU-aa-1", "GPU-bb-2"]
    assert [index for index, uuid in enumerate(uuids) if visible(index, uuid, allowed)] == seen


def test_without_a_build(built: Path) -> None:
    (built / "resources.json").unlink()
    assert library.why_not() == "not built; `make kernels` builds it"
    assert library.kernels() == []


@pytest.mark.gpu
def test_the_library_is_loaded_on_a_card_that_it_was_built_for() -> None:
    from rooflight.kernels.driver import driver

    found = driver()
    assert found is not None
    assert found.cards[0][0] == torch.cuda.get_device_name()
    assert found.cards[0][1] == torch.cuda.get_device_capability()
    if BUILT and found.cards[0][1] == (9, 0):
        assert library.load() is None
        import rooflight

        assert rooflight.ops.REGISTRY["rms_norm"].active["cuda"] in ("cuda", "triton")
        assert "cuda" in rooflight.ops.REGISTRY["rms_norm"].providers
