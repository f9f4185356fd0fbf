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

MAX_MODULE_LINES: Final = 350
MAX_FUNCTION_LINES: Final = 60
MAX_ATTRIBUTES: Final = 14
MAX_MODULES_IN_A_FOLDER: Final = 16
TIGHTER: Final = {"trio_llm.frontend.async_llm": 260}
"""Lines of modules that would else become the place for everything."""
TIGHTER_CLASSES: Final = {"AsyncLLM": 12}
"""Attributes, likewise."""

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
    is_package: bool = False

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

    @property
    def node(self) -> str:
        """The sub-room it is in: its package, or the module itself if it stands directly in `frontend` or `engine`."""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        return self.name if package in (PACKAGE, *_SUB_ROOMS) else package

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
        name = ".".join(parts)
        modules.append(Module(name.removesuffix(".__init__"), path.read_text(), name.endswith(".__init__")))
    return modules


# ------------------------------------------------------------------------------------------- rules

Complaints = Iterator[str]
_FLOORS: Final = {
    **dict.fromkeys(
        ("errors", "config", "quoting", "sampling", "bans", "pooling", "tokenization", "outputs", "parent", "version"),
        0,
    ),
    "wire": 1,
    **dict.fromkeys(("frontend", "engine"), 2),
    **dict.fromkeys(("client", "testing", "supervisor"), 3),
    "cli": 4,
}
_SUB_ROOMS: Final = {
    "trio_llm.frontend": (
        ("exception_groups", "gc_tuning", "keyword_errors", "text", "core_client", "http.server"),
        ("run_in_order",),
        ("rendering", "control", "requests.output"),
        ("statistics", "kv_events", "control_client"),
        ("tracing",),
        ("requests",),
        ("engine_client", "loaded_model", "output_handler"),
        ("library", "http.answers"),
        ("async_llm", "http.openai"),
        ("open_llm", "http"),
    ),
    "trio_llm.engine": (
        ("device", "ops", "transfer"),
        ("engine_state", "link", "scheduling"),
        ("outbox", "request_checks", "models", "sampling.logits_processors"),
        ("sampling", "worker"),
        ("executor",),
        ("weight_transfer",),
        ("clients", "control_calls", "step_pipeline"),
        ("core",),
        ("loop",),
        ("process",),
        ("__main__",),
    ),
}
"""From the lowest floor to the highest. A package counts with all modules directly in it."""


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


def sub_rooms_import_downwards(modules: Sequence[Module]) -> Complaints:
    floors = {
        f"{room}.{name}": floor
        for room, stack in _SUB_ROOMS.items()
        for floor, names in enumerate(stack)
        for name in names
    }
    for module in modules:
        if not module.name.startswith(tuple(f"{room}." for room in _SUB_ROOMS)):
            continue
        if module.node not in floors:
            yield module.complaint(1, f"{module.node} stands in no order; add it to _SUB_ROOMS")
            continue
        for other, line in _imported_modules(module, modules):
            other_floor = floors.get(other.node)
            if other.node != module.node and other_floor is not None and other_floor >= floors[module.node]:
                yield module.complaint(line, f"must not import {other.name}: {other.node} is not below {module.node}")


def no_package_imports_itself_through_others(modules: Sequence[Module]) -> Complaints:
    """Imports for the type checker count: a reader follows them, too."""
    edges: dict[str, set[str]] = {}
    for module in modules:
        others = {other.node for other, _ in _imported_modules(module, modules)} - {module.node}
        edges.setdefault(module.node, set()).update(others)
    yield from _rings(edges, "packages")


def no_module_imports_itself_even_for_types(modules: Sequence[Module]) -> Complaints:
    edges = {module.name: {other.name for other, _ in _imported_modules(module, modules)} for module in modules}
    yield from _rings(edges, "modules")


def _imported_modules(module: Module, modules: Sequence[Module]) -> Iterator[tuple[Module, int]]:
    known = {one.name: one for one in modules}
    for found in module.imports:
        # `from a.b import c` is the module a.b.c if there is one, else a name in a.b.
        target = known.get(found.target) or known.get(found.target.rpartition(".")[0])
        if target is not None and target is not module:
            yield target, found.line


