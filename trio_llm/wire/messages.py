"""The messages that cross the process line, as msgspec structs.

Pure. The front end and the engine share nothing else. Arrays on the wire: append fields, with defaults.

Every message from an engine carries its `engine_index`, and its `epoch`, the count of its incarnation, so that what a
dead one sent late is recognised. Every output row carries `start`, the index of its first token among those
generated for its request, so that repeats and gaps are recognised.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from trio_llm.outputs import FinishReason
from trio_llm.pooling import PoolingParams
from trio_llm.sampling import RequestOutputKind, SamplingParams

__all__ = [
    "NO_SAMPLING",
    "Abort",
    "Ack",
    "AllBlocksCleared",
    "AttachClient",
    "BlockRemoved",
    "BlockStored",
    "Continue",
    "DetachClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDead",
    "FromEngine",
    "Heartbeat",
    "KVEvent",
    "LogprobRow",
    "ModelConfig",
    "PlainValue",
    "Progress",
    "Ready",
    "SchedulerStats",
    "StateValue",
    "ToEngine",
    "UtilityCall",
    "UtilityResult",
    "UtilityValue",
]

NO_SAMPLING: Final = SamplingParams(temperature=0, seed=0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
"""The sampling parameters of pooling requests: they ask for nothing."""

PlainValue = None | bool | int | float | str
"""What arguments and results of utility calls are made of."""
StateValue = PlainValue | list[PlainValue]
UtilityValue = PlainValue | list[PlainValue] | dict[str, StateValue]
"""The result of a utility call."""


class _Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Base: an array with the tag in front, defaults left off at the end. Plain data: the collector need not look."""


# ------------------------------------------------------------------------------------- to the engine


class EngineCoreRequest(_Message, frozen=True, gc=False, tag="add"):
    """Generate for one request, or pool its prompt to one vector."""

    request_id: str
    """Internal id: unique for ever."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """With `seed` and `max_tokens` filled in; `NO_SAMPLING` beside `pooling_params`."""
    priority: int = 0
    """Lower is earlier."""
    deadline_s: float | None = None
    """Seconds left, at sending, until the reader's deadline; a request that still waits then is dropped."""
    output_token_ids: list[int] = msgspec.field(default_factory=list)
    """Tokens that an earlier incarnation generated already: the answer goes on after them."""
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    """`params.bad_words` in tokens, each in one or several ways; none of these may come to stand in the answer."""
    resumable: bool = False
    """A session: after its answer it stays, and goes on with each `Continue`, until it is aborted."""
    cache_salt: str | None = None
    """Only requests with the same one share what is computed of their prompts."""
    num_earlier_tokens: int = 0
    """For a session that goes on after a restart: the tokens of answers to earlier inputs, part of the prompt.
    Rows count from there."""
    pooling_params: PoolingParams | None = None
    """Set: the request is for a vector, and over when its prompt is computed."""


class Continue(_Message, frozen=True, gc=False, tag="continue"):
    """The next input of a session whose answer is over: its tokens come after all that there is."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    """For the answer to this input; with `seed` and `max_tokens` filled in."""
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    """As in the request."""


class Abort(_Message, frozen=True, gc=False, tag="abort"):
    """Forget these requests. Each gets one confirming row."""

    request_ids: list[str]


class Ack(_Message, frozen=True, gc=False, tag="ack"):
    """Credit: the front end has taken every message up to this step."""

    step: int


class UtilityCall(_Message, frozen=True, gc=False, tag="call"):
    """Call a method out of the engine's fixed table."""

    call_id: int
    method: str
    args: list[PlainValue] = msgspec.field(default_factory=list)
    kwargs: dict[str, PlainValue] = msgspec.field(default_factory=dict)
    """Arguments by name."""


class AttachClient(_Message, frozen=True, gc=False, tag="attach"):
    """Serve one more front end, or another incarnation of one. Only client 0 may send this. The engine connects to the
    addresses and sends `Ready` there; what an earlier incarnation had is aborted."""

    client_index: int
    """From 1. Client 0 is the process that started the engine; it is attached from the beginning."""
    epoch: int
    """Count of this client's incarnations. An older one than the engine knows is refused."""
    input_address: str
    """The client's ROUTER: what the engine reads."""
    output_address: str
    """The client's PULL: what the engine writes."""


class DetachClient(_Message, frozen=True, gc=False, tag="detach"):
    """A front end is gone: abort all its requests and forget it. Only client 0 may send this."""

    client_index: int


ToEngine = EngineCoreRequest | Continue | Abort | Ack | UtilityCall | AttachClient | DetachClient


# ----------------------------------------------------------------------------------- from the engine


class LogprobRow(_Message, frozen=True, gc=False):
    """Log-probabilities of one position: the sampled token first, then the likeliest ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_rank: int
    """Rank of the sampled token in the whole vocabulary, 1 for the likeliest."""


class EngineCoreOutput(_Message, frozen=True, gc=False):
    """What one step did for one request."""

    request_id: str
    start: int
    """Index of the first of `new_token_ids` among the request's generated tokens."""
    new_token_ids: list[int]
    logprobs: list[LogprobRow] | None = None
    """One a token, if asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token that ended it."""
    error: str | None = None
    """Why, for the finish reason `error`."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed; in the first row of a request."""
    prompt_logprobs: list[LogprobRow] | None = None
    """Rows for prompt tokens, if asked for, the prompt's own one in the place of the sampled. Such rows have no new
    tokens; all of them come before the first row that has."""
    prompt_logprobs_start: int = 0
    """Index of the first of `prompt_logprobs` among the prompt's tokens. Index 0 has none: nothing comes before it."""
    is_expired: bool = False
    """The deadline passed before anything was computed; finish reason `error`. It may come again."""
    goes_on: bool = False
    """A session's: the finish reason is that of one answer, and the engine keeps the session for its next input."""
    pooled: bytes | None = None
    """The vector of a pooling request, in its one row: float32, little-endian. Finish reason `stop`."""
    queued_s: float | None = None
    """Seconds that the request waited in this engine until a token of it was planned; in the row with its first token,
    or its vector."""
    scheduled_s: float | None = None
    """When that was, on the clock of `EngineCoreOutputs.timestamp`; in the same row."""
    num_preemptions: int = 0
    """Times that it lost its blocks in this engine; in its last row."""


