"""Rooflight as a contender."""

from __future__ import annotations

from collections.abc import Sequence

import rooflight
from rooflight.bench.measurement import RequestTiming
from rooflight.engine import LLM, SamplingParams


class RooflightContender:
    def __init__(self, model: str | None, dtype: str, device: str) -> None:
        # Every round has the same prompts: a cache of prefixes would leave nothing of them to run.
        self.llm = LLM(model, dtype=dtype, device=device, skip_tokenizer=True, prefix_cache=False)

    def versions(self) -> dict[str, str]:
        return {"rooflight": rooflight.__version__}

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        completion = self.llm.generate([list(prompt)], params)[0]
        return RequestTiming(completion.timing.first_token, completion.timing.total, completion.token_ids)
