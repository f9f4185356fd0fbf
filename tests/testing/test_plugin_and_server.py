"""The pytest fixtures, the test server, and the examples for users: README.md and docs/testing.md."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio

import trio_llm
from trio_llm.errors import ConfigError
from trio_llm.frontend.statistics.prometheus import PrometheusStatLogger
from trio_llm.testing import FakeLLM, open_fake_llm, open_test_server

ROOT: Final = Path(__file__).parents[2]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(*arguments: str, cwd: Path) -> str:
    """Of our own interpreter; its output."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ----------------------------------------------------------------------------------------- fixtures


async def test_the_fixture_gives_a_fake_llm(fake_llm: FakeLLM) -> None:
    fake_llm.answer = "Hi"

    assert (await fake_llm.complete("Hello")).outputs[0].text == "Hi"


async def test_the_fixtures_server_serves_the_tests_llm(fake_llm: FakeLLM, fake_llm_server: str) -> None:
    fake_llm.answers = {"Hello": "Hi there"}
    async with httpx.AsyncClient(base_url=fake_llm_server) as client:
        reply = await client.post("/v1/completions", json={"model": "fake", "prompt": "Hello"})

    assert reply.json()["choices"][0]["text"] == "Hi there"
    assert fake_llm.requests[0].prompt == "Hello"


def test_the_plugin_loads_nothing_heavy() -> None:
    loaded = run(
        "-c",
        "import sys, pytest_trio; before = set(sys.modules); import trio_llm.testing.plugin;"
        "print(*sorted(set(sys.modules) - before))",
        cwd=ROOT,
    ).split()

    assert set(loaded) == {"trio_llm", "trio_llm.version", "trio_llm.testing", "trio_llm.testing.plugin"}


# ------------------------------------------------------------------------------------------- server


async def test_a_test_server_listens_while_its_block_lasts() -> None:
    metrics = PrometheusStatLogger("fake")
    async with open_fake_llm(answer="Hi", stat_loggers=[metrics]) as llm:
        server = open_test_server(llm, metrics=metrics, served_model_names=("mine",))
        async with server as url, httpx.AsyncClient(base_url=url) as client:
            models = (await client.get("/v1/models")).json()
            series = (await client.get("/metrics")).text

        assert url.startswith("http://127.0.0.1:")
        assert [model["id"] for model in models["data"]] == ["mine"]
        assert "vllm:" in series
        with pytest.raises(OSError):
            await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))


async def test_leaving_the_block_of_a_test_server_aborts_what_it_streams() -> None:
    async with open_fake_llm() as llm:
        async with open_test_server(llm) as url, httpx.AsyncClient(base_url=url) as client:
            body = {"model": "fake", "prompt": "Hello", "stream": True, "max_tokens": 4000}
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                await anext(reply.aiter_bytes())

        await llm.assert_idle()
        assert llm.requests[0].was_aborted


async def test_an_error_in_the_block_of_a_test_server_comes_out_as_itself() -> None:
    async with open_fake_llm() as llm:
        with pytest.raises(ZeroDivisionError):
            async with open_test_server(llm):
                raise ZeroDivisionError
        with pytest.raises(ConfigError):
            async with open_test_server(llm, port=-1):
                pass


# ----------------------------------------------------------------------------------------- examples


def test_the_program_of_the_readme_works_as_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def open_llm() -> AsyncIterator[FakeLLM]:
        async with open_fake_llm(answers={"Why is the sky blue?": "It scatters."}) as llm:
            yield llm

    monkeypatch.setattr(trio_llm, "open_llm", open_llm, raising=False)
    (program,) = (example for example in examples("README.md") if "trio.run" in example)
    names: dict[str, Any] = {}

    exec(compile(program, "README.md", "exec"), names)

    assert capsys.readouterr().out == "It scatters.\n"


def test_the_examples_for_testing_pass_without_trio_mode(tmp_path: Path) -> None:
    pages = examples("docs/testing.md")
    assert len(pages) == 3
    for number, example in enumerate(pages):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = false\n")

    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path)

    assert "5 passed" in said


def test_the_fake_model_is_in_the_wheel(tmp_path: Path) -> None:
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=ROOT)

    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert f"trio_llm/testing/model/{name}" in names
