"""How rows and keys are shared among the programs of `block_attention_partial`, and where its shares are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from dflash_trt.plugins.kernel import cdiv

MOST_ROWS = 128
_MOST_ROWS_AHEAD_OF_TIME = 64


@dataclass(frozen=True)
class Shares:
    """Programs in tiles of rows and splits of keys. Sizes are numbers, or TensorRT's symbolic expressions."""

    ratio: int
    """Query heads a KV head."""
    most_rows: int
    """Rows a sequence that are taken together, if `ratio` leaves room; passes of more are taken in parts."""
    programs: int
    """Thread blocks that keys are split for, where sequences and heads do not make as many."""

    ahead_of_time: bool
    """Whether TensorRT launches the kernel, and `AHEAD_OF_TIME_SHARED` is all that a program has."""

    @property
    def block_m(self) -> int:
        """Rows of query heads that a program takes."""
        most = _MOST_ROWS_AHEAD_OF_TIME if self.ahead_of_time else MOST_ROWS
        return min(most, max(16, int(triton.next_power_of_2(self.most_rows * self.ratio))))

    def tiles(self, rows: Any) -> Any:
        """Programs that share the rows of a KV head."""
        return cdiv(rows * self.ratio, self.block_m)

    def splits(self, batch: Any, rows: Any, kv_heads: Any) -> Any:
        """Parts that keys are split into."""
        whole = self.tiles(rows) * kv_heads * batch
        return (whole + (self.programs - 1)) // whole

    def room(self, batch: Any, rows: Any, kv_heads: Any) -> Any:
        """Programs that there is room for: at least those there are, and no fewer for a larger batch, or more rows.

        Splits become fewer as batches grow, and TensorRT reserves memory for a profile's largest sizes.
        """
        return self.tiles(rows) * kv_heads * batch + (self.programs - 1)


def filling_programs(multiprocessors: int) -> int:
    """Thread blocks that fill a GPU: two on each multiprocessor, so that one computes while one waits."""
    return 2 * multiprocessors
