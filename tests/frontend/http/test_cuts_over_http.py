"""How the engine's tokens are grouped does not change what an HTTP client gets, streamed or whole.

All of the front end is real, from the routes to the output handler; the engine is a script that says the same tokens
in other groups each time, in messages that come alone or together, so that unread outputs are merged, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from tests.support.exchange import Post
from tests.support.scripted_core import ScriptedCore
from trio_llm.config import EngineConfig
from trio_llm.frontend.open_llm import open_llm_over
from trio_llm.outputs import FinishReason
from trio_llm.testing.answers import END, LOGITS_WIDTH, MODEL_DIR
from trio_llm.wire.codec import decode_from_engine, encode
from trio_llm.wire.messages import (
    Abort,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LogprobRow,
    ModelConfig,
    Ready,
    ToEngine,
)

MODEL = ModelConfig(
    model_dir=str(MODEL_DIR),
    max_model_len=500,
    logits_width=LOGITS_WIDTH,
    num_blocks=100,
    block_size=32,
    dtype="float32",
    device="cpu",
    eos_token_ids=(END,),
    tasks=("generate",),
    versions={},
)
SEED = 7
STOP_TOKEN = ord("!")
NUM_CACHED = 2
TOKEN_IDS = [*b"aabbc", *"é€".encode(), 0xFF, 257, 258]


@dataclass(frozen=True)
class Cuts:
    """Sizes of groups, over and over, and whether a message waits until all before it is read."""

    sizes: tuple[int, ...] = (1,)
    pauses: tuple[bool, ...] = (True,)


class CuttingCore(ScriptedCore):
    """An engine that answers choice i of a request with `scripts[i]`."""

    def __init__(self, scripts: list[list[int]]) -> None:
        super().__init__()
        self._scripts = scripts
        self._step = 0
        self._running: dict[str, Iterator[EngineCoreOutput]] = {}
        self._has_requests = trio.Event()
        self._sizes = cycle((1,))
        self._pauses = cycle((True,))
        self.say(Ready(1, MODEL))

    def cut(self, cuts: Cuts) -> None:
        self._sizes, self._pauses = cycle(cuts.sizes), cycle(cuts.pauses)

    def send_nowait(self, message: ToEngine) -> None:
        super().send_nowait(message)
        if isinstance(message, EngineCoreRequest):
            self._running[message.request_id] = self._rows(message)
            self._has_requests.set()
        elif isinstance(message, Abort):
            ended = [request_id for request_id in message.request_ids if self._running.pop(request_id, None)]
            self._say([EngineCoreOutput(request_id, 0, [], finish_reason="abort") for request_id in ended])

    async def run(self) -> None:
        while True:
            await self._has_requests.wait()
            await wait_all_tasks_blocked()  # the reader has sent all its prompts by then
            while self._running:
                rows = [(request_id, next(rows, None)) for request_id, rows in self._running.items()]
                for request_id, row in rows:
                    if row is None:
                        del self._running[request_id]
                self._say([row for _, row in rows if row is not None])
                if next(self._pauses):
                    await wait_all_tasks_blocked()
            self._has_requests = trio.Event()

    def _say(self, rows: list[EngineCoreOutput]) -> None:
        if rows:
            self._step += 1
            self.say(decode_from_engine(encode(EngineCoreOutputs(1, self._step, 0.0, rows))))

    def _rows(self, request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        params = request.params
        assert params.seed is not None
        assert params.max_tokens is not None
        if params.prompt_logprobs is not None:
            scored = [_logprobs(token_id, params.prompt_logprobs) for token_id in request.prompt_token_ids[1:]]
            for start, stop in self._groups(len(scored)):
                yield EngineCoreOutput(
                    request.request_id, 0, [], prompt_logprobs=scored[start:stop], prompt_logprobs_start=start + 1
                )
        script = self._scripts[params.seed - SEED][: params.max_tokens]
        for start, stop in self._groups(len(script)):
            token_ids = script[start:stop]
            yield EngineCoreOutput(
                request.request_id,
                start,
                token_ids,
                None if params.logprobs is None else [_logprobs(one, params.logprobs) for one in token_ids],
                _finish_reason(script[-1]) if stop == len(script) else None,
                STOP_TOKEN if stop == len(script) and script[-1] == STOP_TOKEN else None,
                num_cached_tokens=0 if start else min(NUM_CACHED, len(request.prompt_token_ids)),
            )

    def _groups(self, count: int) -> Iterator[tuple[int, int]]:
        start = 0
        while start < count:
            stop = min(count, start + next(self._sizes))
            yield start, stop
            start = stop


def _finish_reason(last_token_id: int) -> FinishReason:
    return "stop" if last_token_id in (END, STOP_TOKEN) else "length"


def _logprobs(token_id: int, num_top: int) -> LogprobRow:
    """Each token has its own numbers, so that none can stand for another."""
    others = [(token_id + number) % LOGITS_WIDTH for number in range(num_top)]
    return LogprobRow([token_id, *others], [-(token_id + 1.0) - number / 8 for number in range(num_top + 1)], 1)


# ------------------------------------------------------------------------------------- what comes out


def whole(post: Post) -> Any:
    assert post.status == 200, post.body
    answer = json.loads(post.body)
    assert answer.pop("created") > 0
    return answer


def seen_in_whole(answer: Any) -> dict[int, Any]:
    """What a whole answer says of each choice, in the shape of `seen_in_stream`."""
    return {choice["index"]: _told(choice, choice.get("message") or choice) for choice in answer["choices"]}


def seen_in_stream(chunks: list[Any]) -> dict[int, Any]:
    """What the chunks of a stream say of each choice, one after the other."""
    seen: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        new = _told(choice, choice.get("delta") or choice)
        known = seen.setdefault(choice["index"], new)
        assert known is new or known["finish_reason"] is None, "something came after the end"
        if known is not new:
            seen[choice["index"]] = {name: _and(known[name], new[name]) for name in known}
    return seen


def _told(choice: Any, texts: Any) -> dict[str, Any]:
    logprobs = choice["logprobs"] or {}
    return {
        "text": texts.get("content", texts.get("text")),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids") or [],
        **{name: logprobs.get(name, []) for name in ("content", "tokens", "token_logprobs", "top_logprobs")},
        "text_offset": logprobs.get("text_offset", []),
    }


def _and(known: Any, new: Any) -> Any:
    return known + new if isinstance(known, str | list) and new is not None else new


def check_usage(chunks: list[Any], final: Any, *, is_continuous: bool) -> None:
    """The last one is the final one; those before grow towards it and count at least what was shown."""
    *running, last = [chunk.get("usage") for chunk in chunks]
    assert last == final
    assert chunks[-1]["choices"] == []
    if not is_continuous:
        assert running == [None] * len(running)
        return
    num_shown = 0
    for chunk, usage, following in zip(chunks, running, [*running[1:], last], strict=False):
        num_shown += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
        assert num_shown <= usage["completion_tokens"] <= following["completion_tokens"]
        assert usage["prompt_tokens"] <= following["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert {**running[-1]} == final


# --------------------------------------------------------------------------------------- the property


SCRIPTS = st.lists(st.sampled_from(TOKEN_IDS), max_size=12).flatmap(
    lambda ids: st.sampled_from([[*ids, END], [*ids, STOP_TOKEN], [*ids, ord("z")]])
)
CUTS = st.builds(
    Cuts,
    st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple),
    st.lists(st.booleans(), min_size=1, max_size=5).map(tuple),
)
COMMON: dict[str, Any] = {
    "n": st.integers(1, 2),
    "stop": st.sampled_from([None, "b", ["ab", "é"], ["aab", "ba"]]),
    "min_tokens": st.integers(0, 2),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "timeout": st.sampled_from([None, 1000]),  # with one, outputs take another way
}
CHATS = st.fixed_dictionaries({**COMMON, "top_logprobs": st.sampled_from([None, 0, 2])}).map(
    lambda fields: {**fields, "logprobs": fields["top_logprobs"] is not None}
)
COMPLETIONS = st.fixed_dictionaries(
    {
        **COMMON,
        "logprobs": st.sampled_from([None, 0, 2]),
        "echo": st.booleans(),
        "prompt": st.sampled_from(["x", "Once", ["Once", "upon a"]]),
    }
)
REQUESTS = CHATS.map(lambda fields: ("/v1/chat/completions", fields)) | COMPLETIONS.map(
    lambda fields: ("/v1/completions", fields)
)


@settings(max_examples=150, deadline=None)
@given(scripts=st.lists(SCRIPTS, min_size=2, max_size=2), request=REQUESTS, cuts=CUTS, is_continuous=st.booleans())
def test_how_tokens_are_grouped_does_not_change_the_answer(
    scripts: list[list[int]], request: tuple[str, dict[str, Any]], cuts: Cuts, is_continuous: bool
) -> None:
    path, fields = request
    fields = {**fields, "seed": SEED, "temperature": 1, "max_tokens": 13, "request_id": "R"}
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}

    async def main() -> None:
        core = CuttingCore(scripts)
        async with open_llm_over(core, EngineConfig()) as llm:
            token_by_token, grouped = Post(llm, path, **fields), Post(llm, path, **fields)
            streamed = Post(llm, path, **{**fields, "stream": True, "stream_options": options})
            await token_by_token.run()
            core.cut(cuts)
            await grouped.run()
            await streamed.run()
            await llm.wait_idle()

        expected = whole(token_by_token)
        assert whole(grouped) == expected
        assert streamed.events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in streamed.events[:-1]]
        assert seen_in_stream(chunks) == seen_in_whole(expected)
        check_usage(chunks, expected["usage"], is_continuous=is_continuous)
        for seen in seen_in_whole(expected).values():
            if path == "/v1/chat/completions" and fields["logprobs"] and fields["return_token_ids"]:
                assert len(seen["content"]) == len(seen["token_ids"])

    trio.run(main)