def _rings(edges: dict[str, set[str]], what: str) -> Complaints:
    """One complaint per ring that a walk closes."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Complaints:
        if name in path:
            yield f"ring of {what}: {' -> '.join((*path[path.index(name) :], name))}"
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                yield from visit(target, (*path, name))
            done.add(name)

    for name in sorted(edges):
        yield from visit(name, ())


def folders_are_small(modules: Sequence[Module]) -> Complaints:
    counts: dict[str, int] = {}
    for module in modules:
        package = module.name if module.is_package else module.name.rpartition(".")[0]
        counts[package] = counts.get(package, 0) + 1
    for package, count in counts.items():
        if count > MAX_MODULES_IN_A_FOLDER:
            yield f"{package} has {count} modules at one level, the cap is {MAX_MODULES_IN_A_FOLDER}"


def classes_have_few_attributes(modules: Sequence[Module]) -> Complaints:
    """Classes that do something. A dataclass lists what it has in one place, and may be a table."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef) or any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                continue
            attributes = {
                child.attr
                for child in ast.walk(node)
                if isinstance(child, ast.Attribute)
                and isinstance(child.ctx, ast.Store)
                and isinstance(child.value, ast.Name)
                and child.value.id == "self"
            }
            cap = TIGHTER_CLASSES.get(node.name, MAX_ATTRIBUTES)
            if len(attributes) > cap:
                yield module.complaint(node.lineno, f"{node.name} has {len(attributes)} attributes, the cap is {cap}")


def names_that_ask_are_answered_with_a_bool(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            returns = "" if node.returns is None else ast.unparse(node.returns)
            if node.name.lstrip("_").startswith(("is_", "has_", "can_")) and not (
                returns == "bool" or returns.startswith(("TypeGuard[", "TypeIs["))
            ):
                yield module.complaint(node.lineno, f"{node.name} asks a question and returns {returns or 'anything'}")


def modules_and_functions_are_short(modules: Sequence[Module]) -> Complaints:
    for module in modules:
        lines = len(module.source.splitlines())
        cap = TIGHTER.get(module.name, MAX_MODULE_LINES)
        if lines > cap:
            yield module.complaint(1, f"has {lines} lines, the cap is {cap}")
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
    sub_rooms_import_downwards: [
        {
            "trio_llm.frontend.text.a": "from trio_llm.frontend.requests import b",
            "trio_llm.frontend.requests.b": "x = 1",
        },
        {
            "trio_llm.engine.core": "def f():\n    from trio_llm.engine.loop import run_loop",
            "trio_llm.engine.loop": "x = 1",
        },
        {
            "trio_llm.engine.models.a": "if TYPE_CHECKING:\n    from trio_llm.engine.sampling.b import c",
            "trio_llm.engine.sampling.b": "x = 1",
        },
        {"trio_llm.engine.attic.a": "x = 1"},
    ],
    no_package_imports_itself_through_others: [
        {
            "trio_llm.cli.a": "if TYPE_CHECKING:\n    from trio_llm.testing.b import x",
            "trio_llm.testing.b": "def f():\n    from trio_llm.client.c import y",
            "trio_llm.client.c": "import trio_llm.cli.a",
        },
    ],
    no_module_imports_itself_even_for_types: [
        {
            "trio_llm.wire.a": "from trio_llm.wire.b import x",
            "trio_llm.wire.b": "from trio_llm.wire import c",
            "trio_llm.wire.c": "import trio_llm.wire.a",
        },
        {
            "trio_llm.wire.a": "if TYPE_CHECKING:\n    from trio_llm.wire.b import x",
            "trio_llm.wire.b": "from trio_llm.wire.a import y",
        },
    ],
    folders_are_small: [{f"trio_llm.wire.a{n}": "x = 1" for n in range(MAX_MODULES_IN_A_FOLDER + 1)}],
    classes_have_few_attributes: [
        {
            "trio_llm.wire.a": "class A:\n    def f(self):\n"
            + "".join(f"        self.x{n} = 1\n" for n in range(MAX_ATTRIBUTES + 1))
        },
        {
            "trio_llm.wire.a": "class AsyncLLM:\n    def f(self):\n"
            + "".join(f"        self.x{n}: int = 1\n" for n in range(13))
        },
    ],
    names_that_ask_are_answered_with_a_bool: [
        {"trio_llm.wire.a": "def is_red() -> str: ..."},
        {"trio_llm.wire.a": "class A:\n    async def _has_gone(self): ..."},
    ],
    modules_and_functions_are_short: [
        {"trio_llm.wire.a": "x = 1\n" * (MAX_MODULE_LINES + 1)},
        {"trio_llm.wire.a": "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES},
        {"trio_llm.frontend.async_llm": "x = 1\n" * 261},
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
        Module("trio_llm.frontend.kv_events", '"""Waits."""\nimport trio\nfrom trio_llm.wire.messages import Ready'),
        Module("trio_llm.frontend.text.b", '"""Cuts."""\nfrom trio_llm.frontend.text import c'),
        Module("trio_llm.frontend.text.c", '"""Joins."""\nclass A:\n    def is_red(self) -> bool: ...'),
        Module(
            "trio_llm.engine.core", '"""Impure. Runs."""\nimport os\nimport torch\nsubprocess.run(["ls"], shell=False)'
        ),
        Module("trio_llm.cli.a", '"""Starts."""\ndef f():\n    from trio_llm.frontend.kv_events import g'),
    ]

    assert [complaint for rule in PLANTED for complaint in rule(innocent)] == []
