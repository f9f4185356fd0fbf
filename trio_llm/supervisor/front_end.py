"""A front-end process under a supervisor: `python -m trio_llm.supervisor.front_end DESCRIPTOR`.

The descriptor is this end of the socket pair to the supervisor. Its end is the order to end at once.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

import trio

from trio_llm.errors import EngineDeadError, TrioLLMError
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.gc_tuning import tune_gc
from trio_llm.frontend.http.model_names import model_names
from trio_llm.frontend.http.serve import serve
from trio_llm.frontend.http.server.listeners import Listeners
from trio_llm.frontend.open_llm import open_tasks
from trio_llm.frontend.requests.admission import LoadOfOthers
from trio_llm.frontend.requests.balancing import Balancer
from trio_llm.frontend.statistics.loggers import make_metrics
from trio_llm.parent import die_with_parent
from trio_llm.supervisor.channel import Channel
from trio_llm.supervisor.messages import Boot, ToFrontEnd, decode_to_front_end
from trio_llm.supervisor.shared_load import SharedLoad
from trio_llm.supervisor.supervisor_link import SupervisorLink

__all__ = ["main", "run_front_end"]


def main() -> int:
    """Serve until the supervisor stops or ends this process. Returns the exit code."""
    # Die with the supervisor, and leave the terminal's signals to it.
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    try:
        trio.run(_serve_supervisor, end)
    except TrioLLMError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


async def _serve_supervisor(end: socket.socket) -> None:
    end.setblocking(False)
    channel = Channel(trio.SocketStream(trio.socket.from_stdlib_socket(end)), decode_to_front_end)
    boot = await channel.receive()
    if not isinstance(boot, Boot):
        return  # the supervisor has gone already
    logging.basicConfig(level=boot.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("trio_llm.hypercorn").setLevel(logging.WARNING)
    with SharedLoad(boot.load_fd, boot.client_index - 1) as load:
        listeners = Listeners(tuple(socket.socket(fileno=fd) for fd in boot.listener_fds), load.turns)
        await run_front_end(channel, boot, listeners, load)


async def run_front_end(channel: Channel[ToFrontEnd], boot: Boot, listeners: Listeners, load: LoadOfOthers) -> None:
    """Serve `boot.server` over the supervisor's engines, until it says stop, or is gone.

    Cancellation: connections are closed, and their requests aborted.

    Raises:
        EngineStartupError: the sockets for the engines cannot be made.
        EngineDeadError: all engines are dead for good.
    """
    metrics = make_metrics(boot.engine, model_names(boot.engine, boot.server)[0])
    link = SupervisorLink(channel, boot, metrics)
    metrics.collect_others = link.collect_metrics
    llm = AsyncLLM(
        link.cores,
        boot.engine,
        [] if boot.engine.disable_log_stats else [metrics],
        keep_alive_on_engine_death=boot.server.keep_alive_on_engine_death,
        make_call=link.make_call,
        load_of_others=load,
        balancer=Balancer.of(
            boot.engine,
            num_engines=boot.num_engines,
            num_front_ends=boot.server.api_server_count,
            front_end_index=boot.client_index - 1,
        ),
    )
    with unwrap_single():
        async with trio.open_nursery() as nursery, open_tasks(llm, wait_until_ready=False):
            nursery.start_soon(channel.run)

            async def follow_supervisor() -> None:
                await link.run(llm.engines)
                nursery.cancel_scope.cancel(reason="the supervisor is gone")

            nursery.start_soon(follow_supervisor)
            nursery.start_soon(link.report_metrics)
            run_http = partial(serve, llm, boot.server, metrics=metrics, listeners=listeners, stop=link.stop)
            if boot.is_restarted:
                # Others answer meanwhile: a process that can only refuse should not take their clients.
                with suppress(EngineDeadError):
                    await llm.wait_until_ready()
            async with trio.open_nursery() as http:
                await http.start(run_http)
                with suppress(EngineDeadError):  # `serve` ends for it
                    await llm.wait_until_ready()
                    tune_gc()
                    link.report_serving()
            nursery.cancel_scope.cancel(reason="the server has stopped")


if __name__ == "__main__":
    sys.exit(main())
