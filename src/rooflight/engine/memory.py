"""How long a context and how many pages a machine can hold."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from rooflight.engine.params import whole
from rooflight.engine.sequence import MOST_ENTRIES
from rooflight.models.config import ModelConfig
from rooflight.models.device import refusing

CPU_CONTEXT = 8192  # a longer default context would reserve gigabytes nobody asked for
SHARE = 0.9  # of the memory that is free after the weights
GPU_FIXED = 3 << 30  # bytes: graphs, kernels, the matrix library's workspace
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class CachePlan:
    """Sizes of the KV cache: tokens a request may have, and pages in the pool."""

    max_model_len: int
    num_pages: int
    page_size: int
    bytes: int


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):  # counts the page cache, which a just read model fills, as free
            return int(line.split()[1]) * 1024
    free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS has only the latter
    return os.sysconf(free) * os.sysconf("SC_PAGE_SIZE")


def working_bytes(config: ModelConfig, dtype: torch.dtype, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """What a step on a GPU needs beside weights and cache: logits of all sequences, what is kept of each to change and
    report them, activations, graphs, libraries.

    Generous: a pool that leaves too little fails at the first full batch, hours after it was made.
    """
    # In the model's dtype and four times in FP32: as they are, as they were, changed, as log-probabilities.
    logits = max_num_seqs * config.vocab_size * (dtype.itemsize + 4 * torch.float32.itemsize)
    entries = MOST_ENTRIES * 4 * (torch.int64.itemsize + torch.float32.itemsize)  # lists, and a step's copies of them
    tables = (max_num_seqs + 1) * (config.vocab_size * (torch.int32.itemsize + torch.bool.itemsize) + entries)
    widths = 4 * config.hidden_size + 4 * config.intermediate_size + 3 * config.num_heads * config.head_dim
    activations = max_num_batched_tokens * widths * dtype.itemsize
    # Twice: graphs keep theirs, and steps with prompts, kernel by kernel, have their own.
    return 2 * (logits + activations) + tables + GPU_FIXED


def plan_cache(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None = None,
    num_pages: int | None = None,
    page_size: int = 16,
    max_num_seqs: int = 1,
    working: int = 0,
) -> CachePlan:
    """Default: the model's context (at most 8192 tokens on a CPU), and pages for one request that fills it.

    On a GPU: for max_num_seqs such requests, or as many as there is memory for beside `working` bytes. Raises
    ValueError, with both numbers, for a context beyond the model's and for a cache that does not fit into the memory
    that is free.
    """
    context = config.max_position_embeddings
    whole("page_size", page_size, 1, None)
    if max_model_len is None:
        max_model_len = min(context, CPU_CONTEXT) if device.type == "cpu" else context
    whole("max_model_len", max_model_len, 1, None)
    if max_model_len > context:
        raise ValueError(f"max_model_len must be from 1 to the model's context of {context}, was {max_model_len}")
    page, free = page_size * config.kv_bytes_per_token(dtype), free_bytes(device)
    room = int(SHARE * free) - working
    if num_pages is None:
        num_pages = -(-max_model_len // page_size)
        if device.type == "cuda":
            num_pages = max(num_pages, min(max_num_seqs * num_pages, room // page))
    whole("num_pages", num_pages, 1, None)
    need = num_pages * page
    if need > room:
        beside = f", of which {working / 1e9:.2f} GB are for the steps themselves" if working else ""
        raise ValueError(
            f"max_model_len or num_pages must be smaller: a KV cache of {num_pages} pages of {page_size} tokens takes "
            f"{need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free on {device}" + beside
        )
    return CachePlan(max_model_len, num_pages, page_size, need)


def starting(plan: CachePlan, device: torch.device) -> AbstractContextManager[None]:
    """Around making the cache and the steps: what `plan_cache` only estimates may turn out too little."""
    free = free_bytes(device)
    return refusing(
        f"num_pages, max_num_seqs or max_num_batched_tokens must be smaller: of {free / 1e9:.2f} GB that were free on "
        f"{device} the KV cache takes {plan.bytes / 1e9:.2f} GB, and the rest is too little for the steps"
    )
