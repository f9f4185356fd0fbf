"""The command `trio-llm`: reads the command line, and turns every expected error into one line on stderr.

Imports only what `--help` needs: Trio, Hypercorn and Starlette are loaded inside the commands, torch never.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer
from typer.main import get_command

from trio_llm.cli import chat_options, log_options, options, scaling_options
from trio_llm.cli.output import checked_output
from trio_llm.config import EngineConfig, ServerConfig
from trio_llm.errors import TrioLLMError
from trio_llm.version import __version__

__all__ = ["app", "main", "run"]

_ENGINE = EngineConfig()
_SERVER = ServerConfig()

app = typer.Typer(
    name="trio-llm",
    help="Serve large language models from Trio.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console script. Exit codes: 0, 1 for an error, 2 for a command line that cannot be read, 130 for Ctrl-C."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run the command line `args` and return the exit code. Never raises for an expected error."""
    with checked_output():
        try:
            code = get_command(app).main([_known_spelling(arg) for arg in args], "trio-llm", standalone_mode=False)
            sys.stdout.flush()
        except typer.TyperException as error:
            # What the command line's reader found; its text names the option.
            return _fail(_plain(error.format_message()), error.exit_code)
        except TrioLLMError as error:
            return _fail(str(error), 1)
        except (KeyboardInterrupt, typer.Abort):
            return 130
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    if message:  # empty if no command was given, and the help was printed
        print(f"trio-llm: {' '.join(message.split())}", file=sys.stderr)
    return code


def _plain(message: str) -> str:
    """A message such as `Invalid value for '--port': Value error, 'x' is ...` as `--port: 'x' is ...`."""
    return re.sub(r"^Invalid value for '([^']*)': (Value error, )?", r"\1: ", message)


def _known_spelling(arg: str) -> str:
    """Hyphens for underscores, and the first name of an option for another: `--max_model_len=8k` is accepted, too."""
    match = re.fullmatch(r"(--[a-z][a-z_-]*)(=.*)?", arg, re.DOTALL)
    if match is None:
        return arg
    name = match[1].replace("_", "-")
    return options.OTHER_NAMES.get(name, name) + (match[2] or "")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trio-llm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve large language models from Trio."""


def _fields_of(config: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options are named as the fields that they fill."""
    return {name: given[name] for name in config.__struct_fields__ if name in given}


@app.command()
def serve(  # noqa: PLR0913 - typer reads the options off the signature
    model: options.Model = _ENGINE.model,
    dtype: options.DType = _ENGINE.dtype,
    device: options.Device = _ENGINE.device,
    max_model_len: options.MaxModelLen = _ENGINE.max_model_len,
    served_model_name: options.ServedModelName = None,
    max_num_seqs: options.MaxNumSeqs = _ENGINE.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = _ENGINE.max_num_batched_tokens,
    scheduling_policy: options.SchedulingPolicy = _ENGINE.scheduling_policy,
    step_time_target_s: options.StepTimeTarget = _ENGINE.step_time_target_s,
    max_num_queued_reqs: options.MaxNumQueuedReqs = _ENGINE.max_num_queued_reqs,
    max_num_queued_tokens: options.MaxNumQueuedTokens = _ENGINE.max_num_queued_tokens,
    kv_cache_memory_bytes: options.KVCacheMemory = _ENGINE.kv_cache_memory_bytes,
    num_gpu_blocks_override: options.NumBlocks = _ENGINE.num_gpu_blocks_override,
    disable_prefix_caching: options.DisablePrefixCaching = not _ENGINE.enable_prefix_caching,
    run_ahead: options.RunAhead = _ENGINE.run_ahead,
    data_parallel_size: scaling_options.DataParallelSize = _ENGINE.data_parallel_size,
    data_parallel_rank: scaling_options.DataParallelRank = _ENGINE.data_parallel_rank,
    data_parallel_external_lb: scaling_options.DataParallelExternalLB = _ENGINE.data_parallel_external_lb,
    disable_prefix_affinity: scaling_options.DisablePrefixAffinity = not _ENGINE.enable_prefix_affinity,
    host: options.Host = _SERVER.host,
    port: options.Port = _SERVER.port,
    allow_unauthenticated: options.AllowUnauthenticated = _SERVER.allow_unauthenticated,
    api_server_count: options.APIServerCount = _SERVER.api_server_count,
    max_body_bytes: options.MaxBodyBytes = _SERVER.max_body_bytes,
    body_timeout_s: options.BodyTimeout = _SERVER.body_timeout_s,
    sse_keep_alive_interval_s: options.SSEKeepAlive = _SERVER.sse_keep_alive_interval_s,
    output_proc_chunk_size: options.OutputProcChunkSize = _ENGINE.output_proc_chunk_size,
    enable_per_request_metrics: options.PerRequestMetrics = _SERVER.enable_per_request_metrics,
    drain_timeout_s: options.DrainTimeout = _SERVER.drain_timeout_s,
    keep_alive_on_engine_death: options.KeepAlive = _SERVER.keep_alive_on_engine_death,
    on_engine_death: options.OnEngineDeath = _ENGINE.on_engine_death,
    max_engine_restarts: options.MaxEngineRestarts = _ENGINE.max_engine_restarts,
    stall_timeout_s: options.StallTimeout = _ENGINE.stall_timeout_s,
    dev_mode: options.DevMode = _SERVER.dev_mode,
    weights_root: options.WeightsRoot = _SERVER.weights_root,
    profile_dir: options.ProfileDir = _ENGINE.profile_dir,
    log_level: log_options.LogLevel = "info",
    disable_log_stats: log_options.DisableLogStats = _ENGINE.disable_log_stats,
    enable_log_requests: log_options.EnableLogRequests = _ENGINE.enable_log_requests,
    max_log_len: log_options.MaxLogLen = _ENGINE.max_log_len,
    otlp_traces_endpoint: log_options.OTLPTracesEndpoint = _ENGINE.otlp_traces_endpoint,
) -> int:
    """Serve MODEL with an OpenAI-compatible API. The port answers at once; /health is 503 until the model is loaded."""
    given = locals()
    engine_config = EngineConfig(
        enable_prefix_caching=not disable_prefix_caching,
        enable_prefix_affinity=not disable_prefix_affinity,
        **_fields_of(EngineConfig, given),
    )
    server_config = ServerConfig(served_model_names=tuple(served_model_name or ()), **_fields_of(ServerConfig, given))
    from trio_llm.cli.serve import run_server

    return run_server(engine_config, server_config, log_level=log_level)


@app.command()
def chat(
    url: chat_options.URL = f"http://{_SERVER.host}:{_SERVER.port}",
    question: chat_options.Question = None,
    system_prompt: chat_options.SystemPrompt = None,
    model: chat_options.ModelName = None,
    max_tokens: chat_options.MaxTokens = None,
    temperature: chat_options.Temperature = None,
) -> int:
    """Chat with a server in the terminal. Ctrl-C ends an answer, Ctrl-D the chat."""
    from trio_llm.cli.chat import ChatOptions, run_chat

    asked = ChatOptions(model=model, system_prompt=system_prompt, max_tokens=max_tokens, temperature=temperature)
    return run_chat(url, asked, question=question)
