"""RequestOutputCollector: the mailbox of one request, a memory channel of size 1 that merges.

The output handler puts and never waits; the request's reader takes. A slow reader gets fewer and larger pieces; no
token is lost on the way. Used by the output handler and by `GenerateStream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from trio_llm.frontend.requests.output.parallel_sampling import repeat_choice
from trio_llm.outputs import CompletionOutput, RequestOutput
from trio_llm.sampling import RequestOutputKind

__all__ = ["RepeatingCollector", "RequestOutputCollector", "Unread"]

_PIECE_BYTES: Final = 350
_TOKEN_BYTES: Final = 8
_LOGPROBS_BYTES: Final = 200
"""About what pieces, token ids and log-probabilities take as Python objects."""


@dataclass(slots=True)
class _Pieces:
    """Several pieces in the one slot. They are joined when taken, so that merging costs the same each time."""

    pieces: list[RequestOutput]
    size_bytes: int


Unread = RequestOutput | _Pieces
"""What the one slot holds."""


class RequestOutputCollector:
    """One producer, one reader.

    Args:
        kind: how an unread output and a newer one become one: DELTA joins them, else the newer one replaces, each
            choice by itself.
    """

    __slots__ = ("_merge_by_joining", "_send", "channel", "error", "is_unread", "must_resubmit", "prompt")

    def __init__(self, kind: RequestOutputKind) -> None:
        self._merge_by_joining = kind is RequestOutputKind.DELTA
        self._send: trio.MemorySendChannel[Unread]
        self.channel: trio.MemoryReceiveChannel[Unread]
        self._send, self.channel = trio.open_memory_channel[Unread](1)
        self.error: BaseException | None = None
        """What was put by `put_error`."""
        self.is_unread = False
        """Something was put since the reader took last, so it need not wait. Saves an exception per token."""
        self.must_resubmit = False
        """The engine has dropped the request, uncomputed: a reader that reads on must send it again."""
        self.prompt: str | None = None
        """The prompt's text, for each output that is taken; None if the caller gave token ids."""

    def put(self, output: RequestOutput) -> int:
        """Add an output. Never blocks; does nothing if the reader has left or an error was put.

        Returns:
            About how many bytes of memory the pieces that were merged take; 0 if nothing was unread.
        """
        try:
            self._send.send_nowait(output)
            self.is_unread = True
        except trio.WouldBlock:
            return self._merge(output)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        return 0

    def _merge(self, output: RequestOutput) -> int:
        """Take the unread output back and put both as one."""
        unread = self.channel.receive_nowait()
        if not self._merge_by_joining:
            assert isinstance(unread, RequestOutput)
            self._send.send_nowait(_replace(unread, output))
            return 0
        if not isinstance(unread, _Pieces):
            unread = _Pieces([unread], _size_bytes(unread))
        unread.pieces.append(output)
        unread.size_bytes += _size_bytes(output)
        self._send.send_nowait(unread)
        return unread.size_bytes

    def put_error(self, error: BaseException) -> None:
        """End the mailbox: the reader gets what is unread, then this error. The first error counts. Never blocks."""
        if self.error is None:
            self.error = error
        self._send.close()

    async def receive(self) -> RequestOutput:
        """Take all that is unread as one output, waiting if there is none.

        Returns at once, without a schedule point, if something is there.

        Cancellation: safe. If this raises `trio.Cancelled`, nothing was taken.

        Raises:
            Exception: what was put by `put_error`, after all that was put before it was taken.
            trio.EndOfChannel: `close` was called.
        """
        try:
            if self.is_unread:
                await trio.lowlevel.checkpoint_if_cancelled()
                return self.unpack(self.channel.receive_nowait())
            return self.unpack(await self.channel.receive())
        except trio.EndOfChannel:
            self.raise_error()
            raise

    def unpack(self, unread: Unread) -> RequestOutput:
        """What was taken from `channel`, as one output. For a reader that receives from `channel` itself."""
        self.is_unread = False
        output = _join(unread.pieces) if isinstance(unread, _Pieces) else unread
        if self.prompt is not None:  # each token passes here
            output.prompt = self.prompt
        return output

    def raise_error(self) -> None:
        """Raise what was put by `put_error`, if anything was. For the end of the channel."""
        if self.error is not None:
            raise self.error from self.error.__cause__

    def close(self) -> None:
        """The reader leaves: from now on `put` does nothing. Idempotent."""
        self.channel.close()
        self._send.close()


class RepeatingCollector(RequestOutputCollector):
    """For several choices that are all equal: the one that was computed is copied when it is taken.

    Args:
        num_choices: of each output that is taken.
    """

    __slots__ = ("_num_choices",)

    def __init__(self, kind: RequestOutputKind, num_choices: int) -> None:
        super().__init__(kind)
        self._num_choices = num_choices

    def unpack(self, unread: Unread) -> RequestOutput:
        """As its base."""
        output = super().unpack(unread)
        return repeat_choice(output, self._num_choices) if output.outputs else output


def _replace(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """The newer output, with those choices of the older one that it does not have."""
    seen = {choice.index for choice in newer.outputs}
    kept = [choice for choice in older.outputs if choice.index not in seen]
    if kept:
        newer.outputs = sorted([*kept, *newer.outputs], key=lambda choice: choice.index)
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs
    return newer


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
        outputs=[_join_choices(by_index[index]) for index in sorted(by_index)],
        finished=last.finished,
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        weight_version=last.weight_version,
        metrics=last.metrics,
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
        weight_versions=last.weight_versions,
    )
