"""load_model over engines that a supervisor owns: their deaths are the supervisor's to judge."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.frontend.core_client.test_restarting import MODEL
from tests.support.scripted_core import ScriptedCore
from trio_llm.config import EngineConfig
from trio_llm.errors import EngineDeadError, EngineStartupError
from trio_llm.frontend.control.engine import Engine, SupervisedEngine
from trio_llm.frontend.loaded_model import load_model
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.wire.messages import ModelConfig, Ready


async def fail_to_load(model: ModelConfig) -> Renderer:
    await trio.lowlevel.checkpoint()
    raise EngineStartupError("the tokenizer is broken")


def make_engines(engine_type: type[Engine]) -> tuple[list[Engine], list[ScriptedCore]]:
    cores = [ScriptedCore() for _ in range(2)]
    return [engine_type(index, core, EngineConfig()) for index, core in enumerate(cores)], cores


async def test_a_tokenizer_that_cannot_be_loaded_ends_this_front_end_and_no_engine(autojump_clock: MockClock) -> None:
    engines, cores = make_engines(SupervisedEngine)
    engines[0].die(EngineDeadError("dead for good"))
    engines[1].take(Ready(1, MODEL, 1))

    with pytest.raises(EngineStartupError, match="the tokenizer is broken"):
        await load_model(engines, fail_to_load)
    assert [core.kill_reason for core in cores] == [None, None]


async def test_engines_that_are_all_dead_are_killed_no_more(autojump_clock: MockClock) -> None:
    engines, cores = make_engines(SupervisedEngine)
    for engine in engines:
        engine.die(EngineDeadError("dead for good"))

    assert await load_model(engines, fail_to_load) is None
    assert [core.kill_reason for core in cores] == [None, None]


async def test_engines_of_our_own_end_with_the_first_that_cannot_start(autojump_clock: MockClock) -> None:
    engines, cores = make_engines(Engine)
    engines[0].die(EngineDeadError("dead for good"))

    assert await load_model(engines, fail_to_load) is None
    assert all(core.kill_reason == "dead for good" for core in cores)
