from __future__ import annotations

import os

import pytest

from trio_llm.engine import process


@pytest.mark.parametrize(
    ("num_engines", "cpus", "operator", "expected"),
    [
        (1, 8, None, None),
        (2, 8, None, "4"),
        (3, 8, None, "2"),
        (16, 8, None, "1"),
        (2, 8, "8", "8"),
    ],
)
def test_engines_of_one_front_end_divide_the_processors_unless_the_operator_has(
    num_engines: int, cpus: int, operator: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if operator is None else {"OMP_NUM_THREADS": operator}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(process, "usable_cpus", lambda: cpus)

    process.share_processors(num_engines)

    assert environment.get("OMP_NUM_THREADS") == expected
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
