"""OutputProcessor: however the engine's tokens are cut into rows, the request gets the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_llm.errors import EngineGenerateError
from trio_llm.frontend.requests.output.lifecycle import RequestStatus
from trio_llm.frontend.requests.output.output_processor import OutputGap, OutputProcessor, ProcessedRow
from trio_llm.frontend.text.detokenizer import TokenTable
from trio_llm.outputs import RequestOutput
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import RequestOutputKind, SamplingParams
from trio_llm.wire.messages import EngineCoreOutput, EngineCoreRequest, LogprobRow

EOS = 256
WIDTH = 258


def no_decoding(token_ids: list[int], skip_special_tokens: bool) -> str:
    raise AssertionError("a byte table needs no decoding")


# Id 0 to 255 is that byte; 256 is the end; 257 is an id that the tokenizer does not know.
TABLE = TokenTable(
    bytes_by_id=[*(bytes([b]) for b in range(256)), b"<end>", b""],
    special_ids=frozenset({EOS}),
    scheme="bytes",
    decode=no_decoding,
    logits_width=WIDTH,
)


class Case:
    """One processor with one request, fed rows of our choice."""

    def __init__(self, **params: Any) -> None:
        self.processor = OutputProcessor(TABLE)
        request = EngineCoreRequest("x-1", [104], SamplingParams(max_tokens=1000, seed=1, **params))
        self.state = self.processor.make_state(request, "x")
        self.state.mark_sent()
        self.num_fed = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.num_logprobs = 0
        self.last: RequestOutput | None = None

    def row(self, token_ids: list[int], **fields: Any) -> ProcessedRow | None:
        logprobs = None
        if self.state.request.params.logprobs is not None:
            count = 1 + min(1, self.state.request.params.logprobs)
            logprobs = [LogprobRow([t, 1][:count], [-0.5, -1.0][:count], 1) for t in token_ids]
        start = fields.pop("start", self.num_fed)
        row = EngineCoreOutput("x-1", start, token_ids, logprobs, **fields)
        self.num_fed += len(token_ids)
        processed = self.processor.process(self.state, row)
        if processed is not None and processed.output is not None:
            (choice,) = processed.output.outputs
            self.text += choice.text
            self.token_ids += choice.token_ids
            self.num_logprobs += len(choice.logprobs or ())
            self.last = processed.output
        return processed


def cuts(data: Any, token_ids: list[int]) -> list[list[int]]:
    """The ids in pieces of any size."""
    pieces = []
    while token_ids:
        size = data.draw(st.integers(1, len(token_ids)))
        pieces.append(token_ids[:size])
        token_ids = token_ids[size:]
    return pieces


@given(data=st.data(), text=st.text(max_size=30), stop=st.lists(st.text("ab🌶", min_size=1, max_size=3), max_size=2))
def test_how_tokens_are_cut_into_rows_does_not_change_the_answer(data: Any, text: str, stop: list[str]) -> None:
    token_ids = [*(text + "ab🌶").encode(), EOS]

    def run(pieces: list[list[int]]) -> tuple[Any, ...]:
        case = Case(stop=tuple(stop), logprobs=1)
        for piece in pieces:
            case.row(piece, finish_reason="stop" if piece[-1] == EOS else None)
            if case.last is not None and case.last.finished:
                break
        assert case.last is not None
        choice = case.last.outputs[0]
        return case.text, case.token_ids, case.num_logprobs, choice.finish_reason, choice.stop_reason

    one_by_one = run([[token_id] for token_id in token_ids])

    assert run(cuts(data, token_ids)) == one_by_one
    assert one_by_one[2] == len(one_by_one[1])


def test_a_stop_string_ends_the_request_and_asks_for_an_abort() -> None:
    case = Case(stop=("b",))

    processed = case.row(list(b"abc"))

    assert processed is not None
    assert processed.must_abort
    assert processed.finish_reason == "stop"
    assert case.last is not None
    choice = case.last.outputs[0]
    assert (case.text, case.token_ids, choice.finish_reason, choice.stop_reason) == ("a", list(b"ab"), "stop", "b")


def test_rows_after_a_stop_string_are_dropped_until_the_engines_last_one() -> None:
    case = Case(stop=("b",))
    case.row(list(b"ab"))

    assert case.row(list(b"c")) is None
    last = case.row([], finish_reason="abort")

    assert last is not None
    assert (last.is_gone, last.output, last.finish_reason) == (True, None, None)
    assert case.state.status is RequestStatus.GONE


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    case = Case(stop=("a",), min_tokens=3)

    case.row(list(b"aaab"))

    assert case.text == "aa"
    assert case.token_ids == list(b"aaa")


def test_the_token_that_ended_the_answer_is_no_text() -> None:
    case = Case(skip_special_tokens=False)

    case.row([*b"hi", EOS], finish_reason="stop")

    assert case.text == "hi"
    assert case.token_ids == [*b"hi", EOS]


def test_the_token_that_ended_the_answer_is_text_when_stops_are_asked_for() -> None:
    case = Case(skip_special_tokens=False, include_stop_str_in_output=True)

    case.row([*b"hi", EOS], finish_reason="stop")

    assert case.text == "hi<end>"


def test_an_unfinished_character_shows_as_one_replacement_at_the_end() -> None:
    case = Case()

    case.row(list("🌶".encode())[:2], finish_reason="length")

    assert case.text == "\N{REPLACEMENT CHARACTER}"


def test_repeated_tokens_are_dropped() -> None:
    case = Case()
    case.row(list(b"ab"))

    case.row(list(b"bc"), start=1)

    assert (case.text, case.token_ids) == ("abc", list(b"abc"))


def test_a_missing_row_is_the_engines_fault() -> None:
    case = Case()
    case.row(list(b"a"))

    for finish_reason in (None, "length"):
        with pytest.raises(OutputGap):
            case.row(list(b"c"), start=2, finish_reason=finish_reason)
    assert case.state.status is RequestStatus.SENT, "its reader waits"


@pytest.mark.parametrize("token_id", [-1, WIDTH, 2**63])
def test_an_id_the_model_cannot_emit_fails_its_request(token_id: int) -> None:
    case = Case()

    processed = case.row([97, token_id])

    assert processed is not None
    assert isinstance(processed.error, EngineGenerateError)
    assert str(token_id) in str(processed.error)
    assert processed.must_abort
    assert case.row([98], start=2) is None


def test_an_error_of_our_own_fails_its_request_and_keeps_its_cause() -> None:
    case = Case()
    case.state.detokenizer = BrokenDetokenizer()

    processed = case.row([97])

    assert processed is not None
    assert isinstance(processed.error, EngineGenerateError)
    assert isinstance(processed.error.__cause__, ZeroDivisionError)
    assert processed.must_abort


class BrokenDetokenizer:
    def feed(self, token_ids: Sequence[int]) -> str:
        raise ZeroDivisionError

    def finish(self) -> str:
        raise ZeroDivisionError


def test_an_id_that_only_the_tokenizer_does_not_know_is_no_text() -> None:
    case = Case()

    case.row([97, 257, 98])

    assert case.text == "ab"


def test_missing_logprobs_fail_the_request() -> None:
    case = Case(logprobs=1)

    processed = case.processor.process(case.state, EngineCoreOutput("x-1", 0, [97]))

    assert processed is not None
    assert isinstance(processed.error, EngineGenerateError)


def entries(count: int) -> list[LogprobRow]:
    return [LogprobRow([97, 1], [-0.5, -1.0], 1) for _ in range(count)]


MISFITS: dict[str, tuple[dict[str, Any], EngineCoreOutput, str]] = {
    "more log-probabilities than tokens": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], entries(2)),
        "for 2 of 1 tokens",
    ),
    "fewer": ({"logprobs": 1}, EngineCoreOutput("x-1", 0, [97, 98], entries(1)), "for 1 of 2 tokens"),
    "log-probabilities without tokens": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [], entries(1), finish_reason="length"),
        "for 1 of 0 tokens",
    ),
    "an entry with fewer numbers than ids": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([97, 1], [-0.5], 1)]),
        "1 log-probabilities for 2 token ids",
    ),
    "an entry without a token": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([], [], 1)]),
        "0 log-probabilities for 0 token ids",
    ),
    "more of the prompt than it has": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [], prompt_logprobs=entries(3), prompt_logprobs_start=1),
        "prompt tokens 1 to 4, but the prompt has 3",
    ),
    "of the prompt before its begin": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [], prompt_logprobs=entries(1), prompt_logprobs_start=-1),
        "prompt tokens -1 to 0",
    ),
    "of the prompt beside tokens": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [97], prompt_logprobs=entries(2), prompt_logprobs_start=1),
        "together with tokens",
    ),
    "of the prompt beside the end": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [], prompt_logprobs=entries(2), prompt_logprobs_start=1, finish_reason="length"),
        "together with tokens or an end",
    ),
    "too few of the prompt before the first token": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [97]),
        "for 1 of 3 prompt tokens",
    ),
    "a start before the first token": ({}, EngineCoreOutput("x-1", -1, [97]), "starts at -1"),
    "an answer's end in a request that is no session": (
        {},
        EngineCoreOutput("x-1", 0, [97], finish_reason="length", goes_on=True),
        "no session",
    ),
    "tokens for a vector": (
        {"pooling": True},
        EngineCoreOutput("x-1", 0, [97]),
        "1 tokens to a request for a vector",
    ),
    "log-probabilities of another token than the one that is sampled": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([98, 97], [-0.5, -1.0], 1)]),
        "of token 98 for token 97",
    ),
    "those of the second token": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97, 98], [LogprobRow([97], [-0.5], 1), LogprobRow([97], [-0.5], 1)]),
        "of token 97 for token 98",
    ),
    "a log-probability that is no number": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([97, 98], [-0.5, float("nan")], 1)]),
        "nan as a log-probability",
    ),
    "a positive log-probability": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([97, 98], [0.5, -1.0], 1)]),
        "0.5 as a log-probability",
    ),
    "a rank of 0": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([97], [-0.5], 0)]),
        "the rank 0",
    ),
    "more alternatives than asked for": (
        {"logprobs": 1},
        EngineCoreOutput("x-1", 0, [97], [LogprobRow([97, 98, 99], [-0.5, -1.0, -2.0], 1)]),
        "2 alternatives to token 97, and 1 were asked for",
    ),
    "log-probabilities of another token than the prompt's": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [], prompt_logprobs=[LogprobRow([106], [-0.5], 1)], prompt_logprobs_start=1),
        "of token 106 for token 105",
    ),
    "no number for the prompt": (
        {"prompt_logprobs": 0},
        EngineCoreOutput("x-1", 0, [], prompt_logprobs=[LogprobRow([106], [float("nan")], 1)], prompt_logprobs_start=2),
        "nan as a log-probability",
    ),
    "fewer cached tokens than none": (
        {},
        EngineCoreOutput("x-1", 0, [97], num_cached_tokens=-1),
        "-1 cached tokens of a prompt of 3",
    ),
    "more cached tokens than the prompt has": (
        {},
        EngineCoreOutput("x-1", 0, [97], num_cached_tokens=4),
        "4 cached tokens of a prompt of 3",
    ),
    "a vector for a text": ({}, EngineCoreOutput("x-1", 0, [97], pooled=b"1234"), "a vector to a request for text"),
    "more tokens than max_tokens": (
        {},
        EngineCoreOutput("x-1", 0, [97] * 10, finish_reason="length"),
        "10 tokens and max_tokens is 9",
    ),
    "a vector that is cut": (
        {"pooling": True},
        EngineCoreOutput("x-1", 0, [], finish_reason="stop", pooled=b"123"),
        "without a vector",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_row_whose_parts_do_not_fit_is_its_requests_error(misfit: str) -> None:
    fields, row, text = MISFITS[misfit]
    pooling = PoolingParams() if fields.get("pooling") else None
    processor = OutputProcessor(TABLE)
    own = {name: value for name, value in fields.items() if name != "pooling"}
    params = SamplingParams(max_tokens=9, seed=1, **own)
    state = processor.make_state(EngineCoreRequest("x-1", [104, 105, 106], params, pooling_params=pooling), "x")
    state.mark_sent()

    processed = processor.process(state, row)

    assert processed is not None
    assert isinstance(processed.error, EngineGenerateError)
    assert text in str(processed.error)
    is_over = row.finish_reason is not None and not row.goes_on
    assert (processed.is_gone, processed.must_abort) == (is_over, not is_over)
    assert state.status is (RequestStatus.GONE if is_over else RequestStatus.ABORTING)


def test_what_is_just_true_is_no_error() -> None:
    params = SamplingParams(max_tokens=2, seed=1, logprobs=1)
    processor = OutputProcessor(TABLE)
    state = processor.make_state(EngineCoreRequest("x-1", [104, 105, 106], params), "x")
    state.mark_sent()
    rows = [LogprobRow([97, 98], [0.0, float("-inf")], 1), LogprobRow([98], [-1e9], 258)]

    processed = processor.process(state, EngineCoreOutput("x-1", 0, [97, 98], rows, "length", num_cached_tokens=3))

    assert processed is not None
    assert (processed.error, processed.num_new_tokens) == (None, 2)


def test_the_end_of_a_plain_answer_shows_that_there_were_more_tokens_than_max_tokens() -> None:
    processor = OutputProcessor(TABLE)
    state = processor.make_state(EngineCoreRequest("x-1", [104], SamplingParams(max_tokens=3, seed=1)), "x")
    state.mark_sent()
    processor.process(state, EngineCoreOutput("x-1", 0, [97]))
    for start in (1, 2):
        assert processor.process_delta(state, EngineCoreOutput("x-1", start, [97])) is not None

    processed = processor.process(state, EngineCoreOutput("x-1", 3, [97], finish_reason="length"))

    assert processed is not None
    assert "4 tokens and max_tokens is 3" in str(processed.error)


@pytest.mark.parametrize("fields", [{}, {"finish_reason": "length", "goes_on": True}], ids=["tokens", "another end"])
def test_tokens_for_a_session_that_waits_for_its_input_are_its_error(fields: dict[str, Any]) -> None:
    processor = OutputProcessor(TABLE)
    params = SamplingParams(max_tokens=9, seed=1)
    state = processor.make_state(EngineCoreRequest("x-1", [], params, resumable=True), "x")
    processor.begin_answer(state, EngineCoreRequest("x-1", [104], params), [104], num_input_tokens=1)
    state.mark_sent()
    processor.process(state, EngineCoreOutput("x-1", 0, [97], finish_reason="length", goes_on=True))

    processed = processor.process(state, EngineCoreOutput("x-1", 1, [98], **fields))

    assert processed is not None
    assert "waits for its next input" in str(processed.error)
    assert processed.must_abort


def test_an_error_row_is_the_requests_error() -> None:
    processed = Case().row([], finish_reason="error", error="NaN in the logits")

    assert processed is not None
    assert str(processed.error) == "NaN in the logits"
    assert processed.is_gone
    assert not processed.must_abort


def test_cumulative_outputs_hold_everything_so_far() -> None:
    case = Case(output_kind=RequestOutputKind.CUMULATIVE, logprobs=0)
    case.row(list(b"ab"))
    case.row(list(b"c"), finish_reason="length")

    assert case.last is not None
    choice = case.last.outputs[0]
    assert (choice.text, choice.token_ids, len(choice.logprobs or ())) == ("abc", list(b"abc"), 3)


def test_final_only_gives_one_output() -> None:
    case = Case(output_kind=RequestOutputKind.FINAL_ONLY)

    first = case.row(list(b"ab"))
    case.row(list(b"c"), finish_reason="length")

    assert first is not None
    assert first.output is None
    assert case.text == "abc"


def test_a_request_aborted_on_demand_ends_with_what_was_held_back() -> None:
    case = Case(stop=("abc",))
    case.row(list(b"xab"))

    output = case.processor.finish(case.state)

    assert output is not None
    assert case.text + output.outputs[0].text == "xab"
    assert output.outputs[0].finish_reason == "abort"
    assert output.finished


@pytest.mark.parametrize("status", [RequestStatus.UNSENT, RequestStatus.EXPIRED, RequestStatus.GONE])
def test_rows_of_requests_that_the_engine_does_not_have_are_dropped(status: RequestStatus) -> None:
    case = Case()
    match status:
        case RequestStatus.UNSENT:
            case.state.move(RequestStatus.UNSENT)
            case.state.num_tokens_when_sent = None
        case RequestStatus.EXPIRED:
            case.state.mark_expired()
        case RequestStatus.GONE:
            case.state.move(RequestStatus.GONE)

    assert case.row([97], finish_reason="length") is None
    assert (case.state.status, case.state.num_tokens) == (status, 0)


# ---------------------------------------------------------------------------------------- the short way

ODDITIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a stop string": {"stop": ("b",)},
    "log-probabilities": {"logprobs": 0},
    "of the prompt": {"prompt_logprobs": 0},
    "all at the end": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "all so far": {"output_kind": RequestOutputKind.CUMULATIVE},
}


@given(data=st.data(), token_ids=st.lists(st.integers(0, WIDTH + 1), min_size=1, max_size=12))
@pytest.mark.parametrize("oddity", ODDITIES)
def test_the_short_way_of_a_row_gives_what_the_long_one_gives_or_leaves_the_row_alone(
    oddity: str, data: Any, token_ids: list[int]
) -> None:
    short, long = Case(**ODDITIES[oddity]), Case(**ODDITIES[oddity])
    start = 0
    for piece in cuts(data, token_ids):
        logprobs = [LogprobRow([t, 1], [-0.5, -1.0], 1) for t in piece] if oddity == "log-probabilities" else None
        row = EngineCoreOutput("x-1", start, piece, logprobs, "length" if data.draw(st.booleans()) else None)
        start += len(piece)
        plain, expected = short.processor.process_delta(short.state, row), long.processor.process(long.state, row)
        if plain is None:
            processed = short.processor.process(short.state, row)
            assert str(processed and processed.output) == str(expected and expected.output)
            assert str(processed and processed.error) == str(expected and expected.error)
        else:
            assert oddity == "nothing"
            assert expected is not None
            assert plain == expected.output
            assert expected.finish_reason is None
            assert expected.error is None
        assert (short.state.num_tokens, short.state.token_ids) == (long.state.num_tokens, long.state.token_ids)


def test_nearly_every_row_goes_the_short_way() -> None:
    case = Case()
    ways = [case.processor.process_delta(case.state, EngineCoreOutput("x-1", 0, [97]))]
    case.row([97])
    ways += [case.processor.process_delta(case.state, EngineCoreOutput("x-1", i, [97])) for i in range(1, 5)]

    assert [way is not None for way in ways] == [False, True, True, True, True]


@pytest.mark.parametrize("why", ["aborting", "a gap", "a repeat", "idle", "suspected", "nothing new"])
def test_a_row_that_is_not_quite_usual_goes_the_long_way(why: str) -> None:
    case = Case()
    case.row([97])
    start = 1
    match why:
        case "aborting":
            case.state.move(RequestStatus.ABORTING)
        case "a gap":
            start = 2
        case "a repeat":
            start = 0
        case "idle":
            case.state.move(RequestStatus.IDLE)
        case "suspected":
            case.state.num_deaths = 1

    token_ids = [] if why == "nothing new" else [97]
    assert case.processor.process_delta(case.state, EngineCoreOutput("x-1", start, token_ids)) is None
    assert case.state.num_tokens == 1
