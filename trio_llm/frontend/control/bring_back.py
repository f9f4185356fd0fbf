"""bring_back: undo, on one engine, what a call has changed that others could not carry out. Used by `EngineControl`."""

from __future__ import annotations

import logging

from trio_llm.errors import EngineDeadError, EngineUnavailableError, TrioLLMError
from trio_llm.frontend.control.engine import Engine
from trio_llm.frontend.control.state import ControlState

__all__ = ["bring_back"]

logger = logging.getLogger(__name__)


async def bring_back(engine: Engine, state: ControlState) -> None:
    """Bring an engine back to a state. If that fails, it is killed: its next incarnation is brought there.

    Cancellation: the engine is somewhere between both states.
    """
    changed, engine.control_state = engine.control_state, state
    if not engine.is_up or changed == state:
        return
    assert engine.model is not None
    calls = state.calls_from(changed, first_weights=engine.model.model_dir)
    engine.num_control_calls += 1
    try:
        for method, args in calls:
            await engine.utilities.call(method, *args, max_deaths=1)
        logger.warning("engine %d is %s again", engine.rank, state.describe())
    except (EngineUnavailableError, EngineDeadError):
        pass  # it has died
    except TrioLLMError as error:
        engine.kill(f"it could not be brought back to where the other engines are: {error}")
    finally:
        engine.num_control_calls -= 1
