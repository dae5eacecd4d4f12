"""Recorded networks, interpreted, against the torch executor's passes: all ranks of them against one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt
import torch
from torch import Tensor

from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.engine.bindings import Model
from dflash_trt.models.pair import Pair
from dflash_trt.plugins.noise import gumbel
from dflash_trt.runtime.sampling import Sampling, SamplingParams, choose
from dflash_trt.runtime.verifier import Step, Verified
from tests.engine.recorded import NetworkPasses, TorchPasses, rank_pairs, widened
from tests.models.test_dflash import as_speculators
from tests.network_interpreter import kind_of
from tests.quantized_models import quantized_drafter, quantized_target
from tests.tiny_models import SIZES, random_drafter, random_target

GREEDY, WARM = SamplingParams(seed=1), SamplingParams(temperature=0.8, seed=3)
VOCABULARY: int = SIZES["vocab_size"]
MODELS: tuple[Model, Model] = ("target", "drafter")
ROUNDS_ALIKE = 1.1
"""A network that rounds where torch does has the same error but for chance, in ten thousand values some per cent."""
ROUNDS_TWICE = math.sqrt(2)
"""For each of torch's roundings there is at most one more, of a product before its bias is added or of a rank's term
before the sum, and squares of errors add."""
SLIDING = {"use_sliding_window": True, "sliding_window": 6}
DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    "sliding, not causal": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "scaled and capped": {
        "dflash_config": {
            "mask_token_id": 2,
            "target_layer_ids": [0, 2],
            "input_embedding_scale": 6.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
        }
    },
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
}
FORMATS: dict[str, tuple[QuantAlgo, QuantAlgo | None]] = {
    "FP8": ("FP8", "NVFP4"),
    "NVFP4": ("NVFP4", None),
    "W4A16": ("W4A16_NVFP4", "FP8"),
}


both_types = pytest.mark.parametrize(("dtype", "ranks"), [("float32", 2), ("bfloat16", 1)])


@pytest.fixture(params=[False, True], ids=["native", "plugins"])
def plugins(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 1), ("float32", 4), ("bfloat16", 1), ("bfloat16", 2)])
@pytest.mark.parametrize("family", TARGETS)
def test_families(family: str, dtype: str, ranks: int, tmp_path: Path, plugins: bool) -> None:
    target = random_target(tmp_path / "target", family, num_hidden_layers=3, **TARGETS[family])
    random_drafter(tmp_path / "drafter", target)
    limit = ROUNDS_ALIKE if ranks == 1 and "attention_bias" not in TARGETS[family] else ROUNDS_TWICE
    compare(tmp_path, ranks, dtype, limit, plugins=plugins)


@both_types
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters(drafter: str, dtype: str, ranks: int, tmp_path: Path, plugins: bool) -> None:
    target = random_target(tmp_path / "target", num_hidden_layers=3)
    random_drafter(tmp_path / "drafter", target, **DRAFTERS[drafter])
    compare(tmp_path, ranks, dtype, ROUNDS_ALIKE if ranks == 1 else ROUNDS_TWICE, plugins=plugins)


@both_types
def test_a_drafter_with_a_head_of_its_own(dtype: str, ranks: int, tmp_path: Path, plugins: bool) -> None:
    drafter_with_own_head(tmp_path)
    compare(tmp_path, ranks, dtype, ROUNDS_ALIKE if ranks == 1 else ROUNDS_TWICE, plugins=plugins)


def test_a_head_of_its_own_is_on_every_rank(tmp_path: Path) -> None:
    """So each rank chooses by itself; otherwise ranks gather their best scores, and the tokens that have them."""
    drafter_with_own_head(tmp_path)
    for drafter, gathered in (("drafter", 0), ("z-lab", 2)):
        engine = rank_pairs(tmp_path / "target", tmp_path / drafter, tmp_path / "engine", tp_size=2)
        native, plugins = (collectives(NetworkPasses(*engine, plugins=plugins)) for plugins in (False, True))
        assert plugins == native + gathered


def drafter_with_own_head(root: Path) -> None:
    target = random_target(root / "target", num_hidden_layers=3)
    random_drafter(root / "z-lab", target)
    token_ids = [3, 4, 9, 40, 41, 96]
    as_speculators(root / "z-lab", root / "drafter", token_ids, target.lm_head.weight[token_ids].clone())


@both_types
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("formats", FORMATS)
def test_formats(formats: str, family: str, dtype: str, ranks: int, tmp_path: Path, plugins: bool) -> None:
    algo, of_drafter = FORMATS[formats]
    target = quantized_target(tmp_path / "target", algo, family=family, num_hidden_layers=3)
    quantized_drafter(tmp_path / "drafter", target, of_drafter)
    compare(tmp_path, ranks, dtype, plugins=plugins, seeds=4)


@both_types
def test_fp8_caches(dtype: str, ranks: int, tmp_path: Path) -> None:
    """Which native layers do not have."""
    target = quantized_target(tmp_path / "target", "FP8", fp8_cache=True, num_hidden_layers=3)
    quantized_drafter(tmp_path / "drafter", target, "FP8", fp8_cache=True)
    compare(tmp_path, ranks, dtype, plugins=True, seeds=4)


def compare(root: Path, ranks: int, dtype: str, limit: float = ROUNDS_TWICE, *, plugins: bool, seeds: int = 1) -> None:
    """The networks' error in some passes, against float64, is at most `limit` times that of the torch executor.

    Args:
        seeds: of random tokens, one of which will do: where activations are quantized, one part in 10^7 may decide a
            rounding, and all that follows differs.
    """
    config, (whole,) = rank_pairs(root / "target", root / "drafter", root / "one", dtype=dtype)
    all_ranks = rank_pairs(root / "target", root / "drafter", root / "all", tp_size=ranks, dtype=dtype)
    for seed in range(seeds):
        networks = NetworkPasses(*all_ranks, plugins=plugins)
        comparison = Comparison(TorchPasses(widened(whole), config), TorchPasses(whole, config), networks)
        run(comparison, whole, torch.Generator().manual_seed(seed), is_exact=dtype == "float32" and seeds == 1)
        if comparison.ratio() <= limit:
            return
    raise AssertionError(f"the networks' error is {comparison.ratio():.3f} times the torch executor's, {limit=:.3f}")


def run(comparison: Comparison, pair: Pair, generator: torch.Generator, *, is_exact: bool) -> None:
    """Prefill of two slots in chunks; then twice, with a rollback between: a draft and a ragged verification."""
    block = pair.drafter.block_size

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, pair.target.vocab_size, shape, generator=generator)

    for slot, chunks, params in ((0, (7, 4), GREEDY), (1, (5,), WARM)):
        start = 0
        for length in chunks:
            comparison.verify(step_of(tokens(1, length), [length], [0], [start], slot, [params]))
            start += length
    lengths, counts = [11, 5], [block, 2]
    for sampling, agreeing, emitted in (
        ([GREEDY, hot(lengths[1] + 1)], [block - 1, 0], [3, 2]),
        ([WARM, GREEDY], [1, 1], [1, 1]),
    ):
        comparison.draft(tokens(2), torch.tensor(lengths), sampling_of(sampling))
        step = step_of(tokens(2, block), counts, [count - 1 for count in counts], lengths, 0, sampling)
        accepted = comparison.verify(comparison.agreeing(step, agreeing))
        assert not is_exact or accepted.tolist() == agreeing
        comparison.compare_caches([length + count for length, count in zip(lengths, counts, strict=True)])
        lengths = [length + count for length, count in zip(lengths, emitted, strict=True)]


class Comparison:
    """Passes by the torch executor's operations, in float64 and in the engine's type, and by networks."""

    def __init__(self, exact: TorchPasses, torch_passes: TorchPasses, networks: NetworkPasses) -> None:
        self.exact, self.torch, self.networks = exact, torch_passes, networks
        self.compared: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"logits": [], "caches": []}

    def verify(self, step: Step) -> Tensor:
        """How many guesses the networks' target agrees with, of its own logits."""
        logits = self.networks.target(step)
        self.compared["logits"].append((self.exact.target(step), self.torch.target(step), logits))
        verified, chosen = verified_by(logits, step)
        for outputs in self.networks.outputs if self.networks.plugins else ():
            counts = torch.arange(chosen.shape[1]) <= step.draft_len[:, None]
            assert torch.equal(outputs["chosen"][counts].long(), chosen[counts])
            assert torch.equal(outputs["accepted"].long(), verified.accepted)
            assert torch.equal(outputs["next"].long(), verified.next)
        return verified.accepted

    def draft(self, anchors: Tensor, kv_len: Tensor, sampling: Sampling) -> None:
        logits = self.networks.draft(anchors, kv_len, sampling)
        exact, rounded = (each.draft(anchors, kv_len, sampling) for each in (self.exact, self.torch))
        self.compared["logits"].append((exact, rounded, logits))
        positions = kv_len[:, None] + torch.arange(1, 1 + logits.shape[1])
        for outputs in self.networks.outputs if self.networks.plugins else ():
            assert torch.equal(outputs["drafts"].long(), choose(logits, positions, sampling, anchors[:, None][:, :0]))

    def agreeing(self, step: Step, counts: Sequence[int]) -> Step:
        """The step with guesses of which so many are right, and the next one, where there is one, wrong."""
        tokens = step.tokens.clone()
        for column in range(1, tokens.shape[1]):
            step = replace(step, tokens=tokens)
            _, chosen = verified_by(self.torch.target(step), step)
            for row, count in enumerate(counts):
                right = int(chosen[row, column - 1]) if column <= int(step.draft_len[row]) else 0
                tokens[row, column] = right if column <= count else (right + 1) % self.torch.pair.target.vocab_size
        return replace(step, tokens=tokens)

    def compare_caches(self, lengths: Sequence[int]) -> None:
        for model in MODELS:
            stored = self.networks.cache(model)
            exact, rounded = (getattr(passes.caches, model) for passes in (self.exact, self.torch))
            for layer, (slot, length) in itertools.product(range(len(exact)), enumerate(lengths)):
                for kind in ("keys", "values"):
                    parts = getattr(exact[layer], kind), getattr(rounded[layer], kind), getattr(stored, kind)[layer]
                    first, second, third = (part[slot, :, :length].clone() for part in parts)
                    self.compared["caches"].append((first.double(), second, third))

    def ratio(self) -> float:
        """The networks' error as a part of the torch passes', of logits or of caches, whichever is more."""
        squares = {kind: torch.zeros(2, dtype=torch.float64) for kind in self.compared}
        for kind, compared in self.compared.items():
            for exact, *others in compared:
                finite = exact.isfinite()  # a token that a drafter does not know has no logit
                assert all(torch.equal(each.double().isfinite(), finite) for each in others)
                squares[kind] += torch.stack([(each.double() - exact)[finite].square().sum() for each in others])
        return max(float((networks / executor).sqrt()) for executor, networks in squares.values())


