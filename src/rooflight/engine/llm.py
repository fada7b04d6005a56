"""The library's front door: a model by name, text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rooflight.engine.core import Engine
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.memory import plan_cache
from rooflight.engine.outputs import Chunk, Completion
from rooflight.engine.params import SamplingParams
from rooflight.engine.runner import Runner
from rooflight.engine.scheduler import Scheduler
from rooflight.models.load import load_model
from rooflight.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model ready to generate.

    model: a Hugging Face folder, a .gguf file, a hub name, "random:<preset>" or None for the embedded default.
    dtype: "auto" (the file's), "fp32", "bf16", "fp16" or a torch dtype. device: "auto" (a GPU if there is one).
    max_model_len: most tokens of prompt and answer together. num_pages, page_size: the KV pool, allocated once.
    max_num_seqs: most requests that decode together. prefill_chunk: prompt tokens a step.
    progress: called with (bytes loaded, bytes in all). Raises ValueError for arguments and files that are wrong.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        num_pages: int | None = None,
        page_size: int = 16,
        max_num_seqs: int = 8,
        prefill_chunk: int = 512,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, was {value}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
        self.config = loaded.config
        self.decoder = loaded.decoder
        self.tokenizer = _tokenizer(loaded.tokenizer_files)
        kv_dtype = self.decoder.embed.dtype
        plan = plan_cache(
            self.config,
            kv_dtype,
            torch.device(device),
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
        )
        self.max_model_len = plan.max_model_len
        cache = KVCache(self.config, plan.num_pages, page_size, kv_dtype, torch.device(device))
        scheduler = Scheduler(plan.num_pages, page_size, max_num_seqs, prefill_chunk)
        ends = frozenset(self.config.eos_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.engine = Engine(Runner(self.decoder, cache, plan.max_model_len), scheduler, self.tokenizer, ends)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or many; a prompt is a text or a list of token ids. Results in the order of prompts.

        A text gets the tokenizer's BOS if it has one. Raises ValueError for an empty prompt, one that leaves no room
        for an answer in the context, or parameters whose number differs; nothing is run then.
        """
        many = _as_list(prompts)
        options = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(options) != len(many):
            raise ValueError(f"params must be one or as many as prompts = {len(many)}, was {len(options)}")
        order: dict[int, int] = {}
        results: dict[int, Completion] = {}
        try:
            for index, (prompt, option) in enumerate(zip(many, options, strict=True)):
                order[self.engine.submit(self.encode(prompt), option)] = index
            while self.engine.busy:
                for request_id, chunk in self.engine.step():
                    if chunk.completion is not None:
                        results[order[request_id]] = chunk.completion
        finally:
            for request_id in order:
                self.engine.abort(request_id)
        return [results[index] for index in range(len(many))]

    def chat(self, messages: str | Messages, params: SamplingParams | None = None, **template: Any) -> Completion:
        """Answer a conversation: [{"role": "user", "content": …}, …] or one user text.

        Further keywords go to the model's chat template (`enable_thinking=False`, `tools=[…]`).
        """
        return self.generate([self.encode_chat(messages, **template)], params)[0]

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Chunk]:
        """Like `generate` for one prompt, or `chat` for a list of messages, a chunk at a time.

        Errors in the arguments are raised by this call, before the first chunk. Closing the iterator frees the
        request's memory.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        ids = self.encode_chat(prompt, **template) if is_chat else self.encode(prompt)  # type: ignore[arg-type]
        return self._chunks(self.engine.submit(ids, params or SamplingParams()))

    def _chunks(self, request_id: int) -> Iterator[Chunk]:
        try:
            done = False
            while not done:
                for owner, chunk in self.engine.step():
                    if owner == request_id:
                        done = chunk.finish_reason is not None
                        yield chunk
        finally:
            self.engine.abort(request_id)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; token ids are passed on."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        return self._need_tokenizer().encode(prompt)

    def encode_chat(self, messages: str | Messages, **template: Any) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._need_tokenizer().encode_chat(messages, **template)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("prompt must be token ids: this model has no tokenizer, was text")
        return self.tokenizer


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _tokenizer(source: Path | Mapping[str, Any] | None) -> Tokenizer | None:
    if source is None:
        return None
    return Tokenizer.from_folder(source) if isinstance(source, Path) else Tokenizer.from_gguf(source)
