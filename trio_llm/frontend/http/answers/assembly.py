"""Assembly: outputs of one or several streams become typed events, and events become whole answers.

Pure. Used by every generating route, streaming or not. Protocols only write what comes out.

The events of a choice are: one `ChoiceStarted`, one `PromptEchoed` if the answer repeats its prompt, any number of
`TextDelta`, one `ChoiceFinished`. All choices start before anything else happens. How the outputs were cut into pieces
does not change the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from trio_llm.errors import EngineGenerateError
from trio_llm.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    WeightVersionSpan,
)

__all__ = [
    "TEXT_ONLY",
    "AnswerContents",
    "Assembler",
    "Choice",
    "ChoiceFinished",
    "ChoiceStarted",
    "Event",
    "PromptEcho",
    "PromptEchoed",
    "TextDelta",
    "Usage",
    "whole_choices",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEcho:
    """A prompt that its answer repeats."""

    token_ids: list[int]
    text: str
    """What stands in front of the answer's text. May be empty."""
    first_token: str
    """The name of the first token: it has no log-probabilities, which name the others."""
    text_offsets: list[int] | None = None
    """Where each token begins in `text`. None: not asked for."""
    whole_text: str | None = None
    """All of the prompt's text, for a field of its own. None: not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContents:
    """What an answer has besides new text and its log-probabilities, and what it leaves out."""

    prompts: Sequence[PromptEcho] = ()
    """All prompts of the request, if the answer repeats them."""
    with_token_ids: bool = False
    with_weight_versions: bool = False
    """Each choice ends with the versions of the weights that computed its tokens."""
    echo_logprobs: int | None = None
    """Alternatives in the prompt's log-probabilities that precede those of the answer. None: not asked for."""
    prompt_logprobs: int | None = None
    """The same for those that stand in a field of their own."""
    is_prompt_only: bool = False
    """Nothing of what was generated is shown. The engine cannot generate less than one token."""


TEXT_ONLY: Final = AnswerContents()


@dataclass(frozen=True, slots=True)
class ChoiceStarted:
    """The choice exists. Nothing of it is known yet."""

    num_tokens: ClassVar[int] = 0
    index: int


@dataclass(frozen=True, slots=True)
class PromptEchoed:
    """What a choice repeats of its prompt."""

    num_tokens: ClassVar[int] = 0
    index: int
    prompt: PromptEcho
    echo_logprobs: list[TokenLogprobs | None] | None
    """The first token has None. None: not asked for, or the answer ended before they were known."""
    prompt_logprobs: list[TokenLogprobs | None] | None
    """The same for those that stand in a field of their own."""
    token_ids: list[int] | None
    """None: not asked for."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new in a choice."""

    index: int
    text: str
    """Never empty."""
    logprobs: list[TokenLogprobs] | None
    """One entry per token since the last event with text, tokens without text included. None: not asked for."""
    token_ids: list[int] | None = None
    """The same for ids."""
    num_tokens: int = 0
    """Tokens since the last event with text."""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """The last event of a choice, with the rest of its text."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    num_tokens: int = 0
    weight_versions: list[WeightVersionSpan] | None = None
    """None: not asked for."""


Event = ChoiceStarted | PromptEchoed | TextDelta | ChoiceFinished


@dataclass(slots=True)
class Usage:
    """Tokens over all prompts and choices."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    metrics: RequestMetrics | None = None
    """How long an answer with one choice took, if it is to be told; known at its end."""


