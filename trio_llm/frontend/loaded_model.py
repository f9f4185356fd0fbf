"""load_model: wait for the engines' model, and load what belongs to it here. Used by `AsyncLLM`, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from trio_llm.errors import EngineStartupError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.input_processor import InputProcessor
from trio_llm.wire.messages import ModelConfig, Progress

__all__ = ["LoadedModel", "describe_model", "load_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model that the engines run, and what belongs to it here."""

    config: ModelConfig
    renderer: Renderer
    input_processor: InputProcessor


async def load_model(
    engines: Sequence[Engine], load_renderer: Callable[[ModelConfig], Awaitable[Renderer]]
) -> LoadedModel | None:
    """Wait for each engine's first `Ready`, then load the tokenizer that belongs to their weights.

    Engines that a supervisor owns are its own to judge: those that are dead are left out.

    Returns:
        None: an engine or the loading failed. Then all engines are ended, and none is started again. Of engines that a
            supervisor owns: all are dead.

    Cancellation: safe.

    Raises:
        EngineStartupError: the tokenizer of engines that a supervisor owns cannot be loaded. They go on.
    """
    owns_engines = engines[0].is_owned
    await _wait_for_all(engines, until_one_is_dead=owns_engines)
    errors = [engine.monitor.dead_error for engine in engines if engine.is_dead]
    if errors and owns_engines:
        _kill_all(engines, str(errors[0]))
    if errors and (owns_engines or len(errors) == len(engines)):
        return None
    for engine in engines:
        engine.monitor.progress = Progress(0, "tokenizer", 0, 0)
    try:
        renderer = await load_renderer(describe_model(engines))
    except EngineStartupError as error:
        if not owns_engines:
            raise
        _kill_all(engines, str(error))
        return None
    model = describe_model(engines)  # as other incarnations describe it, if one died meanwhile
    return LoadedModel(model, renderer, InputProcessor(model))


async def _wait_for_all(engines: Sequence[Engine], *, until_one_is_dead: bool) -> None:
    """Wait until each is ready or dead, or one is dead: others may load for minutes when one has failed already."""

    async def wait(engine: Engine) -> None:
        await engine.wait_settled()
        if engine.is_dead and until_one_is_dead:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(wait, engine)


def describe_model(engines: Sequence[Engine]) -> ModelConfig:
    """The model that they all run, with the shortest of their context lengths: any of them may get a request.

    Each has said once that it is ready.
    """
    models = [engine.model for engine in engines if engine.model is not None]
    shortest = min(model.max_model_len for model in models)
    return msgspec.structs.replace(models[0], max_model_len=shortest)


def _kill_all(engines: Sequence[Engine], reason: str) -> None:
    for engine in engines:
        engine.core.kill(reason, for_good=True)
