"""Requests to tokens: scheduler, KV cache, runner, sampler, and the `LLM` that people use."""

from rooflight.engine.llm import LLM
from rooflight.engine.outputs import Chunk, Completion, Timing
from rooflight.engine.params import SamplingParams

__all__ = ["LLM", "Chunk", "Completion", "SamplingParams", "Timing"]
