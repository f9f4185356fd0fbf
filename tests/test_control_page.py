"""docs/control.md draws the tables of the control state as they are, and docs/api.md lists the control routes."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.engine.test_control_calls import an_engine
from tests.test_api_page import section
from trio_llm.engine.engine_state import PAUSES, SLEEP_STATES
from trio_llm.frontend.http.control_routes import MAX_ARGS
from trio_llm.frontend.http.route_table import ROUTES, ControlRoute

PAGE: Final = (Path(__file__).parents[1] / "docs" / "control.md").read_text()


def diagram(table: Mapping[Any, Mapping[Any, enum.Enum]]) -> str:
    """A table of transitions as a Mermaid diagram. The first state is the one to begin with."""

    def name(state: enum.Enum) -> str:
        return str(state.value).replace(" ", "_")

    lines = [f"    [*] --> {name(next(iter(table)))}"]
    for state, events in table.items():
        lines += [f"    {name(state)} --> {name(target)}: {event}" for event, target in events.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def test_the_diagrams_of_the_page_are_the_tables() -> None:
    drawn = re.findall(r"```mermaid\n.*?\n```", PAGE, re.DOTALL)

    assert drawn == [diagram(SLEEP_STATES), diagram(PAUSES)]


def test_the_control_routes_of_the_api_page_are_those_there_are() -> None:
    listed = re.findall(r"^\| `(GET|POST) (/\w+)`", section("Control of the running engine"), re.MULTILINE)
    routes = [(route.method, route.path) for route in ROUTES if isinstance(route, ControlRoute)]

    assert listed == routes
    assert f"up to {MAX_ARGS} plain values" in section("Control of the running engine")


def test_the_methods_of_remote_calls_on_the_page_are_those_that_workers_have() -> None:
    listed = re.findall(r"^\| `(\w+)\(.*?\)` \|", PAGE.split("\n## Questions\n")[1].split("\n## ")[0], re.MULTILINE)

    error = an_engine().call("collective_rpc", "no such").error
    assert error is not None
    assert ", ".join(listed) == error.split("use one of ")[1]
