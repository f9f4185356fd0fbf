"""open_llm: start the engines, and stop them at the end of the block.

The nursery held here owns every task of an `AsyncLLM`; docs/architecture.md lists them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from trio_llm.config import EngineConfig
from trio_llm.frontend.async_llm import AsyncLLM
from trio_llm.frontend.core_client.base import CoreClient
from trio_llm.frontend.core_client.one_engine import OneEngineClient
from trio_llm.frontend.core_client.restart_policy import RestartPolicy
from trio_llm.frontend.core_client.restarting import RestartingClient
from trio_llm.frontend.exception_groups import unwrap_single
from trio_llm.frontend.statistics.stats import StatLoggerSource

__all__ = ["make_cores", "open_llm", "open_llm_over", "open_tasks"]


@asynccontextmanager
async def open_llm(
    config: EngineConfig | str | None = None,
    *,
    wait_until_ready: bool = True,
    stat_loggers: Sequence[StatLoggerSource] = (),
    keep_alive_on_engine_death: bool = False,
) -> AsyncIterator[AsyncLLM]:
    """Start the engines, one unless `data_parallel_size` says more, and stop them when the block is left.

    Args:
        config: what to run; a string is a model directory, None the embedded model.
        wait_until_ready: False: enter at once; `generate()` raises EngineUnavailableError until the model is loaded.
        stat_loggers: get the statistics, in tasks that serve requests. A logger gets those of all engines; a factory
            makes one per engine, with the configuration and the engine's index, and a class that derives from
            `AggregateStatLogger` one for all. Plugins (entry points `trio_llm.stat_loggers`) get them as well.
        keep_alive_on_engine_death: tells servers to go on answering when the engine is gone.

    Cancellation: leaving the block, by any way, stops the engine processes; this takes up to about four seconds,
        and three more if traces are sent and their collector does not answer.

    Raises:
        ConfigError: `config` is no model directory, or traces are asked for without OpenTelemetry.
        EngineStartupError: an engine ended before it was ready (only with `wait_until_ready`).
    """
    if not isinstance(config, EngineConfig):
        config = EngineConfig(model=config)
    llm = AsyncLLM(make_cores(config), config, stat_loggers, keep_alive_on_engine_death=keep_alive_on_engine_death)
    async with open_tasks(llm, wait_until_ready=wait_until_ready):
        yield llm


def make_cores(config: EngineConfig) -> list[CoreClient]:
    """The core clients of the engines that `config` asks for. Nothing is started yet.

    Raises:
        EngineStartupError: the sockets cannot be made.
    """
    return [_make_core(config, config.first_rank + index) for index in range(config.num_local_engines)]


def _make_core(config: EngineConfig, rank: int) -> CoreClient:
    make = partial(OneEngineClient, config, engine_index=rank)
    if config.on_engine_death == "exit":
        return make()
    return RestartingClient(make, RestartPolicy(config.max_engine_restarts))


@asynccontextmanager
async def open_llm_over(
    core: CoreClient,
    config: EngineConfig,
    *,
    wait_until_ready: bool = True,
    stat_loggers: Sequence[StatLoggerSource] = (),
    keep_alive_on_engine_death: bool = False,
) -> AsyncIterator[AsyncLLM]:
    """As `open_llm`, over a core client of one's own."""
    llm = AsyncLLM([core], config, stat_loggers, keep_alive_on_engine_death=keep_alive_on_engine_death)
    async with open_tasks(llm, wait_until_ready=wait_until_ready):
        yield llm


@asynccontextmanager
async def open_tasks(llm: AsyncLLM, *, wait_until_ready: bool = True) -> AsyncIterator[None]:
    """Own the tasks of a new `llm` while the block lasts; the rest of what `open_llm` does. Raises as it does."""
    with unwrap_single():
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(llm._run, nursery)
                try:
                    if wait_until_ready:
                        await llm.wait_until_ready()
                    yield
                finally:
                    # Readers in nurseries outside this block must not wait for ever.
                    llm._close()
                    nursery.cancel_scope.cancel()
        finally:
            await llm._submitter.observers.aclose()
