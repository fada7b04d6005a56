"""Every combination of the decoder's switches says the same, and each of them runs what it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.limits.trace import Step, trace
from rooflight.models import Decoder, load_config, load_model
from rooflight.models.recipe import Recipe, on_gpu
from tests.models import tiny

SWITCHES = [field.name for field in fields(Recipe)]
COMBINATIONS = [
    recipe
    for values in product((False, True), repeat=len(SWITCHES))
    if (recipe := Recipe(*values)).projections or not recipe.scaled  # by itself it does nothing
]
LENGTH = 24
BOUND = 1e-5  # of the largest logit, as against transformers
NAIVE = Recipe(norm=False, rope=False, grouped=False, split=False)


def by_name(recipe: Recipe) -> str:
    return "+".join(name for name in SWITCHES if getattr(recipe, name)) or "none"


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, torch.Tensor]:
    """With head norms, without, and with biases."""
    model = tiny.reference_model(request.param)
    decoder = load_model(tiny.save(model, tmp_path_factory.mktemp(request.param))).decoder
    return decoder, tiny.reference_logits(model, tiny.prompt(LENGTH))


@pytest.mark.parametrize("recipe", COMBINATIONS, ids=by_name)
def test_logits_of_every_combination(pair: tuple[Decoder, torch.Tensor], recipe: Recipe) -> None:
    """A prompt, a second chunk of it, and tokens one by one."""
    decoder, expected = pair
    decoder.recipe = recipe
    actual = tiny.decoder_logits(decoder, tiny.prompt(LENGTH), [10, 7, *[1] * 7])
    assert tiny.relative_error(actual, expected) < BOUND


@pytest.mark.parametrize("recipe", COMBINATIONS, ids=by_name)
def test_wanted_rows_of_every_combination(pair: tuple[Decoder, torch.Tensor], recipe: Recipe) -> None:
    """Of a second chunk some, in any order, and of a third none: what it wrote is what the last token sees."""
    decoder, expected = pair
    decoder.recipe = recipe
    ids, paged = tiny.prompt(LENGTH), tiny.Paged(decoder.config, 1, LENGTH)
    done, found = 0, []
    with torch.inference_mode():
        for count, wanted in ((10, []), (8, [7, 2, 7]), (5, []), (1, None)):
            positions, slots, meta = paged.step([count])
            rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
            given = ids[done : done + count], positions, paged.caches, slots, meta, count == 1, rows
            found.append(decoder.logits(decoder(*given)))
            done += count
    assert [len(logits) for logits in found] == [0, 3, 0, 1]
    assert tiny.relative_error(torch.cat(found), expected[[17, 12, 17, 23]]) < BOUND


@pytest.mark.parametrize(
    "recipe",
    [NAIVE, replace(NAIVE, rope=True), replace(NAIVE, grouped=True), Recipe(attention=True)],
    ids=by_name,
)
def test_switches_change_between_steps_of_a_batch_with_a_padded_row(
    pair: tuple[Decoder, torch.Tensor], recipe: Recipe
) -> None:
    """The second row is padding: no slot of the cache is written for it, though its page would have room."""
    decoder, expected = pair
    ids = tiny.prompt(LENGTH)
    paged = tiny.Paged(decoder.config, 2, LENGTH)
    with torch.inference_mode():
        decoder.recipe = Recipe()
        positions, slots, meta = paged.step([LENGTH - 1, 0])
        decoder(ids[:-1], positions, paged.caches, slots, meta, False)
        decoder.recipe = recipe
        positions, slots, meta = paged.step([1, 1])
        slots[1] = -1
        meta.seq_lens[1] = 0
        before = [cache.clone() for layer in paged.caches for cache in layer]
        hidden = decoder(ids[-1:].repeat(2), positions, paged.caches, slots, meta, True)
        logits = decoder.logits(hidden)[:1]
    assert tiny.relative_error(logits, expected[-1:]) < BOUND
    page, offset = divmod(int(slots[0]), 16)
    for cache, old in zip([cache for layer in paged.caches for cache in layer], before, strict=True):
        assert not cache[page, :, offset].isnan().any()
        cache[page, :, offset] = old[page, :, offset]
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


def operators(recipe: Recipe) -> Counter[str]:
    return Counter(call.operator for call in trace(load_config("random:qwen3-0.6b"), Step("decode", 1, 100), recipe))


def test_each_switch_runs_what_it_names() -> None:
    """Per layer of 28, for a model with head norms and two query heads a KV head."""
    naive, default = operators(NAIVE), operators(Recipe())
    assert naive["rms_norm"] == 28 * 4 + 1
    assert naive["add_"] == 28 * 2
    assert naive["fused_add_rms_norm_"] == 0
    assert (naive["rope_"], naive["qk_norm_rope_cache_"]) == (28, 28)
    assert (naive["decode_attention"], naive["stack"] + naive["cat"]) == (56, 28)
    assert naive["clone"] == naive["copy_"] == 0  # the heads of one token lie side by side
    assert (default["rms_norm"], default["fused_add_rms_norm_"], default["add_"]) == (1, 56, 0)
    assert (default["rope_"], default["qk_norm_rope_cache_"], default["decode_attention"]) == (0, 28, 28)
    fused = operators(Recipe(projections=True))
    assert [fused[name] for name in ("rms_norm_linear", "rms_norm_swiglu", "linear_add_")] == [29, 28, 56]
    together = operators(Recipe(projections=True, attention=True))
    assert fused - together == Counter(qk_norm_rope_cache_=28, decode_attention=28)
    assert together - fused == Counter(qk_norm_rope_attention_=28)
    assert operators(on_gpu(torch.bfloat16, True)) == together  # one row: norms are in the products
    assert sum(together.values()) < sum(fused.values()) < sum(default.values()) < sum(naive.values())


def test_norms_of_tens_of_rows_are_shared_by_two_products() -> None:
    """But the first one, which no product is in front of, and the last one, whose rows are few of a prompt's."""
    config = load_config("random:qwen3-0.6b")
    names = "rms_norm_linear", "scaled_linear", "linear_add_", "linear_add_scale_", "rms_norm_swiglu", "scaled_swiglu"

    def found(
        batch: int,
        dtype: torch.dtype = torch.bfloat16,
        width: int = config.intermediate_size,
        hidden: int = config.hidden_size,
    ) -> list[int]:
        model = replace(config, intermediate_size=width, hidden_size=hidden)
        calls = Counter(call.operator for call in trace(model, Step("decode", batch, 100), on_gpu(dtype, True)))
        return [calls[name] for name in names]

    apart, shared = [29, 0, 56, 0, 28, 0], [2, 27, 1, 55, 0, 28]
    assert [found(batch) for batch in (1, 8, 9, 64, 256, 257)] == [apart, apart, shared, shared, shared, apart]
    assert found(64, torch.float16) == found(64, torch.float32) == apart
    assert on_gpu(torch.bfloat16, False) == replace(on_gpu(torch.bfloat16, True), scaled=False)
    assert found(64, hidden=2560) == shared
    assert found(64, hidden=2568) == apart
    larger = 2 * config.intermediate_size
    assert [found(batch, width=larger) for batch in (64, 65)] == [shared, apart]


