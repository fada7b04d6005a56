"""Hugging Face transformers, eager, as a contender.

The peer gets its best: a plain loop over the model's forward with its own KV cache and logits of the last position
only, without the bookkeeping of `generate`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from rooflight.bench.measurement import Facts, RequestTiming
from rooflight.bench.peers.hf_config import hf_config
from rooflight.models.load import DTYPES, load_config
from rooflight.models.sources import Kind, resolve


class TransformersContender:
    def __init__(self, model: str | None, dtype: str, device: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.device = device
        self.model: Any = _load(model, DTYPES[dtype], device).to(device).eval()

    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__}

    def facts(self) -> Facts:
        return {"attention": getattr(self.model.config, "_attn_implementation", None), "cache": "dynamic"}

    def complete(self, prompt: Sequence[int], max_tokens: int) -> object:
        return self.run(prompt, max_tokens)

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        start = time.perf_counter()
        ids = torch.tensor([list(prompt)], device=self.device)
        cache, tokens, first = None, [], 0.0
        for _ in range(max_tokens):
            result = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = result.past_key_values
            ids = result.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
            first = first or time.perf_counter()
        return RequestTiming(first - start, time.perf_counter() - start, tuple(tokens))


def _load(model: str | None, dtype: torch.dtype, device: str) -> Any:
    source = resolve(model)
    auto = transformers.AutoModelForCausalLM
    if source.kind is Kind.GGUF:
        return auto.from_pretrained(source.path.parent, gguf_file=source.path.name, dtype=dtype)
    if source.kind is Kind.FOLDER:
        return auto.from_pretrained(source.path, dtype=dtype)
    if source.kind is Kind.HUB:
        return auto.from_pretrained(source.name, dtype=dtype)
    config = load_config(source.name)  # random weights: the same shapes, other values than ours
    fields = hf_config(config, dtype)
    with torch.device(device):
        return auto.from_config(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=dtype)
