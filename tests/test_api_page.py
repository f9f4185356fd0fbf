"""docs/api.md and the code say the same about fields, limits and series."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from trio_llm.errors import InvalidRequestError
from trio_llm.frontend.http.openai.body import Neutral, parse_body
from trio_llm.frontend.http.openai.chat import MAX_TEMPLATE_KWARGS, ChatRequest
from trio_llm.frontend.http.openai.completions import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_PROMPTS,
    CompletionRequest,
)
from trio_llm.frontend.http.openai.fields import NOT_SUPPORTED, CommonFields
from trio_llm.frontend.http.openai.pooling import (
    MAX_INPUTS,
    POOLING_NOT_SUPPORTED,
    EmbeddingRequest,
    PoolingRequest,
    ScoreRequest,
    VectorFields,
)
from trio_llm.frontend.http.openapi import openapi_document
from trio_llm.frontend.rendering.messages import MAX_MESSAGES, MAX_PARTS
from trio_llm.frontend.requests.input_processor import MAX_CACHE_SALT_CHARS, MAX_PROMPT_LOGPROBS
from trio_llm.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)

PAGE: Final = (Path(__file__).parents[1] / "docs" / "api.md").read_text()

CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Hi?"}]}
COMPLETION: Final[dict[str, Any]] = {"prompt": "Hi?"}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def fields(title: str) -> dict[str, str]:
    """Each field of a table, and what is said of it."""
    return {row[0].strip("` "): " ".join(row[1:]) for row in rows(title)}


REFUSED: Final = [
    (row[0].strip("` "), row[1], [json.loads(text) for text in re.findall("`(.*?)`", row[2])])
    for row in rows("Fields that are refused")
]


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Fields of both generating paths", set(CommonFields.model_fields)),
        ("Fields of chat completions", set(ChatRequest.model_fields) - set(CommonFields.model_fields)),
        ("Fields of completions", set(CompletionRequest.model_fields) - set(CommonFields.model_fields)),
    ],
)
def test_the_tables_of_supported_fields_are_the_request_models(title: str, expected: set[str]) -> None:
    assert set(fields(title)) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("both", set(NOT_SUPPORTED)),
        ("chat", set(ChatRequest.not_supported) - set(NOT_SUPPORTED)),
        ("completions", set(CompletionRequest.not_supported) - set(NOT_SUPPORTED)),
    ],
)
def test_the_table_of_refused_fields_is_the_code_s(path: str, expected: set[str]) -> None:
    assert {name for name, where, _ in REFUSED if where == path} == expected


@pytest.mark.parametrize(("name", "where", "accepted"), REFUSED)
def test_a_refused_field_is_accepted_with_the_values_of_the_page_alone(
    name: str, where: str, accepted: list[Any]
) -> None:
    tables: list[Mapping[str, Neutral]] = []
    if where in ("both", "chat"):
        tables.append(ChatRequest.not_supported)
    if where in ("both", "completions"):
        tables.append(CompletionRequest.not_supported)

    for table in tables:
        assert table[name].accepts(None)
        assert all(table[name].accepts(value) for value in accepted)
        others = [True, False, -1, 0, 1, 2, "", "none", "auto", "required", [], ["a"], {}, {"a": 1}, {"type": "text"}]
        for value in others:
            is_listed = any(type(one) is type(value) and one == value for one in accepted)
            assert table[name].accepts(value) == is_listed, value


def test_the_fields_of_vectors_are_those_of_the_request_models() -> None:
    table, refused = section("Fields of embeddings, pooled outputs and scores").split("These fields are refused")
    models: dict[str, type[VectorFields]] = {
        "embeddings": EmbeddingRequest, "pooling": PoolingRequest, "score": ScoreRequest
    }  # fmt: skip
    listed: dict[str, set[str]] = {path: set() for path in models}
    for line in [line for line in table.splitlines() if line.startswith("| `")]:
        names, paths = line.split(" | ")[:2]
        for path in models if paths == "all" else paths.split(", "):
            listed[path] |= set(re.findall("`(.*?)`", names))

    assert listed == {path: set(model.model_fields) for path, model in models.items()}
    assert f"up to {MAX_INPUTS} of such" in table
    assert f"Together up to {MAX_INPUTS}" in table
    accepted = {
        line.split(" | ")[0].strip("| `"): [json.loads(text) for text in re.findall("`(.*?)`", line.split(" | ")[1])]
        for line in refused.splitlines()
        if line.startswith("| `")
    }
    assert set(accepted) == set(POOLING_NOT_SUPPORTED)
    for name, values in accepted.items():
        others: list[Any] = [True, False, -1, 0, 1, "", "native", "little", "float32", "big", [], {}, {"a": 1}]
        for value in [None, *others]:
            is_listed = value is None or any(type(one) is type(value) and one == value for one in values)
            assert POOLING_NOT_SUPPORTED[name].accepts(value) == is_listed, (name, value)


def test_the_limits_of_the_page_are_the_code_s() -> None:
    both, chat = fields("Fields of both generating paths"), fields("Fields of chat completions")
    completions = fields("Fields of completions")

    assert f"up to {MAX_STOP_STRINGS}, of up to {MAX_STOP_STRING_CHARS} characters" in both["stop"]
    assert f"up to {MAX_STOP_TOKEN_IDS} token ids" in both["stop_token_ids"]
    assert f"below {MIN_TEMPERATURE} counts as {MIN_TEMPERATURE}" in both["temperature"]
    assert f"1 to {MAX_ALLOWED_TOKEN_IDS} token ids" in both["allowed_token_ids"]
    assert f"up to {MAX_BAD_WORDS} words, of up to {MAX_BAD_WORD_CHARS} characters" in both["bad_words"]
    assert f"0 to {MAX_LOGPROBS} alternatives" in both["prompt_logprobs"]
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert f"-{MAX_PENALTY} to {MAX_PENALTY}" in both[penalty]
    least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    assert "any finite number above 0;" in both["repetition_penalty"]
    assert f"Below {least} counts as {least}, above {most} as {most}" in both["repetition_penalty"]
    assert f"up to {MAX_LOGIT_BIAS_TOKENS} token ids" in both["logit_bias"]
    assert f"-{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}" in both["logit_bias"]
    assert f"may have {MAX_PROMPT_LOGPROBS} of them" in " ".join(section("Answers").split())
    assert f"1 to {MAX_CACHE_SALT_CHARS} characters" in both["cache_salt"]
    assert f"1 to {MAX_MESSAGES} objects" in chat["messages"]
    assert f"up to {MAX_PARTS} parts" in chat["messages"]
    assert f"0 to {MAX_LOGPROBS} alternatives" in chat["top_logprobs"]
    assert f"0 to {MAX_LOGPROBS} alternatives" in completions["logprobs"]
    assert f"up to {MAX_TEMPLATE_KWARGS} values" in chat["chat_template_kwargs"]
    assert f"1 to {MAX_N} choices, up to {MAX_CHOICES} for all prompts" in both["n"]
    assert f"up to {MAX_PROMPTS} of such" in completions["prompt"]
    assert f"`max_tokens` is {DEFAULT_MAX_TOKENS} here" in section("Fields of completions")


def test_the_ignored_fields_of_the_page_are_ignored() -> None:
    names = re.findall("`([a-z_]+)`", section("Fields that are ignored"))
    assert len(names) > 5
    extra = {name: ["any", "thing"] for name in names}

    assert parse_body(ChatRequest, {**CHAT, **extra}) == parse_body(ChatRequest, CHAT)
    assert parse_body(CompletionRequest, {**COMPLETION, **extra}) == parse_body(CompletionRequest, COMPLETION)


def test_a_field_that_is_refused_names_itself() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatRequest, {**CHAT, "best_of": 2})

    assert caught.value.param == "best_of"


def test_the_paths_of_the_page_are_those_of_the_openapi_document() -> None:
    table = PAGE.split("\n## ")[0]
    listed = {path for _, path in re.findall(r"`(GET|POST) (/[^`]*)`", table)}

    assert listed == {*openapi_document("1")["paths"], "/openapi.json"}
