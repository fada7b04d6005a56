"""vLLM as a contender: compiled, with CUDA graphs, its engine in this process, which is its faster set-up.

Written for vLLM 0.23. Token ids in, token ids out: no tokenizer is loaded and nothing is turned into text. Its own
defaults decide how many requests run together, and how many tokens a step has unless the bench asks for some. Of
random models it gets the config alone, and makes up weights of its own ("dummy").
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read when vllm is imported. In a process of its own the engine would also be out of the profiler's sight.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import vllm

from rooflight.bench.measurement import ANY_ROOM, Facts, RequestTiming, Room
from rooflight.bench.peers.hf_config import write_folder
from rooflight.models.load import DTYPES, load_config
from rooflight.models.sources import Kind, resolve

SHARE = 0.4  # of the GPU's memory, weights and cache together: the other engines stand beside it
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class VllmContender:
    def __init__(self, model: str | None, dtype: str, device: str, room: Room = ANY_ROOM) -> None:
        if device != "cuda":
            raise ValueError(f"device must be cuda for the peer vllm, was {device!r}")
        self._folder = tempfile.TemporaryDirectory()  # of the config; vLLM may read it again later
        name, load_format = _files(model, dtype, Path(self._folder.name))
        self.llm: Any = vllm.LLM(
            model=name,
            load_format=load_format,
            dtype=NAMES[dtype],
            max_model_len=room.max_model_len,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=SHARE,
            max_num_batched_tokens=room.max_num_batched_tokens,  # as ours, where memory lets ours; None: its own choice
            generation_config="vllm",  # not the checkpoint's sampling
            seed=0,
        )

    def versions(self) -> dict[str, str]:
        return {"vllm": vllm.__version__}

    def facts(self) -> Facts:
        """As far as this version tells: where a name has moved, there is None."""
        config = getattr(getattr(self.llm, "llm_engine", None), "vllm_config", None)
        names = {
            "max_model_len": ("model_config", "max_model_len"),
            "num_pages": ("cache_config", "num_gpu_blocks"),
            "page_size": ("cache_config", "block_size"),
            "max_num_seqs": ("scheduler_config", "max_num_seqs"),
            "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
            "graph_buckets": ("compilation_config", "cudagraph_capture_sizes"),
            "prefix_cache": ("cache_config", "enable_prefix_caching"),
        }
        facts = {name: _plain(getattr(getattr(config, part, None), key, None)) for name, (part, key) in names.items()}
        how = {"engine": "in the same process", "first_token": "of a request for one token"}
        return facts | how | {"gpu_memory_utilization": SHARE}

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        """The time to the first token is that of a request for one token: `generate` tells no more."""
        first, _ = self._timed([prompt], 1)
        total, answers = self._timed([prompt], max_tokens)
        return RequestTiming(first, total, answers[0])

    def complete(self, prompt: Sequence[int], max_tokens: int) -> object:
        return self._timed([prompt], max_tokens)

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        return self._timed(prompts, max_tokens)[0]

    def _timed(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """Seconds, and the tokens of every request; RuntimeError if one has not as many as were asked for."""
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        results = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [tuple(result.outputs[0].token_ids) for result in results]
        for answer in answers:
            if len(answer) != max_tokens:
                raise RuntimeError(f"a request for {max_tokens} tokens ended after {len(answer)}")
        return seconds, answers


def _files(model: str | None, dtype: str, folder: Path) -> tuple[str, str]:
    """What vLLM calls model and load_format. `folder` is where a config may be written."""
    source = resolve(model)
    if source.kind is Kind.RANDOM:
        return str(write_folder(load_config(source.name), DTYPES[dtype], folder)), "dummy"
    if source.kind is Kind.FOLDER:
        return str(source.path), "auto"
    if source.kind is Kind.HUB:
        return source.name, "auto"
    raise ValueError(f"model must be random, a folder or a hub name for the peer vllm, was {source.name}")


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
