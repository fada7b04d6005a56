"""The library's front door: a model by name, text in, text out."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from rooflight.engine.core import Engine
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.memory import plan_cache
from rooflight.engine.outputs import Chunk, Completion
from rooflight.engine.params import SamplingParams, whole
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
    skip_tokenizer: prompts are token ids only, and the model need not have a tokenizer.
    On a CPU the weights are packed for its matrix library: `decoder` then runs, but cannot be moved or saved.
    progress: called with (bytes loaded, bytes in all). Raises ValueError for arguments and files that are wrong,
    FileNotFoundError for a folder without tokenizer.json.
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
        skip_tokenizer: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk", prefill_chunk)):
            whole(name, value, 1, None)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
        self.config = loaded.config
        self.decoder = loaded.decoder
        self.tokenizer = None if skip_tokenizer else _tokenizer(loaded.tokenizer_files)
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
        self._inboxes: dict[int, deque[Chunk]] = {}  # per open request: chunks that its reader has not taken yet

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
        one = SamplingParams() if params is None else params
        options = list(one) if isinstance(one, Sequence) and not isinstance(one, str) else [one] * len(many)
        if len(options) != len(many):
            raise ValueError(f"params must be one or as many as prompts = {len(many)}, was {len(options)}")
        opened: list[Generator[Chunk, None, None]] = []
        try:
            for prompt, option in zip(many, options, strict=True):
                opened.append(self._open(self.encode(prompt), option))
            return [chunk.completion for chunks in opened for chunk in chunks if chunk.completion is not None]
        finally:
            for chunks in opened:
                chunks.close()

    def chat(self, messages: str | Messages, /, params: SamplingParams | None = None, **template: Any) -> Completion:
        """Answer a conversation: [{"role": "user", "content": …}, …] or one user text.

        Further keywords go to the model's chat template (`enable_thinking=False`, `tools=[…]`); here and in `stream`,
        `params` is always the sampling parameters. A template that has a variable of that name gets it through
        `encode_chat`, whose token ids `generate` and `stream` take. The name `messages` is refused with ValueError.
        """
        return self.generate([self.encode_chat(messages, **template)], params)[0]

    def stream(
        self, prompt: Prompt | Messages, /, params: SamplingParams | None = None, **template: Any
    ) -> Generator[Chunk, None, None]:
        """Like `generate` for one prompt, or `chat` for a list of messages, a chunk at a time.

        Errors in the arguments are raised by this call, before the first chunk. Closing or dropping the iterator frees
        the request's memory. Several may be open at once and be read in any order: they decode together.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if template and not is_chat:
            raise ValueError(f"prompt must be a list of messages for template keywords, which were {sorted(template)}")
        ids = self.encode_chat(prompt, **template) if is_chat else self.encode(prompt)  # type: ignore[arg-type]
        return self._open(ids, SamplingParams() if params is None else params)

    def _open(self, ids: list[int], params: SamplingParams) -> Generator[Chunk, None, None]:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, was {params!r}")
        chunks = self._chunks(self.engine.submit(ids, params))
        next(chunks)  # a generator that was never started would free nothing when it is dropped
        return chunks

    def _chunks(self, request_id: int) -> Generator[Chunk, None, None]:
        inbox = self._inboxes[request_id] = deque()
        done = False
        try:
            yield Chunk("")  # for `_open`
            while not done:
                while not inbox:  # a step serves every open request
                    if not self.engine.busy:
                        raise RuntimeError(f"request {request_id} was aborted by someone else than its reader")
                    for owner, chunk in self.engine.step():
                        if owner in self._inboxes:
                            self._inboxes[owner].append(chunk)
                done = inbox[0].finish_reason is not None
                yield inbox.popleft()
        finally:
            self.engine.abort(request_id)
            del self._inboxes[request_id]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; token ids are passed on."""
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                raise ValueError(f"prompt must be a text or a list of token ids ({error})") from None
        return self._need_tokenizer().encode(prompt)

    def encode_chat(self, messages: str | Messages, /, **template: Any) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template with every keyword as its variable."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._need_tokenizer().encode_chat(messages, **template)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("prompt must be token ids: this model has no tokenizer, was text")
        return self.tokenizer


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _tokenizer(source: Path | Mapping[str, Any] | None) -> Tokenizer | None:
    if source is None:
        return None
    return Tokenizer.from_folder(source) if isinstance(source, Path) else Tokenizer.from_gguf(source)
