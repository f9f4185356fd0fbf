"""open_recorder: which logger gets what, plugins, and that nothing is computed when statistics are off."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.support.stat_loggers import RecordingStatLogger
from trio_llm.config import EngineConfig
from trio_llm.errors import NotSupportedError, QueueFullError
from trio_llm.frontend.statistics import iteration
from trio_llm.frontend.statistics.iteration import EngineRecorder
from trio_llm.frontend.statistics.stats import AggregateStatLogger, IterationStats, StatLogger
from trio_llm.sampling import SamplingParams
from trio_llm.testing.fake_llm import open_fake_llm
from trio_llm.wire.messages import ModelConfig, SchedulerStats

LONG = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


class PerEngine(RecordingStatLogger):
    """One for each engine. A factory is called with the configuration and the rank."""

    made: list[PerEngine]

    def __init__(self, config: EngineConfig, engine_index: int) -> None:
        super().__init__()
        self.rank = engine_index
        self.num_ready = 0
        self.made.append(self)

    def record_engine_ready(self, model: ModelConfig, *, engine_index: int) -> None:
        assert engine_index == self.rank
        self.num_ready += 1


class Aggregate(AggregateStatLogger):
    made: list[Aggregate]

    def __init__(self, config: EngineConfig, engine_indices: Sequence[int]) -> None:
        super().__init__(config, engine_indices)
        self.heard: set[int] = set()
        self.made.append(self)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
        self.heard.add(engine_index)


@pytest.fixture(autouse=True)
def nothing_made_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerEngine, "made", [], raising=False)
    monkeypatch.setattr(Aggregate, "made", [], raising=False)


async def test_an_instance_gets_all_engines_and_a_factory_makes_one_for_each(autojump_clock: MockClock) -> None:
    whole = RecordingStatLogger()
    async with open_fake_llm(num_engines=2, stat_loggers=[whole, PerEngine], max_num_queued_reqs=4) as llm:
        streams = [llm.generate(f"prompt {i}", LONG) for i in range(4)]
        for stream in streams:
            await stream.__aenter__()
        with pytest.raises(QueueFullError):
            await llm.complete("one more")
        for stream in streams:
            async for _ in stream:
                pass
            await stream.__aexit__(None, None, None)

    assert [logger.rank for logger in PerEngine.made] == [0, 1]
    assert [logger.engine_indices for logger in PerEngine.made] == [{0}, {1}]
    assert [logger.num_ready for logger in PerEngine.made] == [1, 1]
    assert all(logger.num_tokens > 0 for logger in PerEngine.made)
    assert sum(logger.num_tokens for logger in PerEngine.made) == whole.num_tokens == 80
    assert [len(logger.rejections) for logger in PerEngine.made] == [1, 0], "a refusal counts once"
    assert whole.engine_indices == {0, 1}


async def test_an_aggregate_class_is_made_once_for_all_engines() -> None:
    async with open_fake_llm(num_engines=2, stat_loggers=[Aggregate], answer="Hi") as llm:
        await llm.complete("a")

    [logger] = Aggregate.made
    assert list(logger.engine_indices) == [0, 1]
    assert logger.config.data_parallel_size == 2
    assert logger.heard == {0, 1}


async def test_loggers_of_a_single_rank_are_told_that_rank() -> None:
    async with open_fake_llm(stat_loggers=[PerEngine], answer="Hi", data_parallel_size=4, data_parallel_rank=2) as llm:
        await llm.complete("a")

    [logger] = PerEngine.made
    assert (logger.rank, logger.engine_indices, logger.num_ready) == (2, {2}, 1)


async def test_an_error_of_a_factory_that_was_given_is_the_callers() -> None:
    def broken(config: EngineConfig, engine_index: int) -> StatLogger:
        raise OSError("no such host")

    with pytest.raises(OSError, match="no such host"):
        async with open_fake_llm(stat_loggers=[broken]):
            pass


# ----------------------------------------------------------------------------------------- plugins


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """A package with these entry points, and the module `stat_plugin` of this file's classes."""
    info = folder / "stat_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stat-plugin\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[trio_llm.stat_loggers]", *lines]) + "\n")
    (folder / "stat_plugin.py").write_text("from tests.frontend.statistics.test_loggers import Aggregate, PerEngine\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "stat_plugin", raising=False)


@pytest.mark.parametrize("off", [False, True])
async def test_plugins_get_the_statistics_also_when_the_default_loggers_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    install(tmp_path, monkeypatch, each="stat_plugin:PerEngine", all="stat_plugin:Aggregate")

    async with open_fake_llm(num_engines=2, answer="Hi", disable_log_stats=off) as llm:
        await llm.complete("a")
        assert llm.statistics().num_generation_tokens == 3

    assert sum(logger.num_tokens for logger in PerEngine.made) == 3
    assert [logger.heard for logger in Aggregate.made] == [{0, 1}]


async def test_a_plugin_that_cannot_be_loaded_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, gone="stat_plugin:Gone", each="stat_plugin:PerEngine")

    async with open_fake_llm(answer="Hi") as llm:
        await llm.complete("a")

    assert PerEngine.made[0].num_tokens == 3
    assert "'stat_plugin:Gone' of the entry point gone cannot be loaded" in caplog.text


# --------------------------------------------------------------------------------------------- off


def fail(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("statistics are off, and something was computed for them")


async def test_without_statistics_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(EngineRecorder) if not name.startswith("__") and name != "__slots__"]:
        if callable(getattr(EngineRecorder, name)):
            monkeypatch.setattr(EngineRecorder, name, fail)
    monkeypatch.setattr(EngineRecorder, "__init__", fail)
    monkeypatch.setattr(iteration, "IterationStats", fail)

    async with open_fake_llm(
        disable_log_stats=True, max_num_queued_reqs=8, failing_row_prompt=7, on_engine_death="restart"
    ) as llm:
        output = await llm.complete("Hello", LONG)
        await llm.complete("Hello", n=2, temperature=1, max_tokens=5)
        await llm.embed("Hello")
        with pytest.raises(QueueFullError):
            async with llm.generate("Hello"):
                await llm.complete("Hello", n=8, temperature=1)
        async with llm.generate("Hello", LONG) as stream:
            await anext(stream)
            llm.kill()
            assert sum([len(output.outputs[0].token_ids) async for output in stream]) == 19
        with pytest.raises(NotSupportedError, match="disable_log_stats"):
            llm.statistics()
        llm.do_log_stats()
        await llm.assert_idle()

    assert len(output.outputs[0].token_ids) == 20
    assert output.metrics is None


async def test_a_logger_that_is_given_turns_statistics_on() -> None:
    logger = RecordingStatLogger()
    async with open_fake_llm(disable_log_stats=True, stat_loggers=[logger], answer="Hi") as llm:
        output = await llm.complete("Hello")

    assert logger.num_tokens == 3
    assert output.metrics is not None


async def test_what_is_neither_a_logger_nor_a_factory_is_refused() -> None:
    class Alike:
        def record(self, scheduler: SchedulerStats | None, iteration: IterationStats, *, engine_index: int) -> None:
            raise AssertionError

    loggers: Any = [Alike()]
    with pytest.raises(TypeError, match="must derive from StatLogger"):
        async with open_fake_llm(stat_loggers=loggers):
            pass
