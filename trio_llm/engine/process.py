"""The engine process: gets its configuration through its standard input, and ends when that pipe ends.

The front end holds the other end of the pipe. When the front end dies, for whatever reason, the kernel closes it, and a
thread that reads the pipe ends this process at once: there is nothing to save.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from typing import Final, NoReturn

from trio_llm.engine.clients import OWNER
from trio_llm.engine.core import EngineCore
from trio_llm.engine.device import ProgressCallback
from trio_llm.engine.executor.base import Executor
from trio_llm.engine.link import EngineLink
from trio_llm.engine.loop import run_loop
from trio_llm.engine.worker.system_limits import usable_cpus
from trio_llm.errors import TrioLLMError
from trio_llm.parent import die_with_parent
from trio_llm.wire.boot import LENGTH_BYTES, EngineBoot, decode_boot
from trio_llm.wire.messages import EngineDead, Progress

__all__ = ["main", "share_processors"]

_PIPE: Final = 0
"""File descriptor of standard input."""


def main() -> NoReturn:
    """Run until the front end closes the pipe (exit code 0) or the engine fails (1)."""
    _tie_to_parent()
    boot = decode_boot(_read_exactly(int.from_bytes(_read_exactly(LENGTH_BYTES), "big")))
    share_processors(boot.config.num_local_engines)
    threading.Thread(target=_exit_at_end_of_pipe, daemon=True).start()
    link = EngineLink(boot)
    try:
        _serve(boot, link)
    except TrioLLMError as error:
        # The operator can correct it: one line, no traceback.
        link.send_to_all(EngineDead(boot.epoch, str(error), boot.engine_index))
    except BaseException as error:
        traceback.print_exc()
        link.send_to_all(EngineDead(boot.epoch, f"{type(error).__name__}: {error}", boot.engine_index))
    link.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # not sys.exit: the cleanup of a device that failed may hang


def share_processors(num_engines: int) -> None:
    """Leave processors to others, unless the operator has said otherwise. To be called before torch is imported, which
    reads the environment once.

    Threads that spin while they wait take the processors from the front end and from each other: beside two other busy
    processes a token took 2 to 3 times as long without this. Nor do engines of one front end use more threads together
    than there are processors.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if num_engines > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // num_engines)))


def _serve(boot: EngineBoot, link: EngineLink) -> None:
    def report(phase: str, done: int, total: int) -> None:
        link.send(OWNER, Progress(boot.epoch, phase, done, total, boot.engine_index))

    report("starting", 0, 0)
    executor = _load(boot, report)
    core = EngineCore(executor, boot.config, epoch=boot.epoch, engine_index=boot.engine_index, clock=time.monotonic)
    link.send(OWNER, core.ready())
    run_loop(core, link)


def _load(boot: EngineBoot, progress: ProgressCallback) -> Executor:
    config = boot.config
    # Imported here, so that a fake engine does not wait seconds for torch.
    if config.fake is not None:
        from trio_llm.engine.executor.fake import load_fake

        model_dir = config.fake.model_dir
        if model_dir is None:
            from trio_llm.engine.models.locate import locate_model

            model_dir = str(locate_model(config, progress))
        return load_fake(config, progress, model_dir=model_dir)
    from trio_llm.engine.executor.torch_executor import load_torch

    return load_torch(config, progress, rank=boot.engine_index)


def _tie_to_parent() -> None:
    """Die when the parent dies, even if the pipe stays open, and leave the terminal's signals to the parent."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(_PIPE, size - len(data))
        if not piece:
            sys.exit(0)  # the front end died first, or this was started by hand without a pipe
        data += piece
    return data


def _exit_at_end_of_pipe() -> None:
    while os.read(_PIPE, 1024):
        pass
    os._exit(0)
