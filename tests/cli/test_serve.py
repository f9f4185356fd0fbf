"""`trio-llm serve` as far as it goes without an engine. The rest is in tests/end_to_end."""

from __future__ import annotations

import io
import socket
from typing import cast

import msgspec
import pytest
import trio
import trio.testing

from trio_llm.cli.banner import banner
from trio_llm.cli.main import run
from trio_llm.cli.serve import _show_start_up
from trio_llm.errors import EngineStartupError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.control.status import EngineStatus
from trio_llm.wire.messages import ModelConfig

MODEL = ModelConfig(
    model_dir="/models/tiny",
    max_model_len=2048,
    logits_width=1000,
    num_blocks=640,
    block_size=32,
    dtype="bfloat16",
    device="cpu",
    eos_token_ids=(2,),
    tasks=("generate",),
    versions={},
)


class LoadingEngine:
    """As much of an AsyncLLM as the display of its start-up looks at; the start-up is a script of moments."""

    def __init__(self, phases: dict[float, str], *, ends_at: float, error: EngineStartupError | None = None) -> None:
        self._phases = phases
        self._ends_at = ends_at
        self._error = error

    @property
    def status(self) -> EngineStatus:
        phase = [phase for began, phase in self._phases.items() if began <= trio.current_time()][-1]
        return EngineStatus(state="loading", phase=phase)

    async def wait_until_ready(self) -> None:
        await trio.sleep_until(self._ends_at)
        if self._error:
            raise self._error


async def show(engine: LoadingEngine) -> list[str]:
    stream = io.StringIO()
    try:
        await _show_start_up(cast(AsyncLLM, engine), stream)
    finally:
        lines = [line.partition(" (")[0] for line in stream.getvalue().splitlines()]
    return lines


async def test_each_phase_of_a_start_up_is_shown_until_it_is_over(autojump_clock: trio.testing.MockClock) -> None:
    now = trio.current_time()
    engine = LoadingEngine({now: "starting", now + 1: "load", now + 5: "warm-up"}, ends_at=now + 6)

    assert await show(engine) == ["starting the engine", "loading the model", "warming up"]
    assert trio.current_time() == pytest.approx(now + 6)


async def test_a_failed_start_up_raises_its_cause(autojump_clock: trio.testing.MockClock) -> None:
    now = trio.current_time()
    engine = LoadingEngine({now: "load"}, ends_at=now + 1, error=EngineStartupError("no weights"))

    with pytest.raises(EngineStartupError, match="no weights"):
        await show(engine)


async def test_the_display_of_a_start_up_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    now = trio.current_time()

    with trio.move_on_after(3) as scope:
        await show(LoadingEngine({now: "load"}, ends_at=now + 1000))

    assert scope.cancelled_caught


def test_a_taken_port_is_one_line_that_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert run(["serve", "--port", str(port)]) == 1

    error = capsys.readouterr().err
    assert error.startswith(f"trio-llm: --port {port} ")
    assert error.count("\n") == 1


def test_the_banner_says_where_what_and_how_much() -> None:
    text = banner(MODEL, name="tiny", urls=["http://127.0.0.1:8000"], elapsed_s=2.04)

    assert "Ready after 2.0 s" in text
    for expected in ("http://127.0.0.1:8000\n", "tiny\n", "bfloat16 on cpu", "2048 tokens"):
        assert expected in text
    assert "20480 tokens: about 10 requests of 2048 tokens" in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in text


def test_a_cache_smaller_than_the_context_holds_one_request_of_its_own_size() -> None:
    model = msgspec.structs.replace(MODEL, num_blocks=10)

    assert "320 tokens: about 1 request of 320 tokens" in banner(model, name="tiny", urls=["http://a"], elapsed_s=0)


@pytest.mark.parametrize(
    ("trained_len", "asked_len", "is_shown"),
    [(8192, None, True), (2048, None, False), (None, None, False), (8192, 2048, False)],
)
def test_a_context_that_was_cut_is_shown_with_both_lengths(
    trained_len: int | None, asked_len: int | None, is_shown: bool
) -> None:
    model = msgspec.structs.replace(MODEL, trained_len=trained_len)

    text = banner(model, name="tiny", urls=["http://a"], elapsed_s=0, asked_len=asked_len)

    [line] = [line for line in text.splitlines() if line.startswith("  context ")]
    assert ("2048 tokens, cut from 8192: the KV cache holds no more" in line) == is_shown
    assert ("--kv-cache-memory" in line) == is_shown
