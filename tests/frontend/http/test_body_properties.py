"""Whatever stands in a body, reading it gives a request or an InvalidRequestError, and the error can be sent."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.json_body import parse_json_object
from trio_llm.frontend.http.openai.body import parse_body
from trio_llm.frontend.http.openai.chat import ChatRequest, chat_params
from trio_llm.frontend.http.openai.completions import (
    CompletionRequest,
    completion_params,
)
from trio_llm.frontend.http.openai.pooling import (
    PoolingRequest,
    ScoreRequest,
    pair_up,
    pooling_params,
    score_params,
)
from trio_llm.frontend.http.openai.prompts import parse_prompts
from trio_llm.frontend.http.server.errors import reply_for
from trio_llm.frontend.rendering.messages import plain_messages

FIELDS = sorted(
    {"n", "tools", "echo", "logit_bias", "dimensions"}.union(
        *(model.model_fields for model in (ChatRequest, CompletionRequest, PoolingRequest, ScoreRequest))
    )
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "text", "\ud800", "\x00", "", 2**63, -1, 0, 1])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage"]), inner, max_size=3)
    ),
    max_leaves=6,
)
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": "Hi",
    "text_1": "Hi",
    "text_2": "Ho",
}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).map(lambda fields: {**GOOD, **fields})


def read(body: bytes) -> None:
    fields = parse_json_object(body, "application/json")
    chat = parse_body(ChatRequest, fields)
    chat_params(chat, {})
    plain_messages(chat.messages)
    completion = parse_body(CompletionRequest, fields)
    completion_params(completion, {})
    parse_prompts(completion.prompt, name="prompt", most=1024, max_model_len=100)
    del fields["messages"]
    pooling = parse_body(PoolingRequest, fields)
    pooling_params(pooling, ("embed",))
    parse_prompts(pooling.input, name="input", most=1024, max_model_len=100)
    score = parse_body(ScoreRequest, fields)
    score_params(score)
    pair_up(score)


def check(body: bytes) -> None:
    try:
        read(body)
    except InvalidRequestError as error:
        reply = reply_for(error)
        assert reply.status == 400
        sent = json.loads(reply.body)["error"]
        assert sent["message"]
        assert sent["param"] is None or isinstance(sent["param"], str)


def test_the_good_body_is_read() -> None:
    read(json.dumps(GOOD).encode())


@settings(max_examples=300, deadline=None)
@given(BODIES)
def test_any_fields_are_read_or_refused(fields: dict[str, Any]) -> None:
    check(json.dumps(fields).encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789eE.-+ntfalsu\\ud', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    check(body)