def step_of(
    tokens: Tensor, q_len: list[int], draft_len: list[int], kv_len: list[int], slot: int, params: list[SamplingParams]
) -> Step:
    lengths = (torch.tensor(each) for each in (q_len, draft_len, kv_len))
    return Step(tokens, *lengths, torch.arange(slot, slot + len(tokens)), sampling_of(params))


def sampling_of(params: Sequence[SamplingParams]) -> Sampling:
    return Sampling.of(params, [()] * len(params))


def verified_by(logits: Tensor, step: Step) -> tuple[Verified, Tensor]:
    chosen = choose(logits, step.chosen_positions, step.sampling, step.guesses)
    return step.verified(chosen), chosen


def hot(position: int) -> SamplingParams:
    """Of all tokens with room in a padded vocabulary, noise at a position favours the first that does not exist."""
    seeds = torch.arange(2000)
    noise = gumbel(seeds, torch.full_like(seeds, position), VOCABULARY + 3, torch.float32)
    lead = noise[:, VOCABULARY] - noise[:, :VOCABULARY].amax(-1)
    assert lead.max() > 1
    return SamplingParams(temperature=100.0, seed=int(lead.argmax()))


def collectives(passes: NetworkPasses) -> int:
    """Exchanges that a draft takes."""
    network = passes.drafters[0].network
    layers = (network.get_layer(index) for index in range(network.num_layers))
    return sum(kind_of(layer) == trt.LayerType.DIST_COLLECTIVE for layer in layers)
