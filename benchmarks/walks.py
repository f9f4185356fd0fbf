"""`python -m benchmarks.walks`: which modules a streamed chat passes, with FakeLLM and real HTTP in one process.

Counts modules of the package, the engine's and the fakes' left out, since a real engine is another process. Cases, one
JSON object a line:
    request   from the bytes on the socket to the encoded frame for the engine
    token     from the engine's message to the bytes on the socket, for a token amid the answer
    leave     from the end of the client's connection to the encoded abort

Each case is walked several times, and a module counts if every walk passes it: what only happens to run at the same
time, such as a timer, drops out. `docs/architecture.md` writes the walks down.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import trio

import trio_llm
from trio_llm.testing import FakeLLM, open_fake_llm, open_test_server
from trio_llm.wire.messages import Abort, EngineCoreRequest, ToEngine

_ROOT: Final = Path(trio_llm.__file__).parent
_ELSEWHERE: Final = ("engine", "testing")
_SENDS: Final = frozenset({"send", "sendall", "sendmsg", "sendto"})
_STEP_S: Final = 0.05
_BODY: Final = json.dumps(
    {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 40, "temperature": 0}
).encode()
_REQUEST: Final = b"".join(
    (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n",
        b"content-length: %d\r\n\r\n" % len(_BODY),
        _BODY,
    )
)


class Walk:
    """Notes the modules of all functions that run between `begin` and `end`, in the order of their first calls."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self._is_on = False
        self._names: dict[str, str | None] = {}
        self._on_send: Callable[[], None] | None = None

    def begin(self, *, on_send: Callable[[], None] | None = None) -> None:
        """Start anew; `on_send` is called when bytes go into a socket."""
        self.modules = {}
        self._on_send = on_send
        self._is_on = True

    def end(self) -> dict[str, None]:
        self._is_on = False
        return self.modules

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """For `sys.setprofile`."""
        if not self._is_on:
            return
        if event == "call":
            if (name := self._name_of(frame.f_code.co_filename)) is not None:
                self.modules.setdefault(name)
        elif event == "c_call" and self._on_send is not None and _is_send(arg):
            self._on_send()

    def _name_of(self, filename: str) -> str | None:
        if filename not in self._names:
            path = Path(filename)
            name = None
            if path.is_relative_to(_ROOT):
                name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
                if name.split(".")[0] in _ELSEWHERE:
                    name = None
            self._names[filename] = name
        return self._names[filename]


def _is_send(function: Any) -> bool:
    """The function writes to a socket, or to a descriptor."""
    of_socket = isinstance(getattr(function, "__self__", None), socket.socket) and function.__name__ in _SENDS
    return of_socket or function is os.write


def main() -> None:
    """Walk and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="walks of each case (default: 5)")
    parser.add_argument("--names", action="store_true", help="print the modules, too, in the order they are reached")
    options = parser.parse_args()
    for case, modules in trio.run(walk_all, options.rounds).items():
        line: dict[str, Any] = {"case": case, "modules": len(modules)}
        if options.names:
            line["names"] = modules
        print(json.dumps(line), flush=True)


async def walk_all(rounds: int) -> dict[str, list[str]]:
    """The modules of each case that every walk has passed."""
    cases: dict[str, list[list[str]]] = {"request": [], "token": [], "leave": []}
    async with open_fake_llm(step_s=_STEP_S) as llm, open_test_server(llm) as url:
        port = int(url.rpartition(":")[2])
        await walk_once(llm, port)  # imports and caches
        for _ in range(rounds):
            for case, modules in (await walk_once(llm, port)).items():
                cases[case].append(list(modules))
    return {case: [name for name in walks[0] if all(name in walk for walk in walks)] for case, walks in cases.items()}


async def walk_once(llm: FakeLLM, port: int) -> dict[str, dict[str, None]]:
    """One streamed chat whose client leaves amid the answer."""
    walk, walks = Walk(), {}
    is_sent, has_left = trio.Event(), trio.Event()
    remember = llm.core.on_sent

    def note_sent(message: ToEngine) -> None:
        remember(message)
        if isinstance(message, EngineCoreRequest):
            walks["request"] = walk.end()
            is_sent.set()
        elif isinstance(message, Abort):
            walks["leave"] = walk.end()
            has_left.set()

    llm.core.on_sent = note_sent
    client = await trio.open_tcp_stream("127.0.0.1", port)
    await trio.sleep(0.1)  # the server waits for a request, and nothing else is under way
    sys.setprofile(walk.profile)
    try:
        walk.begin()
        await client.send_all(_REQUEST)
        await is_sent.wait()
        for _ in range(3):  # the head and the first tokens are a way of their own
            await client.receive_some(65536)
        walks["token"] = await walk_token(llm, walk, client)
        llm.stall()
        await trio.sleep(3 * _STEP_S)
        walk.begin()
        await client.aclose()
        await has_left.wait()
    finally:
        sys.setprofile(None)
        llm.core.on_sent = remember
        llm.resume()
    await llm.wait_idle()
    return walks


async def walk_token(llm: FakeLLM, walk: Walk, client: trio.SocketStream) -> dict[str, None]:
    """From the next message of the engine to the bytes that it becomes."""
    receive = llm.core.receive
    modules: dict[str, None] = {}
    is_written = trio.Event()

    def note_send() -> None:
        nonlocal modules
        if not is_written.is_set():
            modules = walk.end()
            is_written.set()

    async def receive_noted() -> Any:
        messages = await receive()
        if not is_written.is_set():
            walk.begin(on_send=note_send)
        return messages

    llm.core.receive = receive_noted  # type: ignore[method-assign]
    while not is_written.is_set():
        if not await client.receive_some(65536):
            raise RuntimeError("the answer ended before a token was seen")
    llm.core.receive = receive  # type: ignore[method-assign]
    return modules


if __name__ == "__main__":
    main()
