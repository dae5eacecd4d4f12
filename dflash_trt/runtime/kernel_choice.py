"""The choice of tokens by the plugin's kernels, where no filter or penalty looks at whole rows."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.ops.ranks import Ranks, vocabulary_part
from dflash_trt.plugins.verify import verify_combine, verify_partial
from dflash_trt.runtime.sampling import Sampling


def choose_by_kernels(
    ranks: Ranks,
    logits: Tensor,
    vocab_size: int,
    sampling: Sampling,
    first: Tensor,
    tokens: Tensor,
    draft_len: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What engines with the plugin do inside, after an engine that has none; every rank returns the same.

    Args:
        logits: [B, v, P] of this rank's tokens, as `choose_among_ranks` takes them; of all of them if it is alone.
        vocab_size: of the model.
        first: [B] position of the token that row 0 chooses.
        tokens: [B, v] what stands before each row; from the second on they are guesses.
        draft_len: [B] how many of them are.

    Returns:
        Tokens [B, v], -1 where a logit is infinite or NaN; guesses that agree [B]; the token after those [B]; all
        int32, where the logits are.
    """
    offset, valid = vocabulary_part(ranks.rank, logits.shape[-1], vocab_size)

    def there(values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        return values.to(logits.device, dtype).contiguous()

    best = verify_partial(
        logits,
        there(sampling.temperature, torch.float32),
        there(sampling.seeds, torch.int64),
        there(first),
        there(torch.tensor([valid])),
        there(torch.tensor([offset])),
    )
    scores, ids = (ranks.all_gather(part).movedim(0, -2).flatten(-2).contiguous() for part in best)
    chosen, accepted, following = verify_combine(scores, ids, there(tokens), there(draft_len))
    return chosen, accepted, following
