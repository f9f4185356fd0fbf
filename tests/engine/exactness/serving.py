"""An engine core driven through the wire's codec, for tests that compare answers and count computed tokens.

Invariants of the scheduler are asserted after every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.support.one_client import step, take_answers
from trio_llm.config import EngineConfig
from trio_llm.engine.core import EngineCore
from trio_llm.engine.executor.base import Executor
from trio_llm.sampling import SamplingParams
from trio_llm.wire.codec import decode_from_engine, decode_to_engine, encode
from trio_llm.wire.messages import (
    Abort,
    Continue,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LogprobRow,
    ToEngine,
)

MAX_STEPS = 20_000
NEAR_TIE = 1e-3
"""Nats between the two likeliest tokens. Below this, adding the same float32 numbers in another order may change which
one wins."""


@dataclass(slots=True)
class Answer:
    """Everything that the engine sent for one request."""

    start: int = 0
    """Tokens that were given with the request."""
    token_ids: list[int] = field(default_factory=list)
    ends: list[tuple[str, int | None]] = field(default_factory=list)
    """Finish and stop reasons: one, or for a session one per answer."""
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens computed, counted only by `serve_alone`."""
    error: str | None = None
    pooled: bytes | None = None

    def take(self, row: EngineCoreOutput) -> None:
        assert self.error is None, "a row after an error"
        assert row.start == self.start + len(self.token_ids), "a gap or a repeat"
        self.token_ids += row.new_token_ids
        self.logprobs += row.logprobs or []
        if row.prompt_logprobs is not None:
            assert row.prompt_logprobs_start == len(self.prompt_logprobs) + 1, "a gap or a repeat in the prompt"
            self.prompt_logprobs += row.prompt_logprobs
        self.num_cached_tokens += row.num_cached_tokens
        self.error, self.pooled = row.error, row.pooled
        if row.finish_reason is not None:
            self.ends.append((row.finish_reason, row.stop_reason))


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the later inputs if it is a session."""

    request: EngineCoreRequest
    inputs: tuple[Continue, ...] = ()

    def renamed(self, request_id: str) -> Case:
        return Case(
            msgspec.structs.replace(self.request, request_id=request_id),
            tuple(msgspec.structs.replace(one, request_id=request_id) for one in self.inputs),
        )


class Serving:
    """An engine of its own over an executor: no request finds what another engine has computed.

    Args:
        settings: of the EngineConfig; blocks are the executor's.
    """

    def __init__(self, executor: Executor, **settings: Any) -> None:
        self.core = EngineCore(
            executor, EngineConfig(credit_steps=10 * MAX_STEPS, **settings), epoch=1, clock=lambda: 0.0
        )
        self.answers: dict[str, Answer] = {}
        self.num_steps = 0
        self._inputs: dict[str, list[Continue]] = {}

    @property
    def num_preempted(self) -> int:
        return self.core.stats.num_preempted

    @property
    def is_empty(self) -> bool:
        """Nothing is left, and all blocks are free."""
        stats = self.core.stats
        return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)

    def send(self, message: ToEngine) -> None:
        """Give the engine a message, through the codec."""
        self.core.handle(decode_to_engine(encode(message)))

    def add(self, case: Case) -> None:
        request = case.request
        self.answers[request.request_id] = Answer(len(request.output_token_ids))
        self._inputs[request.request_id] = list(case.inputs)
        self.send(request)

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests, and run the others to their end."""
        self.send(Abort(request_ids))
        self.run()

    def step(self) -> EngineCoreOutputs | None:
        for answer in take_answers(self.core):
            self.take(answer)
        sealed = step(self.core)
        self.core._scheduler.check()
        self.num_steps += 1
        return None if sealed is None else self.take(sealed)

    def take(self, sealed: EngineCoreOutputs) -> EngineCoreOutputs:
        outputs = decode_from_engine(encode(sealed))
        assert isinstance(outputs, EngineCoreOutputs)
        for row in outputs.outputs:
            self.answers[row.request_id].take(row)
            if row.goes_on and (inputs := self._inputs[row.request_id]):
                self.send(inputs.pop(0))
        return outputs

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if not self.core.is_busy:
                return
            self.step()
        raise AssertionError("the engine is never done")

    def serve(self, cases: Sequence[Case], *, steps_between: int = 0) -> list[Answer]:
        """The answers to cases that come together, or so many steps apart."""
        for case in cases:
            self.add(case)
            for _ in range(steps_between):
                self.step()
        self.run()
        return [self.answers[case.request.request_id] for case in cases]

    def serve_alone(self, case: Case) -> Answer:
        """The answer to one case, with nothing beside it; counts the prompt tokens that were computed."""
        self.add(case)
        answer = self.answers[case.request.request_id]
        while self.core.is_busy:
            outputs = self.step()
            # A step without rows sends nothing, but counts its tokens.
            stats = self.core.stats if outputs is None else outputs.stats
            assert stats is not None
            answer.num_prompt_tokens += stats.num_prompt_tokens
        return answer


