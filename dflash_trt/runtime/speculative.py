"""The speculative loop: draft a block, verify it in one pass, keep what the target agrees with.

Plain autoregressive decoding is this loop with windows of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import IMPOSSIBLE, Sampling
from dflash_trt.runtime.step import Executor, Step, Verified


@dataclass(frozen=True)
class Block:
    """What a pass gives a request."""

    tokens: list[int]
    """Accepted guesses and the target's own token; in an error those guesses, and none where values are not finite."""
    logprobs: Sequence[TokenLogprobs]
    """Of each token, or empty."""
    error: str | None

    @classmethod
    def of(cls, verified: Verified, row: int, guesses: Sequence[int]) -> Block:
        """A row's."""
        accepted, own = guesses[: int(verified.accepted[row])], int(verified.next[row])
        logprobs = verified.logprobs[row] if verified.logprobs else ()
        if own == IMPOSSIBLE:
            return cls([*accepted], logprobs[:-1], verified.errors[row])
        if row in verified.errors:
            return cls([], (), verified.errors[row])
        return cls([*accepted, own], logprobs, None)


def prefill(
    executor: Executor, request: Request, slot: int, start: int, sampling: Sampling
) -> tuple[int, Block | None]:
    """Run the next chunk of a prompt, whose first `start` tokens are in its slot's caches.

    Returns:
        How many tokens are then, and the one that follows the prompt, None where more of it is to come.
    """
    end = min(start + executor.max_num_tokens, request.prompt_length)
    verified = executor.verify(
        Step(
            tokens=torch.tensor([request.tokens[start:end]]),
            q_len=torch.tensor([end - start]),
            draft_len=torch.tensor([0]),
            kv_len=torch.tensor([start]),
            slots=torch.tensor([slot]),
            sampling=sampling,
        )
    )
    return end, Block.of(verified, 0, ()) if end == request.prompt_length else None


def decode(executor: Executor, requests: Sequence[Request], sampling: Sampling, windows: Sequence[int]) -> list[Block]:
    """One step for every request, where request i is in slot i: its next 1..`windows[i]` tokens.

    Of the drafted block, `windows[i]` - 1 guesses are verified; where that is none for all, no block is drafted.
    """
    slots = torch.arange(len(requests))
    anchors = torch.tensor([request.tokens[-1] for request in requests])
    kv_len = torch.tensor([request.kv_len for request in requests])
    q_len = torch.tensor(windows)
    tokens = anchors[:, None]
    count = max(windows) - 1
    if count > 0:
        drafts = executor.draft(anchors, kv_len, slots, sampling, count)
        tokens = torch.cat((tokens, drafts), dim=1)

    verified = executor.verify(Step(tokens, q_len, q_len - 1, kv_len, slots, sampling))

    for request, window, accepted in zip(requests, windows, verified.accepted.tolist(), strict=True):
        request.statistics.count_verification(window - 1, accepted)
    return [Block.of(verified, row, guesses) for row, guesses in enumerate(tokens[:, 1:].tolist())]
