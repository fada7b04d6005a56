from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from rooflight.text import Tokenizer

# Of the kind of Qwen 3: thinking is on unless it is switched off, then an empty thought is written.
THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# Of the kind of Llama 3: BOS from the template, a date, trimmed contents.
HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{{- '<|start|>system<|stop|>\\n\\nToday is ' + date_string + '.<|eot|>' }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Role ' + message['role'] + ' is not known') }}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '<|stop|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\\n\\n' }}
{%- endif %}
"""
ASK = [{"role": "user", "content": "2 < 3?"}]


def with_template(metadata: dict[str, Any], template: str, **named: str) -> Tokenizer:
    more = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    bos = {"tokenizer.ggml.bos_token_id": 1}
    return Tokenizer.from_gguf({**metadata, **bos, **more, "tokenizer.chat_template": template})


@pytest.fixture
def thinking(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return with_template(byte_level_metadata, THINKING)


def test_br_053_enable_thinking_true_false_absent(thinking: Tokenizer) -> None:
    plain = "<|im_start|>user\n2 < 3?<|im_end|>\n<|im_start|>assistant\n"
    assert thinking.render_chat(ASK) == plain
    assert thinking.render_chat(ASK, enable_thinking=True) == plain
    assert thinking.render_chat(ASK, enable_thinking=False) == plain + "<think>\n\n</think>\n\n"


def test_br_053_unknown_variables_do_no_harm(thinking: Tokenizer) -> None:
    strange: dict[str, Any] = {"nonsense": 1, "self": 2, "name": [3], "context": {}, "template": None}
    assert thinking.render_chat(ASK, **strange) == thinking.render_chat(ASK)
    assert thinking.encode_chat(ASK, **strange) == thinking.encode_chat(ASK)


def test_encode_chat_takes_special_tokens_whole(thinking: Tokenizer) -> None:
    ids = thinking.encode_chat(ASK)
    assert ids[0] == 3
    assert [i for i in ids if i in thinking.special_ids] == [3, 4, 3]
    assert thinking.decode(ids, skip_special=False) == thinking.render_chat(ASK)


def test_without_generation_prompt(thinking: Tokenizer) -> None:
    assert thinking.render_chat(ASK, add_generation_prompt=False) == "<|im_start|>user\n2 < 3?<|im_end|>\n"


def test_tools_are_written_without_html_escapes(thinking: Tokenizer) -> None:
    tool = {"name": "less", "description": "a < b & 'c' 한"}
    text = thinking.render_chat(ASK, tools=[tool])
    assert '{"name": "less", "description": "a < b & \'c\' 한"}<|im_end|>' in text
    assert thinking.render_chat(ASK, tools=[]) == thinking.render_chat(ASK)


def test_assistant_message_with_tool_calls_needs_no_content(thinking: Tokenizer) -> None:
    calls = [{"function": {"name": "less", "arguments": {"a": 2}}}]
    expected = '<|im_start|>assistant\n\n<tool_call>{"name": "less", "arguments": {"a": 2}}</tool_call><|im_end|>\n'
    for message in ({"tool_calls": calls}, {"tool_calls": calls, "content": None}):
        text = thinking.render_chat([{"role": "assistant", **message}], add_generation_prompt=False)
        assert text == expected


def test_date_and_trim(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = with_template(byte_level_metadata, HEADERS)
    text = tokenizer.render_chat([{"role": "user", "content": "  hi \n"}], date_string="26 Jul 2024")
    assert text == (
        "<s><|start|>system<|stop|>\n\nToday is 26 Jul 2024.<|eot|>"
        "<|start|>user<|stop|>\n\nhi<|eot|><|start|>assistant<|stop|>\n\n"
    )
    today = {datetime.now().strftime("%d %b %Y")}
    text = tokenizer.render_chat(ASK)
    today.add(datetime.now().strftime("%d %b %Y"))  # midnight may pass in between
    assert any(f"Today is {day}." in text for day in today)


@pytest.mark.parametrize("template_prints_bos", [True, False])
@pytest.mark.parametrize("model_uses_bos", [True, False])
def test_br_051_exactly_one_bos(
    byte_level_metadata: dict[str, Any], template_prints_bos: bool, model_uses_bos: bool
) -> None:
    metadata = {**byte_level_metadata, "tokenizer.ggml.add_bos_token": model_uses_bos}
    tokenizer = with_template(metadata, HEADERS if template_prints_bos else THINKING)
    ids = tokenizer.encode_chat(ASK)
    count = 1 if model_uses_bos or template_prints_bos else 0
    assert ids.count(1) == count
    assert ids[:count] == [1] * count
    assert tokenizer.encode("dog").count(1) == int(model_uses_bos)
    assert tokenizer.encode("<s>dog").count(1) == 1


def test_raise_exception_is_one_clear_line(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = with_template(byte_level_metadata, HEADERS)
    with pytest.raises(ValueError, match=r"^chat template: Role bot is not known$"):
        tokenizer.render_chat([{"role": "bot", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% if %}", r"^chat template, line 2: Expected an expression, got 'end of statement block'$"),
        ("{% for m in messages %}", r"^chat template, line 1: Unexpected end of template"),
        ("{{ raise_exception('two\n lines') }}", r"^chat template: two lines$"),
        ("{{ nothing.at.all }}", r"^chat template: 'nothing' is undefined$"),
        ("{{ 1 / 0 }}", r"^chat template: division by zero$"),
        ("{{ messages | tojson(indent=[]) }}", r"^chat template: "),
        ("{{ 'a' + 1 }}", r"^chat template: can only concatenate str"),
        ("{{ range(10 ** 9) | length }}", r"^chat template: Range too big"),
        ("{% set f = messages.append %}{{ f(1) }}", r"^chat template: access to attribute 'append' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", r"^chat template: access to attribute '__class__' .* is unsafe"),
        ("{{ messages[9].content }}", r"^chat template: .*has no element 9"),
    ],
)
def test_template_errors_are_one_line(byte_level_metadata: dict[str, Any], template: str, words: str) -> None:
    tokenizer = with_template(byte_level_metadata, template)
    with pytest.raises(ValueError, match=words) as caught:
        tokenizer.render_chat(ASK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "a2 < 3?b"),
        ("{%- generation -%} x {%- endgeneration -%} ", "x"),
        ("  {% if true %}\nyes\n  {% endif %}\nno\n", "yes\nno"),
        ("{{ [1, {'b': 1, 'a': '<é>'}] | tojson }}", '[1, {"b": 1, "a": "<é>"}]'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 5 %}{% endfor %}{{ ns.n }}", "5"),
        ("{{ unk_token + pad_token + bos_token }}", "<s>"),
        ("{{ tools is none }} {{ documents is defined }}", "True False"),
        ("{{ '<b>' }}", "<b>"),
    ],
)
def test_what_templates_may_use(byte_level_metadata: dict[str, Any], template: str, expected: str) -> None:
    assert with_template(byte_level_metadata, template).render_chat(ASK) == expected


def test_no_tools_and_an_empty_list_are_the_same(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = with_template(byte_level_metadata, "{{ tools is none }}")
    assert tokenizer.render_chat(ASK, tools=[]) == tokenizer.render_chat(ASK) == "True"


def test_tool_template_is_used_only_with_tools(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = with_template(byte_level_metadata, "plain", tool_use="tools", rag="rag")
    assert tokenizer.chat_template == "plain"
    assert tokenizer.render_chat(ASK) == "plain"
    assert tokenizer.render_chat(ASK, tools=[{"name": "f"}]) == "tools"
    assert with_template(byte_level_metadata, "plain").render_chat(ASK, tools=[{"name": "f"}]) == "plain"


def test_no_template_says_so(byte_level: Tokenizer, byte_level_metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"this tokenizer has no chat template$"):
        byte_level.render_chat(ASK)
    named = Tokenizer.from_gguf({**byte_level_metadata, "tokenizer.chat_template.rag": "x"})
    with pytest.raises(ValueError, match=r"no chat template \(only templates named rag\)$"):
        named.encode_chat(ASK)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", r"^messages must be a list, not str$"),
        ({"role": "user", "content": "x"}, r"^messages must be a list, not dict$"),
        (None, r"^messages must be a list, not NoneType$"),
        ([*ASK, "x"], r"^messages\[1\] must be a mapping, not str$"),
        ([{"content": "x"}], r"^messages\[0\]\.role must be a string, but was None$"),
        ([{"role": 3, "content": "x"}], r"^messages\[0\]\.role must be a string, but was 3$"),
        ([*ASK, {"role": "user"}], r"^messages\[1\]\.content is missing$"),
        ([{"role": "user", "content": 5}], r"^messages\[0\]\.content must be a string or a list of parts, but was 5$"),
        ([{"role": "user", "content": ["x"]}], r"^messages\[0\]\.content\[0\] must be a mapping, not 'x'$"),
    ],
)
def test_malformed_messages_are_named(thinking: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        thinking.render_chat(messages)


@pytest.mark.parametrize(("tools", "words"), [("f", "tools must be a list"), (["f"], r"tools\[0\] must be a mapping")])
def test_malformed_tools_are_named(thinking: Tokenizer, tools: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        thinking.render_chat(ASK, tools=tools)


def test_reserved_variable_is_refused(thinking: Tokenizer) -> None:
    with pytest.raises(ValueError, match="variable 'messages' is reserved"):
        thinking.encode_chat(ASK, messages=[])


def test_callers_messages_stay_as_they_are(byte_level_metadata: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    tokenizer = with_template(byte_level_metadata, "{% set m = messages[0] %}{{ m.pop('role') }}")
    with pytest.raises(ValueError, match="chat template: "):
        tokenizer.render_chat(messages)
    assert messages == [{"role": "user", "content": "x"}]
