"""Several choices for one prompt, in the in-memory engine: each is what a request of its own gets; all end together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.support.fake_llm import FakeSetUp, open_fake_llm
from tests.support.stat_loggers import RecordingStatLogger
from trio_llm.errors import CodecError, EngineDeadError, EngineGenerateError, InvalidRequestError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import Abort, EngineCoreRequest, ToEngine

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
HELLO = list(b"hello")


def params(n: int, max_tokens: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, **{"seed": 1, **fields})  # type: ignore[arg-type]


@dataclass
class Whole:
    """All of one choice, as its reader puts it together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def take(self, choice: CompletionOutput, kind: RequestOutputKind) -> None:
        assert self.finish_reason is None, "something came after the end of a choice"
        if kind is not DELTA:
            assert choice.text.startswith(self.text)
            self.text, self.token_ids, self.logprobs = "", [], []
        self.text += choice.text
        self.token_ids += choice.token_ids
        self.logprobs += choice.logprobs or []
        self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason


async def read(llm: AsyncLLM, asked: SamplingParams, *, pauses: Sequence[int] = (0,)) -> dict[int, Whole]:
    """The choices; between two outputs the reader lets others have so many turns."""
    wholes: dict[int, Whole] = {}
    outputs: list[RequestOutput] = []
    async with llm.generate(HELLO, asked) as stream:
        async for output in stream:
            indexes = [choice.index for choice in output.outputs]
            assert indexes == sorted(set(indexes))
            for choice in output.outputs:
                wholes.setdefault(choice.index, Whole()).take(choice, asked.output_kind)
            for _ in range(pauses[len(outputs) % len(pauses)]):
                await trio.lowlevel.checkpoint()
            outputs.append(output)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if asked.output_kind is FINAL_ONLY:
        assert len(outputs) == 1
    return wholes


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6),
    seed=st.sampled_from([0, -5, 2**63 - 2]),
    temperature=st.sampled_from([0.0, 0.7]),
    kind=st.sampled_from(RequestOutputKind),
    stop=st.sampled_from([(), ("a", "b", "c", "d", "e", "f", "g"), ("never found",)]),
    logprobs=st.sampled_from([None, 1]),
    num_blocks=st.sampled_from([2, 3, 64]),
    pauses=st.lists(st.sampled_from([0, 1, 5, 40]), min_size=1, max_size=5),
)
def test_each_choice_is_what_a_request_of_its_own_with_that_seed_gets(
    n: int,
    seed: int,
    temperature: float,
    kind: RequestOutputKind,
    stop: tuple[str, ...],
    logprobs: int | None,
    num_blocks: int,
    pauses: list[int],
) -> None:
    async def main() -> tuple[dict[int, Whole], dict[int, Whole]]:
        # Few blocks: the engine computes the choices after one another, and preempts some.
        async with open_fake_llm(num_blocks=num_blocks, max_model_len=64) as fake:

            def ask(n: int, seed: int) -> SamplingParams:
                return params(n, 40, seed=seed, temperature=temperature, output_kind=kind, stop=stop, logprobs=logprobs)

            together = await read(fake.llm, ask(n, seed), pauses=pauses)
            await fake.assert_nothing_is_left()
            alone = {}
            for index in range(n):
                own_seed = (seed + index + 2**63) % 2**64 - 2**63
                alone[index] = (await read(fake.llm, ask(1, own_seed)))[0]
            return together, alone

    together, alone = trio.run(main)

    assert together == alone
    if temperature and not stop and n > 1:
        assert together[0].token_ids != together[1].token_ids


async def test_without_a_seed_the_choices_differ() -> None:
    async with open_fake_llm() as fake:
        wholes = await read(fake.llm, params(3, 20, seed=None))

    assert len({tuple(whole.token_ids) for whole in wholes.values()}) == 3


async def test_greedy_choices_are_computed_once(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1) as fake:
        async with fake.llm.generate(HELLO, params(5, temperature=0)) as stream:
            await anext(stream)

            counts = await fake.llm.check_scheduler()

            assert counts["num_running"] == 1
        await fake.assert_nothing_is_left()


# ------------------------------------------------------------------------------------------- ends


async def test_leaving_early_is_one_abort_of_all_children() -> None:
    async with open_fake_llm() as fake:
        sent = record_sent(fake)
        async with fake.llm.generate(HELLO, params(3, 1000)) as stream:
            await anext(stream)

        (abort,) = [message for message in sent if isinstance(message, Abort)]
        assert sorted(abort.request_ids) == sorted(m.request_id for m in sent if isinstance(m, EngineCoreRequest))
        await fake.assert_nothing_is_left()


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_abort_by_the_callers_id_ends_every_choice_and_counts_as_one(
    kind: RequestOutputKind, autojump_clock: MockClock
) -> None:
    async with open_fake_llm(step_s=0.1) as fake:
        sent = record_sent(fake)
        async with fake.llm.generate(HELLO, params(3, 1000, output_kind=kind), request_id="x") as stream:
            await trio.sleep(1)

            assert (fake.llm.abort("x"), fake.llm.abort("x")) == (1, 0)

            ends = [choice for output in [o async for o in stream] for choice in output.outputs]
        assert {choice.index: choice.finish_reason for choice in ends} == {0: "abort", 1: "abort", 2: "abort"}
        assert all(choice.token_ids for choice in ends)
        assert [len(message.request_ids) for message in sent if isinstance(message, Abort)] == [3]
        await fake.assert_nothing_is_left()


