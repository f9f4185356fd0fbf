"""docs/scheduling.md and the code say the same about states, options, series and numbers."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Final

from typer.main import get_command

from tests.support.transitions import draw_transitions
from trio_llm.cli.main import app
from trio_llm.config import EngineConfig
from trio_llm.engine.executor.fake import BLOCK_SIZE
from trio_llm.engine.scheduling.block_hash import NO_SALT, extend_hashes
from trio_llm.engine.scheduling.limits import (
    MAX_PROMPT_LOGPROB_COST,
    MAX_PROMPT_LOGPROB_COST_CUDA,
    prompt_logprob_cost,
)
from trio_llm.engine.scheduling.sequence import TRANSITIONS, SequenceState
from trio_llm.frontend.engine_client import EngineClient
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.sampling import MAX_LOGPROBS
from trio_llm.wire.messages import AllBlocksCleared, BlockRemoved, BlockStored

PAGE: Final = (Path(__file__).parents[1] / "docs" / "scheduling.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"# {title}\n")[1].split("\n#")[0]


def test_the_states_are_drawn_from_the_table_of_the_code() -> None:
    drawn = section("States").split("```")[1].strip()

    expected = draw_transitions(SequenceState, TRANSITIONS)
    assert drawn == expected, f"put this into docs/scheduling.md:\n{expected}"


def test_each_transition_of_the_code_is_explained_once_and_no_other() -> None:
    explained = re.findall(r"^\| `(\w+)` → `(\w+)` \| \w", section("States"), re.MULTILINE)

    assert sorted(explained) == sorted((old.name, new.name) for old, news in TRANSITIONS.items() for new in news)


def test_the_options_of_the_page_are_there() -> None:
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE))

    assert named
    assert named <= {name for param in serve.params for name in param.opts}


def test_the_series_of_the_page_are_there() -> None:
    body, _ = PrometheusStatLogger("m").render()
    named = set(re.findall(r"`(vllm:\w+)`", PAGE))

    assert named
    assert all(f"\n{name}{{" in body.decode() for name in named)


def test_the_events_of_the_page_are_those_of_the_code() -> None:
    events = re.findall(r"^\| `(\w+)` \|", section("KV events"), re.MULTILINE)

    assert events == [kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)]


def test_the_numbers_of_the_page_are_the_codes() -> None:
    text = " ".join(PAGE.split())
    config = EngineConfig()
    hashes: list[bytes] = []
    extend_hashes(hashes, [1] * BLOCK_SIZE, BLOCK_SIZE, root=NO_SALT)
    max_unread = inspect.signature(EngineClient.kv_events).parameters["max_unread"].default

    assert f"*blocks* of {BLOCK_SIZE} tokens" in text
    assert f"`--max-num-batched-tokens` tokens ({config.max_num_batched_tokens})" in text
    assert f"`--max-num-seqs` sequences ({config.max_num_seqs})" in text
    assert f"`--step-time-target` ({config.step_time_target_s} seconds)" in text
    num_positions = MAX_PROMPT_LOGPROB_COST // prompt_logprob_cost(MAX_LOGPROBS)
    assert f"at most {num_positions} of them with {MAX_LOGPROBS} alternatives" in text
    assert f"or {MAX_PROMPT_LOGPROB_COST // prompt_logprob_cost(0)} with none" in text
    assert f"({MAX_PROMPT_LOGPROB_COST_CUDA // MAX_PROMPT_LOGPROB_COST} times as many on a GPU)" in text
    assert f"a hash of {len(hashes[0])} bytes" in text
    assert f"may be {max_unread} batches behind" in text
    assert f"that is {config.credit_steps} messages behind has no *credit*" in text
