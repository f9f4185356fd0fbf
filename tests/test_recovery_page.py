"""docs/recovery.md shows the tables and the diagram that the tests hold the code to, and the numbers of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.end_to_end.death_matrix import ENGINE, FAULTS, FRONT_END, MOMENTS, render_engine, render_front_end
from tests.support.engine_states import diagram
from tests.support.transitions import draw_transitions
from trio_llm.config import MIN_STALL_TIMEOUT_S, EngineConfig
from trio_llm.frontend.core_client.restart_policy import WINDOW_S, RestartPolicy
from trio_llm.frontend.requests.output.lifecycle import TRANSITIONS, RequestStatus

PAGE: Final = (Path(__file__).parents[1] / "docs" / "recovery.md").read_text()
LIFE: Final = PAGE.split("## A request's life\n")[1].split("\n## ")[0]


def test_the_page_has_the_death_matrix_as_the_tests_expect_it() -> None:
    assert f"\n\n{render_engine()}\n\n" in PAGE, "write what `python -m tests.end_to_end.death_matrix` prints into it"
    assert f"\n\n{render_front_end()}\n" in PAGE, "write what `python -m tests.end_to_end.death_matrix` prints into it"


def test_the_matrix_has_every_death_at_every_moment() -> None:
    assert set(ENGINE) == set(FRONT_END) == {(fault, moment) for fault in FAULTS for moment in MOMENTS}
    assert len(ENGINE) == 24


def test_the_diagram_of_the_page_is_the_table_of_states() -> None:
    assert re.findall(r"```mermaid\n.*?\n```", PAGE, re.DOTALL) == [diagram()]


def test_the_states_of_a_request_are_drawn_from_the_table_of_the_code() -> None:
    drawn = LIFE.split("```")[1].strip()

    expected = draw_transitions(RequestStatus, TRANSITIONS)
    assert drawn == expected, f"put this into docs/recovery.md:\n{expected}"


def test_each_change_of_a_request_is_explained_once_and_no_other() -> None:
    explained = re.findall(r"^\| `(\w+)` → `(\w+)` \| \w", LIFE, re.MULTILINE)

    assert sorted(explained) == sorted(
        (old.name, new.name) for old, followers in TRANSITIONS.items() for new in followers
    )


def test_the_back_off_of_the_page_is_that_of_the_policy() -> None:
    policy = RestartPolicy(EngineConfig().max_engine_restarts)
    delays_s = [policy.next_delay_s(0.0) for _ in range(EngineConfig().max_engine_restarts)]

    assert f"after {', '.join(f'{delay_s:g}' for delay_s in delays_s[:-1])} and {delays_s[-1]:g} seconds" in PAGE
    assert f"at most {len(delays_s)} in {WINDOW_S / 60:g} minutes" in PAGE
    assert f"`--stall-timeout` ({EngineConfig().stall_timeout_s:g} seconds, at least {MIN_STALL_TIMEOUT_S:g})" in PAGE
