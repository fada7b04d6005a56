"""Requests to tokens: scheduler, KV cache, runner, sampler, and the `LLM` that people use."""

from rooflight.engine.async_engine import AsyncEngine, EngineStopped, Stream
from rooflight.engine.llm import LLM
from rooflight.engine.metrics import Metrics, Percentiles
from rooflight.engine.outputs import Chunk, Completion, Timing, TokenLogprobs
from rooflight.engine.params import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "Chunk",
    "Completion",
    "EngineStopped",
    "Metrics",
    "Percentiles",
    "SamplingParams",
    "Stream",
    "Timing",
    "TokenLogprobs",
]
