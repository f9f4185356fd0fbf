"""Detokenizer: token ids that arrive in pieces become text in pieces, equal to decoding them all at once.

Pure; needs no tokenizer library: `rendering/tokenizer.py` makes the `TokenTable`. Used by the output processor, which
has one detokenizer per request.
"""

from __future__ import annotations

import codecs
from codecs import utf_8_decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, Protocol

from trio_llm.errors import EngineGenerateError

__all__ = ["Detokenizer", "TokenIdError", "TokenScheme", "TokenTable", "make_detokenizer"]

TokenScheme = Literal["bytes", "byte_fallback", "decode"]
"""How ids become text.

`bytes`: every id stands for bytes, their concatenation is UTF-8 (byte-level BPE).
`byte_fallback`: the same, but an invalid byte shows as one U+FFFD of its own (SentencePiece with byte tokens).
`decode`: only the tokenizer itself can decode (WordPiece, Metaspace and the rest).
"""

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MAX_HELD_BYTES: Final = 3
"""A character of UTF-8 has at most four bytes, so an unfinished one has at most three."""

_EACH_BYTE: Final = "trio_llm.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TokenIdError(EngineGenerateError, ValueError):
    """The engine gave an id that the model cannot emit. The request fails; the detokenizer is as it was before."""

    def __init__(self, token_id: int, num_ids: int) -> None:
        super().__init__(f"the engine gave token id {token_id}, the model's ids are 0 to {num_ids - 1}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """What each id stands for, in plain tables. One per model, shared by all requests."""

    logits_width: int
    """Number of ids that the model can emit."""
    bytes_by_id: list[bytes]
    """Index: token id; as long as the logits are wide. Empty for ids that the tokenizer does not know."""
    special_ids: frozenset[int]
    scheme: TokenScheme
    decode: Callable[[list[int], bool], str]
    """Ids and `skip_special_tokens` to text, by the tokenizer itself. Only called with the scheme `decode`."""
    strips_first_space: bool = False
    """One space at the very start of prompt and answer together is not part of the text."""
    bytes_without_special: list[bytes] = field(init=False)
    """`bytes_by_id` with empty bytes for special tokens."""

    def __post_init__(self) -> None:
        assert self.logits_width == len(self.bytes_by_id)
        hidden = list(self.bytes_by_id)
        for token_id in self.special_ids:
            if token_id < len(hidden):
                hidden[token_id] = b""
        object.__setattr__(self, "bytes_without_special", hidden)

    def shown_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
        """The table of what is shown. Not a copy: do not change it."""
        return self.bytes_without_special if skip_special_tokens else self.bytes_by_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of any id, special or not; empty if the tokenizer does not know it.

        Raises:
            TokenIdError: the model cannot emit this id.
        """
        self.check((token_id,))
        return self.bytes_by_id[token_id]

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise TokenIdError for the first id that the model cannot emit."""
        for token_id in token_ids:
            if not 0 <= token_id < self.logits_width:
                raise TokenIdError(token_id, self.logits_width)


class Detokenizer(Protocol):
    """The text of one answer, piece by piece. However the ids are cut, the pieces joined are the same text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that is certain now, without any of the prompt's.

        Only the bytes of an unfinished character are held back. Bytes that cannot become valid any more show as
        U+FFFD at once.

        Raises:
            TokenIdError: an id is out of range; none of these ids was taken.
        """
        ...

    def finish(self) -> str:
        """What was held back, as U+FFFD. Ids that follow would start a new text."""
        ...


def make_detokenizer(
    table: TokenTable,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """A detokenizer for the answer to this prompt.

    If the prompt ends inside a character that the answer completes, the whole character belongs to the answer.

    Args:
        spaces_between_special_tokens: False: special tokens that follow each other are joined without the space that
            the tokenizer's decoder may put there. Without effect on special tokens that are not shown, and with
            tables, where nothing stands between tokens.
    """
    if table.scheme != "decode":
        return _TableDetokenizer(table, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    is_tight = not spaces_between_special_tokens and not skip_special_tokens
    decode = partial(_decode_tightly, table) if is_tight else table.decode
    return _WindowDetokenizer(table, prompt_token_ids, skip_special_tokens=skip_special_tokens, decode=decode)


class _TableDetokenizer:
    """One look-up per token, then UTF-8; the tail of an unfinished character is kept.

    Equal to the tokenizer's own decoder, with one exception that no incremental decoder can avoid: in a run of
    byte-fallback tokens that is invalid somewhere, the tokenizer replaces every byte of the run, this one only the
    invalid bytes, since the valid characters before them are shown already.
    """

    __slots__ = ("_errors", "_is_edge", "_owed", "_pending", "_shown_bytes", "_strip", "_table")

    def __init__(self, table: TokenTable, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._table = table
        self._shown_bytes = table.shown_bytes(skip_special_tokens=skip_special_tokens)
        self._errors = _EACH_BYTE if table.scheme == "byte_fallback" else "replace"
        tail = self._last_bytes(prompt_token_ids)
        _, used = utf_8_decode(tail, "replace", False)
        self._pending = b"" if _is_hopeless(tail[used:]) else tail[used:]
        # What the prompt's pending bytes show as if the answer does not complete them: text of the prompt.
        self._owed = utf_8_decode(self._pending, self._errors, True)[0]
        self._strip = table.strips_first_space and not tail
        self._is_edge = bool(self._pending) or self._strip  # one flag, as `feed` asks for every token

    def feed(self, token_ids: Sequence[int]) -> str:
        shown_bytes = self._shown_bytes
        # The usual case is one token, which needs no list and no join.
        try:
            if len(token_ids) == 1:
                token_id = token_ids[0]
                if token_id < 0:  # Python would count from the end
                    self._table.check(token_ids)
                data = shown_bytes[token_id]
            else:
                if token_ids and min(token_ids) < 0:
                    self._table.check(token_ids)
                data = b"".join([shown_bytes[token_id] for token_id in token_ids])
        except IndexError:
            self._table.check(token_ids)
            raise
        if self._is_edge:
            return self._decode_edge(data)
        text, used = utf_8_decode(data, self._errors, False)
        if used != len(data):
            return text + self._hold(data[used:])
        return text

    def finish(self) -> str:
        text = utf_8_decode(self._pending, self._errors, True)[0]
        text = text.removeprefix(self._owed)
        self._pending = b""
        self._owed = ""
        self._is_edge = self._strip
        return text

    def _decode_edge(self, data: bytes) -> str:
        """The end of `feed`, where a character is unfinished or the answer begins."""
        if not data:
            return ""
        data = self._pending + data
        text, used = utf_8_decode(data, self._errors, False)
        self._pending = b""
        self._is_edge = self._strip
        if used != len(data):
            text += self._hold(data[used:])
        if not text:
            return ""
        if self._owed:
            text = text.removeprefix(self._owed)
            self._owed = ""
        if self._strip:
            text = text.removeprefix(" ")
            self._strip = False
            self._is_edge = bool(self._pending)
        return text

    def _hold(self, tail: bytes) -> str:
        if _is_hopeless(tail):
            return utf_8_decode(tail, self._errors, True)[0]
        self._pending = tail
        self._is_edge = True
        return ""

    def _last_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text; enough of them to see an unfinished character."""
        tail = b""
        for token_id in _shown_ids_backwards(self._shown_bytes, prompt_token_ids):
            tail = self._shown_bytes[token_id] + tail
            if len(tail) >= MAX_HELD_BYTES:
                break
        return tail[-MAX_HELD_BYTES:]


def _is_hopeless(tail: bytes) -> bool:
    """It is an encoded surrogate: Python's decoder waits for the third byte, but it can never become valid."""
    return len(tail) == 2 and tail[0] == 0xED and tail[1] >= 0xA0


def _shown_ids_backwards(shown_bytes: list[bytes], token_ids: Sequence[int]) -> Iterator[int]:
    # A prompt may have ids that the model can read but not emit, so they are no error here.
    return (i for i in reversed(token_ids) if 0 <= i < len(shown_bytes) and shown_bytes[i])


class _WindowDetokenizer:
    """Decodes the last few tokens with and without the new one, and shows the difference.

    Exact for decoders that look at no more than the neighbours of a token. A few microseconds per token.
    """

    __slots__ = ("_decode_ids", "_num_fresh", "_owed", "_shown", "_shown_bytes", "_skip", "_table", "_window")

    CONTEXT: Final = 8
    """Tokens of the prompt that the window starts with."""
    MAX_FRESH: Final = 16
    """While the text ends in U+FFFD, the window is cut only after so many tokens."""

    def __init__(
        self,
        table: TokenTable,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        decode: Callable[[list[int], bool], str],
    ) -> None:
        self._table = table
        self._decode_ids = decode
        self._skip = skip_special_tokens
        self._shown_bytes = table.shown_bytes(skip_special_tokens=skip_special_tokens)
        window: list[int] = []
        for token_id in _shown_ids_backwards(self._shown_bytes, prompt_token_ids):
            window.append(token_id)
            if len(window) == self.CONTEXT:
                break
        self._window = window[::-1]
        self._num_fresh = 0  # tokens at the end of the window that came since it was last cut
        text = self._decode(self._window)
        self._shown = _without_unfinished(text)  # the part of the window's text that is out already
        self._owed = text[len(self._shown) :]  # U+FFFD that belong to the prompt, unless the answer completes them

    def feed(self, token_ids: Sequence[int]) -> str:
        self._table.check(token_ids)
        shown = [i for i in token_ids if self._shown_bytes[i]]
        # One by one, so that several at once give what each would have given alone.
        return "".join([self._step(token_id) for token_id in shown])

    def finish(self) -> str:
        if not self._num_fresh:
            return ""
        text = self._decode(self._window)
        if text.startswith(self._shown):
            text = text[len(self._shown) :]
        else:
            text = self._decode(self._window[-self._num_fresh :])
        text = self._take_off_owed(text)
        self._owed = ""
        self._cut(self._num_fresh, "")
        return text

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_fresh += 1
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # An unfinished run of byte tokens hides what was complete before it. It may still become valid.
            if text.endswith(REPLACEMENT) and self._num_fresh <= MAX_HELD_BYTES:
                return ""
            # It did not become valid: go on without the context.
            self._window = self._window[-self._num_fresh :]
            self._shown = ""
            text = self._decode(self._window)
        certain = _without_unfinished(text)
        new = certain[len(self._shown) :]
        if len(certain) == len(text):
            self._cut(self._num_fresh, "")
        elif self._num_fresh > self.MAX_FRESH:
            self._cut(self.CONTEXT, text[len(certain) :])
        elif new:
            self._shown = certain
        return self._take_off_owed(new)

    def _cut(self, num_kept: int, held: str) -> None:
        """Forget all but the last tokens; `held` is the end of their text that is not out yet."""
        self._window = self._window[-num_kept:]
        self._num_fresh = num_kept if held else 0
        self._shown = self._decode(self._window).removesuffix(held)

    def _take_off_owed(self, new: str) -> str:
        if not new or not self._owed:
            return new
        count = 0
        while count < min(len(new), len(self._owed)) and new[count] == REPLACEMENT:
            count += 1
        self._owed = self._owed[count:] if count == len(new) else ""
        return new[count:]

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_ids(token_ids, self._skip) if token_ids else ""


def _decode_tightly(table: TokenTable, token_ids: list[int], skip_special_tokens: bool) -> str:
    """The text of these ids, with nothing between special tokens that follow each other: each is decoded alone."""
    text, first = "", 0
    for index in range(1, len(token_ids)):
        if token_ids[index] in table.special_ids and token_ids[index - 1] in table.special_ids:
            text += table.decode(token_ids[first:index], skip_special_tokens)
            first = index
    return text + table.decode(token_ids[first:], skip_special_tokens)


def _without_unfinished(text: str) -> str:
    """`text` without the U+FFFD at its end that an unfinished character may have left."""
    end = len(text)
    while end > max(0, len(text) - MAX_HELD_BYTES) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
