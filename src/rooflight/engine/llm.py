"""The library's front door: a model by name, text in, text out."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from rooflight.engine.collector import COLLECTOR
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import MOST_STEPS, GraphRunner
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.memory import plan_cache, starting, working_bytes
from rooflight.engine.outputs import Chunk, Completion
from rooflight.engine.params import SamplingParams, whole
from rooflight.engine.request import Request
from rooflight.engine.runner import Runner
from rooflight.engine.scheduler import Scheduler
from rooflight.models.load import load_model
from rooflight.text.tokenizer import Tokenizer

# On a CPU, on a GPU: what fits a step without anybody waiting long for it.
MOST_SEQS = 64, 256
MOST_TOKENS = 512, 8192
# Prompts from which Python's collector is kept off: fewer are hardly enough to make it go through everything.
MANY_PROMPTS = 16
EARLY_STEP = 16384  # tokens of prompts with which a device that may begin early does

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model ready to generate.

    model: a Hugging Face folder, a .gguf file, a hub name, "random:<preset>" or None for the embedded default.
    dtype: "auto" (the file's), "fp32", "bf16", "fp16" or a torch dtype. device: "auto" (a GPU if there is one).
    max_model_len: most tokens of prompt and answer together. num_pages, page_size: the KV pool, allocated once.
    max_num_seqs: most sequences that run together, and no more than a step has tokens (default: 64, on a GPU 256).
    max_num_batched_tokens: most tokens of a step, those of prompts and of running sequences together (default: 512, on
    a GPU 8192). prefix_cache: prompts that begin alike share
    pages of the KV pool.
    graphs, most_steps: to measure without: CUDA graphs, and decode steps of a launch, a power of two (on a GPU 8).
    skip_tokenizer: prompts are token ids only, and the model need not have a tokenizer.
    On a CPU the weights are packed for its matrix library: `decoder` then runs, but cannot be moved or saved.
    progress: called with (bytes loaded, bytes in all). `start_seconds` says afterwards what took how long.
    Raises ValueError for arguments and files that are wrong and for a device with too little memory, FileNotFoundError
    for a folder without tokenizer.json.
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
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        prefix_cache: bool = True,
        graphs: bool = True,
        most_steps: int | None = None,
        skip_tokenizer: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        on_gpu = str(device).startswith("cuda")
        max_num_seqs = MOST_SEQS[on_gpu] if max_num_seqs is None else max_num_seqs
        most_tokens = MOST_TOKENS[on_gpu] if max_num_batched_tokens is None else max_num_batched_tokens
        whole("max_num_seqs", max_num_seqs, 1, None)
        whole("max_num_batched_tokens", most_tokens, 1, None)
        steps = MOST_STEPS if most_steps is None else most_steps
        whole("most_steps", steps, 1, None)
        if steps & (steps - 1):  # others would never be planned
            raise ValueError(f"most_steps must be a power of two, was {steps}")
        begin = time.perf_counter()
        loaded = load_model(model, dtype=dtype, device=device, progress=progress)
        self.start_seconds = {"weights": time.perf_counter() - begin}
        self.config = loaded.config
        self.decoder = loaded.decoder
        begin = time.perf_counter()
        self.tokenizer = None if skip_tokenizer else _tokenizer(loaded.tokenizer_files)
        self.start_seconds["tokenizer"] = time.perf_counter() - begin
        begin = time.perf_counter()
        kv_dtype = self.decoder.embed.dtype
        place = torch.device(device)
        plan = plan_cache(
            self.config,
            kv_dtype,
            place,
            max_model_len=max_model_len,
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            working=working_bytes(self.config, kv_dtype, max_num_seqs, most_tokens) if on_gpu else 0,
        )
        self.max_model_len = plan.max_model_len
        most_seqs = min(max_num_seqs, most_tokens)
        self.graph_buckets: tuple[int, ...] = ()
        with starting(plan, place):
            cache = KVCache(self.config, plan.num_pages, page_size, kv_dtype, place)
            self.start_seconds["KV cache"] = time.perf_counter() - begin
            runner: Runner
            if on_gpu:
                runner = GraphRunner(self.decoder, cache, plan.max_model_len, most_seqs, most_tokens, graphs, steps)
                self.graph_buckets = tuple(runner.buckets) if graphs else ()
                self.start_seconds |= runner.seconds
            else:
                runner = Runner(self.decoder, cache, plan.max_model_len)
        scheduler = Scheduler(
            plan.num_pages, page_size, most_seqs, most_tokens, prefix_cache, runner.most_steps, runner.options_on_device
        )
        ends = frozenset(self.config.eos_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.engine = Engine(runner, scheduler, self.tokenizer, ends)
        self.claimed = False  # by an AsyncEngine, whose thread alone may run it then
        self._inboxes: dict[int, deque[Chunk]] = {}  # per open request: chunks that its reader has not taken yet

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or many; a prompt is a text or a list of token ids. Results in the order of prompts.

        A prompt with `n` > 1 has n results, one after the other. A text gets the tokenizer's BOS if it has one.
        progress: called with (completions that have ended, of how many). Raises ValueError for an empty prompt, one
        that leaves no room for an answer in the context, or parameters whose number differs. Nothing has run then but,
        on a GPU, a step that those before it fill or make large: it begins while the others are looked at.
        With many prompts Python's collector leaves alone what was there before, until the end (collector.py).
        """
        many = _as_list(prompts)
        one = SamplingParams() if params is None else params
        options = list(one) if isinstance(one, Sequence) and not isinstance(one, str) else [one] * len(many)
        if len(options) != len(many):
            raise ValueError(f"params must be one or as many as prompts = {len(many)}, was {len(options)}")
        with COLLECTOR.aside() if len(many) >= MANY_PROMPTS else nullcontext():
            return self._complete(many, options, progress)

    def _complete(
        self, many: list[Prompt], options: list[SamplingParams], progress: Callable[[int, int], None] | None
    ) -> list[Completion]:
        results: dict[int, list[Completion]] = {}
        left: dict[int, int] = {}
        prepared: list[list[Request]] = []

        def queue() -> None:
            for requests in prepared:
                requests[0].group.streams = False
                request_id = self._add(requests)
                results[request_id], left[request_id] = [], len(requests)
            prepared.clear()

        room = min(self.engine.scheduler.max_num_batched_tokens, EARLY_STEP)
        try:
            for prompt, option in zip(many, options, strict=True):
                prepared.append(self.prepare(self.encode(prompt), option))
                before, room = room, room - prepared[-1][0].sequence.num_prompt
                if room <= 0 < before and self.engine.runner.ahead:  # the device need not wait for the other prompts
                    queue()
                    self.engine.begin()
            queue()
            total, done = sum(left.values()), 0
            while left:
                for owner, chunk in self._take(left):
                    if chunk.completion is None:
                        continue
                    done += 1
                    results[owner].append(chunk.completion)
                    left[owner] -= 1
                    if left[owner] == 0:
                        del left[owner]
                    if progress is not None:
                        progress(done, total)
            return [c for found in results.values() for c in sorted(found, key=lambda c: c.index)]
        finally:
            for request_id in results:
                self._close(request_id)

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
        Python's collector goes on as ever: it would have to be kept off for as long as an iterator stays open.
        """
        ids = self.encode_any(prompt, **template)
        requests = self.prepare(ids, SamplingParams() if params is None else params)
        chunks = self._chunks(self._add(requests), len(requests))
        next(chunks)  # a generator that was never started would free nothing when it is dropped
        return chunks

    def _chunks(self, request_id: int, many: int) -> Generator[Chunk, None, None]:
        try:
            yield Chunk("")  # for `stream`
            while many:
                for _, chunk in self._take([request_id]):
                    many -= chunk.finish_reason is not None
                    yield chunk
        finally:
            self._close(request_id)

    def prepare(self, ids: list[int], params: SamplingParams) -> list[Request]:
        """What `Engine.add` queues, checked; ValueError for what cannot be served. May be called from any thread.

        The list, which `encode` made, becomes the engine's.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, was {params!r}")
        return self.engine.prepare(ids, params)

    def _add(self, requests: list[Request]) -> int:
        if self.claimed:
            raise RuntimeError("an AsyncEngine runs this LLM: use its submit and generate, or close it first")
        request_id = self.engine.add(requests)
        self._inboxes[request_id] = deque()
        return request_id

    def _close(self, request_id: int) -> None:
        self.engine.abort(request_id)
        self._inboxes.pop(request_id, None)

    def _take(self, unfinished: Collection[int]) -> Iterator[tuple[int, Chunk]]:
        """Chunks of some requests that nobody has read yet; if there are none, a step is run, for every open request.

        RuntimeError if one of them was aborted: it would never end.
        """
        ready = [owner for owner in unfinished if self._inboxes[owner]]
        if not ready:
            for owner in unfinished:
                if not self.engine.is_open(owner):
                    raise RuntimeError(f"request {owner} was aborted by someone else than its reader")
            for owner, chunk in self.engine.step():
                if owner in self._inboxes:
                    self._inboxes[owner].append(chunk)
                    if owner in unfinished:  # another's inbox may be gone when its turn would come
                        ready.append(owner)
        for owner in dict.fromkeys(ready):
            inbox = self._inboxes[owner]
            while inbox and owner in unfinished:
                yield owner, inbox.popleft()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; token ids are passed on."""
        if not isinstance(prompt, str):
            if isinstance(prompt, list) and [*map(type, prompt)].count(int) == len(prompt):  # the fastest way to ask
                return list(prompt)
            try:
                return array("q", list(prompt)).tolist()
            except (TypeError, OverflowError) as error:
                raise ValueError(f"prompt must be a text or a list of token ids ({error})") from None
        return self._need_tokenizer().encode(prompt)

    def encode_any(self, prompt: Prompt | Messages, /, **template: Any) -> list[int]:
        """Token ids of a text, of token ids, or of a list of messages with its template's keywords."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if template and not is_chat:
            raise ValueError(f"prompt must be a list of messages for template keywords, which were {sorted(template)}")
        return self.encode_chat(prompt, **template) if is_chat else self.encode(prompt)  # type: ignore[arg-type]

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
