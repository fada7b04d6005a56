"""Record a profiler trace of transformers decoding, for `rooflight explain --trace`.

    python scripts/record_trace.py OUT.json.gz [PRESET] [STEPS]

A model of the preset's shapes (default qwen3-0.6b) with random weights, BF16 on a GPU and FP32 on a CPU; a prompt of 32
tokens, a few tokens to warm up, then STEPS (default 4) decode steps under torch.profiler with shapes. Recording slows
the host down, so the trace's metadata say what a step takes without: unprofiled_step_us, the median of some. They also
say where it was recorded: environment.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rooflight.bench.environment import describe, describe_gpu, version
from rooflight.bench.peers.hf_config import hf_config
from rooflight.models.config import ModelConfig
from rooflight.models.load import load_config

PROMPT, WARM_UPS, TIMED = 32, 8, 32


def model_of(config: ModelConfig, device: str) -> PreTrainedModel:
    """transformers' model of the same shapes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    common = hf_config(config, dtype)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        if config.qk_norm:
            return Qwen3ForCausalLM(Qwen3Config(**common)).eval()
        return LlamaForCausalLM(LlamaConfig(**common)).eval()


def environment(device: str) -> dict[str, object]:
    gpu = describe_gpu() if device == "cuda" else {}
    return {**gpu, **describe(torch.get_num_threads()), "transformers": version("transformers")}


@torch.inference_mode()
def record(out: Path, preset: str, steps: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = json.dumps(environment(device))
    config = load_config(f"random:{preset}")
    model, cache = model_of(config, device), DynamicCache()
    ids = torch.randint(config.vocab_size, (1, PROMPT), device=device)

    def decode() -> None:
        nonlocal ids
        ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UPS):
        decode()
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        decode()
        times.append((time.perf_counter() - start) * 1e6)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(
        activities=activities,
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=steps),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(out)),
    ) as profiler:
        for _ in range(1 + steps):
            decode()
            profiler.add_metadata_json("unprofiled_step_us", f"{median(times):.1f}")
            profiler.add_metadata_json("environment", where)
            profiler.step()


def main() -> int:
    match sys.argv[1:]:
        case [out, *rest] if len(rest) <= 2:
            record(Path(out), rest[0] if rest else "qwen3-0.6b", int(rest[1]) if len(rest) > 1 else 4)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
