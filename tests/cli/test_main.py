"""The command line: its help, its speed's cause (what it imports), and its errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trio_llm.cli import chat as chat_module
from trio_llm.cli import options
from trio_llm.cli.main import app, run
from trio_llm.config import DAY_S, EngineConfig, ServerConfig
from trio_llm.errors import EngineStartupError
from trio_llm.version import __version__

HEAVY = ("torch", "transformers", "trio", "hypercorn", "fastapi", "jinja2", "zmq", "numpy")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig, dict[str, Any]]]:
    """What `serve` would have run, in place of running it."""
    calls: list[tuple[EngineConfig, ServerConfig, dict[str, Any]]] = []

    def record(engine: EngineConfig, server: ServerConfig, **rest: Any) -> int:
        calls.append((engine, server, rest))
        return 0

    monkeypatch.setattr("trio_llm.cli.serve.run_server", record)
    return calls


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["chat", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\n"
        "from trio_llm.cli.main import run\n"
        f"assert run({args!r}) == 0\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stderr.strip() == "[]"
    assert result.stdout


def test_serving_loads_no_torch_and_no_transformers_in_this_process() -> None:
    code = (
        "import sys, trio_llm.cli.serve, trio_llm.cli.chat\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_help_is_grouped_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0

    text = capsys.readouterr().out
    for expected in ("Model", "Memory and scheduling", "Server", "Failure", "8000", "127.0.0.1", "16M"):
        assert expected in text


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_help_fits_a_terminal_of_80_columns_with_nothing_cut_off(command: str) -> None:
    code = f"from trio_llm.cli.main import run\nrun([{command!r}, '--help'])"
    environment = {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, env=environment
    )

    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    words = set(result.stdout.split())
    assert options_of(command) <= words
    for value in ("float16.", "cuda.", "error.") if command == "serve" else ():
        assert value in words


def test_without_a_command_there_is_help_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2

    printed = capsys.readouterr()
    assert "serve" in printed.out + printed.err
    assert "trio-llm: " not in printed.err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"trio-llm {__version__}"


def test_no_option_changes_no_default(served: list[Any]) -> None:
    assert run(["serve"]) == 0

    assert served == [(EngineConfig(), ServerConfig(), {"log_level": "info"})]


def test_every_option_reaches_its_field(served: list[Any], tmp_path: Path) -> None:
    line = (
        f"serve {tmp_path} --dtype float32 --device cpu --max-model-len 2k --max-num-seqs 8 "
        "--max-num-batched-tokens 1K --step-time-target 0.5 --max-num-queued-reqs 1k --max-num-queued-tokens 1M "
        "--num-gpu-blocks-override 100 --kv-cache-memory-bytes 512M --disable-prefix-caching --run-ahead 1 "
        "--host 0.0.0.0 --port 0 --allow-unauthenticated --served-model-name a --served-model-name b "
        "--on-engine-death exit --max-engine-restarts 0 --stall-timeout 9.5 "
        "--data-parallel-size 4 --data-parallel-rank 2 --data-parallel-external-lb --disable-prefix-affinity "
        "--drain-timeout 5 --keep-alive-on-engine-death --max-body-bytes 1M --body-timeout 7 "
        "--sse-keep-alive-interval 3 --log-level debug --disable-log-stats --enable-per-request-metrics "
        "--enable-log-requests --max-log-len 1k --otlp-traces-endpoint http://127.0.0.1:4318"
    )

    assert run(line.split()) == 0

    engine = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        device="cpu",
        max_model_len=2000,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        step_time_target_s=0.5,
        max_num_queued_reqs=1000,
        max_num_queued_tokens=1024**2,
        num_gpu_blocks_override=100,
        kv_cache_memory_bytes=512 * 1024**2,
        enable_prefix_caching=False,
        run_ahead=1,
        on_engine_death="exit",
        max_engine_restarts=0,
        data_parallel_size=4,
        data_parallel_rank=2,
        data_parallel_external_lb=True,
        enable_prefix_affinity=False,
        stall_timeout_s=9.5,
        disable_log_stats=True,
        enable_log_requests=True,
        max_log_len=1000,
        otlp_traces_endpoint="http://127.0.0.1:4318",
    )
    server = ServerConfig(
        host="0.0.0.0",
        port=0,
        allow_unauthenticated=True,
        served_model_names=("a", "b"),
        drain_timeout_s=5,
        keep_alive_on_engine_death=True,
        max_body_bytes=1024**2,
        body_timeout_s=7,
        sse_keep_alive_interval_s=3,
        enable_per_request_metrics=True,
    )
    assert served == [(engine, server, {"log_level": "debug"})]


def test_underscores_do_for_hyphens_in_names_of_options_only(served: list[Any]) -> None:
    assert run(["serve", "--served_model_name=my_model", "--max_num_seqs", "4"]) == 0

    engine, server, _ = served[0]
    assert (engine.max_num_seqs, server.served_model_names) == (4, ("my_model",))


@pytest.mark.parametrize(
    ("line", "code", "named"),
    [
        ("serve --max-model-len 3q", 2, "--max-model-len"),
        ("serve --port http", 2, "--port"),
        ("serve --dtype int3", 2, "--dtype"),
        ("serve --max-modle-len 4", 2, "--max-model-len"),
        ("serv", 2, "serve"),
        ("serve a b", 2, "b"),
        ("serve --port 70000", 1, "--port"),
        ("serve --max-num-seqs 0", 1, "--max-num-seqs"),
        ("serve --data-parallel-size 0", 1, "--data-parallel-size"),
        ("serve --data-parallel-rank 1", 1, "--data-parallel-rank"),
        ("serve --data-parallel-external-lb", 1, "--data-parallel-external-lb"),
        ("serve --on-engine-death weep", 2, "--on-engine-death"),
        ("serve --max-num-queued-reqs 0", 1, "--max-num-queued-reqs"),
        ("serve --max-num-queued-tokens 0", 1, "--max-num-queued-tokens"),
        ("serve --max-num-seqs 64 --max-num-batched-tokens 8", 1, "--max-num-batched-tokens"),
        ("serve --run-ahead 2", 1, "--run-ahead must be 0 or 1, not 2"),
        ("serve --host 0.0.0.0", 1, "--allow-unauthenticated"),
        ("serve --otlp-traces-endpoint grpc://127.0.0.1:4317", 1, "--otlp-traces-endpoint must be a URL such as http:"),
        ("serve --drain-timeout -1", 1, "--drain-timeout"),
        ("serve --drain-timeout soon", 2, "--drain-timeout: 'soon' is not a number; write it like"),
        ("serve --port abc", 2, "--port: 'abc' is not a port; write a number"),
        ("serve --max-num-seqs -1", 2, "--max-num-seqs: '-1' is negative; write a number"),
        ("serve --kv-cache-memory 9999999T", 2, "--kv-cache-memory: '9999999T' is too large"),
        ("serve --kv-cache-memory-bytes=2q", 2, "--kv-cache-memory: '2q' is not a number"),
        ("serve /no/such/model", 1, "MODEL '/no/such/model'"),
        ("chat ftp://here", 1, "ftp://here"),
        ("chat --temperature 3", 2, "--temperature"),
    ],
)
def test_a_wrong_command_line_gets_one_line_that_names_what_is_wrong(
    line: str, code: int, named: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == code

    error = capsys.readouterr().err
    assert error.startswith("trio-llm: ")
    assert error.count("\n") == 1
    assert named in error
    assert served == []


def test_an_empty_model_is_not_the_working_directory(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", ""]) == 1

    assert capsys.readouterr().err.startswith("trio-llm: MODEL '' is not a directory; give a directory")
    assert served == []


@pytest.mark.parametrize("flag", ["--drain-timeout", "--body-timeout", "--sse-keep-alive-interval", "--stall-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", str(DAY_S + 1), "1e300", "-1"])
def test_a_time_that_cannot_be_waited_for_is_refused(
    flag: str, value: str, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", flag, value]) == 1
    assert capsys.readouterr().err.startswith(f"trio-llm: {flag} must be ")
    assert served == []

    assert run(["serve", flag, str(DAY_S)]) == 0


def test_a_stall_timeout_that_an_idle_engine_would_not_outlive_is_refused(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "--stall-timeout", "1.9"]) == 1
    assert "--stall-timeout must be at least 2 seconds, not 1.9" in capsys.readouterr().err
    assert run(["serve", "--stall-timeout", "2"]) == 0


def test_an_error_of_several_lines_becomes_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **rest: Any) -> int:
        raise EngineStartupError("no memory for the KV cache;\n  lower --max-model-len")

    monkeypatch.setattr("trio_llm.cli.serve.run_server", fail)

    assert run(["serve"]) == 1
    assert capsys.readouterr().err == "trio-llm: no memory for the KV cache; lower --max-model-len\n"


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: Any, **rest: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "run_chat", interrupt)

    assert run(["chat"]) == 130
    assert capsys.readouterr().err.strip() == ""


def options_of(command: str) -> set[str]:
    """Every long option that the command line's reader knows."""
    params = get_command(app).commands[command].params  # type: ignore[attr-defined]
    names = {name for param in params for name in [*param.opts, *param.secondary_opts]}
    return {name for name in names if name.startswith("--")} - {"--help"}


def test_the_configuration_page_and_the_options_are_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    listed = {
        name
        for line in page.splitlines()
        if line.startswith("| `-")
        for name in re.findall(r"`(--[a-z-]+)`", line.split(" | ")[0])
    }

    assert listed == options_of("serve") | options_of("chat") | options.OTHER_NAMES.keys()
