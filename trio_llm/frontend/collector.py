"""RequestOutputCollector: the mailbox of one request, a memory channel of size 1 that merges.

The output handler puts and never waits; the request's reader takes. A slow reader gets fewer and larger pieces; no
token is lost on the way. Used by the output handler and by `RequestStream`.
"""

from __future__ import annotations

from typing import Final

import trio

from trio_llm.outputs import CompletionOutput, RequestOutput
from trio_llm.sampling import RequestOutputKind

__all__ = ["RequestOutputCollector"]

_TOKEN_BYTES: Final = 8
_LOGPROBS_BYTES: Final = 200


class RequestOutputCollector:
    """One producer, one reader.

    Args:
        kind: how an unread output and a newer one become one: DELTA joins them, else the newer one replaces.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._merge_by_joining = kind is RequestOutputKind.DELTA
        # The one slot holds a list of pieces: they are joined when taken, so that merging costs the same each time.
        self._send: trio.MemorySendChannel[list[RequestOutput]]
        self._receive: trio.MemoryReceiveChannel[list[RequestOutput]]
        self._send, self._receive = trio.open_memory_channel[list[RequestOutput]](1)
        self._error: BaseException | None = None
        self.unread_bytes = 0
        """About how much memory the unread pieces take."""

    def put(self, output: RequestOutput) -> None:
        """Add an output. Never blocks; does nothing if the reader has left or an error was put."""
        pieces = [output]
        try:
            self._send.send_nowait(pieces)
        except trio.WouldBlock:
            unread = self._receive.receive_nowait()
            if self._merge_by_joining:
                unread.append(output)
                pieces = unread
            self._send.send_nowait(pieces)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        if self._merge_by_joining:
            self.unread_bytes += _size_bytes(output)

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
                pieces = self._receive.receive_nowait()
            except trio.WouldBlock:
                pieces = await self._receive.receive()
        except trio.EndOfChannel:
            if self._error is None:
                raise
            raise self._error from None
        self.unread_bytes = 0
        return pieces[0] if len(pieces) == 1 else _join(pieces)

    def close(self) -> None:
        """The reader leaves: from now on `put` does nothing. Idempotent."""
        self._receive.close()
        self._send.close()


def _size_bytes(output: RequestOutput) -> int:
    return sum(
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
