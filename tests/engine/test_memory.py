from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM
from rooflight.engine import llm as llm_module
from rooflight.engine import memory
from rooflight.engine.logit_state import Tables
from rooflight.engine.memory import CachePlan, plan_cache, working_bytes
from rooflight.models.load import load_config

TINY = load_config("random:tiny")  # 2 layers, 2 KV heads of 32: 1 KiB a token in FP32
CPU = torch.device("cpu")


def plan(config: Any = TINY, dtype: torch.dtype = torch.float32, **sizes: Any) -> CachePlan:
    return plan_cache(config, dtype, CPU, **sizes)


def test_by_default_one_request_may_fill_the_context() -> None:
    assert plan() == CachePlan(4096, 256, 16, 4096 * 1024)
    assert plan(dtype=torch.bfloat16).bytes == 4096 * 512


def test_on_a_cpu_the_default_context_is_at_most_8192() -> None:
    long = replace(TINY, max_position_embeddings=131_072)
    assert plan(long).max_model_len == 8192
    assert plan(long, max_model_len=10_000).max_model_len == 10_000


def test_the_last_page_may_be_part_full() -> None:
    assert plan(max_model_len=33).num_pages == 3
    assert plan(max_model_len=33, page_size=11).num_pages == 3
    assert plan(max_model_len=1, page_size=64).num_pages == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_size": 0}, r"page_size must be a whole number, 1 or more, was 0"),
        ({"page_size": 16.0}, r"page_size must be a whole number, 1 or more, was 16\.0"),
        ({"num_pages": 0}, r"num_pages must be a whole number, 1 or more, was 0"),
        ({"num_pages": True}, r"num_pages must be a whole number, 1 or more, was True"),
        ({"max_model_len": 0}, r"max_model_len must be a whole number, 1 or more, was 0"),
        ({"max_model_len": "9"}, r"max_model_len must be a whole number, 1 or more, was '9'"),
        ({"max_model_len": 4097}, r"max_model_len must be from 1 to the model's context of 4096, was 4097"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be a whole number, 1 or more, was 0"),
        ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens must be a whole number, 1 or more, was 0"),
    ],
)
def test_wrong_sizes_are_refused_by_name(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("random:tiny", **sizes)


def test_a_cache_that_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000_000)
    assert plan(num_pages=549).bytes <= 9_000_000
    with pytest.raises(ValueError, match=r"550 pages of 16 tokens takes 0\.01 GB, 0\.01 GB are free on cpu"):
        plan(num_pages=550)


@pytest.mark.parametrize("hidden", [False, True])
def test_br_071_too_little_memory_for_the_steps_is_one_message(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    """Also where the end of a capture fails over it with an error of its own."""

    def fail(*_: Any) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total …")
        except torch.OutOfMemoryError:
            if hidden:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None
            raise

    monkeypatch.setattr(memory, "free_bytes", lambda device: 3_000_000_000)
    monkeypatch.setattr(llm_module, "Runner", fail)
    message = (
        r"^num_pages, max_num_seqs or max_num_batched_tokens must be smaller: of 3\.00 GB that were free on cpu the KV "
        r"cache takes 0\.10 GB, and the rest is too little for the steps "
        r"\(CUDA out of memory\. Tried to allocate 20\.00 MiB\)$"
    )
    with pytest.raises(ValueError, match=message):
        LLM("random:tiny", num_pages=6000)


def test_other_errors_of_the_start_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(llm_module, "Runner", fail)
    with pytest.raises(RuntimeError, match=r"^an illegal memory access was encountered$"):
        LLM("random:tiny")


def test_free_memory_of_this_machine_is_a_positive_number() -> None:
    assert 0 < memory.free_bytes(CPU) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_page_cache_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was just read stands in the page cache; the kernel gives that up when asked."""
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:  16000 kB\nMemFree:    1000 kB\nMemAvailable:    9000 kB\nBuffers: 10 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", table)
    assert memory.free_bytes(CPU) == 9000 * 1024


@pytest.mark.parametrize("text", [None, "MemTotal: 16000 kB\nMemFree: 1000 kB\n"])
def test_without_the_kernels_estimate_free_pages_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    table = tmp_path / "meminfo"
    if text is not None:
        table.write_text(text)
    monkeypatch.setattr(memory, "MEMINFO", table)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory.free_bytes(CPU) == 7 * 4096


def test_what_a_step_needs_has_room_for_the_tables_of_options() -> None:
    """Beside the logits of one more sequence, in 2 bytes and four times in FP32."""
    config = replace(TINY, vocab_size=1000)
    tables = sum(t.numel() * t.element_size() for t in vars(Tables(32, 1000, CPU)).values())
    more = working_bytes(config, torch.bfloat16, 32, 64) - working_bytes(config, torch.bfloat16, 0, 64)
    assert more >= 32 * 1000 * (2 + 4 * 4) + 0.95 * tables