class SchedulerStats(_Message, frozen=True, gc=False):
    """The scheduler's state after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preempted: int = 0
    """Preemptions since the engine started."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed in this step."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the cache for sequences that began with this step."""
    num_cached_blocks: int = 0
    """Free blocks whose content can be found again."""
    num_tokens_of_others: int = 0
    """What the engine still has to do for other clients, in prompt tokens: see `wire.work`. May be 0.1 s old."""
    num_deferred: int = 0
    """Those of the waiting sequences that may not begin now, whatever room there is."""
    sleep_level: int = 0
    """0: awake. 2: the weights are dropped. 1: any other part is asleep."""


class UtilityResult(_Message, frozen=True, gc=False):
    """The answer to a UtilityCall: a value, or the text of an error."""

    call_id: int
    value: UtilityValue = None
    error: str | None = None
    error_kind: Literal["failed", "invalid", "unsupported"] = "failed"
    """`invalid`: the caller's fault, and nothing was changed."""
    error_param: str | None = None
    """Which argument is at fault, as `InvalidRequestError.param`."""


class BlockStored(_Message, frozen=True, gc=False, tag="stored"):
    """Blocks that follow each other entered the prefix cache: they can be found from now on."""

    block_hashes: list[bytes]
    """16 bytes each: BLAKE2b of the hash before and the block's token ids as little-endian int64."""
    parent_block_hash: bytes | None
    """The hash before the first of them. It entered earlier, but may have left since. None: they begin a prompt; if
    that has a cache salt, the hash of the salt stands here, which is no block's."""
    token_ids: list[int]
    """`block_size` for each block."""
    block_size: int


class BlockRemoved(_Message, frozen=True, gc=False, tag="removed"):
    """Blocks left the prefix cache: their room was needed, or what was computed in them is not sound."""

    block_hashes: list[bytes]


class AllBlocksCleared(_Message, frozen=True, gc=False, tag="cleared"):
    """The prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""A change of the prefix cache. Applied in order, they give the hashes that it knows."""


class EngineCoreOutputs(_Message, frozen=True, gc=False, tag="outputs"):
    """All that one step has for this front end."""

    epoch: int
    """The engine's."""
    step: int
    """Count of these messages to this front end, from 1; what `Ack` refers to."""
    timestamp: float
    """The engine's monotonic clock, seconds."""
    outputs: list[EngineCoreOutput] = msgspec.field(default_factory=list)
    stats: SchedulerStats | None = None
    utility_results: list[UtilityResult] = msgspec.field(default_factory=list)
    kv_events: list[KVEvent] = msgspec.field(default_factory=list)
    """Since the message before, if the configuration asks for them."""
    weight_version: str = "default"
    """The version of the weights that computed all tokens in this message."""
    engine_index: int = 0
    """Which of a front end's engines sent this."""


class ModelConfig(_Message, frozen=True, gc=False, kw_only=True):
    """The loaded model: what its executor says about it, and what the front end checks requests against."""

    model_dir: str
    """Directory in Hugging Face form with the tokenizer that belongs to the weights."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    logits_width: int
    """Number of ids that the model can emit; the tokenizer may know fewer or more."""
    num_blocks: int
    block_size: int
    """KV cache: blocks, and tokens in each."""
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    tasks: tuple[str, ...]
    """What the model can do: `generate`, `embed`, `classify`, and `score`, which compares embeddings."""
    versions: dict[str, str]
    """Versions of what computes: torch and others."""
    trained_len: int | None = None
    """Tokens that the model was trained for; `max_model_len` may be less. None: it does not say."""
    sampling_defaults: dict[str, float] = msgspec.field(default_factory=dict)
    """What the model's makers recommend for temperature, top_p and top_k; servers use it where a request is silent."""


class Ready(_Message, frozen=True, gc=False, tag="ready"):
    """The model is loaded and the engine takes requests."""

    epoch: int
    model: ModelConfig
    engine_index: int = 0
    """Which of a front end's engines sent this."""


class Progress(_Message, frozen=True, gc=False, tag="progress"):
    """Start-up goes on."""

    epoch: int
    phase: str
    """convert, load, warm-up."""
    done: int
    total: int
    """0: not known."""
    engine_index: int = 0
    """Which of a front end's engines sent this."""


class Heartbeat(_Message, frozen=True, gc=False, tag="heartbeat"):
    """The loop turns although there is nothing for this front end. Sent when it has got nothing for a second."""

    epoch: int
    step: int = 0
    """Number of the last `EngineCoreOutputs` to this front end: if it has not come, it is lost."""
    num_executed: int = 0
    """Steps that were computed so far: it grows while a long prompt is, and no token comes of that."""
    engine_index: int = 0
    """Which of a front end's engines sent this."""


class EngineDead(_Message, frozen=True, gc=False, tag="dead"):
    """The engine's last message: it failed."""

    epoch: int
    reason: str
    engine_index: int = 0
    """Which of a front end's engines sent this."""


FromEngine = EngineCoreOutputs | Ready | Progress | Heartbeat | EngineDead
