"""Chat templates: a list of messages to one prompt text.

What is checked before a template runs is here; `template_sandbox` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_messages(messages: object) -> None:
    """Raises ValueError, naming the place, unless this is a list of role-and-content mappings.

    content is a text or a list of parts; only a message with tool_calls may be without.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list, not {type(messages).__name__}")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{place} must be a mapping, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str):
            raise ValueError(f"{place}.role must be a string, but was {role!r}")
        content = message.get("content")
        if content is None:
            if not message.get("tool_calls"):
                raise ValueError(f"{place}.content is missing")
        elif isinstance(content, list):
            for number, part in enumerate(content):
                if not isinstance(part, Mapping):
                    raise ValueError(f"{place}.content[{number}] must be a mapping, not {part!r}")
        elif not isinstance(content, str):
            raise ValueError(f"{place}.content must be a string or a list of parts, but was {content!r}")


def check_tools(tools: object) -> None:
    """Raises ValueError unless this is None or a list of mappings."""
    if tools is None:
        return
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise ValueError(f"tools must be a list, not {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{index}] must be a mapping, not {type(tool).__name__}")


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template. Whatever goes wrong in it is a ValueError of one line."""
    from rooflight.text import template_sandbox  # Jinja takes 0.1 s to import, and not everybody chats

    return template_sandbox.render(template, variables)