async def test_choices_that_are_over_keep_their_reason_when_the_others_are_aborted(autojump_clock: MockClock) -> None:
    # Two blocks: the second choice waits for the first one to end.
    async with open_fake_llm(step_s=0.1, num_blocks=2, max_model_len=64) as fake:
        asked = params(2, 50, output_kind=FINAL_ONLY)
        async with fake.llm.generate(HELLO, asked, request_id="x") as stream:
            await trio.sleep(6)
            assert fake.llm.abort("x") == 1

            (output,) = [output async for output in stream]

        assert [choice.finish_reason for choice in output.outputs] == ["length", "abort"]
        assert len(output.outputs[0].token_ids) == 50
        await fake.assert_nothing_is_left()


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("fault", [{"failing_row_prompt": 7}, {"faulty_token_prompt": 7}])
async def test_the_error_of_a_child_ends_the_request_and_aborts_the_others(
    kind: RequestOutputKind, fault: dict[str, Any]
) -> None:
    recorder = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[recorder], **fault) as fake:
        with pytest.raises(EngineGenerateError):
            async with fake.llm.generate([7], params(3, 1000, output_kind=kind)) as stream:
                async for _ in stream:
                    pass

        await fake.assert_nothing_is_left()
    assert len(recorder.reasons) == 3
    assert "error" in recorder.reasons


async def test_one_child_that_fails_late_takes_the_running_others_with_it(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1) as fake:
        async with fake.llm.generate(HELLO, params(3, 1000)) as stream:
            await anext(stream)
            states = [request.state for request in fake.llm._registry.in_flight.values()]
            states[1].detokenizer = None  # type: ignore[assignment]

            with pytest.raises(EngineGenerateError, match="could not be processed"):
                async for _ in stream:
                    pass

            assert {state.status for state in states} == {RequestStatus.ABORTING}
            await fake.llm.wait_idle()
        await fake.assert_nothing_is_left()


async def test_when_the_engine_dies_the_reader_gets_its_text_and_one_error(autojump_clock: MockClock) -> None:
    async with open_fake_llm(step_s=0.1, fail_at_step=5) as fake:
        taken = dict.fromkeys(range(3), 0)
        with pytest.raises(EngineDeadError):
            async with fake.llm.generate(HELLO, params(3, 100)) as stream:
                async for output in stream:
                    for choice in output.outputs:
                        taken[choice.index] += len(choice.token_ids)

        assert taken == {0: 4, 1: 4, 2: 4}


async def test_a_reader_that_reads_nothing_is_given_up_with_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_llm.frontend.output_handler._MAX_UNREAD_BYTES", 5000)
    async with open_fake_llm() as fake:
        async with fake.llm.generate(HELLO, params(3, 1000)) as stream:
            await fake.llm.wait_idle()

            with pytest.raises(EngineGenerateError, match="not read"):
                async for _ in stream:
                    pass
        await fake.assert_nothing_is_left()


@pytest.mark.parametrize("num_sent", [0, 1, 2])
async def test_a_child_that_cannot_be_encoded_leaves_nothing_of_its_request(
    num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_llm() as fake:
        send, num_requests = fake.core.send_nowait, 0

        def send_some(message: ToEngine) -> None:
            nonlocal num_requests
            if isinstance(message, EngineCoreRequest):
                assert len(fake.llm._registry) == 3, "all are registered before one is sent"
                num_requests += 1
                if num_requests > num_sent:
                    raise CodecError("too odd")
            send(message)

        monkeypatch.setattr(fake.core, "send_nowait", send_some)
        with pytest.raises(InvalidRequestError, match="too odd"):
            await read(fake.llm, params(3, 1000))

        assert len(fake.llm._registry) == 0
        await fake.assert_nothing_is_left()


# ------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(("temperature", "num_computed"), [(1.0, 4), (0.0, 1)])
async def test_every_child_that_is_computed_ends_once_and_the_prompt_counts_once(
    temperature: float, num_computed: int
) -> None:
    recorder = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[recorder]) as fake:
        await read(fake.llm, params(4, 6, temperature=temperature))

    assert recorder.reasons == ["length"] * num_computed
    assert (recorder.num_prompt_tokens, recorder.num_first_tokens) == (len(HELLO), 1)
    assert recorder.num_tokens == 6 * num_computed


async def test_children_that_are_left_end_once_each() -> None:
    recorder = RecordingStatLogger()
    async with open_fake_llm(stat_loggers=[recorder]) as fake:
        async with fake.llm.generate(HELLO, params(3, 1000), request_id="x") as stream:
            await anext(stream)
            fake.llm.abort("x")
        async with fake.llm.generate(HELLO, params(3, 1000)) as stream:
            await anext(stream)
        await fake.assert_nothing_is_left()

    assert recorder.reasons == ["abort"] * 6


def record_sent(fake: FakeSetUp) -> list[ToEngine]:
    """Everything sent to the engine from now on."""
    sent: list[ToEngine] = []
    send = fake.core.send_nowait

    def note(message: ToEngine) -> None:
        sent.append(message)
        send(message)

    fake.core.send_nowait = note  # type: ignore[method-assign]
    return sent
