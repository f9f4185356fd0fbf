"""ChatTemplate: messages become the text that the model was trained to read, through the model's own template.

Blocking and thread-safe. The template comes from the model's directory, never from a request, and still runs in a
sandbox. Used by the renderer.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from trio_llm.errors import EngineStartupError, InvalidRequestError
from trio_llm.frontend.rendering.messages import plain_messages
from trio_llm.sampling import is_valid_text

__all__ = ["MAX_RENDERED_CHARS", "RESERVED_KWARGS", "ChatTemplate"]

MAX_RENDERED_CHARS: Final = 32 * 1024 * 1024

RESERVED_KWARGS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
    | {"strftime_now", "continue_final_message", "tokenize"}
)
"""Names that a request must not set through the extra variables of a template."""

_CUT_MARK: Final = "\ue0f0trio_llm cuts here\ue0f1"
"""Stands behind the last message, to find its end in the rendered text. Its characters are for private use."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja, in the dialect of transformers. None: the model has no template, and rendering says so.
        tokens: the texts of `bos_token` and `eos_token` inside the template.

    Raises:
        ValueError: `source` is not valid Jinja.
    """

    def __init__(self, source: str | None, *, tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(tokens or {})
        self._template: jinja2.Template | None = None
        self._variables: frozenset[str] = frozenset()
        if source is None:
            return
        environment = _make_environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._variables = frozenset(names - environment.globals.keys())
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    @classmethod
    def load(cls, model_dir: Path, config: Mapping[str, Any]) -> ChatTemplate:
        """Read a model directory: chat_template.jinja, else the template of tokenizer_config.json (`config`). Blocking.

        Raises:
            EngineStartupError: there is one and it is not valid; one line that names the directory.
        """
        try:
            source: str | None = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
        except FileNotFoundError:
            source = _find_template(config.get("chat_template"))
        except (OSError, UnicodeDecodeError) as error:
            raise EngineStartupError(f"MODEL {str(model_dir)!r}: chat_template.jinja: {error}") from error
        tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            return cls(source, tokens=tokens)
        except ValueError as error:
            reason = " ".join(str(error).split())[:300]
            raise EngineStartupError(f"MODEL {str(model_dir)!r}: its chat template is not usable: {reason}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages to prompt text.

        Args:
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end with the last message left open, so that the model writes on in it.
            template_kwargs: extra variables (`enable_thinking`); those that the template does not read do nothing.

        Raises:
            InvalidRequestError: the messages are malformed, the template refuses them, the text would be over
                `MAX_RENDERED_CHARS`, or the model has no template.
        """
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template, so it takes no messages; use a plain prompt", "messages"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        plain = plain_messages(messages)
        if continue_final_message:
            plain[-1]["content"] += _CUT_MARK
        variables = {
            # Templates test for these even if there are none.
            "tools": None,
            "documents": None,
            **self._tokens,
            **self._allowed(template_kwargs or {}),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(self._template, variables)
        if continue_final_message:
            end = text.rfind(_CUT_MARK)
            if end < 0:
                raise InvalidRequestError(
                    "the model's chat template does not show the last message as it is, so it cannot be continued",
                    "continue_final_message",
                )
            text = text[:end]
        if not is_valid_text(text):
            # The messages are valid, so it is in an extra variable, or the template has cut a text badly.
            raise InvalidRequestError("the prompt would contain a lone surrogate, which is not valid text", "messages")
        return text

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(variables):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    break
                pieces.append(piece)
        except Exception as error:
            # Whatever a template does with messages it was not written for is that request's fault alone. Its
            # words may quote the messages, so they are cut and made valid.
            reason = str(error).encode("utf-8", "replace").decode()[:300]
            raise InvalidRequestError(
                f"the model's chat template does not take the messages: {reason}", "messages"
            ) from error
        if size > MAX_RENDERED_CHARS:
            raise InvalidRequestError(
                f"the messages make a prompt of more than {MAX_RENDERED_CHARS} characters, the limit", "messages"
            )
        return "".join(pieces)

    def _allowed(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        for name in template_kwargs:
            if name in RESERVED_KWARGS:
                raise InvalidRequestError(f"chat_template_kwargs must not set {name}", f"chat_template_kwargs.{name}")
        return {name: value for name, value in template_kwargs.items() if name in self._variables}


# ------------------------------------------------------------------------------------ the dialect


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks what the model says, for training. Here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the type jinja2 declares

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the text goes to a model, and escapes would change it
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes HTML and sorts keys, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _find_template(value: Any) -> str | None:
    """The template of a tokenizer_config.json: one, or a list of named ones."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str:
    """A token in tokenizer_config.json is its text, or an object around it, or null."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
