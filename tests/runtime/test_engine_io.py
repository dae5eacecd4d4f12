"""Where bindings lie: shapes, profiles and addresses, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.bindings import Model, engine_bindings, shared_weights
from dflash_trt.engine.build import plan_build
from dflash_trt.engine.config import BuildConfig, EngineConfig
from dflash_trt.errors import UserError
from dflash_trt.runtime.engine_io import CacheStorage, EngineIO
from tests.conftest import TINY
from tests.engine.recorded import for_tensorrt

CPU = torch.device("cpu")
BLOCK, SLOTS, POSITIONS, HEADS, SIZE = 8, 4, 40 + 8, 2, 32


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    build = BuildConfig(dtype="bfloat16", max_batch_size=SLOTS, max_seq_len=40, max_num_tokens=32)
    output = tmp_path_factory.mktemp("io") / "engine"
    return plan_build(open_target(TINY / "target"), open_drafter(TINY / "drafter"), build, output).config


@pytest.fixture(scope="module")
def caches(config: EngineConfig) -> dict[Model, CacheStorage]:
    return {model: CacheStorage.allocate(model, config, CPU) for model in ("target", "drafter")}


def engine_io(config: EngineConfig, caches: dict[Model, CacheStorage], model: Model, *, plugins: bool) -> EngineIO:
    bindings = engine_bindings(for_tensorrt(config, plugins=plugins))[model]
    shared = {each.name: torch.zeros(each.shape, dtype=each.dtype) for each in shared_weights(config, head=True)}  # type: ignore[arg-type]
    return EngineIO(bindings, caches, shared, CPU)


def test_caches_take_what_the_config_says(config: EngineConfig, caches: dict[Model, CacheStorage]) -> None:
    assert sum(part.nbytes for cache in caches.values() for part in (cache.keys, cache.values)) == config.cache_bytes


@given(batch=st.integers(1, SLOTS), rows=st.integers(1, BLOCK), data=st.data())
@settings(max_examples=30)
def test_addresses_of_native_caches(
    config: EngineConfig, caches: dict[Model, CacheStorage], batch: int, rows: int, data: st.DataObject
) -> None:
    """Row i of a pass is slot first + i of a layer, at its bytes in the one allocation."""
    first = data.draw(st.integers(0, SLOTS - batch))
    choices = data.draw(st.integers(1, rows))
    bound = engine_io(config, caches, "target", plugins=False).bind(
        {"batch": batch, "rows": rows, "choices": choices}, first
    )
    of_slot = HEADS * POSITIONS * SIZE * 2
    for layer in range(len(caches["target"].keys)):
        for kind in ("keys", "values"):
            base = getattr(caches["target"], kind).data_ptr()
            for name in (f"target.{layer}.{kind}", f"target.{layer}.{kind}.updated"):
                assert bound[name].shape == (batch, HEADS, POSITIONS, SIZE)
                assert bound[name].data_ptr() == base + (layer * SLOTS + first) * of_slot
    assert bound["tokens"].shape == (batch, rows) and bound["logits"].shape == (batch, choices, 697)
    assert all(tensor.is_contiguous() for tensor in bound.values())


def test_addresses_of_the_plugin(config: EngineConfig, caches: dict[Model, CacheStorage]) -> None:
    """A plugin sees all slots: the target's layer by layer, the drafter's all at once as the target's pass writes them."""
    sizes = {"batch": 2, "rows": 3, "choices": 2}
    bound = engine_io(config, caches, "target", plugins=True).bind(sizes, first_slot=1)  # type: ignore[arg-type]
    assert bound["target.1.keys"].shape == (1, SLOTS, HEADS, POSITIONS, SIZE)
    assert bound["target.1.keys"].data_ptr() == caches["target"].keys[1].data_ptr()
    assert bound["drafter.values.updated"].data_ptr() == caches["drafter"].values.data_ptr()
    assert bound["drafter.values"].shape == caches["drafter"].values.shape
    own = engine_io(config, caches, "drafter", plugins=True).bind({"batch": 2})
    assert own["drafter.1.keys"].data_ptr() == caches["drafter"].keys[1].data_ptr()


