"""TokenizationParams: how the text of a prompt becomes token ids, and how many of them are kept.

Pure. Made by callers and routes, checked on construction, used by the renderer.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from trio_llm.errors import InvalidRequestError
from trio_llm.quoting import quote

__all__ = ["PLAIN", "TokenizationParams", "TruncationSide"]

TruncationSide = Literal["left", "right"]

_INT64: Final = 2**63
_WHOLE_CONTEXT: Final = -1
"""vLLM's word for it in `truncate_prompt_tokens`."""


class TokenizationParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one prompt's tokenization. The names are vLLM's.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of range; `param` names the field.
    """

    add_special_tokens: bool | None = None
    """The tokenizer adds its own, such as the beginning of text. None: to a text it does, and to a conversation it does
    not, since the chat template has put them where they belong. Of no effect for a prompt of token ids."""
    truncate_prompt_tokens: int | None = None
    """Tokens that are kept of a longer prompt, special ones included; -1: as many as the context has room for beside
    the answer. None: a prompt that is too long is refused."""
    truncation_side: TruncationSide = "left"
    """Where tokens are cut off: `left` keeps the last ones, `right` the first ones."""

    def __post_init__(self) -> None:
        if self.add_special_tokens is not None and not isinstance(self.add_special_tokens, bool):
            raise InvalidRequestError("add_special_tokens must be true or false", "add_special_tokens")
        limit = self.truncate_prompt_tokens
        if limit is not None and (type(limit) is not int or (limit != _WHOLE_CONTEXT and not 1 <= limit < _INT64)):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be a 64-bit integer from 1 on, or -1, not {quote(limit)}",
                "truncate_prompt_tokens",
            )
        if self.truncation_side not in get_args(TruncationSide):
            raise InvalidRequestError(
                f"truncation_side must be left or right, not {quote(self.truncation_side)}", "truncation_side"
            )

    @property
    def may_cut(self) -> bool:
        """A prompt that is too long may be cut, so that its length is no error."""
        return self.truncate_prompt_tokens is not None

    def for_chat(self) -> TokenizationParams:
        """The same for the text of a conversation, to which its template has added the special tokens."""
        return self if self.add_special_tokens is not None else msgspec.structs.replace(self, add_special_tokens=False)

    def truncate(self, token_ids: list[int], *, max_model_len: int, room: int) -> list[int]:
        """What is kept of a prompt.

        Args:
            max_model_len: tokens of prompt and answer together.
            room: tokens that -1 leaves for the answer.

        Raises:
            InvalidRequestError: `truncate_prompt_tokens` is more than the model can take.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit > max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {limit}, and this model's maximum context length is {max_model_len} tokens",
                "truncate_prompt_tokens",
            )
        if limit == _WHOLE_CONTEXT:
            limit = max(1, max_model_len - room)
        if len(token_ids) <= limit:
            return token_ids
        return token_ids[-limit:] if self.truncation_side == "left" else token_ids[:limit]


PLAIN: Final = TokenizationParams()
"""All defaults."""
