"""Assembly: outputs of one or several streams become typed events, and events become whole answers.

Pure. Used by every route, streaming or not; protocols only render what comes out.

The events of a choice are: one `ChoiceStarted`, any number of `TextDelta`, one `ChoiceFinished`. All choices
start before anything else happens. How the outputs were cut into pieces does not change the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trio_llm.errors import EngineGenerateError
from trio_llm.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs

__all__ = ["Assembler", "Choice", "ChoiceFinished", "ChoiceStarted", "Event", "TextDelta", "Usage", "whole_choices"]


@dataclass(frozen=True, slots=True)
class ChoiceStarted:
    """The choice exists. Nothing of it is known yet."""

    index: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new in a choice."""

    index: int
    text: str
    """Never empty."""
    logprobs: list[TokenLogprobs] | None
    """Of every token since the last event that had text, also of those that made none; None: not asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last of a choice, with what is left of its text."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


Event = ChoiceStarted | TextDelta | ChoiceFinished


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted so far, over all prompts and choices."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Choice:
    """A whole choice."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class Assembler:
    """Turns the outputs of `num_prompts` streams, of one choice each, into events.

    Output i of `feed` belongs to choice i: one choice a prompt. Outputs are deltas, or one output with everything.
    """

    def __init__(self, num_prompts: int = 1) -> None:
        self._num_prompts = num_prompts
        self._has_started = False
        self._num_output_tokens = 0
        # (prompt tokens, cached tokens) of each prompt that has had an output
        self._prompts: dict[int, tuple[int, int]] = {}
        self._finished: set[int] = set()
        self._held_logprobs: dict[int, list[TokenLogprobs]] = {}

    @property
    def usage(self) -> Usage:
        """What was counted so far. The last one is the final one."""
        return Usage(
            num_prompt_tokens=sum(prompt for prompt, _ in self._prompts.values()),
            num_cached_tokens=sum(cached for _, cached in self._prompts.values()),
            num_output_tokens=self._num_output_tokens,
        )

    @property
    def is_finished(self) -> bool:
        """Every choice has had its `ChoiceFinished`."""
        return len(self._finished) == self._num_prompts

    def feed(self, index: int, output: RequestOutput) -> list[Event]:
        """The events that this output of prompt `index` makes; none if there is no text to show yet.

        Raises:
            EngineGenerateError: something came after the end of the choice.
        """
        if index in self._finished:
            raise EngineGenerateError(f"request {output.request_id}: an output came after the last one")
        self._prompts[index] = (output.num_prompt_tokens, output.num_cached_tokens)
        events: list[Event] = []
        if not self._has_started:
            self._has_started = True
            events.extend(ChoiceStarted(i) for i in range(self._num_prompts))
        for completion in output.outputs:
            self._num_output_tokens += len(completion.token_ids)
            event = self._event(index, completion)
            if event is not None:
                events.append(event)
        return events

    def check_finished(self) -> None:
        """Raise EngineGenerateError if the streams ended before every choice did."""
        if not self.is_finished:
            raise EngineGenerateError("the stream of outputs ended without a finish reason")

    def _event(self, index: int, completion: CompletionOutput) -> Event | None:
        # Log-probabilities of tokens whose text is held back wait for the next event: none may be lost.
        logprobs = completion.logprobs
        if index in self._held_logprobs:
            logprobs = self._held_logprobs.pop(index) + (logprobs or [])
        if completion.finish_reason is not None:
            self._finished.add(index)
            return ChoiceFinished(index, completion.text, logprobs, completion.finish_reason, completion.stop_reason)
        if completion.text:
            return TextDelta(index, completion.text, logprobs)
        if logprobs:
            self._held_logprobs[index] = logprobs
        return None


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None


def whole_choices(events: Iterable[Event]) -> list[Choice]:
    """The finished choices among these events, ordered by index."""
    parts: dict[int, _Parts] = {}
    choices: list[Choice] = []
    for event in events:
        if isinstance(event, ChoiceStarted):
            continue
        part = parts.setdefault(event.index, _Parts())
        part.text.append(event.text)
        if event.logprobs is not None:
            part.logprobs = [*(part.logprobs or []), *event.logprobs]
        if isinstance(event, ChoiceFinished):
            choices.append(
                Choice(event.index, "".join(part.text), part.logprobs, event.finish_reason, event.stop_reason)
            )
    return sorted(choices, key=lambda choice: choice.index)
