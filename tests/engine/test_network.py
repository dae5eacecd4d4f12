"""Recorded networks, interpreted, against the torch executor's passes: all ranks of them against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_trt.runtime.engine_io import CacheStorage
from tests.engine.recorded import NetworkPasses, TorchPasses, rank_pairs
from tests.tiny_models import random_drafter, random_target

PAIRS = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, {}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("networks")
    for name, (family, overrides, of_drafter) in PAIRS.items():
        target = random_target(root / name / "target", family, **{"num_hidden_layers": 3, **overrides})
        random_drafter(root / name / "drafter", target, **of_drafter)
    return {name: root / name for name in PAIRS}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_passes(checkpoints: dict[str, Path], name: str, ranks: int, tmp_path: Path) -> None:
    root = checkpoints[name]
    config, (whole,) = rank_pairs(root / "target", root / "drafter", tmp_path / "one")
    torch_passes = TorchPasses(whole, config)
    networks = NetworkPasses(*rank_pairs(root / "target", root / "drafter", tmp_path / "all", tp_size=ranks))
    compare(torch_passes, networks, rtol=1e-3, atol=1e-3)


def compare(expected: TorchPasses, actual: NetworkPasses, *, rtol: float, atol: float) -> None:
    """Prefill of two slots in chunks, a draft, a ragged verification, and both again after a rollback."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = expected.pair.target.vocab_size
    block = expected.pair.drafter.block_size

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, vocab_size, shape, generator=generator)

    def same(name: str, *arguments: object) -> None:
        torch.testing.assert_close(
            getattr(actual, name)(*arguments), getattr(expected, name)(*arguments), rtol=rtol, atol=atol
        )

    for slot, chunks in ((0, (7, 4)), (1, (5,))):
        start = 0
        for length in chunks:
            same("target", tokens(1, length), torch.tensor([[length - 1]]), [start], [length], slot)
            start += length
    lengths = [11, 5]
    for accepted in ([2, 1], [0, 0]):
        same("draft", tokens(2), lengths)
        rows = torch.arange(block).expand(2, -1)
        same("target", tokens(2, block), rows.clamp(max=block - 1), lengths, [block, block], 0)
        check_caches(expected, actual, lengths, rtol=rtol, atol=atol)
        lengths = [length + count + 1 for length, count in zip(lengths, accepted, strict=True)]


def check_caches(expected: TorchPasses, actual: NetworkPasses, lengths: list[int], *, rtol: float, atol: float) -> None:
    for model in ("target", "drafter"):
        layers = getattr(expected.caches, model)
        stored: CacheStorage = actual.cache(model)  # type: ignore[arg-type]
        for layer, cache in enumerate(layers):
            for kind in ("keys", "values"):
                for slot, length in enumerate(lengths):
                    torch.testing.assert_close(
                        getattr(stored, kind)[layer, slot, :, :length].float(),
                        getattr(cache, kind)[slot, :, :length].float(),
                        rtol=rtol,
                        atol=atol,
                    )
