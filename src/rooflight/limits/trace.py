"""Take a step apart: run the decoder on tensors without values and write down every operator that it calls.

The decoder is the one that serves; there is no second list of what a model does. On meta tensors a step of any model,
batch and context takes about a second and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rooflight import ops
from rooflight.models.communicator import SingleRank
from rooflight.models.config import ModelConfig
from rooflight.models.decoder import Decoder, Linear
from rooflight.models.recipe import Recipe
from rooflight.ops import REGISTRY, AttentionMeta, Cost
from rooflight.ops.contract import PLUMBING

PAGE_SIZE = 16
PHASES = ("decode", "prefill")
MAX_BATCH = 1_000_000


@dataclass(frozen=True)
class Call:
    """One operator call of a step.

    label: the largest parameter that it reads ("qkv", "head"), or "" where it reads none. layer: None outside of them.
    dtype: of the values it computes with. weight_elements: of parameters, read whole. kv_elements: of the KV cache.
    """

    operator: str
    label: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    cost: Cost
    weight_elements: int = 0
    kv_elements: int = 0


class Recorder(TorchDispatchMode):
    """Within the context, the calls of our operators, of collectives, and of PyTorch's that move data, in `calls`.

    hints: host values that operators' costs need on tensors without values (`seq_lens`, `query_lens`).
    """

    def __init__(self, decoder: Decoder, hints: Mapping[str, Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._hints = dict(hints or {})
        self._names = parameter_names(decoder)
        self._costs: dict[tuple[Any, ...], tuple[Cost, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace == ops.contract.NAMESPACE:
            self.calls.append(self._ours(name, args))
        elif namespace == "aten" and (call := _pytorch(func, args, dict(kwargs or {}), result)) is not None:
            self.calls.append(call)
        return result

    def _ours(self, name: str, args: tuple[Any, ...]) -> Call:
        operator = REGISTRY.get(name) or PLUMBING[name]
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        cost, kv = self._cost(operator, name, args, tensors)
        names = [(-t.numel(), *self._names[id(t)]) for t in tensors if id(t) in self._names]
        names.sort(key=lambda name: name[0])  # the matrix before the norm in front of it; else as they come
        layer, label = names[0][1:] if names else (None, "")
        if name == "embedding":
            label = "embed"  # a tied one has the head's name too
        whole = 0 if name == "embedding" else sum(t.numel() for t in tensors if id(t) in self._names)
        floats = [t for t in tensors if t.is_floating_point()] or tensors
        return Call(name, label, layer, tuple(tensors[0].shape), floats[0].dtype, cost, whole, kv)

    def _cost(
        self, operator: Any, name: str, args: tuple[Any, ...], tensors: Sequence[torch.Tensor]
    ) -> tuple[Cost, int]:
        """The cost, and the elements of the KV cache in it. Layers are alike: each kind of call is counted once."""
        if not self._hints:  # the tensors have values, and a cost may depend on them
            return operator.cost_of(*args), 0
        key = (name, *(_kind(argument) for argument in args))
        if key not in self._costs:
            cost, kv = operator.cost_of(*args, **self._hints), 0
            if name.removesuffix("_").endswith("_attention"):
                none = {hint: [0] * len(value) for hint, value in self._hints.items()}
                kv = (cost.bytes_read - operator.cost_of(*args, **none).bytes_read) // tensors[0].element_size()
            self._costs[key] = cost, kv
        return self._costs[key]


def _kind(argument: Any) -> Any:
    """What a cost can depend on."""
    return (tuple(argument.shape), argument.dtype) if isinstance(argument, torch.Tensor) else argument


class RecordingRank(SingleRank):
    """One rank that writes down where several would talk to each other."""

    recorder: Recorder | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._note("all_reduce", x)
        return super().all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self._note("all_gather", x)
        return super().all_gather(x, dim)

    def _note(self, name: str, x: torch.Tensor) -> None:
        if self.recorder is not None:
            size = x.numel() * x.element_size()
            self.recorder.calls.append(Call(name, "", None, tuple(x.shape), x.dtype, Cost(size, size, 0)))


def parameter_names(decoder: Decoder) -> dict[int, tuple[int | None, str]]:
    """(layer, name) of every parameter by its identity; packed ones are no parameters any more, but attributes."""
    names: dict[int, tuple[int | None, str]] = {}
    for path, module in decoder.named_modules():
        parts = path.split(".")
        layer = int(parts[1]) if parts[0] == "layers" and len(parts) > 1 else None
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, Linear):
            own["weight"] = module.weight
        for name, tensor in own.items():
            if tensor is not None:
                names[id(tensor)] = (layer, parts[-1] if name in ("weight", "bias") else name)
    return names


def _pytorch(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Call | None:
    """What one of PyTorch's own operators reads, writes and computes; None for views and for what only allocates."""
    name = func._schema.name.removeprefix("aten::")
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not inputs or not outputs or name.startswith(("new_", "empty", "detach")):
        return None
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    if not func._schema.is_mutable and all(out.untyped_storage()._cdata in own for out in outputs):
        return None
    written = sum(out.numel() * out.element_size() for out in outputs)
    sizes = [tensor.numel() * tensor.element_size() for tensor in inputs]
    if name.startswith("index"):  # reads what it takes
        sizes[0] = min(sizes[0], written)
    flops = 0
    from torch.utils.flop_counter import flop_registry  # here: it brings Triton along

    if func._overloadpacket in flop_registry:
        flops = int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
    cost = Cost(sum(sizes), written, flops, unit="tensor" if flops else "fp32")
    return Call(name, "", None, tuple(inputs[0].shape), inputs[0].dtype, cost)


