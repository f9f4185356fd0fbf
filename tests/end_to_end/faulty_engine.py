"""`python -m tests.end_to_end.faulty_engine`: the engine process itself, with faults that signals bring about.

SIGUSR1 raises in its loop, as a lost device does; SIGTERM makes it exit as if all were well; SIGUSR2 loses the next
message that has tokens.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

from trio_llm.engine import process
from trio_llm.engine.link import EngineLink
from trio_llm.wire.messages import EngineCoreOutputs, FromEngine

__all__ = ["FAULTY_ENGINE"]

FAULTY_ENGINE: Final = (sys.executable, "-m", "tests.end_to_end.faulty_engine")


class LosingLink(EngineLink):
    """Loses one message when it is told to."""

    loses_next = False

    def send(self, client_index: int, message: FromEngine) -> None:
        if LosingLink.loses_next and isinstance(message, EngineCoreOutputs) and message.outputs:
            LosingLink.loses_next = False
            return
        super().send(client_index, message)


def fail(*_: object) -> None:
    raise RuntimeError("the device is lost")


def lose(*_: object) -> None:
    LosingLink.loses_next = True


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, lose)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    process.EngineLink = LosingLink  # type: ignore[attr-defined]
    process.main()