def alone(executor: Executor, cases: Sequence[Case], **settings: Any) -> list[Answer]:
    """The reference: what each case gets in an engine of its own, without prefix cache and run-ahead."""
    settings = {"enable_prefix_caching": False, "run_ahead": 0} | settings
    return [Serving(executor, **settings).serve_alone(case) for case in cases]


def assert_same(got: Sequence[Answer], reference: Sequence[Answer], cases: Sequence[Case]) -> None:
    """Tokens, reasons and numbers of log-probabilities are those of the reference.

    Where the reference's log-probabilities show a near tie, the other token may come: it is reported as a warning.
    """
    assert len(got) == len(reference) == len(cases)
    for one, expected, case in zip(got, reference, cases, strict=True):
        name = case.request.request_id
        skipped = one.start - expected.start
        tokens = expected.token_ids[skipped:]
        if (one.token_ids, one.error) != (tokens, expected.error) and _differs_at_a_near_tie(one, expected, case):
            warnings.warn(f"{name}: another token at a near tie", stacklevel=2)
            continue
        assert one.error == expected.error, name
        assert one.token_ids == tokens, f"{name}: {case.request.params}"
        assert one.ends == expected.ends, name
        assert_close(one.logprobs, expected.logprobs[skipped:], name)
        if not skipped:
            assert_close(one.prompt_logprobs, expected.prompt_logprobs, name)


def assert_close(got: list[LogprobRow], expected: list[LogprobRow], name: str) -> None:
    """Compare the log-probabilities of the tokens themselves; alternatives that are nearly equal may change places."""
    assert len(got) == len(expected), name
    for one, other in zip(got, expected, strict=True):
        assert one.token_ids[0] == other.token_ids[0], name
        assert len(one.token_ids) == len(other.token_ids), name
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(a - b) < NEAR_TIE, f"{name}: {a} and {b}"


def _differs_at_a_near_tie(got: Answer, expected: Answer, case: Case) -> bool:
    if case.request.params.temperature > 0 or len(expected.logprobs) != len(expected.token_ids):
        return False
    tokens = expected.token_ids[got.start - expected.start :]
    at = next((i for i, (a, b) in enumerate(zip(got.token_ids, tokens, strict=False)) if a != b), None)
    if at is None:
        return False
    top = expected.logprobs[got.start - expected.start + at].logprobs[1:]
    return len(top) > 1 and top[0] - top[1] < NEAR_TIE


def a_case(request_id: str, prompt: list[int], **fields: Any) -> Case:
    """A request with these fields of SamplingParams, or of the request."""
    of_request = {name: fields.pop(name) for name in list(fields) if name in EngineCoreRequest.__struct_fields__}
    params = SamplingParams(**{"seed": 0, "max_tokens": 16, **fields})
    return Case(EngineCoreRequest(request_id, prompt, params, **of_request))
