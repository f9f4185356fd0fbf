"""The README names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TREE = README.split("## What is where")[1].split("```")[1]
TOP = {"trio_llm", "tests", "benchmarks", "docs", "scripts"}


@pytest.mark.parametrize("folder", [".", "frontend", "engine"])
def test_the_tree_has_every_folder_and_module(folder: str) -> None:
    inside = [path for path in (ROOT / "trio_llm" / folder).iterdir() if not path.name.startswith("__")]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in inside}
    shown = set(re.findall(r"[\w.]+/|\w+\.py", TREE))

    assert names - {"py.typed"} <= shown


def test_the_tree_has_every_page_and_script() -> None:
    pages = {path.stem.lower() for path in (ROOT / "docs").glob("*.md")}
    scripts = {path.name for path in (ROOT / "scripts").iterdir()}

    assert {name for name in pages | scripts if name not in TREE.lower()} == set()
    assert all(f"{name}/" in TREE for name in TOP)


def test_nothing_in_the_tree_is_gone() -> None:
    modules = {path.name for path in (ROOT / "trio_llm").rglob("*.py")}

    assert set(re.findall(r"\w+\.py", TREE)) <= modules


def test_the_questions_of_the_readme_have_a_limit_and_end_with_a_line() -> None:
    assert '"max_tokens": ' in README.split("curl -N")[1].split("```")[0]
    assert "print()" in README.split("```python")[1].split("```")[0]
