"""Tensor parallelism behind the contract of one executor: rank 0 is called, the others are told to do the same.

Calls travel over a group of the ranks' CPUs, where waiting for the next one costs nothing; what layers exchange travels
over the group that the executors have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

import torch
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.ops.ranks import Ranks, is_disconnection
from dflash_trt.runtime.executor import Executor, RankExecutor
from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.rank_processes import RankProcesses, RanksEnded
from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.verifier import Step, Verified


class _Call(IntEnum):
    """The first of a call's four numbers."""

    CLOSE = 0
    VERIFY = 1
    """Sequences, tokens of each, whether whole rows of logits are needed; a matrix follows."""
    PROPOSE = 2
    """Sequences, draft tokens of each, whether whole rows of logits are needed; a matrix follows."""
    MOVE_SLOT = 3
    """Source, destination, length."""


class ParallelExecutor:
    """Rank 0's executor, whose every call the other ranks follow.

    Args:
        executor: of rank 0.
        control: the ranks, over their CPUs.
        processes: the other ranks where this process started them, and must end them.
    """

    def __init__(self, executor: RankExecutor, control: Ranks, processes: RankProcesses | None) -> None:
        self.max_batch_size = executor.max_batch_size
        self.max_seq_len = executor.max_seq_len
        self.max_num_tokens = executor.max_num_tokens
        self.max_window = executor.max_window
        self._executor = executor
        self._control = control
        self._processes = processes
        self._closed = False

    def verify(self, step: Step) -> Verified:
        """See `Executor.verify`.

        Raises:
            UserError: as the executor of one rank.
            RanksEnded: another rank died, now or before.
        """
        with self._all_ranks():
            sequences, tokens = step.tokens.shape
            self._send(_Call.VERIFY, sequences, tokens, int(step.sampling.needs_rows))
            self._send_matrix(step.tokens, step.q_len, step.draft_len, step.kv_len, step.slots, sampling=step.sampling)
            return self._executor.verify(step)

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """See `Executor.propose`.

        Raises:
            RanksEnded: another rank died, now or before.
        """
        if not self._executor.proposes_on_every_rank:
            return self._executor.propose(sequences, count)
        with self._all_ranks():
            anchors, sampling = sequences.anchors, sequences.sampling
            self._send(_Call.PROPOSE, len(anchors), count, int(sampling.needs_rows))
            self._send_matrix(anchors, sequences.kv_len, sequences.slots, sampling=sampling)
            return self._executor.propose(sequences, count)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Executor.move_slot`.

        Raises:
            RanksEnded: another rank died, now or before.
        """
        with self._all_ranks():
            self._send(_Call.MOVE_SLOT, source, destination, length)
            self._executor.move_slot(source, destination, length)

    def when_a_rank_ends(self, call: Callable[[Exception], object]) -> None:
        """Have it called, on another thread, with what ended a rank that this process started, even between calls."""
        processes = self._processes
        if processes is not None:
            processes.when_one_ends(lambda: call(processes.failure()))

    def close(self) -> None:
        """End the other ranks; may be called again."""
        if not self._closed:
            self._closed = True
            with suppress(RuntimeError):  # of a rank that is gone
                self._send(_Call.CLOSE, 0, 0, 0)
            if self._processes is not None:
                self._processes.close()

    @contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """A call that every rank finishes, or that ends them all: half-way none knows what the others wait for."""
        if self._closed:
            raise RanksEnded("the ranks of this engine have ended; load it again")
        try:
            yield
        except UserError:  # which every rank comes to at the same place
            raise
        except BaseException as error:
            self._closed = True
            failure = self._failure(error) if isinstance(error, RuntimeError) else None
            if self._processes is not None:
                self._processes.close()
            if failure is None:
                raise
            raise failure from error

    def _failure(self, error: RuntimeError) -> Exception | None:
        """Which rank is gone, where that is why an exchange broke; None where it was this rank that failed."""
        if not is_disconnection(error):
            return None
        if self._processes is not None:
            return self._processes.failure()
        return RanksEnded(f"another rank has ended: {str(error).splitlines()[0]}")

    def _send(self, *numbers: int) -> None:
        self._control.broadcast(torch.tensor(numbers))

    def _send_matrix(self, *columns: Tensor, sampling: Sampling) -> None:
        parts = (*columns, sampling.temperature.view(torch.int64), sampling.seeds)
        self._control.broadcast(torch.cat([part.reshape(len(part), -1) for part in parts], dim=1))


def serve(executor: Executor, control: Ranks) -> None:
    """Follow rank 0's calls until it closes.

    Raises:
        RuntimeError: rank 0 or another rank died.
    """
    while True:
        call, *numbers = control.broadcast(torch.empty(4, dtype=torch.int64)).tolist()
        if call == _Call.CLOSE:
            return
        with suppress(UserError):  # rank 0 raises it too, and says so
            _follow(executor, control, call, *numbers)


def _follow(executor: Executor, control: Ranks, call: int, a: int, b: int, c: int) -> None:
    if call == _Call.VERIFY:
        matrix = control.broadcast(torch.empty(a, b + 6, dtype=torch.int64))
        tokens, (q_len, draft_len, kv_len, slots, temperature, seeds) = matrix[:, :b], matrix[:, b:].T.contiguous()
        executor.verify(Step(tokens, q_len, draft_len, kv_len, slots, _sampling(temperature, seeds, bool(c))))
    elif call == _Call.PROPOSE:
        matrix = control.broadcast(torch.empty(a, 5, dtype=torch.int64))
        anchors, kv_len, slots, temperature, seeds = matrix.T.contiguous()
        sampling = _sampling(temperature, seeds, bool(c))
        executor.propose(Sequences(anchors, kv_len, slots, sampling, tokens=((),) * a), b)
    else:
        executor.move_slot(a, b, c)


def _sampling(temperature: Tensor, seeds: Tensor, needs_rows: bool) -> Sampling:
    """What ranks beside the first need to know: edits and filters are rank 0's to apply."""
    none = torch.zeros_like(seeds)
    return Sampling(
        temperature.view(torch.float64),
        top_k=none,
        top_p=none + 1.0,
        min_p=none.double(),
        seeds=seeds,
        edits=((),) * len(seeds),
        logprobs=(None,) * len(seeds),
        needs_rows=needs_rows,
    )
