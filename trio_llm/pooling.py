"""PoolingParams: how one vector is made of a prompt, in place of an answer.

Pure. Made by callers and routes, checked on construction, sent to the engine as it is.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec

from trio_llm.errors import InvalidRequestError

__all__ = ["PoolingKind", "PoolingParams", "PoolingTask"]

PoolingTask = Literal["embed", "classify"]
PoolingKind = Literal["last", "mean"]

_MAX_QUOTED_CHARS: Final = 200


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """Parameters of one vector. Every field is checked on construction, also on the engine's side.

    Raises:
        InvalidRequestError: a value has the wrong type, or does not go with the task; `param` names the field.
    """

    task: PoolingTask = "embed"
    """embed: the model's last hidden state, as wide as the model. classify: a number for each class of a model with a
    classification head: probabilities, unless the model is one of regression."""
    pooling: PoolingKind | None = None
    """The tokens that make the vector: the last one, or the mean of all. None: as the model is meant, which is the last
    one. A classification head always reads the last one."""
    normalize: bool = True
    """Scale an embedding to length 1 (L2). With classify it must be True, and changes nothing."""

    def __post_init__(self) -> None:
        _check_one_of("task", self.task, get_args(PoolingTask))
        if self.pooling is not None:
            _check_one_of("pooling", self.pooling, get_args(PoolingKind))
        if not isinstance(self.normalize, bool):
            raise InvalidRequestError("normalize must be true or false", "normalize")
        if self.task == "classify":
            if self.pooling == "mean":
                raise InvalidRequestError(
                    "pooling must be last with the task classify: the head reads the last token", "pooling"
                )
            if not self.normalize:
                raise InvalidRequestError("normalize is for the task embed; leave it out", "normalize")

    @property
    def is_mean(self) -> bool:
        """Whether every token counts, so that all must be computed. Else only the last one counts."""
        return self.pooling == "mean"


def _check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        shown = ascii(value)[:_MAX_QUOTED_CHARS] if not isinstance(value, int) else "a number"
        raise InvalidRequestError(f"{name} must be {' or '.join(allowed)}, not {shown}", name)
