"""Programs that stand in for the engine process: they speak its wire, compute nothing and start in a moment.

Given to `EngineProcess` and `OneEngineClient` as their command. A frame is spelled out as the array it is on the
wire: `["progress", epoch, phase, done, total]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

__all__ = ["program", "talker"]

_SITE_PACKAGES = str(Path(msgspec.__file__).parents[1])

_TALKER = f"""
import os, signal, sys, threading
sys.path.insert(0, {_SITE_PACKAGES!r})
import msgspec, zmq

size = int.from_bytes(os.read(0, 4), "big")
document = b""
while len(document) < size:
    document += os.read(0, size - len(document))
boot = msgspec.msgpack.decode(document)
epoch = boot["epoch"]
context = zmq.Context()
dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
dealer.identity = boot["engine_index"].to_bytes(2, "little") + boot["epoch"].to_bytes(4, "little")
dealer.connect(boot["input_address"])
push.connect(boot["output_address"])

def hello():
    dealer.send(b"")

def send(*message):
    push.send(msgspec.msgpack.encode(message))

def flush():
    push.close(10_000)
    dealer.close(10_000)
    context.term()

def wait_for_end():
    while os.read(0, 1000):
        pass

def go_at_the_end():
    def watch():
        wait_for_end()
        os._exit(0)
    threading.Thread(target=watch, daemon=True).start()

def hang():
    while True:
        signal.pause()

"""


def program(code: str) -> list[str]:
    """A command that runs `code` and knows nothing of the wire."""
    return [sys.executable, "-S", "-c", code]


def talker(code: str) -> list[str]:
    """A command that connects as an engine does and then runs `code`.

    `code` may use `hello()`, `send(tag, epoch, ...)`, `flush()` (nothing can be sent after it), `wait_for_end()`
    of the pipe, `go_at_the_end()` of it while other things are done, `hang()`, `epoch`, `boot` and the sockets
    `dealer` and `push`.
    """
    return program(_TALKER + code)
