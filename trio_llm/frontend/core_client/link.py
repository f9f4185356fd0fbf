"""OnlyEngineLink: the one engine behind a core client, as the requests see it. Used by `AsyncLLM`."""

from __future__ import annotations

from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.wire.messages import ToEngine

__all__ = ["OnlyEngineLink"]


class OnlyEngineLink:
    """Implements `EngineLink`. The owner sets `is_up`."""

    def __init__(self, core: CoreClient) -> None:
        self._core = core
        self.index = 0
        self.is_up = True

    def send_nowait(self, message: ToEngine) -> None:
        """As `CoreClient.send_nowait`."""
        self._core.send_nowait(message)
