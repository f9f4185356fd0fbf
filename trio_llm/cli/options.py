"""The options of `trio-llm serve`, one alias each: name, help text and the panel of `--help` it stands in.

Used by cli/main.py. Defaults stand there, taken from the configs, so that there is one place for each.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from trio_llm.cli.value_parsers import parse_count, parse_decimal, parse_port
from trio_llm.config import Device as DeviceName
from trio_llm.config import DType as DTypeName
from trio_llm.config import SchedulingPolicy as SchedulingPolicyName

_MODEL = "Model"
_MEMORY = "Memory and scheduling"
_SERVER = "Server"
_FAILURE = "Failure"
_DEV = "Control of the running engine"

OTHER_NAMES: Final = {"--kv-cache-memory-bytes": "--kv-cache-memory"}
"""Other spelling, and the option it stands for. Typer does not know them, so that `--help` shows one name per line."""

OnEngineDeathName = Literal["restart", "exit"]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory in Hugging Face form (config.json, tokenizer.json, *.safetensors). "
        "Left out: the embedded SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
DType = Annotated[
    DTypeName,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Type of the weights: auto, float32, bfloat16 or float16. auto: as the checkpoint says, "
        "but float32, with twice the memory, on a CPU without 16-bit arithmetic.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where the model runs: auto, cpu or cuda. auto: a GPU if there is one.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        parser=parse_count,
        metavar="N",
        help="Tokens of prompt and answer together.",
        show_default="what the model was trained for, or what the KV cache can hold",
        rich_help_panel=_MODEL,
    ),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        help="Name that requests may use; may be given several times.",
        show_default="the directory's name",
        rich_help_panel=_MODEL,
    ),
]

MaxNumSeqs = Annotated[
    int,
    typer.Option(
        "--max-num-seqs", parser=parse_count, metavar="N", help="Sequences in one step.", rich_help_panel=_MEMORY
    ),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option(
        "--max-num-batched-tokens",
        parser=parse_count,
        metavar="N",
        help="Tokens in one step, prompts and answers together.",
        rich_help_panel=_MEMORY,
    ),
]
StepTimeTarget = Annotated[
    float,
    typer.Option(
        "--step-time-target",
        parser=parse_decimal,
        metavar="S",
        help="Seconds that a step should take at most while answers are generated; prompts beside them are cut to fit. "
        "0: no limit.",
        rich_help_panel=_MEMORY,
    ),
]
MaxNumQueuedReqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-queued-reqs",
        parser=parse_count,
        metavar="N",
        help="Unfinished requests beyond which new ones are refused with 429.",
        show_default="no limit",
        rich_help_panel=_MEMORY,
    ),
]
MaxNumQueuedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-queued-tokens",
        parser=parse_count,
        metavar="N",
        help="Prompt tokens of requests without a first answer token, beyond which new ones are refused with 429.",
        show_default="no limit",
        rich_help_panel=_MEMORY,
    ),
]
KVCacheMemory = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory",
        parser=parse_count,
        metavar="BYTES",
        help="Memory for the KV cache, such as 512M or 2G.",
        show_default="40 % of what is free, on a CPU 4G at most",
        rich_help_panel=_MEMORY,
    ),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        "--num-gpu-blocks-override",
        parser=parse_count,
        metavar="N",
        help="Number of KV blocks, on any device, instead of sizing by memory.",
        show_default="by memory",
        rich_help_panel=_MEMORY,
    ),
]
DisablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--disable-prefix-caching",
        help="Compute every prompt from its first token on.",
        rich_help_panel=_MEMORY,
    ),
]
RunAhead = Annotated[
    int | None,
    typer.Option(
        "--run-ahead",
        parser=parse_count,
        metavar="N",
        help="Steps that are launched before the result of the step before is read: 0 or 1.",
        show_default="1 on a GPU, 0 on a CPU",
        rich_help_panel=_MEMORY,
    ),
]

Host = Annotated[str, typer.Option("--host", metavar="ADDR", help="Address to listen on.", rich_help_panel=_SERVER)]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        parser=parse_port,
        metavar="PORT",
        help="Port to listen on; 0: any free one.",
        rich_help_panel=_SERVER,
    ),
]
AllowUnauthenticated = Annotated[
    bool,
    typer.Option(
        "--allow-unauthenticated",
        help="Listen beyond loopback although the server asks for no key.",
        rich_help_panel=_SERVER,
    ),
]
APIServerCount = Annotated[
    int,
    typer.Option(
        "--api-server-count",
        metavar="N",
        help="Front-end processes that share the address and the engines: for many streams on a machine with many "
        "cores. One that dies is started again.",
        rich_help_panel=_SERVER,
    ),
]
MaxBodyBytes = Annotated[
    int,
    typer.Option(
        "--max-body-bytes",
        parser=parse_count,
        metavar="BYTES",
        help="Largest request body.",
        show_default="16M",
        rich_help_panel=_SERVER,
    ),
]
BodyTimeout = Annotated[
    float,
    typer.Option(
        "--body-timeout",
        parser=parse_decimal,
        metavar="S",
        help="Seconds a client has to send its request body.",
        rich_help_panel=_SERVER,
    ),
]
SSEKeepAlive = Annotated[
    float,
    typer.Option(
        "--sse-keep-alive-interval",
        parser=parse_decimal,
        metavar="S",
        help="Seconds of silence in a stream after which a comment is sent.",
        rich_help_panel=_SERVER,
    ),
]
PerRequestMetrics = Annotated[
    bool,
    typer.Option(
        "--enable-per-request-metrics",
        help="Tell in answers how long they took, in the field metrics.",
        rich_help_panel=_SERVER,
    ),
]

DevMode = Annotated[
    bool,
    typer.Option(
        "--dev-mode",
        help="Serve the routes that control the engine, too: sleep, pause, new weights. Loopback only.",
        rich_help_panel=_DEV,
    ),
]
WeightsRoot = Annotated[
    str | None,
    typer.Option(
        "--weights-root",
        metavar="DIR",
        help="Folder below which /update_weights takes weights from.",
        show_default="it takes none",
        rich_help_panel=_DEV,
    ),
]
ProfileDir = Annotated[
    str | None,
    typer.Option(
        "--profile-dir",
        metavar="DIR",
        help="Folder for traces of the torch profiler.",
        show_default="no traces",
        rich_help_panel=_DEV,
    ),
]

SchedulingPolicy = Annotated[
    SchedulingPolicyName,
    typer.Option(
        "--scheduling-policy",
        metavar="NAME",
        help="fcfs: requests are served in the order in which they come. priority: those with a lower priority first.",
        rich_help_panel=_MEMORY,
    ),
]
OutputProcChunkSize = Annotated[
    int,
    typer.Option(
        "--output-proc-chunk-size",
        parser=parse_count,
        metavar="N",
        help="New tokens of different requests that are handled before other tasks of the server get a turn.",
        rich_help_panel=_SERVER,
    ),
]

DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        parser=parse_decimal,
        metavar="S",
        help="Seconds that running requests get after SIGTERM or Ctrl-C; a second signal stops at once.",
        rich_help_panel=_FAILURE,
    ),
]
KeepAlive = Annotated[
    bool,
    typer.Option(
        "--keep-alive-on-engine-death",
        help="Keep answering, with errors, when the engine is gone, instead of ending.",
        rich_help_panel=_FAILURE,
    ),
]

OnEngineDeath = Annotated[
    OnEngineDeathName,
    typer.Option(
        "--on-engine-death",
        metavar="WHAT",
        help="restart: start the engine again and continue all unfinished requests. exit: end the server.",
        rich_help_panel=_FAILURE,
    ),
]
MaxEngineRestarts = Annotated[
    int,
    typer.Option(
        "--max-engine-restarts",
        parser=parse_count,
        metavar="N",
        help="Times that the engine is started again in ten minutes; one more death is the end.",
        rich_help_panel=_FAILURE,
    ),
]
StallTimeout = Annotated[
    float,
    typer.Option(
        "--stall-timeout",
        parser=parse_decimal,
        metavar="S",
        help="Seconds without a step while there is work, or without any sign of life; then the engine is killed.",
        rich_help_panel=_FAILURE,
    ),
]
