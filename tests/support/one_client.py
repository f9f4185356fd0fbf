"""take_answers, step: what an engine core has for its one client, where a test has no other."""

from __future__ import annotations

from trio_llm.engine.clients import OWNER, Addressed
from trio_llm.engine.core import EngineCore
from trio_llm.wire.messages import EngineCoreOutputs

__all__ = ["step", "take_answers"]


def take_answers(core: EngineCore) -> list[EngineCoreOutputs]:
    return [_to_owner(addressed) for addressed in core.take_answers()]


def step(core: EngineCore) -> EngineCoreOutputs | None:
    messages = [_to_owner(addressed) for addressed in core.step()]
    assert len(messages) <= 1, "a step has one message for a client"
    return messages[0] if messages else None


def _to_owner(addressed: Addressed) -> EngineCoreOutputs:
    client_index, message = addressed
    assert client_index == OWNER
    assert isinstance(message, EngineCoreOutputs)
    return message
