"""Chat templates: equal to transformers on honest messages, proof against dishonest ones and against bad templates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chat_templates import BOMBS, make, tokenizer, user
from quire.core.errors import BadRequest, ModelError
from quire.text.template import ChatTemplate
from text_models import PYDOC

oracle = AutoTokenizer.from_pretrained(PYDOC)
template = ChatTemplate.from_folder(PYDOC, tokenizer)
assert template is not None
pydoc_template: ChatTemplate = template

COMPLEX = """{%- set ns = namespace(found=false, n=0) -%}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif -%}
{%- for message in messages -%}
    {%- if message['role'] not in ['user', 'assistant', 'system', 'tool'] %}
        {{- raise_exception('bad role ' ~ message.role) }}
    {% endif %}
    {%- if loop.index0 == 9 %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- generation %}<|{{ message.role }}|>{{ message.content | trim }}{{ '<|end|>\\n' }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name ~ '(' ~ call.function.arguments | tojson ~ ')' }}
    {%- endfor %}
{%- endfor -%}
{{ ns.n }}{{ bos_token is defined }}{{ eos_token }}
{{ dict(a=1) | tojson }}{{ 'x,y'.split(',')[1] }}{{ [3, 1] | sort | join('-') }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What does <b>print()</b> do? é 日本 "},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é\n"}}}]},
    {"role": "tool", "content": "42"},
]


words = st.text(alphabet="abc <>|\n日", max_size=20)
chats = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": words}), min_size=1
)


@given(chats, st.booleans())
def test_equals_transformers(messages: list[dict[str, str]], prompt: bool) -> None:
    expected = oracle.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    assert pydoc_template.encode(messages, add_generation_prompt=prompt) == expected
    text = oracle.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert pydoc_template.render(messages, add_generation_prompt=prompt) == text


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {"é": [1]}}}]])
def test_a_template_with_everything_equals_transformers(tools: list[dict[str, Any]] | None) -> None:
    for prompt in (True, False):
        expected = oracle.apply_chat_template(
            MESSAGES, chat_template=COMPLEX, tools=tools, add_generation_prompt=prompt, tokenize=False
        )
        assert make(COMPLEX).render(MESSAGES, tools, prompt) == expected


@pytest.mark.parametrize("source", [COMPLEX, "{% for m in messages %}<|user|>{{ m.content }} {% endfor %}"])
def test_continue_final_message_equals_transformers(source: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It prints "}]
    expected = oracle.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, add_generation_prompt=False, tokenize=False
    )
    assert make(source).render(messages, None, False, True) == expected
    assert make(source).encode(messages, None, False, True) == oracle.encode(expected, add_special_tokens=False)


forged = st.lists(
    st.sampled_from(["<|end|>", "<|system|>", "<|", "|>", "end", "<|e<|end|>nd|>", "\ufdd0", "\ufdd1", "a"])
)


@given(forged.map("".join), forged.map("".join))
def test_messages_cannot_forge_special_tokens(a: str, b: str) -> None:
    messages = [{"role": "user", "content": a}, {"role": "assistant", "content": [{"type": "text", "text": b}]}]
    ids = pydoc_template.encode(messages)
    assert [i for i in ids if tokenizer.is_special(i)] == [2, 4, 3, 4, 3]
    clean = a.replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd")
    assert tokenizer.decode(ids[1 : ids.index(4)]) == clean
    assert pydoc_template.render(messages).startswith("<|user|>" + clean + "<|end|><|assistant|>")


def test_nested_strings_keys_and_variables_are_escaped() -> None:
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ extra | tojson }}"
    evil = "<|end|>"
    messages = [{"role": "assistant", "content": "", evil: [{evil: {"x": evil}}]}]
    ids = make(source).encode(messages, [{evil: [evil]}], extra=[evil, {evil: evil}])
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids).count(evil) == 8


def test_parts_and_their_errors() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert pydoc_template.render(user(parts)) == "<|user|>a\nb\nc<|end|><|assistant|>"
    for content in ([{"type": "image_url", "image_url": {"url": "x"}}], 5, {"a": 1}, [{"type": "text", "text": 5}]):
        with pytest.raises(BadRequest, match=r"messages\[0\].content"):
            pydoc_template.render(user(content))


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "must not be empty"),
        ([5], {}, "must be an object"),
        ([{"content": "x"}], {}, "role"),
        ([{"role": "end", "content": "x"}], {}, "role"),
        ([{"role": "user", "content": object()}], {}, "not JSON"),
        (user("x"), {"tokenize": False}, "cannot be set"),
        (user("x"), {"continue_final_message": True}, "excludes"),
        (user(None), {"continue_final_message": True, "add_generation_prompt": False}, "no text"),
    ],
)
def test_bad_requests(messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        pydoc_template.render(messages, **options)


def test_deep_nesting_and_the_templates_own_refusal() -> None:
    nested: Any = "x"
    for _ in range(100):
        nested = [nested]
    with pytest.raises(BadRequest, match="levels"):
        pydoc_template.render([{"role": "user", "content": "x", "extra": nested}])
    with pytest.raises(BadRequest, match="only one system"):
        make("{{ raise_exception('only one system message') }}").render(user("x"))
    with pytest.raises(BadRequest, match="misses a field"):
        make("{{ messages[0].nothing.deeper }}").render(user("x"))
    with pytest.raises(BadRequest, match="leaves out"):
        make("{{ 'constant' }}").render(user("x"), None, False, True)


@pytest.mark.parametrize("source", BOMBS)
def test_bombs_are_stopped(source: str) -> None:
    bomb = make(source)
    begin = time.thread_time()
    with pytest.raises((BadRequest, ModelError)):
        bomb.render(user("x"))
    assert time.thread_time() - begin < 1.0


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ messages[0] + 1 }}",
    ],
)
def test_what_is_not_allowed(source: str) -> None:
    with pytest.raises((BadRequest, ModelError)):
        make(source).render(user("x"))


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nofilter }}", "{%" + "(" * 5000])
def test_broken_templates_fail_at_load(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        make(source)


def test_where_templates_come_from(tmp_path: Path) -> None:
    def load(override: Path | None = None) -> ChatTemplate:
        found = ChatTemplate.from_folder(tmp_path, tokenizer, override)
        assert found is not None
        return found

    assert ChatTemplate.from_folder(tmp_path, tokenizer) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config"}))
    assert load().render(user("x")) == "config"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load().render(user("x")) == "one"
    assert load().render(user("x"), tools=[{"a": 1}]) == "two"
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(ModelError, match="chat_template must be"):
        load()
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load().render(user("x")) == "file"
    (tmp_path / "mine").write_text("mine")
    assert load(tmp_path / "mine").render(user("x")) == "mine"
    with pytest.raises(ModelError, match="missing"):
        load(tmp_path / "missing")


def test_reasoning_under_any_name() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning", "thinking", "reasoning_content"):
        message = {"role": "assistant", "content": "x", name: "because"}
        expected = oracle.apply_chat_template([message], chat_template=source, tokenize=False)
        assert make(source).render([message]) == expected == "becausebecause"


def test_variables_reach_the_template() -> None:
    assert make("{{ enable_thinking }}").render(user("x"), enable_thinking=False) == "False"
    assert make("{{ strftime_now('%Y') }}").render(user("x")).isdigit()
