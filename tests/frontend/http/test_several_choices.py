"""Several choices for a prompt over HTTP: shapes, order, counts and limits, streamed and whole."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.support.fake_client import End, FakeClient, Held, Of, Together
from tests.support.fake_llm import open_fake_llm
from tests.support.http_server import Reply, ask, open_server
from trio_llm.frontend.http.openai.completions import MAX_CHOICES
from trio_llm.sampling import MAX_N

MIXED = (Of(1, "x"), Of(0, "a"), Of(1, End("y", "length")), Of(0, "b"), Of(0, End("", "stop", "!")))
PATHS = ["/v1/chat/completions", "/v1/completions"]


def text_of(choice: dict[str, Any]) -> str:
    text = choice["text"] if "text" in choice else (choice.get("delta") or choice["message"])["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_has_the_choices_in_order_and_counts_the_prompt_once(path: str) -> None:
    client = FakeClient(*MIXED)

    answer = (await ask(client, path, n=2)).json

    assert [(choice["index"], text_of(choice)) for choice in answer["choices"]] == [(0, "ab"), (1, "xy")]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["!", None]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 4)
    assert [asked.params.n for asked in client.asked] == [2], "one request, so that it is one to abort"


async def test_a_stream_of_a_chat_starts_every_choice_first_and_ends_each_once() -> None:
    reply = await ask(FakeClient(*MIXED), PATHS[0], n=2, stream=True, stream_options={"include_usage": True})

    *chunks, usage = reply.chunks
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (5, 4)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(c["index"], c["delta"].get("role")) for c in choices[:2]] == [(0, "assistant"), (1, "assistant")]
    assert [(c["index"], c["delta"]["content"], c["finish_reason"]) for c in choices[2:]] == [
        (1, "x", None),
        (0, "a", None),
        (1, "y", "length"),
        (0, "b", None),
        (0, "", "stop"),
    ]


@pytest.mark.parametrize("path", PATHS)
async def test_continuous_usage_counts_what_was_sent_also_when_outputs_of_choices_were_merged(path: str) -> None:
    """A reader that was away gets both choices in one output, which makes one chunk each."""
    client = FakeClient(Together(Of(0, "ab"), Of(1, "xyz")), Of(0, Held("c")), Of(1, End("!")), Of(0, End("d")))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await ask(client, path, n=2, stream=True, stream_options=options)).chunks

    sent = [
        (text_of(chunk["choices"][0]) if chunk["choices"] else None, chunk["usage"]["completion_tokens"])
        for chunk in chunks
    ]
    starts: list[Any] = [("", 0), ("", 0)] if path == PATHS[0] else []
    assert sent == [*starts, ("ab", 1), ("xyz", 2), ("!", 3), ("d", 5), (None, 5)]


async def test_a_stream_of_completions_numbers_the_choices_over_all_prompts() -> None:
    client = FakeClient(Of(1, End("b")), Of(0, End("a")))
    reply = await ask(client, PATHS[1], prompt=["one", "two"], n=2, stream=True)

    ends = [(c["index"], c["text"], c["finish_reason"]) for chunk in reply.chunks for c in chunk["choices"]]
    assert sorted(ends) == [(0, "a", "stop"), (1, "b", "stop"), (2, "a", "stop"), (3, "b", "stop")]


async def test_whole_completions_of_several_prompts_count_each_prompt_once() -> None:
    client = FakeClient(Of(1, End("b")), Of(0, End("a")))
    answer = (await ask(client, PATHS[1], prompt=["one", "two", "six"], n=2)).json

    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate("ababab"))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (15, 6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [None, 1])
async def test_null_is_one_choice(path: str, n: int | None) -> None:
    client = FakeClient()
    answer = (await ask(client, path, n=n)).json

    assert [choice["index"] for choice in answer["choices"]] == [0]
    assert client.asked[0].params.n == 1


@pytest.mark.parametrize(
    ("num_prompts", "n", "status"),
    [(1, MAX_N, 200), (8, MAX_N, 200), (9, MAX_N, 400), (MAX_CHOICES // 2 + 1, 2, 400), (1, MAX_N + 1, 400)],
)
async def test_the_choices_of_all_prompts_together_have_a_limit(num_prompts: int, n: int, status: int) -> None:
    client = FakeClient(*(Of(index, End("a", "stop")) for index in range(n)))
    reply = await ask(client, PATHS[1], prompt=["x"] * num_prompts, n=n)

    assert reply.status == status
    if status == 200:
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(num_prompts * n))
    else:
        assert reply.error["param"] == "n"
        assert client.asked == []


@pytest.mark.parametrize("path", PATHS)
async def test_best_of_is_refused_whatever_n_is(path: str) -> None:
    reply = await ask(FakeClient(), path, n=2, best_of=3)

    assert (reply.status, reply.error["param"]) == (400, "best_of")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0, 1])
async def test_over_a_real_engine_streamed_and_whole_choices_are_those_of_single_requests(
    path: str, temperature: int
) -> None:
    async with open_fake_llm() as fake, open_server(fake.llm) as server:

        async def call(**fields: Any) -> Reply:
            reply = await server.ask(path, max_tokens=6, temperature=temperature, **fields)
            assert reply.status == 200
            return reply

        alone = [text_of((await call(seed=7 + index)).json["choices"][0]) for index in range(3)]
        whole = (await call(seed=7, n=3)).json
        streamed: defaultdict[int, str] = defaultdict(str)
        ends: list[int] = []
        for chunk in (await call(seed=7, n=3, stream=True)).chunks:
            for choice in chunk["choices"]:
                streamed[choice["index"]] += text_of(choice)
                ends += [choice["index"]] if choice["finish_reason"] else []
        await fake.assert_nothing_is_left()

    assert [text_of(choice) for choice in whole["choices"]] == alone
    assert [streamed[index] for index in range(3)] == alone
    assert sorted(ends) == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 3 * 6
    assert len(set(alone)) == (3 if temperature else 1), json.dumps(alone)
