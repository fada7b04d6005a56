"""KEY=VALUE of `--template`."""

from __future__ import annotations

import pytest

from rooflight.cli.options import template_arguments


def test_values_are_json_or_text() -> None:
    given = ["a=true", "b=False", "c=3", "d=null", 'e={"x": [1]}', "f=short", "g=", "h=x=y", 'i="3"', "j=NaNa"]
    assert template_arguments(given) == {
        "a": True,
        "b": False,
        "c": 3,
        "d": None,
        "e": {"x": [1]},
        "f": "short",
        "g": "",
        "h": "x=y",
        "i": "3",
        "j": "NaNa",
    }
    assert template_arguments(["a=1", "a=2"]) == {"a": 2}
    assert template_arguments(None) == {}


@pytest.mark.parametrize("pair", ["thinking", "=x", "a-b=1", " a=1", ""])
def test_refuses_what_is_no_pair(pair: str) -> None:
    with pytest.raises(ValueError) as caught:
        template_arguments([pair])
    assert str(caught.value) == f"--template must be KEY=VALUE with a name as key, was {pair!r}"
