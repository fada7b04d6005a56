"""A tiny random model on the GPU: the same greedy tokens as on the CPU, in every provider there."""

from __future__ import annotations

import sys

import torch

from rooflight import LLM, SamplingParams, ops


def main() -> int:
    prompt = [(7 * i + 3) % 900 for i in range(45)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    want = LLM("random:tiny", dtype="fp32", device="cpu").generate([prompt], params)[0].token_ids
    failed = 0
    for provider in ("ref", "triton", None):
        llm = LLM("random:tiny", dtype="fp32", device="cuda", max_model_len=256)
        llm.engine.runner.cache.data.fill_(float("nan"))
        with ops.backend(provider):
            got = llm.generate([prompt], params)[0].token_ids
        torch.cuda.synchronize()
        equal = sum(a == b for a, b in zip(got, want, strict=True))
        print(f"{provider or 'table'}: {equal} of {len(want)} tokens equal to the CPU's")
        failed |= got != want
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
