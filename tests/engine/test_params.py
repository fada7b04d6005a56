from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from typing import Any

import pytest

from rooflight import SamplingParams
from rooflight.engine.params import choice_seed

HUGE = 10**400  # beyond any float


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 0},
        {"max_tokens": HUGE},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 1e-45},
        {"temperature": 1e308},
        {"temperature": HUGE},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 1},
        {"top_k": HUGE},
        {"top_p": 0},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1.0},
        {"seed": None},
        {"seed": 0},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ["a", "bc"]},
        {"stop": ()},
        {"stop_token_ids": [0, 5]},
        {"ignore_eos": True},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": HUGE},
        {"frequency_penalty": -2, "presence_penalty": 2.0},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"logprobs": None, "prompt_logprobs": None},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"n": 1},
        {"n": 128},
    ],
    ids=lambda fields: ",".join(f"{name}={str(value)[:12]}" for name, value in fields.items()),
)
def test_values_in_range_are_kept(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        kept = getattr(params, name)
        assert kept == (tuple(value) if isinstance(value, list) else value)


WHOLE = "a whole number"
BAD: list[tuple[str, str, list[Any]]] = [
    ("max_tokens", f"{WHOLE}, 0 or more", [-1, 1.0, 2.5, True, "3", None, math.nan, math.inf]),
    ("min_tokens", f"{WHOLE}, from 0 to 256", [-1, 257, 1.0, False, "3", None, math.nan, math.inf]),
    ("temperature", "a number, 0 or more", [-0.1, True, "hot", None, math.nan, math.inf, -math.inf]),
    ("top_k", f"{WHOLE}, -1 or more", [-2, 1.0, True, "1", None, math.nan, math.inf]),
    ("top_p", "a number, from 0 to 1", [-1e-9, 1.000001, 2, True, "1", None, math.nan, math.inf, HUGE]),
    ("min_p", "a number, from 0 to 1", [-1e-9, 1.000001, 2, False, "0", None, math.nan, math.inf]),
    ("seed", f"{WHOLE}, from {-(2**63)} to {2**63 - 1}", [2**63, -(2**63) - 1, 1.0, True, "1", math.nan, math.inf]),
    ("stop", "strings that are not empty", ["", [""], ["a", ""], ["a", 1], [None], None, 5, b"a", math.nan]),
    ("stop_token_ids", f"{WHOLE}, 0 or more", [[-1], [1, 2.0], [True], ["1"], "12", [None], [math.nan], [math.inf]]),
    ("stop_token_ids", "a list of token ids", [None, 5, math.nan]),
    ("ignore_eos", "True or False", [0, 1, "no", None, math.nan]),
    ("repetition_penalty", "a number, above 0", [0, 0.0, -1.0, True, "1", None, math.nan, math.inf]),
    ("frequency_penalty", "a number, from -2 to 2", [-2.1, 2.000001, True, "1", None, math.nan, math.inf, HUGE]),
    ("presence_penalty", "a number, from -2 to 2", [-2.1, 2.000001, False, "1", None, math.nan, -math.inf]),
    ("logit_bias", "a mapping of token ids to numbers", [None, 5, [(1, 2.0)], "1", math.nan]),
    ("logprobs", f"{WHOLE}, from 0 to 20", [-1, 21, 1.0, True, "5", math.nan, math.inf]),
    ("prompt_logprobs", f"{WHOLE}, from 0 to 20", [-1, 21, 1.0, False, "5", math.nan, math.inf]),
    ("n", f"{WHOLE}, from 1 to 128", [0, -1, 129, 1.0, True, "2", None, math.nan, math.inf]),
]


@pytest.mark.parametrize(
    ("field", "wish", "value"), [(field, wish, value) for field, wish, values in BAD for value in values]
)
def test_values_out_of_range_are_refused_with_field_wish_and_value(field: str, wish: str, value: Any) -> None:
    shown = value
    if field == "stop_token_ids" and isinstance(value, list | str):
        shown = value[-1] if value != "12" else "1"  # the entry that is wrong
    with pytest.raises(ValueError, match=re.escape(f"{field} must be {wish}, was {shown!r}")):
        SamplingParams(**{field: value})


def test_min_tokens_is_bounded_by_max_tokens() -> None:
    with pytest.raises(ValueError, match=r"^min_tokens must be a whole number, from 0 to 4, was 5$"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_one_stop_string_is_a_list_of_one_and_not_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_params_do_not_follow_a_list_that_changes_later() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=(1,)))