def test_passes_of_a_shape_are_bound_alike(config: EngineConfig, caches: dict[Model, CacheStorage]) -> None:
    """So that one can be captured and replayed; those of other shapes start where these do."""
    io = engine_io(config, caches, "target", plugins=False)

    def addresses(batch: int) -> dict[str, int]:
        bound = io.bind({"batch": batch, "rows": 4, "choices": 4})
        return {name: tensor.data_ptr() for name, tensor in bound.items()}

    assert addresses(3) == addresses(3) == addresses(1)


@pytest.mark.parametrize(
    ("batch", "rows", "profile"), [(1, 1, "decode"), (4, 8, "decode"), (1, 9, "prefill"), (1, 32, "prefill")]
)
def test_profiles(config: EngineConfig, caches: dict[Model, CacheStorage], batch: int, rows: int, profile: str) -> None:
    io = engine_io(config, caches, "target", plugins=False)
    assert io.profile({"batch": batch, "rows": rows, "choices": 1}) == profile


@pytest.mark.parametrize(("batch", "rows"), [(2, 9), (5, 1), (1, 33)])
def test_a_pass_that_no_profile_holds(
    config: EngineConfig, caches: dict[Model, CacheStorage], batch: int, rows: int
) -> None:
    io = engine_io(config, caches, "target", plugins=False)
    with pytest.raises(UserError, match=f"^a pass of batch {batch}, rows {rows}, choices 1 fits no profile of the en"):
        io.profile({"batch": batch, "rows": rows, "choices": 1})


def test_moving_a_slot(config: EngineConfig) -> None:
    storage = CacheStorage.allocate("drafter", config, CPU)
    storage.keys[:, 3, :, :5], storage.values[:, 3, :, :5] = 3, 4
    storage.move_slot(3, 1, 4)
    assert bool((storage.keys[:, 1, :, :4] == 3).all()) and bool((storage.values[:, 1, :, :4] == 4).all())
    assert not storage.keys[:, 1, :, 4:].any() and not storage.keys[:, [0, 2]].any()


@pytest.mark.parametrize(
    ("sizes", "padded"),
    [
        ((3, 5, 4), (4, 8, 4)),
        ((1, 1, 1), (1, 1, 1)),
        ((4, 8, 8), (4, 8, 8)),
        ((1, 17, 1), (1, 32, 1)),
    ],
)
def test_padded_passes(
    config: EngineConfig, caches: dict[Model, CacheStorage], sizes: tuple[int, ...], padded: tuple[int, ...]
) -> None:
    names = ("batch", "rows", "choices")
    io = engine_io(config, caches, "target", plugins=True)
    assert io.padded(dict(zip(names, sizes, strict=True))) == dict(zip(names, padded, strict=True))  # type: ignore[arg-type]


def test_what_a_pass_is_given(config: EngineConfig, caches: dict[Model, CacheStorage]) -> None:
    """Exactly its inputs; what is smaller than its buffer is followed by padding, whatever was there."""
    io = engine_io(config, caches, "drafter", plugins=False)
    tensors = io.bind({"batch": 3})
    io.fill(tensors, {"anchors": torch.tensor([7, 8, 9]), "kv_len": torch.tensor([1, 2, 3])})
    io.fill(tensors, {"anchors": torch.tensor([5]), "kv_len": torch.tensor([4])})
    assert tensors["anchors"].tolist() == [5, 0, 0] and tensors["kv_len"].tolist() == [4, POSITIONS, POSITIONS]
    with pytest.raises(ValueError, match=r"a pass was given \['anchors'\], it takes \['anchors', 'kv_len'\]"):
        io.fill(tensors, {"anchors": torch.tensor([5])})
    assert io.results(tensors, {"batch": 2})["logits"].shape == (2, BLOCK - 1, 697)
