"""The rules of the house that a program can check: floors, purity, forbidden things, sizes.

Reads the package's source and imports none of it. Each rule is a function from modules to complaints, and each
has a planted violation beside it that it must catch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = "trio_llm"
ROOT: Final = Path(__file__).parent.parent / PACKAGE

MAX_MODULE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60

ENVIRONMENT: Final = {
    "trio_llm.config": "the one reader",
    "trio_llm.engine.process": "sets what OpenMP reads when torch is imported, unless the operator has set it",
}
"""Modules that may touch os.environ, and why. An entry that is not needed any more is a complaint, too."""

_PURE_FOLDERS = ("trio_llm.wire", "trio_llm.frontend.text", "trio_llm.engine.scheduling")
_IMPURE = ("trio", "torch", "zmq", "time", "os", "socket", "random", "logging", "subprocess", "threading", "secrets")
_NOWHERE = ("asyncio", "pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "uvicorn", "anyio")
_NOT_IN_FRONT = ("torch", "transformers", "threading", "accelerate", "concurrent")
_NOT_IN_ENGINE = ("trio", "trio_websocket", "hypercorn", "fastapi", "starlette", "typer", "rich")
_UNFIT_FOR_STREAMS = ("BaseHTTPMiddleware", "StreamingResponse", "is_disconnected")
_NO_CALLS = ("eval", "exec", "os.system", "os.popen", "torch.load")


@dataclass(frozen=True)
class Import:
    target: str
    """Dotted name; for `from a import b` it is `a.b`."""
    line: int
    at_start: bool
    """Runs when the module is imported: neither inside a function nor for the type checker alone."""
    for_types: bool

    def is_of(self, names: Iterable[str]) -> bool:
        return any(self.target == name or self.target.startswith(f"{name}.") for name in names)


@dataclass(frozen=True)
class Module:
    name: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree, at_start=True, for_types=False))

    @property
    def room(self) -> str:
        """`frontend` for trio_llm.frontend.http.app, `errors` for trio_llm.errors, empty for the package itself."""
        return f"{self.name}.".split(".")[1]

    @property
    def is_pure(self) -> bool:
        marked = "Pure." in (ast.get_docstring(self.tree) or "").split()
        return marked or any(f"{self.name}.".startswith(f"{folder}.") for folder in _PURE_FOLDERS)

    def complaint(self, line: int, text: str) -> str:
        return f"{self.name}:{line}: {text}"


def _imports(node: ast.AST, *, at_start: bool, for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_start and not for_types, for_types)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide the floor"
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", child.lineno, at_start and not for_types, for_types)
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), at_start=at_start, for_types=True)
            yield from _imports(ast.Module(child.orelse, []), at_start=at_start, for_types=for_types)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, at_start=at_start and not inside, for_types=for_types)


def load_package() -> list[Module]:
    modules = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        modules.append(Module(".".join(parts).removesuffix(".__init__"), path.read_text()))
    return modules


# ------------------------------------------------------------------------------------------- rules

Complaints = Iterator[str]
_FLOORS: Final = {
    **dict.fromkeys(("errors", "config", "quoting", "sampling", "bans", "pooling", "outputs", "version"), 0),
    "wire": 1,
    **dict.fromkeys(("frontend", "engine"), 2),
    **dict.fromkeys(("client", "testing", "cli"), 3),
}


def imports_go_down_or_stay_in_the_room(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        if module.room == "":
            continue  # the package's own __init__ names what is public; see the rule below
        if module.room not in _FLOORS:
            yield module.complaint(1, f"{module.room!r} stands on no floor")
            continue
        for found in module.imports:
            if found.is_of([PACKAGE]) and not _may_import(module.room, Module(found.target, "").room):
                yield module.complaint(found.line, f"must not import {found.target}")


def _may_import(room: str, other: str) -> bool:
    if room == other:
        return True
    if other not in _FLOORS:
        return False  # `from trio_llm import x` would load the public names, and all below them
    return _FLOORS[other] < _FLOORS[room] or _FLOORS[other] == _FLOORS[room] == 0


def importing_the_package_loads_nothing_heavy(modules: Sequence[Module]) -> Complaints:
    """Each process imports it: what it loads at once, the engine, the server and `--help` all load."""
    for module in modules:
        for found in module.imports:
            room = Module(found.target, "").room
            if module.room == "" and found.at_start and found.is_of([PACKAGE]) and _FLOORS.get(room, 9) > 0:
                yield module.complaint(found.line, f"loads {found.target} at once; name it in __getattr__")


def pure_modules_touch_no_world(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        for found in module.imports:
            if module.is_pure and not found.for_types and found.is_of(_IMPURE):
                yield module.complaint(found.line, f"is pure and imports {found.target}")


def some_modules_are_imported_nowhere(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        yield from _unwanted(module, _NOWHERE)


def the_front_end_has_no_model_code_and_no_threads_of_its_own(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        if module.room in ("frontend", "client", "cli"):
            yield from _unwanted(module, _NOT_IN_FRONT)


def the_engine_has_no_trio(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        if module.room == "engine":
            yield from _unwanted(module, _NOT_IN_ENGINE)


def _unwanted(module: Module, names: Sequence[str]) -> Complaints:
    for found in module.imports:
        if found.is_of(names) and not found.for_types:
            yield module.complaint(found.line, f"must not import {found.target}, not even inside a function")


def nothing_runs_text_as_code(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in _NO_CALLS:
                yield module.complaint(node.lineno, f"must not call {called}")
            for keyword in node.keywords:
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False":
                    yield module.complaint(node.lineno, f"{called} must not use a shell")


def streams_use_nothing_that_hides_a_disconnect(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        for name, line in _names(module.tree):
            if module.room == "frontend" and name in _UNFIT_FOR_STREAMS:
                yield module.complaint(line, f"must not use {name}")


def the_environment_is_read_in_one_place(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        uses = [
            (name, line) for name, line in _names(module.tree) if name in ("environ", "environb", "getenv", "putenv")
        ]
        if module.name not in ENVIRONMENT:
            for name, line in uses:
                yield module.complaint(line, f"must not use os.{name}: add a field to the config")
        elif not uses:
            yield module.complaint(1, "stands in ENVIRONMENT and does not need to")


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that the code uses, however it is reached."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names)


def no_module_imports_itself_through_others(modules: Sequence[Module]) -> Complaints:
    known = {module.name: module for module in modules}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Complaints:
        if name in path:
            yield f"import cycle: {' -> '.join((*path[path.index(name) :], name))}"
        elif name not in done:
            for found in known[name].imports:
                # `from a.b import c` is the module a.b.c if there is one, else a name in a.b.
                target = found.target if found.target in known else found.target.rpartition(".")[0]
                if found.at_start and target in known:
                    yield from visit(target, (*path, name))
            done.add(name)

    for module in modules:
        yield from visit(module.name, ())


def modules_and_functions_are_short(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        lines = len(module.source.splitlines())
        if lines > MAX_MODULE_LINES:
            yield module.complaint(1, f"has {lines} lines, the cap is {MAX_MODULE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield module.complaint(node.lineno, f"{node.name} has {lines}, the cap is {MAX_FUNCTION_LINES}")


def modules_open_with_their_job(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        if not ast.get_docstring(module.tree):
            yield module.complaint(1, "has no docstring")


Rule = Callable[[Sequence[Module]], Complaints]

PLANTED: Final[dict[Rule, list[dict[str, str]]]] = {
    imports_go_down_or_stay_in_the_room: [
        {"trio_llm.wire.codec": "from trio_llm.frontend.control.status import EngineStatus"},
        {"trio_llm.frontend.a": "from trio_llm.engine.b import c"},
        {"trio_llm.engine.a": "def f():\n    import trio_llm.frontend.b"},
        {"trio_llm.frontend.a": "if TYPE_CHECKING:\n    from trio_llm.cli.main import app"},
        {"trio_llm.errors": "from trio_llm.wire import messages"},
        {"trio_llm.frontend.a": "from trio_llm import open_llm"},
        {"trio_llm.attic": "x = 1"},
    ],
    importing_the_package_loads_nothing_heavy: [{"trio_llm": "from trio_llm.frontend.async_llm import open_llm"}],
    pure_modules_touch_no_world: [
        {"trio_llm.wire.a": "import time"},
        {"trio_llm.frontend.text.a": "def f():\n    from os.path import join"},
        {"trio_llm.frontend.a": '"""Decides things.\n\nPure. Used by b.\n"""\nimport trio.abc'},
    ],
    some_modules_are_imported_nowhere: [
        {"trio_llm.config": "import asyncio"},
        {"trio_llm.engine.a": "def f():\n    from pickle import loads"},
    ],
    the_front_end_has_no_model_code_and_no_threads_of_its_own: [
        {"trio_llm.frontend.a": "def f():\n    import torch.nn"},
        {"trio_llm.cli.a": "from transformers import AutoTokenizer"},
        {"trio_llm.frontend.a": "try:\n    import threading\nexcept ImportError:\n    pass"},
    ],
    the_engine_has_no_trio: [{"trio_llm.engine.a": "class A:\n    def f(self):\n        import trio"}],
    nothing_runs_text_as_code: [
        {"trio_llm.cli.a": "eval('1')"},
        {"trio_llm.cli.a": "import os\nos.system('ls')"},
        {"trio_llm.engine.a": "import subprocess\nsubprocess.run('ls', shell=True)"},
        {"trio_llm.engine.a": "import torch\ntorch.load('weights.bin')"},
    ],
    streams_use_nothing_that_hides_a_disconnect: [
        {"trio_llm.frontend.http.a": "from starlette.responses import StreamingResponse"},
        {"trio_llm.frontend.http.a": "async def f(request):\n    await request.is_disconnected()"},
    ],
    the_environment_is_read_in_one_place: [
        {"trio_llm.frontend.a": "import os\nos.environ['A']"},
        {"trio_llm.engine.a": "from os import getenv"},
        {"trio_llm.config": "import os"},
    ],
    no_module_imports_itself_through_others: [
        {
            "trio_llm.wire.a": "from trio_llm.wire.b import x",
            "trio_llm.wire.b": "from trio_llm.wire import c",
            "trio_llm.wire.c": "import trio_llm.wire.a",
        },
    ],
    modules_and_functions_are_short: [
        {"trio_llm.wire.a": "x = 1\n" * (MAX_MODULE_LINES + 1)},
        {"trio_llm.wire.a": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES},
    ],
    modules_open_with_their_job: [{"trio_llm.wire.a": "x = 1"}],
}
"""What each rule must catch. The rules are the keys, so that there is none without a violation to try it on."""


@pytest.fixture(scope="module")
def package() -> list[Module]:
    modules = load_package()
    assert len(modules) > 20, "the package was not found"
    return modules


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule, package: list[Module]) -> None:
    assert list(rule(package)) == []


@pytest.mark.parametrize(
    ("rule", "sources"),
    [(rule, sources) for rule, violations in PLANTED.items() for sources in violations],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_the_rule_catches_a_planted_violation(rule: Rule, sources: dict[str, str]) -> None:
    modules = [Module(name, source) for name, source in sources.items()]

    assert len(list(rule(modules))) == 1


def test_what_is_allowed_is_not_complained_about() -> None:
    innocent = [
        Module("trio_llm.frontend.a", '"""Waits."""\nimport trio\nfrom trio_llm.wire.messages import Ready'),
        Module("trio_llm.frontend.text.b", '"""Cuts."""\nfrom trio_llm.frontend.text import c'),
        Module(
            "trio_llm.frontend.text.c", '"""Joins."""\nif TYPE_CHECKING:\n    from trio_llm.frontend.text.b import d'
        ),
        Module(
            "trio_llm.engine.a", '"""Impure. Runs."""\nimport os\nimport torch\nsubprocess.run(["ls"], shell=False)'
        ),
        Module("trio_llm.cli.a", '"""Starts."""\ndef f():\n    from trio_llm.frontend.a import g'),
    ]

    assert [complaint for rule in PLANTED for complaint in rule(innocent)] == []
