"""Prompts of a request: a string, a list of token ids, or a list of such, as OpenAI's API takes them.

Pure. Used by the routes of completions and of pooled outputs.
"""

from __future__ import annotations

from typing import Any

from trio_llm.errors import InvalidRequestError, PromptTooLongError
from trio_llm.quoting import quote

__all__ = ["parse_prompts"]

_INT32 = 2**31


def parse_prompts(
    value: Any, *, name: str, most: int, max_model_len: int | None, room: int = 1
) -> list[str | list[int]]:
    """The prompts in a field of a request: at least one, none of them empty.

    Args:
        name: of the field.
        most: prompts in one request.
        max_model_len: tokens of prompt and answer together. None: a list of ids may have any length, since it may be
            cut.
        room: tokens that a prompt must leave for the answer.

    Raises:
        PromptTooLongError: a list has so many ids that the model cannot take them, whatever they are.
        InvalidRequestError: something else, or too many, or an empty prompt.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > most:
            raise InvalidRequestError(f"{len(value)} prompts are over the limit of {most}", name)
        kind = type(value[0])
        if any(type(one) is not kind for one in value):
            raise InvalidRequestError(f"{name} must not mix strings and lists of token ids", name)
        return [_one_prompt(one, name, max_model_len, room) for one in value]
    return [_one_prompt(value, name, max_model_len, room)]


def _one_prompt(prompt: Any, name: str, max_model_len: int | None, room: int) -> str | list[int]:
    if not isinstance(prompt, str | list):
        raise InvalidRequestError(
            f"{name} must be a string, a list of token ids, or a list of such, not {quote(prompt)}", name
        )
    if not prompt:
        raise InvalidRequestError(f"{name} must not be empty", name)
    if isinstance(prompt, list):
        if max_model_len is not None and len(prompt) > max_model_len - room:
            error = PromptTooLongError(limit=max_model_len, num_prompt_tokens=len(prompt), max_tokens=None)
            error.param = name
            raise error
        return _token_ids(prompt, name)
    return prompt


def _token_ids(ids: list[Any], name: str) -> list[int]:
    """The ids, also those that are written as 2.0."""
    # In C, since there may be very many; the one at fault is looked for only if there is one.
    kinds = set(map(type, ids))
    if kinds <= {int, float} and min(ids) >= 0 and max(ids) < _INT32:
        whole = ids if kinds == {int} else list(map(int, ids))
        if whole == ids:
            return whole
    wrong = next(one for one in ids if type(one) not in (int, float) or not 0 <= one < _INT32 or one != int(one))
    raise InvalidRequestError(f"{name}: {quote(wrong)} is not a token id", name)