@dataclass(slots=True)
class Choice:
    """A whole choice."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt: PromptEchoed | None = None
    weight_versions: list[WeightVersionSpan] | None = None


class Assembler:
    """Turns the outputs of `num_prompts` streams, of `choices_per_prompt` choices each, into events.

    Choice i of prompt p is choice p * choices_per_prompt + i of the whole. Outputs are deltas, or one output with
    everything.
    """

    def __init__(
        self,
        num_prompts: int = 1,
        *,
        choices_per_prompt: int = 1,
        contents: AnswerContents = TEXT_ONLY,
        with_metrics: bool = False,
    ) -> None:
        assert len(contents.prompts) in (0, num_prompts)
        self._contents = contents
        self._choices_per_prompt = choices_per_prompt
        self._num_choices = num_prompts * choices_per_prompt
        self._with_metrics = with_metrics and self._num_choices == 1
        self._has_started = False
        self.usage: Final = Usage()
        """The events so far. Tokens whose text is held back count with the event that brings it. Updated in place."""
        self._prompts: dict[int, tuple[int, int]] = {}
        """(prompt tokens, cached tokens) of each prompt that has had an output."""
        self._finished: set[int] = set()
        self._num_held: dict[int, int] = {}
        """By choice: tokens since its last event. Their text is not known yet."""
        self._held_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._held_token_ids: dict[int, list[int]] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        """By prompt, since only one of its choices may have brought them."""
        self._echoed: set[int] = set()

    @property
    def is_finished(self) -> bool:
        """Every choice has had its `ChoiceFinished`."""
        return len(self._finished) == self._num_choices

    def feed(self, index: int, output: RequestOutput) -> list[Event]:
        """The events of this output of prompt `index`. None at all if there is no text to show yet.

        Raises:
            EngineGenerateError: something came after the end of a choice.
        """
        counts = (output.num_prompt_tokens, output.num_cached_tokens)
        if self._prompts.get(index) != counts:
            self._count_prompt(index, counts)
        events: list[Event] = []
        if not self._has_started:
            self._has_started = True
            events.extend(ChoiceStarted(i) for i in range(self._num_choices))
        first_choice = index * self._choices_per_prompt
        if output.metrics is not None and self._with_metrics:
            self.usage.metrics = output.metrics
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        for completion in output.outputs:
            choice = first_choice + completion.index
            if choice in self._finished:
                raise EngineGenerateError(f"request {output.request_id}: an output came after the last one")
            if self._contents.prompts and choice not in self._echoed:
                self._echoed.add(choice)
                events.append(self._echo_prompt(index, choice))
            if self._contents.is_prompt_only:
                completion = _without_answer(completion)
            event = self._event(choice, completion)
            if event is not None:
                self.usage.num_output_tokens += event.num_tokens
                events.append(event)
        return events

    def _count_prompt(self, index: int, counts: tuple[int, int]) -> None:
        self._prompts[index] = counts
        self.usage.num_prompt_tokens = sum(prompt for prompt, _ in self._prompts.values())
        self.usage.num_cached_tokens = sum(cached for _, cached in self._prompts.values())

    def _echo_prompt(self, index: int, choice: int) -> PromptEchoed:
        contents, logprobs = self._contents, self._prompt_logprobs.get(index)
        prompt = contents.prompts[index]
        return PromptEchoed(
            choice,
            prompt,
            _cut(logprobs, contents.echo_logprobs),
            _cut(logprobs, contents.prompt_logprobs),
            prompt.token_ids if contents.with_token_ids else None,
        )

    def check_finished(self) -> None:
        """Raise EngineGenerateError if the streams ended before every choice did."""
        if not self.is_finished:
            raise EngineGenerateError("the stream of outputs ended without a finish reason")

    def _event(self, index: int, completion: CompletionOutput) -> TextDelta | ChoiceFinished | None:
        # What belongs to tokens whose text is held back waits for the next event: none of it may be lost.
        num_tokens = len(completion.token_ids) + self._num_held.pop(index, 0)
        logprobs = completion.logprobs
        if index in self._held_logprobs:
            logprobs = self._held_logprobs.pop(index) + (logprobs or [])
        token_ids = None
        if self._contents.with_token_ids:
            token_ids = self._held_token_ids.pop(index, []) + completion.token_ids
        if completion.finish_reason is not None:
            self._finished.add(index)
            reasons = completion.finish_reason, completion.stop_reason
            versions = completion.weight_versions or [] if self._contents.with_weight_versions else None
            return ChoiceFinished(index, completion.text, logprobs, *reasons, token_ids, num_tokens, versions)
        if completion.text:
            return TextDelta(index, completion.text, logprobs, token_ids, num_tokens)
        if num_tokens:
            self._num_held[index] = num_tokens
        if logprobs:
            self._held_logprobs[index] = logprobs
        if token_ids:
            self._held_token_ids[index] = token_ids
        return None


def _cut(logprobs: list[TokenLogprobs | None] | None, num_top: int | None) -> list[TokenLogprobs | None] | None:
    """With at most so many alternatives, since two fields may ask for different numbers. None: without any entry."""
    if logprobs is None or num_top is None:
        return None
    return [one and TokenLogprobs(one.sampled, one.top[:num_top]) for one in logprobs]


def _without_answer(completion: CompletionOutput) -> CompletionOutput:
    """The end alone. It is `length`, whatever the one token was that had to be generated."""
    reason: FinishReason | None = (
        "length" if completion.finish_reason in ("stop", "length") else completion.finish_reason
    )
    return CompletionOutput(completion.index, "", [], None if completion.logprobs is None else [], reason)


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    token_ids: list[int] | None = None
    prompt: PromptEchoed | None = None
    weight_versions: list[WeightVersionSpan] | None = None


def whole_choices(events: Iterable[Event]) -> list[Choice]:
    """The finished choices among these events, ordered by index."""
    parts: dict[int, _Parts] = {}
    choices: list[Choice] = []
    for event in events:
        if isinstance(event, ChoiceStarted):
            continue
        part = parts.setdefault(event.index, _Parts())
        if isinstance(event, PromptEchoed):
            part.prompt = event
            part.text.append(event.prompt.text)
            continue
        part.text.append(event.text)
        if event.token_ids is not None:
            part.token_ids = [*(part.token_ids or []), *event.token_ids]
        if event.logprobs is not None:
            part.logprobs = [*(part.logprobs or []), *event.logprobs]
        if isinstance(event, ChoiceFinished):
            choices.append(
                Choice(
                    event.index,
                    "".join(part.text),
                    part.logprobs,
                    event.finish_reason,
                    event.stop_reason,
                    part.token_ids,
                    part.prompt,
                    event.weight_versions,
                )
            )
    return sorted(choices, key=lambda choice: choice.index)
