from __future__ import annotations

import math
import re
from typing import Any

import pytest

from rooflight import SamplingParams

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
