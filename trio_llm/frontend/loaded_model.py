"""load_model: wait for the engines' model, and load what belongs to it here. Used by `AsyncLLM`, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from trio_llm.errors import EngineStartupError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.rendering.renderer import Renderer
from trio_llm.frontend.requests.input_processor import InputProcessor
from trio_llm.wire.messages import ModelConfig, Progress

__all__ = ["LoadedModel", "load_model"]


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

    Returns:
        None: an engine or the loading failed. Then all engines are ended, and none is started again.

    Cancellation: safe.
    """
    for engine in engines:
        await engine.wait_settled()
    if errors := [engine.monitor.dead_error for engine in engines if engine.is_dead]:
        _kill_all(engines, str(errors[0]))
        return None
    for engine in engines:
        engine.monitor.progress = Progress(0, "tokenizer", 0, 0)
    model = engines[0].model
    assert model is not None
    try:
        renderer = await load_renderer(model)
    except EngineStartupError as error:
        _kill_all(engines, str(error))
        return None
    model = engines[0].model  # as another incarnation describes it, if the first one died meanwhile
    assert model is not None
    return LoadedModel(model, renderer, InputProcessor(model))


def _kill_all(engines: Sequence[Engine], reason: str) -> None:
    for engine in engines:
        engine.core.kill(reason, for_good=True)
