"""The speculative loop: propose draft tokens, verify them in one pass, keep what the target agrees with.

Plain autoregressive decoding is this loop with windows of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.proposer import Sequences
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import IMPOSSIBLE, Sampling
from dflash_trt.runtime.verifier import Step, Verified


@dataclass(frozen=True)
class Block:
    """What a pass gives a request."""

    tokens: list[int]
    """Accepted draft tokens and the target's own; in an error those accepted, and none where values are not finite."""
    logprobs: Sequence[TokenLogprobs]
    """Of each token, or empty."""
    error: str | None
    draft_len: int
    """Draft tokens that were verified."""

    @classmethod
    def of(cls, verified: Verified, row: int, drafts: Sequence[int]) -> Block:
        """A row's, of whose draft tokens `drafts` were verified."""
        accepted, own = drafts[: int(verified.accepted[row])], int(verified.next[row])
        logprobs = verified.logprobs[row] if verified.logprobs else ()
        if own == IMPOSSIBLE:
            return cls([*accepted], logprobs[:-1], verified.errors[row], len(drafts))
        if row in verified.errors:
            return cls([], (), verified.errors[row], len(drafts))
        return cls([*accepted, own], logprobs, None, len(drafts))


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

    Up to `windows[i]` - 1 draft tokens are verified; where that is none for all, none are proposed.
    """
    sequences = Sequences(
        anchors=torch.tensor([request.tokens[-1] for request in requests]),
        kv_len=torch.tensor([request.kv_len for request in requests]),
        slots=torch.arange(len(requests)),
        sampling=sampling,
        tokens=[request.tokens for request in requests],
    )
    tokens, draft_len = sequences.anchors[:, None], torch.zeros_like(sequences.slots)
    if max(windows) > 1:
        proposal = executor.propose(sequences, max(windows) - 1)
        draft_len = torch.minimum(proposal.draft_len, torch.tensor(windows) - 1)
        tokens = torch.cat((tokens, proposal.tokens[:, : int(draft_len.max())]), dim=1)

    verified = executor.verify(Step(tokens, draft_len + 1, draft_len, sequences.kv_len, sequences.slots, sampling))

    blocks = []
    for row, (drafts, length) in enumerate(zip(tokens[:, 1:].tolist(), draft_len.tolist(), strict=True)):
        blocks.append(Block.of(verified, row, drafts[:length]))
        requests[row].statistics.count_verification(length, int(verified.accepted[row]))
    return blocks
