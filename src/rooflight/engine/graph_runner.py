"""Runs plans on a GPU without waiting for it: CUDA graphs for decoding and short prompts, the sampler on the device.

A launch writes its numbers into pinned memory, asks for one copy, a graph and a copy back, and returns. The next launch
is planned and asked for while this one runs: tokens that the host has not seen yet are taken on the device.

    decode    graphs of one step and of `most_steps` for each number of rows in `buckets`, padded up to it
    prompts   graphs for so many tokens of so many prompts, and of sequences that decode beside them, padded up to it;
              large steps that would be padded far, and what does not fit, kernel by kernel
    options   penalties, biases, bans, log-probabilities (options.py): on the device too, in graphs of their own that
              are made when they are first asked for; beside prompts kernel by kernel
    the rest  prompt_logprobs, and lists of biases that are too long: as on a CPU, with the host
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from rooflight.engine.capture import captured
from rooflight.engine.graph_sizes import buckets, prompt_sizes, suits
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.launch import InFlight, Launch
from rooflight.engine.logit_state import LogitState
from rooflight.engine.options import Options, Wish, wish_of
from rooflight.engine.plan import Row, StepPlan
from rooflight.engine.runner import Runner
from rooflight.engine.sequence import Sequence
from rooflight.engine.static_batch import DecodeBatch, Model, PromptBatch, PromptSize
from rooflight.models.decoder import Decoder
from rooflight.models.recipe import Recipe, on_gpu
from rooflight.ops import REGISTRY

MOST_STEPS = 8  # of a launch: what the host needs for a step, at batch 1, is more than the GPU does
LATE = "options", "reports"  # graphs of decode steps with options, without and with log-probabilities
LONG_PROMPT = 6144  # tokens from which PyTorch's attention is faster than Triton's, with its way to it (docs/decode.md)


class GraphRunner(Runner):
    """See the module text. seconds: what starting took, by part. `graphs=False` runs the same steps one by one.

    recipe: of the decoder from now on; graphs keep the one that they were captured with.
    """

    ahead = 1
    options_on_device = True

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        graphs: bool = True,
        most_steps: int = MOST_STEPS,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(decoder, cache, max_model_len)
        decoder.recipe = recipe or served(decoder.embed.dtype, self.device)
        self.most_steps = most_steps
        self.model = Model(decoder, cache, max_model_len, max_num_seqs)
        heads = decoder.config.num_heads // decoder.config.num_kv_heads
        self._compiled_prompts = compiled_prompts(self.device, decoder.config.head_dim, heads, cache.page_size)
        self.buckets = buckets(max_num_seqs)
        self.seconds: dict[str, float] = {}
        with torch.inference_mode():
            self._decode = {rows: DecodeBatch(self.model, rows, self.most_steps) for rows in self.buckets}
            sizes = prompt_sizes(max_num_seqs, max_num_batched_tokens)
            self._prompts = [PromptBatch(self.model, room) for room in sizes]
            self._any_prompts = PromptBatch(self.model, PromptSize(max_num_batched_tokens, max_num_seqs, max_num_seqs))
        self._graphs: dict[tuple[str | int, ...], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # of the graphs' memory, if there are graphs
        self._side: Any = None  # the stream that they are made on
        self._state = LogitState(max_num_seqs, decoder.config.vocab_size, self.device)
        if graphs:
            self._capture_all()

    def launch(self, plan: StepPlan, sampling: Many[Sequence]) -> Launch:
        if plan.needs_host:
            self._state.forget(plan.rows)
            return super().launch(plan, sampling)
        with torch.inference_mode(), on_device(self.device):
            wish = wish_of(plan, sampling)
            self._state.write(wish.rows, wish.sequences)
            ask = self._ask_decode if all(map(_decodes, plan.rows)) else self._ask_prompts
            launch = ask(plan, sampling, wish)
            self._state.launched(wish.rows, wish.sequences, [plan.gets(row) for row in wish.rows])
            return launch

    def _options(self, batch: DecodeBatch | PromptBatch, wish: Wish) -> Options | None:
        return Options(self._state, batch.reports if wish.reports else None) if wish.places else None

    def _ask_decode(self, plan: StepPlan, sampling: Many[Sequence], wish: Wish) -> InFlight:
        batch = self._decode[_fitting(self.buckets, len(plan.rows))]
        batch.write(plan.rows, sampling, wish.places)
        options = self._options(batch, wish)
        # Graphs with options are made while requests wait, and those of one step are made soonest.
        many = self.most_steps if plan.steps == self.most_steps and options is None else 1
        key: tuple[str | int, ...] = ("decode", batch.rows, many)
        step = partial(_decode_steps, batch, many, options)
        if options is not None:
            key = (LATE[options.reports is not None], batch.rows, many, self._state.width)
            self._capture_late(key, step, options)
        out, reports = batch.down.begin(), options.reports if options else None
        for first in range(0, plan.steps, many):
            self._replay(key, step)
            out[first : first + many].copy_(batch.history[:many], non_blocking=True)
            if reports:
                reports.copy(first, many)
        gets = [plan.gets(row) for row in plan.rows]
        return InFlight(batch.down.end(), gets, range(len(gets)), reports.end(wish.tops) if reports else None)

    def _ask_prompts(self, plan: StepPlan, sampling: Many[Sequence], wish: Wish) -> InFlight:
        # Prompts before sequences that decode: behind them these have attention of their own.
        order = sorted(range(len(plan.rows)), key=lambda index: _decodes(plan.rows[index]))
        owners = iter(sampling)
        drawing = {index: next(owners) for index, row in enumerate(plan.rows) if row.samples}
        sequences = [drawing[index] for index in order if index in drawing]
        rows = [plan.rows[index] for index in order]
        batch, many = self._room_for(rows, bool(wish.places))
        prompts, decodes = rows[:many], rows[many:]
        reports = None
        if batch is None:
            batch = self._any_prompts
            size, options = _size_of(prompts, decodes), self._options(batch, wish)
            batch.write(prompts, decodes, sequences, size, wish.places)
            batch.step(size, len(sequences), self._is_long(rows), options)
            reports = options.reports if options else None
        else:
            size = batch.room
            batch.write(prompts, decodes, sequences, size)
            self._replay(("prompt", *size), partial(batch.step, size, size.rows))
        batch.down.begin().copy_(batch.drawn, non_blocking=True)
        if reports:
            reports.copy(0, 1)
        columns = {index: column for column, index in enumerate(index for index in order if index in drawing)}
        arrival = batch.down.end(), [1] * len(columns), [columns[index] for index in drawing]
        return InFlight(*arrival, reports.end(wish.tops) if reports else None)

    def _room_for(self, rows: list[Row], options: bool) -> tuple[PromptBatch | None, int]:
        """The smallest captured step that suits these rows, and how many of them, the first ones, are its prompts.

        None: there is no such step, nor are there any with options.
        """
        prompts = sum(not _decodes(row) for row in rows)
        apart = _size_of(rows[:prompts], rows[prompts:])
        # A few sequences that decode can pass for prompts of one token.
        together = _size_of(rows, [])
        if options or self._is_long(rows):
            return None, prompts
        for batch in self._prompts:
            if suits(batch.room, apart):
                return batch, prompts
            if suits(batch.room, together):
                return batch, len(rows)
        return None, prompts

    def _is_long(self, rows: Many[Row]) -> bool:
        """One prompt alone that PyTorch's attention takes, whose kernels for half types beat Triton's."""
        (first, *others) = rows
        long = first.start == 0 and len(first.tokens) >= LONG_PROMPT
        half = self.decoder.embed.dtype.itemsize == 2
        return long and not others and half and not self._compiled_prompts

    def _replay(self, key: tuple[str | int, ...], step: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            step()
        else:
            graph.replay()

    def _capture_all(self) -> None:
        """Every graph of draws without options; none of them is made while requests wait."""
        with torch.inference_mode(), on_device(self.device):
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            for prompt in reversed(self._prompts):
                self._capture(("prompt", *prompt.room), partial(prompt.step, prompt.room, prompt.room.rows))
            for rows, batch in reversed(self._decode.items()):
                for many in sorted({1, self.most_steps}):
                    self._capture(("decode", rows, many), partial(_decode_steps, batch, many))

    def _capture(self, key: tuple[str | int, ...], step: Callable[[], None]) -> None:
        begin = time.perf_counter()
        if key[0] == "prompt" or key[2] == 1:  # kernels are compiled and loaded, and libraries made ready, outside
            self._run_aside(step)
        between = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self._pool, self._side, "global"):
            step()
        self._graphs[key] = graph
        self._count(f"first {key[0]} steps", between - begin)
        self._count(f"{key[0]} graphs", time.perf_counter() - between)

    def _capture_late(self, key: tuple[str | int, ...], step: Callable[[], None], options: Options) -> None:
        """A graph of decode steps with options, while requests wait: not everybody has use for one.

        The steps must not run for it, since they move the batch on. All but their draws has run before.
        """
        if self._pool is None or key in self._graphs:
            return
        self._graphs = {
            other: graph for other, graph in self._graphs.items() if other[0] not in LATE or other[3] == key[3]
        }
        self._run_aside(partial(options.rehearse, int(key[1]), self.decoder.embed.dtype))
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self._pool, self._side, "thread_local"):  # other threads may go on with the device
            step()
        self._graphs[key] = graph

    def _run_aside(self, run: Callable[[], None]) -> None:
        """On a stream of its own, and wait for it: what libraries keep for that of captures belongs to the graphs."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()

    def _count(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


def served(dtype: torch.dtype, device: torch.device) -> Recipe:
    """Of a decoder on that device. `scaled` only where csrc/skinny_linear.cu serves: elsewhere norms are faster."""
    there = device.type == "cuda" and REGISTRY["linear_add_scale_"].active.get("cuda") == "cuda"
    return on_gpu(dtype, there and torch.cuda.get_device_capability(device)[0] == 9)


def compiled_prompts(device: torch.device, head_dim: int, heads: int, page_size: int) -> bool:
    """Whether csrc/prefill_attention.cu serves prompts of half types; heads: query heads of a KV head."""
    if device.type != "cuda" or REGISTRY["prefill_attention"].active.get("cuda") != "cuda":
        return False
    pages = page_size >= 16 and page_size & (page_size - 1) == 0
    return torch.cuda.get_device_capability(device)[0] == 9 and head_dim in (64, 128) and heads <= 64 and pages


def _size_of(prompts: Many[Row], decodes: Many[Row]) -> PromptSize:
    return PromptSize(sum(len(row.tokens) for row in prompts), len(prompts), len(decodes))


def _decodes(row: Row) -> bool:
    """Not so a chunk of a prompt that happens to be one token: nothing is drawn for it."""
    return row.start > 0 and len(row.tokens) == 1 and row.samples


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """With that GPU current, whichever is the caller's: graphs and events go by it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _fitting(sizes: Many[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]


def _decode_steps(batch: DecodeBatch, many: int, options: Options | None = None) -> None:
    batch.begin()
    for index in range(many):
        batch.step(index, options)
