"""Chat templates: the dialect models use, errors that are the request's, and a sandbox that holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trio_llm.errors import EngineStartupError, InvalidRequestError
from trio_llm.frontend.rendering import chat_template
from trio_llm.frontend.rendering.chat_template import ChatTemplate

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: Any = None, **options: Any) -> str:
    return ChatTemplate(source, tokens={"bos_token": "<s>", "eos_token": "</s>"}).render(messages or HELLO, **options)


def test_a_conversation_ends_with_the_beginning_of_an_answer_on_demand() -> None:
    body = "<|im_start|>user\nhello<|im_end|>\n"

    assert render(CHATML) == body + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == body


@pytest.mark.parametrize("content", ["The sky is ", "  x", "", "ends\n"])
def test_the_last_message_is_left_open_on_demand(content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]

    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)

    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n" + content


def test_continuing_and_beginning_an_answer_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other") as caught:
        render(CHATML, continue_final_message=True)

    assert caught.value.param == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        render("{{ messages[-1].content[:3] }}", add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # blocks take their line with them
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{% if tools %}t{% endif %}{% if documents is not none %}d{% endif %}-", "-"),
        ("{{ '<b>' + messages[0].content }}", "<b>hello"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ missing }}{{ messages[0].missing }}", ""),
    ],
)
def test_the_dialect(source: str, text: str) -> None:
    assert render(source) == text


def test_extra_variables_reach_the_template_and_unknown_ones_do_nothing() -> None:
    source = "{{ 'on' if enable_thinking else 'off' }}{{ range(2) | list | length }}"

    assert render(source) == "off2"
    assert render(source, template_kwargs={"enable_thinking": True, "other": 1, "range": "no"}) == "on2"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "raise_exception", "tokenize"])
def test_extra_variables_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"must not set {name}") as caught:
        render(CHATML, template_kwargs={name: "x"})

    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "does not take the messages"),
        ("{{ messages[7].content }}", "does not take the messages"),
        ("{{ 1 / 0 }}", "does not take the messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not take the messages"),
        ("{{ raise_exception(messages[0].content) }}", "does not take the messages: hello"),
    ],
)
def test_an_error_inside_the_template_is_the_requests(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        render(source)

    assert caught.value.param == "messages"
    str(caught.value).encode()


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ strftime_now.__code__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10000000) | list | length }}",
    ],
)
def test_the_sandbox_refuses_escapes_and_changes(escape: str) -> None:
    messages = [{"role": "user", "content": "hello"}]

    try:
        text = render(escape, messages)
    except InvalidRequestError:
        text = ""

    assert text == ""
    assert messages == HELLO


def test_a_text_over_the_limit_is_refused_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxx{{ i }}{% endfor %}{% endfor %}"

    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        render(endless)


def test_a_model_without_a_template_takes_no_messages() -> None:
    template = ChatTemplate(None)

    with pytest.raises(InvalidRequestError, match="has no chat template") as caught:
        template.render(HELLO)
    assert caught.value.param == "messages"


def test_malformed_messages_do_not_reach_the_template() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(CHATML, [*HELLO, {"role": "user", "content": [{"type": "text"}]}])

    assert caught.value.param == "messages.1.content.0.text"


def test_text_parts_reach_the_template_as_one_string_and_an_empty_answer_can_be_continued() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]

    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)

    assert text == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    assert messages[1] == {"role": "assistant", "content": None}


def test_a_lone_surrogate_in_an_extra_variable_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        render("{{ mood }}", template_kwargs={"mood": "\udc97"})

    assert caught.value.param == "messages"


def load(directory: Path, config: dict[str, Any]) -> str:
    return ChatTemplate.load(directory, config).render(HELLO)


def test_the_template_is_found_in_each_place_a_model_may_have_it(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named{{ eos_token }}"}]

    assert load(tmp_path, {"chat_template": "config{{ bos_token }}", "bos_token": "<s>"}) == "config<s>"
    assert load(tmp_path, {"chat_template": named, "eos_token": {"content": "</s>"}}) == "named</s>"
    (tmp_path / "chat_template.jinja").write_text("file{{ bos_token }}")
    assert load(tmp_path, {"chat_template": "config", "bos_token": None}) == "file"


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": [{"name": "rag"}]}])
def test_a_model_may_have_no_template(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        load(tmp_path, config)


def test_a_broken_template_stops_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% if %}\n\n{{")

    with pytest.raises(EngineStartupError, match=r"^MODEL '.*': its chat template is not usable: \w+") as caught:
        ChatTemplate.load(tmp_path, {})

    assert "\n" not in str(caught.value)
