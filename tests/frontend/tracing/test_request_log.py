"""RequestLog: a line for each end of a request, and if that is asked for, one for its arrival."""

from __future__ import annotations

import logging
import re

import pytest

from tests.support.asking import ask
from tests.support.fake_llm import open_fake_llm
from trio_llm.errors import EngineGenerateError
from trio_llm.sampling import SamplingParams

SECRET = "my secret"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The requests' logger writes all."""
    caplog.set_level(logging.DEBUG, "trio_llm.requests")
    return caplog


def messages(log: pytest.LogCaptureFixture) -> list[str]:
    """What it wrote, with S for numbers of seconds."""
    own = [record for record in log.records if record.name == "trio_llm.requests"]
    return [re.sub(r"\d+\.\d{3} s", "S", record.getMessage()) for record in own]


async def test_each_request_that_is_over_is_a_line_without_its_prompt(log: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=3, seed=1, stop=(SECRET,))
    async with open_fake_llm() as fake:
        await ask(fake.llm, SECRET, params, request_id="a")
        await ask(fake.llm, SECRET, SamplingParams(max_tokens=2, seed=1, n=2), request_id="b")
        async with fake.llm.generate(SECRET, params, request_id="c"):
            pass
        await fake.llm.encode(SECRET, request_id="d")
        fake.llm.fail_next_row(SECRET)
        with pytest.raises(EngineGenerateError):
            await ask(fake.llm, SECRET, params, request_id="e")
        await fake.llm.wait_idle()

    assert messages(log) == [
        "Finished request a: length, 9 prompt tokens (0 cached), 3 generated tokens, first token after S, S in all",
        "Finished request b: length, length, 9 prompt tokens (0 cached), 4 generated tokens, first token after S, "
        "S in all",
        "Aborted request c: abort, 9 prompt tokens (0 cached), 0 generated tokens, no token, S in all",
        "Finished request d: stop, 9 prompt tokens (0 cached), 0 generated tokens, no token, S in all",
        "Failed request e: EngineGenerateError, 9 prompt tokens (0 cached), 0 generated tokens, no token, S in all",
    ]


async def test_an_arrival_is_a_line_with_the_parameters_if_that_is_asked_for(
    log: pytest.LogCaptureFixture,
) -> None:
    log.set_level(logging.INFO, "trio_llm.requests")
    async with open_fake_llm(engine={"enable_log_requests": True}) as fake:
        params = SamplingParams(max_tokens=3, seed=1, temperature=0.5)
        await ask(fake.llm, SECRET, params, request_id="a", cache_salt="salt")
        await fake.llm.encode(SECRET, request_id="b")
        await fake.llm.wait_idle()

    first, _, second, _ = messages(log)
    assert first == (
        "Received request a: 9 prompt tokens, priority 0, SamplingParams(temperature=0.5, seed=1, max_tokens=3)"
    )
    assert second == "Received request b: 9 prompt tokens, priority 0, PoolingParams()"


@pytest.mark.parametrize(
    ("max_len", "shown"),
    [
        (None, "prompt 'my secret', token ids [109, 121, 32, 115, 101, 99, 114, 101, 116]"),
        (2, "prompt 'my', token ids [109, 121]"),
        (0, "prompt '', token ids []"),
    ],
)
async def test_a_prompt_is_shown_at_level_debug_as_far_as_its_limit(
    max_len: int | None, shown: str, log: pytest.LogCaptureFixture
) -> None:
    async with open_fake_llm(engine={"enable_log_requests": True, "max_log_len": max_len}) as fake:
        await ask(fake.llm, SECRET, SamplingParams(max_tokens=3, seed=1), request_id="a")

    assert f"Request a: {shown}" in messages(log)


async def test_an_id_does_not_break_the_line(log: pytest.LogCaptureFixture) -> None:
    async with open_fake_llm(engine={"enable_log_requests": True}) as fake:
        await ask(fake.llm, SECRET, SamplingParams(max_tokens=1), request_id="a\nFinished request b")

    assert len(messages(log)) == 3
    assert not any("\n" in message for message in messages(log))


async def test_without_a_configured_log_nothing_is_written(caplog: pytest.LogCaptureFixture) -> None:
    async with open_fake_llm(engine={"enable_log_requests": True}) as fake:
        await ask(fake.llm, SECRET, SamplingParams(max_tokens=1))

    assert messages(caplog) == []