@dataclass(frozen=True)
class Step:
    """What is to be taken apart: `batch` sequences of `context` tokens.

    decode: these are in the cache, one more a sequence is new. prefill: they are all new, and the logits of each
    sequence's last one are wanted.
    """

    phase: str
    batch: int
    context: int

    @property
    def new_tokens(self) -> int:
        """Of each sequence."""
        return 1 if self.phase == "decode" else self.context

    @property
    def length(self) -> int:
        """Tokens of a sequence that attention sees at most."""
        return self.context + 1 if self.phase == "decode" else self.context

    def check(self, config: ModelConfig) -> None:
        """ValueError, naming what is wrong, for a step that the model cannot take."""
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, was {self.phase!r}")
        if not 1 <= self.batch <= MAX_BATCH:
            raise ValueError(f"batch must be from 1 to {MAX_BATCH:,} sequences, was {self.batch:,}")
        most = config.max_position_embeddings - (self.phase == "decode")
        least = 0 if self.phase == "decode" else 1
        if not least <= self.context <= most:
            raise ValueError(
                f"context must be from {least} to {most:,} tokens for this model's {self.phase}, was {self.context:,}"
            )


PLAIN = Recipe()


def trace(config: ModelConfig, step: Step, recipe: Recipe = PLAIN) -> list[Call]:
    """Every operator call of one step, in order, the greedy sampler's included; nothing is loaded or allocated.

    recipe: of the decoder, which operators are one.
    Collectives stand where several ranks would need them: "all_reduce" and "all_gather", of the whole tensor.
    """
    step.check(config)
    rank = RecordingRank()
    decoder = Decoder(config, rank, device="meta")
    decoder.recipe = recipe
    hints = {"seq_lens": [step.length] * step.batch, "query_lens": [step.new_tokens] * step.batch}
    with torch.no_grad(), torch.device("meta"):  # under inference_mode PyTorch's composites would not come apart
        inputs, columns = _inputs(config, step)
        rank.recorder = recorder = Recorder(decoder, hints)
        with recorder:
            ops.sample(decoder.logits(decoder(*inputs)), *columns)
    return recorder.calls


def _inputs(config: ModelConfig, step: Step) -> tuple[tuple[Any, ...], Sequence[torch.Tensor]]:
    """Arguments of the decoder and columns of the sampler, without values."""
    new: Callable[..., torch.Tensor] = torch.empty
    tokens, pages = step.batch * step.new_tokens, -(-step.length // PAGE_SIZE)
    page = (config.num_kv_heads, PAGE_SIZE, config.head_dim)
    cache = tuple(new(step.batch * pages, *page, dtype=config.dtype) for _ in range(2))
    table, lengths, starts = (
        new(*size, dtype=torch.int32) for size in ((step.batch, pages), (step.batch,), (step.batch + 1,))
    )
    meta = AttentionMeta(table, lengths, starts, step.new_tokens, step.length)
    ids, positions, slots = (new(tokens, dtype=torch.int64) for _ in range(3))
    decode = step.phase == "decode"
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    columns = [new(step.batch, dtype=dtype) for dtype in dtypes]
    wanted = None if decode or step.new_tokens == 1 else new(step.batch, dtype=torch.int64)
    return (ids, positions, [cache] * config.num_layers, slots, meta, decode, wanted), columns
