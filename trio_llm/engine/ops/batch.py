"""DeviceBatch: the tokens of one step as tensors, in the form that every attention kernel reads.

T tokens in R rows; one row is what one sequence computes in this step. The first `num_decode` rows have one token each.
Uploaded by the worker, read by models and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["DeviceBatch", "RowsOnHost"]

I32 = npt.NDArray[np.int32]


class RowsOnHost(Protocol):
    """The same numbers in host memory, where reading them waits for nothing."""

    @property
    def num_decode(self) -> int: ...
    @property
    def slots(self) -> I32: ...
    @property
    def query_start(self) -> I32: ...
    @property
    def context(self) -> I32: ...
    @property
    def block_start(self) -> I32: ...
    @property
    def blocks(self) -> I32: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceBatch:
    """One step. All tensors are int32 and parts of one buffer."""

    host: RowsOnHost
    num_decode: int
    max_query: int
    """Tokens of the row that has most."""
    token_ids: Tensor  # [T]
    token_source: Tensor  # [T]: index among the ids that the step before sampled; -1: `token_ids` has the token
    positions: Tensor  # [T]
    slots: Tensor  # [T]: block * BLOCK_SIZE + offset, where the token's K and V go
    query_start: Tensor  # [R + 1]: the tokens of row r are query_start[r] to query_start[r + 1] - 1
    context: Tensor  # [R]: tokens that the last query of a row sees, itself included; 0: a row that only pads
    block_start: Tensor  # [R + 1]: the table of row r is blocks[block_start[r] : block_start[r + 1]]
    logits_rows: Tensor  # [B]: tokens that the model's head runs over
    blocks: Tensor  # [sum of tables]
