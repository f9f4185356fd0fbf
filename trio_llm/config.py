"""EngineConfig and ServerConfig: everything an operator can set, frozen and checked on construction.

The only module that reads environment variables. Used by the command line, `open_llm()` and the engine
process, which gets its EngineConfig as msgpack through a pipe.
"""

from __future__ import annotations

import ipaddress
import math
import os
from pathlib import Path, PurePath
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from trio_llm.errors import ConfigError

__all__ = [
    "EMBEDDED_MODEL_NAME",
    "DType",
    "Device",
    "EngineConfig",
    "FakeEngineConfig",
    "SchedulingPolicy",
    "ServerConfig",
    "cache_dir",
    "default_model_name",
    "traces_endpoint",
]

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]

_INT64 = 2**63
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MIN_STALL_TIMEOUT_S = 2.0
MAX_API_SERVERS = 64
EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
MAX_DATA_PARALLEL_SIZE = 1024
DAY_S = 24 * 60 * 60
"""The longest time that can be set: usual ones are minutes, and the kernel's timers overflow at some point."""


def cache_dir() -> Path:
    """Folder for converted models: `$TRIO_LLM_CACHE`, else `$XDG_CACHE_HOME/trio_llm`, else `~/.cache/trio_llm`."""
    if own := os.environ.get("TRIO_LLM_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trio_llm"


class FakeEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run a FakeExecutor in place of a model: deterministic tokens, chosen delays and faults. For tests and benchmarks.

    The token at index i of a request's answer is a fixed function of its prompt, i and, above temperature 0, its seed,
    unless `script` is set.
    """

    model_dir: str | None = None
    """Directory with the tokenizer to pretend to; None: the embedded model's."""
    logits_width: int = 256
    max_model_len: int = 4096
    script: tuple[int, ...] = ()
    """If not empty: every answer repeats these tokens; an end-of-sequence id among them ends the answer."""
    eos_token_ids: tuple[int, ...] = ()
    step_s: float = 0.0
    """Seconds that every step takes."""
    start_s: float = 0.0
    """Seconds that loading takes."""
    fail_at_step: int | None = None
    """The step that raises, as a lost device would; counted from 1."""
    faulty_token_prompt: int | None = None
    """Requests whose prompt starts with this token get token id -1, as broken logits would give."""
    failing_row_prompt: int | None = None
    """Requests whose prompt starts with this token fail alone, with an error of their own."""
    killer_prompt: int | None = None
    """A step with a request whose prompt starts with this token raises, as a lost device would."""
    embedding_size: int = 8
    """Numbers in an embedding. It is a fixed function of the prompt, as are the probabilities of classes."""
    num_labels: int | None = None
    """If set: the fake is a classifier with this many classes, which embeds and classifies, and does not generate."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine process runs, and how.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    model: str | None = None
    """Directory in Hugging Face form; None: the embedded SmolLM2-135M-Instruct."""
    dtype: DType = "auto"
    """auto: as the checkpoint says, but float32 on a CPU that has no arithmetic for the checkpoint's 16-bit type."""
    device: Device = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None: what the model was trained for, or what the KV cache can hold."""
    max_num_seqs: int = 64
    """Sequences in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step, prompts and answers together."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """fcfs: requests are served in the order in which they come, and one with a priority other than 0 is refused.
    priority: those with a lower priority first, then in that order."""
    step_time_target_s: float = 0.2
    """Seconds that a step should take at most while answers are generated: prompts beside them are cut into pieces that
    fit. 0: prompts always get the whole token budget."""
    num_gpu_blocks_override: int | None = None
    """KV blocks, on whatever device; None: by memory."""
    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache; None: 40 % of what is free, on a CPU 4 GiB at most."""
    enable_prefix_caching: bool = True
    """The common beginning of prompts, in whole KV blocks, is computed once."""
    kv_events: bool = False
    """Report what enters and leaves the prefix cache, for `llm.kv_events()`."""
    run_ahead: int | None = None
    """Steps that are launched before the result of the step before is read, 0 or 1; None: 1 on a GPU, which then does
    not wait for the host, and 0 on a CPU, where nothing could run meanwhile."""
    max_num_queued_reqs: int | None = None
    """Unfinished requests, running and waiting, beyond which new ones are refused; None: no limit."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens of requests without a first token, beyond which new ones are refused; None: no limit."""
    output_proc_chunk_size: int = 128
    """Rows of requests that a front end handles before its other tasks get a turn."""
    credit_steps: int = 256
    """Steps the engine may be ahead of a front end before it pauses that front end's requests."""
    startup_timeout_s: float = 600.0
    """Seconds without any sign of life while the engine starts, after which the start has failed."""
    on_engine_death: Literal["restart", "exit"] = "restart"
    """restart: an engine that dies after it was ready is started again and continues all unfinished requests."""
    max_engine_restarts: int = 5
    """Restarts of an engine within ten minutes; one more death is its end. 0: its first death is."""
    stall_timeout_s: float = 120.0
    """Seconds without a step while there is work, or without any sign of life, after which an engine is killed."""
    data_parallel_size: int = 1
    """Engines that run the same model, its ranks. A front end starts and balances all of them, unless it has a rank."""
    data_parallel_rank: int | None = None
    """This front end has one engine, of this rank: a balancer in front of all of them shares out the requests."""
    data_parallel_external_lb: bool = False
    """There is such a balancer. Implied by `data_parallel_rank`, without which it cannot be."""
    enable_prefix_affinity: bool = True
    """With several engines: prefer one that has computed the beginning of a prompt. Not without prefix caching."""
    disable_log_stats: bool = False
    """Compute no statistics, unless a stat logger is given or installed; servers have no log line of them and no series
    of the engine in /metrics."""
    profile_dir: str | None = None
    """Folder for traces of the torch profiler; None: it cannot be started."""
    enable_log_requests: bool = False
    """Log each request also when it arrives, with its parameters; at level DEBUG with its prompt, too."""
    max_log_len: int | None = None
    """Characters of text, and ids of tokens, that the log shows of a prompt; None: all."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that takes traces as OTLP over HTTP; None: as
    `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` says, and if it is not set, no traces. See `traces_endpoint`."""
    fake: FakeEngineConfig | None = None

    @property
    def num_local_engines(self) -> int:
        """Engines that one front end starts."""
        return 1 if self.data_parallel_rank is not None else self.data_parallel_size

    @property
    def first_rank(self) -> int:
        """The rank of the first of them. The others follow."""
        return self.data_parallel_rank or 0

    def __post_init__(self) -> None:
        self._check_data_parallel()
        _check_positive("--max-model-len", self.max_model_len)
        _check_positive("--max-num-seqs", self.max_num_seqs)
        _check_positive("--max-num-batched-tokens", self.max_num_batched_tokens)
        _check_seconds("--step-time-target", self.step_time_target_s, zero=True)
        _check_positive("--num-gpu-blocks-override", self.num_gpu_blocks_override)
        _check_positive("--kv-cache-memory", self.kv_cache_memory_bytes)
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ConfigError(f"--scheduling-policy must be fcfs or priority, not {self.scheduling_policy!r}")
        if self.run_ahead not in (None, 0, 1):
            raise ConfigError(f"--run-ahead must be 0 or 1, not {self.run_ahead}")
        _check_positive("--max-num-queued-reqs", self.max_num_queued_reqs)
        _check_positive("--max-num-queued-tokens", self.max_num_queued_tokens)
        _check_positive("--output-proc-chunk-size", self.output_proc_chunk_size)
        _check_positive("credit_steps", self.credit_steps)
        _check_seconds("startup_timeout_s", self.startup_timeout_s)
        _check_positive("--max-engine-restarts", self.max_engine_restarts, zero=True)
        _check_seconds("--stall-timeout", self.stall_timeout_s)
        if self.stall_timeout_s < MIN_STALL_TIMEOUT_S:
            raise ConfigError(
                f"--stall-timeout must be at least {MIN_STALL_TIMEOUT_S:g} seconds, not {self.stall_timeout_s:g}: an "
                "idle engine sends a sign of life every second"
            )
        if self.profile_dir == "":
            raise ConfigError("--profile-dir must not be empty")
        _check_positive("--max-log-len", self.max_log_len, zero=True)
        if self.otlp_traces_endpoint is not None:
            _check_url("--otlp-traces-endpoint", self.otlp_traces_endpoint)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs ({self.max_num_seqs}) must not be above "
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}): each sequence of a step needs a token"
            )
        if self.kv_events and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events reports changes of the prefix cache, which --disable-prefix-caching "
                "(enable_prefix_caching=False) turns off; leave out one of the two"
            )
        # An empty path would be the working directory.
        if self.model is not None and not (self.model and Path(self.model).is_dir()):
            raise ConfigError(
                f"MODEL {self.model!r} is not a directory; give a directory in Hugging Face form "
                "(config.json, tokenizer.json, *.safetensors), or no MODEL for the embedded one"
            )

    def _check_data_parallel(self) -> None:
        size, rank = self.data_parallel_size, self.data_parallel_rank
        if not 1 <= size <= MAX_DATA_PARALLEL_SIZE:
            raise ConfigError(f"--data-parallel-size must be from 1 to {MAX_DATA_PARALLEL_SIZE}, not {size}")
        if rank is not None and not 0 <= rank < size:
            raise ConfigError(
                f"--data-parallel-rank must be from 0 to --data-parallel-size - 1 ({size - 1}), not {rank}"
            )
        if self.data_parallel_external_lb and rank is None:
            raise ConfigError(
                "--data-parallel-external-lb needs --data-parallel-rank: which of the engines this server has"
            )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the HTTP server listens on, and its limits.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    allow_unauthenticated: bool = False
    """Listen beyond loopback although the server asks for no key."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; empty: the model's directory name."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    keep_alive_on_engine_death: bool = False
    """Keep answering, with errors, when the engine is gone, instead of ending."""
    api_server_count: int = 1
    """Front-end processes that share the address and the engines; above 1, a supervisor owns them all."""
    max_body_bytes: int = 16 * MIB
    body_timeout_s: float = 60.0
    """Seconds a client has to send its request body."""
    sse_keep_alive_interval_s: float = 10.0
    """Seconds of silence in a stream after which a comment is sent."""
    max_connections: int = 4096
    """Open connections; further ones are closed at once. Fewer if the process may not open that many descriptors."""
    dev_mode: bool = False
    """Serve the control routes, too: every program that reaches the port may then control the engine."""
    enable_per_request_metrics: bool = False
    """Answers to a single choice tell how long the request took, in the field `metrics`."""
    weights_root: str | None = None
    """Folder below which /update_weights takes weights from; None: it takes none."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")
        if not _is_loopback(self.host) and not self.allow_unauthenticated:
            raise ConfigError(
                f"--host {self.host} would let anyone on the network use this server, which asks for no key; "
                "use 127.0.0.1, or say --allow-unauthenticated"
            )
        if self.dev_mode and not _is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} with --dev-mode would let anyone on the network control the engine; "
                "use 127.0.0.1, or leave --dev-mode out"
            )
        if self.weights_root is not None and not (self.weights_root and Path(self.weights_root).is_dir()):
            raise ConfigError(f"--weights-root {self.weights_root!r} is not a directory; give one that exists")
        _check_seconds("--drain-timeout", self.drain_timeout_s, zero=True)
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(f"--api-server-count must be from 1 to {MAX_API_SERVERS}, not {self.api_server_count}")
        _check_positive("--max-body-bytes", self.max_body_bytes)
        _check_seconds("--body-timeout", self.body_timeout_s)
        if not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty")
        _check_seconds("--sse-keep-alive-interval", self.sse_keep_alive_interval_s)
        _check_positive("max_connections", self.max_connections)