def test_of_a_prompt_with_few_wanted_rows_the_last_layer_shares_its_norm() -> None:
    step = Step("prefill", 16, 40)
    calls = Counter(c.operator for c in trace(load_config("random:qwen3-0.6b"), step, on_gpu(torch.bfloat16, True)))
    assert (calls["linear_add_scale_"], calls["scaled_swiglu"], calls["scaled_linear"]) == (1, 1, 0)


@pytest.mark.parametrize("name", ["rope", "grouped", "split"])
def test_attention_with_its_step_takes_what_it_holds_for_granted(name: str) -> None:
    assert operators(replace(NAIVE, attention=True)) == operators(replace(NAIVE, attention=True, **{name: True}))
    assert operators(replace(NAIVE, attention=True))["qk_norm_rope_attention_"] == 28


def test_without_grouping_keys_are_read_once_a_query_head() -> None:
    config, step = load_config("random:qwen3-0.6b"), Step("decode", 1, 1000)
    kv = [
        sum(call.kv_elements * call.dtype.itemsize for call in trace(config, step, recipe))
        for recipe in (Recipe(), Recipe(grouped=False))
    ]
    assert kv == [config.kv_bytes_per_token(config.dtype) * 1001, 2 * config.kv_bytes_per_token(config.dtype) * 1001]


def test_without_the_split_rule_there_is_one_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rooflight.models import recipe as module

    seen = []

    def noted(attention: Callable[..., object]) -> Callable[..., object]:
        def note(*args: Any, window: int) -> object:
            (meta,) = (value for value in args if isinstance(value, module.ops.AttentionMeta))
            seen.append(meta.splits)
            return attention(*args, window=window)

        return note

    for name in ("decode_attention", "qk_norm_rope_attention_"):
        monkeypatch.setattr(module.ops, name, noted(getattr(module.ops, name)))
    decoder = load_model("random:tiny").decoder
    parts = {True: 0, False: 1}
    for split, projections, together in product((True, False), repeat=3):
        recipe, splits = Recipe(split=split, projections=projections, attention=together), parts[split]
        decoder.recipe = recipe
        tiny.decoder_logits(decoder, tiny.prompt(5), [4, 1])
        assert set(seen) == {splits}
        seen.clear()
