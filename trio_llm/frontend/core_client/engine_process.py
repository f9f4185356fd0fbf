"""EngineProcess: the process of an engine. Used by the core client."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from trio_llm.frontend.core_client.child_process import ChildProcess
from trio_llm.wire.boot import EngineBoot, encode_boot

__all__ = ["ENGINE_COMMAND", "EngineProcess"]

ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "trio_llm.engine")


class EngineProcess(ChildProcess):
    """A running engine. The end of its standard input is the order to stop.

    Args:
        boot: what the process reads from its pipe first.
        command: the program and its arguments.

    Raises:
        CodecError: the configuration has no form on the wire. Nothing was started.
        OSError: it cannot be started. Nothing is left running.
    """

    def __init__(self, boot: EngineBoot, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        # Encoded before anything runs that an error would leave behind.
        super().__init__(command, f"engine {boot.engine_index}", document=encode_boot(boot))
