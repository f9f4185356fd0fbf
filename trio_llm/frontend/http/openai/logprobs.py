"""Log-probabilities in the shapes of OpenAI's API.

Pure. Used by the writers of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from trio_llm.outputs import Logprob, TokenLogprobs

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "NameToken",
    "PromptLogprobs",
    "chat_logprobs",
    "completion_logprobs",
    "name_by_id",
    "prompt_logprobs",
    "token_id_name",
    "token_text",
]


class Candidate(TypedDict):
    """A token that could stand at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatPosition(Candidate):
    """The token at a position, and the likeliest ones there."""

    top_logprobs: list[Candidate]


class ChatLogprobs(TypedDict):
    """One entry per token of the answer."""

    content: list[ChatPosition]


class CompletionLogprobs(TypedDict):
    """Columns with one entry per token. The first token of an echoed prompt has null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptCandidate(TypedDict):
    """A token that could stand at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptCandidate] | None]
"""By token id, for each token of the prompt. The first one has null."""


NameToken = Callable[[Logprob], str]
"""How an answer calls a token."""


def token_text(logprob: Logprob) -> str:
    """The token's text. Different tokens may have the same."""
    return logprob.token


def token_id_name(logprob: Logprob) -> str:
    """A name that keeps tokens apart whose texts are equal."""
    return name_by_id(logprob.token_id)


def name_by_id(token_id: int) -> str:
    """The same for a token without log-probabilities."""
    return f"token_id:{token_id}"


def chat_logprobs(positions: Sequence[TokenLogprobs], name: NameToken) -> ChatLogprobs:
    """One entry per position: the sampled token and the likeliest ones."""
    return {
        "content": [
            {**_candidate(position.sampled, name), "top_logprobs": [_candidate(one, name) for one in position.top]}
            for position in positions
        ]
    }


def _candidate(logprob: Logprob, name: NameToken) -> Candidate:
    return {"token": name(logprob), "logprob": logprob.logprob, "bytes": list(logprob.token_bytes)}


def completion_logprobs(
    positions: Sequence[TokenLogprobs | None], offsets: list[int], name: NameToken, *, first_token: str = ""
) -> CompletionLogprobs:
    """The positions in columns.

    Args:
        offsets: where the tokens begin in the text.
        first_token: name of the position that is None, which only the first one of a prompt is.
    """
    return {
        "text_offset": offsets,
        "token_logprobs": [None if position is None else position.sampled.logprob for position in positions],
        "tokens": [first_token if position is None else name(position.sampled) for position in positions],
        "top_logprobs": [None if position is None else _top(position, name) for position in positions],
    }


def _top(position: TokenLogprobs, name: NameToken) -> dict[str, float]:
    """The alternatives, best first, and the sampled token, which may be one of them. Equal names are one entry."""
    top: dict[str, float] = {}
    for one in (*position.top, position.sampled):
        top.setdefault(name(one), one.logprob)
    return top


def prompt_logprobs(positions: Sequence[TokenLogprobs | None] | None) -> PromptLogprobs | None:
    """For each token of the prompt its own candidate, then the likeliest ones, by token id."""
    if positions is None:
        return None
    return [None if position is None else _by_token_id(position) for position in positions]


def _by_token_id(position: TokenLogprobs) -> dict[str, PromptCandidate]:
    return {
        str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.token}
        for one in (position.sampled, *position.top)
    }