def default_model_name(config: EngineConfig) -> str:
    """The name under which a model is served unless the operator chooses one: that of its directory."""
    if config.model is None:
        return EMBEDDED_MODEL_NAME
    return PurePath(config.model).name or config.model


def traces_endpoint(config: EngineConfig) -> str | None:
    """The URL that traces are sent to; a URL without a path gets `/v1/traces`. None: no traces are recorded.

    Raises:
        ConfigError: what the environment says is no URL; the message names the variable.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    url = config.otlp_traces_endpoint
    if url is None:
        url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
        if not url:
            return None
        _check_url("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
    parts = urlsplit(url)
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else url


def _check_url(flag: str, url: str) -> None:
    """The URL is not shown: it may hold a password."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{flag} must be a URL such as http://127.0.0.1:4318/v1/traces; traces are sent as OTLP over HTTP, not gRPC"
        )


def _is_loopback(host: str) -> bool:
    """Whether it is a loopback address or `localhost`. Other names are not resolved, and count as not loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_positive(flag: str, value: float | None, *, zero: bool = False) -> None:
    # Written so that NaN is refused; larger numbers have no form on the wire.
    if value is not None and not (0 <= value < _INT64 and (zero or value > 0)):
        shown = value if abs(value) < _INT64 or math.isinf(value) else "that much"
        raise ConfigError(f"{flag} must be {'0 or more' if zero else 'more than 0'} and below 2**63, not {shown}")


def _check_seconds(flag: str, value: float, *, zero: bool = False) -> None:
    _check_positive(flag, value, zero=zero)
    if value > DAY_S:
        raise ConfigError(f"{flag} must be at most {DAY_S} seconds (a day), not {value:g}")
