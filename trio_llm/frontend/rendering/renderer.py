"""Renderer: prompts and chat messages become token ids, big ones in a worker thread.

Trio. Holds the loaded model's tokenizer and chat template. Used by `AsyncLLM` and the routes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from trio_llm.errors import InvalidRequestError, PromptTooLongError
from trio_llm.frontend.rendering.chat_template import ChatTemplate
from trio_llm.frontend.rendering.tokenizer import Tokenizer, read_tokenizer_config
from trio_llm.frontend.text.detokenizer import TokenIdError, TokenTable, make_detokenizer
from trio_llm.quoting import quote
from trio_llm.sampling import is_valid_text
from trio_llm.tokenization import PLAIN, TokenizationParams

__all__ = ["Renderer", "TextTooLongError"]

INLINE_CHARS: Final = 4_000
"""Texts up to this length take about a millisecond; longer ones would make every stream of the process wait."""
MAX_THREADS: Final = 2
"""Big texts that are worked on at once, so that a burst of them leaves the other cores alone."""

_T = TypeVar("_T")


class TextTooLongError(PromptTooLongError):
    """The text has so many characters that its tokens cannot fit, however it would be cut into them."""

    def __init__(self, *, limit: int, num_chars: int, min_tokens: int) -> None:
        InvalidRequestError.__init__(
            self,
            f"this model's maximum context length is {limit} tokens, but the prompt has {num_chars} characters, "
            f"which are {min_tokens} tokens or more; shorten the prompt",
            "prompt",
        )


class Renderer:
    """Text and conversations to ids, for one model.

    Args:
        max_model_len: tokens of prompt and answer together; longer texts are refused, early if that is possible.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, max_model_len: int) -> None:
        self.tokenizer: Final = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._threads = trio.CapacityLimiter(MAX_THREADS)

    @classmethod
    def load(cls, model_dir: Path, max_model_len: int, *, logits_width: int) -> Renderer:
        """Read tokenizer and template of a model directory. Blocking, up to about a second; call it in a thread.

        Args:
            logits_width: number of ids that the model can emit.

        Raises:
            EngineStartupError: a file is missing or not usable; one line that names the directory.
        """
        tokenizer = Tokenizer.load(model_dir, logits_width=logits_width)
        template = ChatTemplate.load(model_dir, read_tokenizer_config(model_dir))
        return cls(tokenizer, template, max_model_len=max_model_len)

    @property
    def token_table(self) -> TokenTable:
        """The bytes of each id."""
        return self.tokenizer.table

    async def render_prompt(
        self, prompt: str | list[int], tokenization: TokenizationParams = PLAIN, *, room: int = 0
    ) -> list[int]:
        """The ids of a prompt. Those of a list of ids come back as they are: the input processor checks them.

        Args:
            tokenization: may also cut a prompt that is too long.
            room: tokens of the context that a prompt which is cut leaves for the answer, unless a number is asked for.

        Cancellation: safe. A worker thread that has begun goes on to its end, holds its place until then, and its
        result is dropped.

        Raises:
            InvalidRequestError: the text is not valid (`param` is `prompt`), or `truncate_prompt_tokens` is more than
                the model can take.
            PromptTooLongError: it has so many characters that it cannot fit the context, and may not be cut. One that
                has too many tokens without that comes back as it is.
        """
        if not isinstance(prompt, str):
            await trio.lowlevel.checkpoint()
            return self.truncate(prompt, tokenization, room=room)
        if not tokenization.may_cut:
            self._check_fits(prompt)
        adds_special_tokens = tokenization.add_special_tokens is not False
        encode = functools.partial(self._encode_prompt, prompt, add_special_tokens=adds_special_tokens)
        return self.truncate(await self._run(encode, size=len(prompt)), tokenization, room=room)

    async def render_prompts(
        self, prompts: Sequence[str | list[int]], tokenization: TokenizationParams = PLAIN, *, room: int = 0
    ) -> list[list[int]]:
        """The ids of several prompts, in their order. Arguments, cancellation and errors: as `render_prompt`."""
        await trio.lowlevel.checkpoint()
        return [
            await self.render_prompt(prompt, tokenization, room=room)
            if isinstance(prompt, str)
            else self.truncate(prompt, tokenization, room=room)
            for prompt in prompts
        ]

    def truncate(self, token_ids: list[int], tokenization: TokenizationParams, *, room: int) -> list[int]:
        """What is kept of a prompt's ids, which need not be checked yet. Arguments and errors: as `render_prompt`."""
        if not (tokenization.may_cut and isinstance(token_ids, list)):
            return token_ids
        return tokenization.truncate(token_ids, max_model_len=self._max_model_len, room=room)

    async def render_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of words that must not come: each at the start of a text and after a space, if those differ.

        Cancellation: as `render_prompt`.

        Raises:
            InvalidRequestError: the tokenizer makes nothing of a word (`param` is `bad_words`).
        """
        return await self._run(functools.partial(self._encode_bad_words, words), size=2 * sum(map(len, words)))

    async def render_text(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of a prompt's ids.

        Cancellation: as `render_prompt`.

        Raises:
            InvalidRequestError: one of the ids is none that the model can emit (`param` is `prompt`).
        """
        decode = functools.partial(self._decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._run(decode, size=4 * len(token_ids))

    async def render_offsets(self, token_ids: list[int], text: str) -> list[int]:
        """Where the tokens of a prompt begin in its text, in characters.

        Tokens inside a character have the offset of the character; special tokens that `text` does not show have the
        offset of what follows them. Where the tokenizer normalizes text, offsets may be off; none is behind the end.

        Cancellation: as `render_prompt`.

        Raises:
            InvalidRequestError: as `render_text`.
        """
        return await self._run(functools.partial(self._find_offsets, token_ids, text), size=4 * len(token_ids))

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are not valid UTF-8 on their own show as U+FFFD. Raises as `render_text`."""
        try:
            return self.token_table.token_bytes(token_id).decode("utf-8", "replace")
        except TokenIdError:
            raise InvalidRequestError(
                f"the prompt's token id {token_id} is not one of the {self.token_table.logits_width} of the model",
                "prompt",
            ) from None

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, by the model's template, for `render_prompt` with
        `TokenizationParams.for_chat`. See `ChatTemplate.render`.

        Cancellation: as `render_prompt`.

        Raises:
            InvalidRequestError: the messages are malformed, not valid text, or the template refuses them; `param`
                names the place.
        """
        size = _measure(messages, INLINE_CHARS) + _measure(template_kwargs, INLINE_CHARS)
        render = functools.partial(
            self._template.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return await self._run(render, size=size)

    def _check_fits(self, text: str) -> None:
        min_tokens = self.tokenizer.count_at_least(text)
        if min_tokens > self._max_model_len:
            raise TextTooLongError(limit=self._max_model_len, num_chars=len(text), min_tokens=min_tokens)

    def _encode_prompt(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        if not is_valid_text(prompt):
            raise InvalidRequestError("the prompt contains a lone surrogate, which is not valid text", "prompt")
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        table = self.token_table
        self._check_ids(token_ids)
        if table.scheme == "decode":
            return table.decode(token_ids, skip_special_tokens)
        detokenizer = make_detokenizer(table, (), skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(token_ids) + detokenizer.finish()

    def _check_ids(self, token_ids: list[int]) -> None:
        table = self.token_table
        try:
            table.check(token_ids)
        except TokenIdError:
            raise InvalidRequestError(
                f"the prompt's token ids must be from 0 to {table.logits_width - 1}, the model's vocabulary", "prompt"
            ) from None

    def _find_offsets(self, token_ids: list[int], text: str) -> list[int]:
        table = self.token_table
        self._check_ids(token_ids)
        detokenizer = make_detokenizer(table, (), skip_special_tokens=False)
        pieces = [detokenizer.feed((token_id,)) for token_id in token_ids]
        ordinary = [
            piece for token_id, piece in zip(token_ids, pieces, strict=True) if token_id not in table.special_ids
        ]
        # Some tokenizers put a space before the first word. Of several spaces, only the count tells.
        has_added_space = "".join(ordinary) == f" {text}"
        offsets, end = [], 0
        for token_id, piece in zip(token_ids, pieces, strict=True):
            offsets.append(min(end, len(text)))
            if token_id in table.special_ids and not text.startswith(piece, end):
                continue  # added by the tokenizer, or left out of the text
            if piece.startswith(" ") and (has_added_space or not text.startswith(piece, end)):
                has_added_space = False
                if text.startswith(piece[1:], end):
                    piece = piece[1:]
            end += len(piece)
        return offsets

    def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ") or word
            ways = [bare] if bare.startswith(" ") else [bare, f" {bare}"]
            encoded = [tuple(self.tokenizer.encode(way, add_special_tokens=False)) for way in ways]
            if not all(encoded):
                raise InvalidRequestError(
                    f"bad_words: the model's tokenizer makes no tokens of {quote(word)}; leave it out", "bad_words"
                )
            found.update(dict.fromkeys(encoded))
        return [list(token_ids) for token_ids in found]

    async def _run(self, work: Callable[[], _T], *, size: int) -> _T:
        if size <= INLINE_CHARS:
            await trio.lowlevel.checkpoint()
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)


def _measure(value: Any, enough: int) -> int:
    """Characters of all strings inside plain data, counted until there are enough to know that it is big.

    Every item counts for a little besides, so that many small ones are big too. Without recursion: nesting is the
    caller's.
    """
    size = 0
    todo = [value]
    while todo and size <= enough:
        item = todo.pop()
        size += 8
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            size += 8 * len(item)
            todo.extend(item.values() if len(item) <= enough else ())
        elif isinstance(item, list | tuple):
            size += 8 * len(item)
            todo.extend(item if len(item) <= enough else ())
    return size
