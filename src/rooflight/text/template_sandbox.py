"""Runs chat templates.

They come with the model file, so they run in Jinja's sandbox: no private attributes, nothing
that changes the caller's messages. The environment has what the common templates expect of it:
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break`/`continue`, and
`{% generation %}` blocks, which mark training text and mean nothing here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` renders its body as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter turns <, >, & and ' into \u escapes, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template. Whatever goes wrong in it is a ValueError of one line."""
    try:
        # Passed as one mapping: a variable may have any name, `self` too.
        return _compiled(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {_one_line(error.message or '')}") from error
    except Exception as error:
        # A template is a program from outside: it may add a number to a string, divide by zero or
        # index past an end, and that must stay the error of this one request.
        raise ValueError(f"chat template: {_one_line(str(error)) or type(error).__name__}") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