def test_the_default_is_greedy_and_limited() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.stop, params.seed) == (0.0, 256, (), None)


@pytest.mark.parametrize(
    ("bias", "message"),
    [({token: 1.0}, f"logit_bias token id must be {WHOLE}, 0 or more, was {token!r}") for token in (-1, 1.0, "5", True)]
    + [
        ({5: value}, f"logit_bias[5] must be a number, from -100 to 100, was {value!r}")
        for value in (-100.5, 101, math.inf, -math.inf, math.nan, "1", True, None)
    ],
)
def test_a_wrong_entry_of_logit_bias_is_named(bias: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(logit_bias={3: 0.5} | bias)


def test_logit_bias_is_a_mapping_that_follows_nobody_and_can_be_hashed_and_copied() -> None:
    given = {5: 1.5, 3: -2}
    params = SamplingParams(logit_bias=given)
    given[5] = 9.0
    assert params.logit_bias == {3: -2, 5: 1.5}
    assert params.logit_bias[5] == 1.5
    assert params == SamplingParams(logit_bias={3: -2, 5: 1.5})
    assert hash(params) == hash(SamplingParams(logit_bias={3: -2, 5: 1.5}))
    assert params != SamplingParams(logit_bias={3: -2, 5: 1.25})
    with pytest.raises(TypeError):
        params.logit_bias[5] = 2.0  # type: ignore[index]
    changed = dataclasses.replace(params, n=2)
    assert (changed.logit_bias, changed.n) == ({3: -2, 5: 1.5}, 2)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


def test_a_bias_beyond_the_vocabulary_is_refused_and_an_end_token_there_is_not() -> None:
    params = SamplingParams(logit_bias={1: 1.0, 100: 1.0, 2: 1.0}, stop_token_ids=[500])
    params.check_vocabulary(101)
    with pytest.raises(ValueError, match=r"^logit_bias must have token ids below 100, was one with 100$"):
        params.check_vocabulary(100)
    SamplingParams().check_vocabulary(1)


def test_what_the_operators_get_is_in_the_range_of_their_dtypes() -> None:
    largest = 3.4028234663852886e38
    params = SamplingParams(temperature=HUGE, top_k=HUGE, top_p=0.5, min_p=0.25, repetition_penalty=HUGE)
    assert params.filters == (largest, 0.5, 0.25, 2**31 - 1)
    assert params.penalties == (largest, 0, 0)
    assert SamplingParams(repetition_penalty=1e-300).penalties[0] == 2.0**-126


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, False),
        ({"temperature": 1.0, "min_tokens": 3, "logprobs": 5}, False),
        ({"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": {0: 1}}, True),
    ],
)
def test_only_penalties_and_bias_change_logits(fields: dict[str, Any], changes: bool) -> None:
    assert SamplingParams(**fields).changes_logits is changes


def test_choice_seeds_are_the_published_mix_and_differ() -> None:
    """SplitMix64 started at 0 gives 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 and 0x06C45D188009454F first."""
    assert [choice_seed(0, i) for i in range(4)] == [
        0,
        0xE220A8397B1DCDAF >> 1,
        0x6E789E6AA1B965F4 >> 1,
        0x06C45D188009454F >> 1,
    ]
    seeds = [*range(-50, 50), 2**63 - 1, -(2**63)]
    drawn = [choice_seed(seed, index) for seed in seeds for index in range(1, 100)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert [choice_seed(seed, 0) for seed in seeds] == seeds
