"""RequestOutputCollector: the mailbox of one request, a memory channel of size 1 that merges.

The output handler puts and never waits; the request's reader takes. A slow reader gets fewer and larger pieces; no
token is lost on the way. Used by the output handler and by `GenerateStream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from trio_llm.outputs import CompletionOutput, RequestOutput
from trio_llm.sampling import RequestOutputKind

__all__ = ["RequestOutputCollector"]

_PIECE_BYTES: Final = 350
_TOKEN_BYTES: Final = 8
_LOGPROBS_BYTES: Final = 200
"""What pieces, token ids and log-probabilities take as Python objects, about."""


@dataclass(slots=True)
class _Unread:
    """What the one slot holds: pieces that are joined when taken, so that merging costs the same each time."""

    pieces: list[RequestOutput]
    size_bytes: int


class RequestOutputCollector:
    """One producer, one reader.

    Args:
        kind: how an unread output and a newer one become one: DELTA joins them, else the newer one replaces.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._merge_by_joining = kind is RequestOutputKind.DELTA
        self._send: trio.MemorySendChannel[_Unread]
        self._receive: trio.MemoryReceiveChannel[_Unread]
        self._send, self._receive = trio.open_memory_channel[_Unread](1)
        self._error: BaseException | None = None

    def put(self, output: RequestOutput) -> int:
        """Add an output. Never blocks; does nothing if the reader has left or an error was put.

        Returns:
            About how many bytes of memory the unread pieces take now; 0 if the reader waits for them already.
        """
        new = _Unread([output], 0)
        try:
            self._send.send_nowait(new)
        except trio.WouldBlock:
            unread = self._receive.receive_nowait()
            if self._merge_by_joining:
                unread.pieces.append(output)
                unread.size_bytes += _size_bytes(output)
                new = unread
            self._send.send_nowait(new)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return 0
        return new.size_bytes

    def put_error(self, error: BaseException) -> None:
        """End the mailbox: the reader gets what is unread, then this error. The first error counts. Never blocks."""
        if self._error is None:
            self._error = error
        self._send.close()

    async def receive(self) -> RequestOutput:
        """Take all that is unread as one output, waiting if there is none.

        Returns at once, without a schedule point, if something is there.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            Exception: what was put by `put_error`, after all that was put before it was taken.
            trio.EndOfChannel: `close` was called.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            try:
                unread = self._receive.receive_nowait()
            except trio.WouldBlock:
                unread = await self._receive.receive()
        except trio.EndOfChannel:
            if self._error is None:
                raise
            raise self._error from self._error.__cause__
        return unread.pieces[0] if len(unread.pieces) == 1 else _join(unread.pieces)

    def close(self) -> None:
        """The reader leaves: from now on `put` does nothing. Idempotent."""
        self._receive.close()
        self._send.close()


def _size_bytes(output: RequestOutput) -> int:
    return _PIECE_BYTES + sum(
        len(choice.text) + _TOKEN_BYTES * len(choice.token_ids) + _LOGPROBS_BYTES * len(choice.logprobs or ())
        for choice in output.outputs
    )


def _join(pieces: list[RequestOutput]) -> RequestOutput:
    """One output that says what the pieces say one after the other, choice by choice."""
    by_index: dict[int, list[CompletionOutput]] = {}
    for piece in pieces:
        for choice in piece.outputs:
            by_index.setdefault(choice.index, []).append(choice)
    last = pieces[-1]
    return RequestOutput(
        request_id=last.request_id,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        outputs=[_join_choices(choices) for choices in by_index.values()],
        finished=last.finished,
    )


def _join_choices(choices: list[CompletionOutput]) -> CompletionOutput:
    last = choices[-1]
    has_logprobs = any(choice.logprobs is not None for choice in choices)
    return CompletionOutput(
        index=last.index,
        text="".join([choice.text for choice in choices]),
        token_ids=[token_id for choice in choices for token_id in choice.token_ids],
        logprobs=[entry for choice in choices for entry in choice.logprobs or ()] if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
