"""The kernel in the interpreter against its reference, and that against the operations that models are written in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.ops.base import LayerCache, RotaryTable, Span
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.plugins.e4m3 import e4m3_codes
from dflash_trt.plugins.gpus import SHARED_MEMORY
from dflash_trt.plugins.kernel import Kernel
from dflash_trt.plugins.kv_write import kv_write
from dflash_trt.plugins.kv_write_kernel import kv_write_kernel

FP8 = torch.float8_e4m3fn
STEP = {torch.float32: 2.0**-21, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6, FP8: 2.0**-2}
"""How far apart two neighbours may be, relatively, and twice that: sums in another order may round to either."""

AXES = {
    "keys": 4,
    "values": 5,
    "k_norm": 2,
    "cos": 2,
    "sin": 2,
    "kv_len": 1,
    "q_len": 1,
    "slots": 1,
    "k_scale": 1,
    "v_scale": 1,
    "v_cache": 5,
}
"""The axes of each argument that another one's size depends on, but of `k_cache`, which alone knows its slots."""


@dataclass(frozen=True)
class Pass:
    """Arguments of `kv_write`."""

    keys: Tensor
    values: Tensor
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    kv_len: Tensor
    q_len: Tensor
    slots: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_cache: Tensor
    v_cache: Tensor

    def written(self, *, interpret: bool) -> tuple[Tensor, Tensor]:
        """The caches after it, as bytes can be compared; those given stay as they are."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        kv_write(*list(vars(self).values())[:-2], *caches, eps=1e-6, interpret=interpret)
        return caches


def ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def random_pass(
    dtype: torch.dtype,
    head_dim: int,
    where: list[tuple[int, int, int]],
    *,
    rows: int,
    layers: int = 1,
    kv_heads: int = 1,
    positions: int = 24,
    has_norm: bool = True,
    fp8_cache: bool = False,
    seed: int = 0,
) -> Pass:
    """Of sequences of length, rows and slot as in `where`; some values are beyond e4m3's largest, or subnormal there."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    kv_len, q_len, slots = (ints(list(each)) for each in zip(*where, strict=True))
    angles = normal(positions, head_dim // 2)
    cache = (layers, max(slots.tolist()) + 2, kv_heads, positions, head_dim)
    spread = normal(len(where), rows, layers, kv_heads, 1).mul(2).exp2()
    return Pass(
        keys=(normal(*spread.shape[:-1], head_dim) * spread).to(dtype),
        values=(normal(*spread.shape[:-1], head_dim) * spread).to(dtype),
        k_norm=normal(layers, head_dim).to(dtype) if has_norm else None,
        cos=angles.cos(),
        sin=angles.sin(),
        kv_len=kv_len,
        q_len=q_len,
        slots=slots,
        k_scale=normal(layers).div(4).exp2() / 64 if fp8_cache else None,
        v_scale=normal(layers).div(4).exp2() / 64 if fp8_cache else None,
        k_cache=normal(*cache).to(FP8 if fp8_cache else dtype),
        v_cache=normal(*cache).to(FP8 if fp8_cache else dtype),
    )


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    rows = draw(st.integers(1, 16))
    positions = draw(st.integers(1, 24))
    slots = draw(st.permutations(range(4)))[: draw(st.integers(1, 3))]
    # The last row may stand past the cache's end.
    where = [(draw(st.integers(0, positions)), draw(st.integers(0, rows)), slot) for slot in slots]
    return random_pass(
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        draw(st.sampled_from([16, 32, 64, 80, 96, 128])),
        where,
        rows=rows,
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        positions=positions,
        has_norm=draw(st.booleans()),
        fp8_cache=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


@given(passes())
@settings(max_examples=60)
def test_the_kernel_writes_what_the_reference_writes(written: Pass) -> None:
    """To the bit, but for normalized keys: their mean is a sum in another order."""
    keys, values = written.written(interpret=True)
    expected_keys, expected_values = written.written(interpret=False)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    if written.k_norm is None:
        assert torch.equal(keys.view(torch.uint8), expected_keys.view(torch.uint8))
    else:
        step = STEP[keys.dtype]
        torch.testing.assert_close(keys.float(), expected_keys.float(), rtol=step, atol=STEP[written.keys.dtype] * 16)


@given(passes())
@settings(max_examples=60)
def test_nothing_else_is_written(written: Pass) -> None:
    """A cache of NaN holds numbers afterwards where rows that count stand, and nowhere else."""
    touched = torch.zeros(written.k_cache.shape, dtype=torch.bool)
    for length, count, slot in zip(written.kv_len, written.q_len, written.slots, strict=True):
        touched[:, slot, :, length : length + count] = True
    for cache in (written.k_cache, written.v_cache):
        cache.copy_(torch.full(cache.shape, torch.nan).to(cache.dtype))
    for interpret in (False, True):
        for cache in written.written(interpret=interpret):
            assert torch.equal(cache.float().isfinite(), touched)


@pytest.mark.parametrize("where_bad", ["keys", "values"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_head_that_is_not_finite_has_keys_of_nan_and_values_of_zero(
    dtype: torch.dtype, fp8_cache: bool, bad: float, where_bad: str
) -> None:
    """And no other head, of the same row or another one; so does the torch executor write it."""
    given_ = random_pass(dtype, 32, [(3, 3, 1)], rows=3, layers=2, kv_heads=2, fp8_cache=fp8_cache)
    sound = given_.written(interpret=False)
    vars(given_)[where_bad][0, 1, 1, 0, 5] = bad
    for interpret in (False, True):
        for cache, before, expected in zip(given_.written(interpret=interpret), sound, (torch.nan, 0.0), strict=True):
            assert torch.equal(cache[1, 1, 0, 4].float().nan_to_num(7), torch.full((32,), expected).nan_to_num(7))
            before[1, 1, 0, 4] = cache[1, 1, 0, 4]
            torch.testing.assert_close(cache.float(), before.float(), rtol=2.0**-3, atol=0.02, equal_nan=True)


@pytest.mark.parametrize("bogus", [-(2**31), -30, -1, 24, 2**31 - 1])
@pytest.mark.parametrize("name", ["kv_len", "slots"])
def test_whatever_stands_in_memory_writes_nowhere(name: str, bogus: int) -> None:
    """TensorRT times kernels with it. A negative slot or position would be before the cache, or in another slot."""
    given_ = random_pass(torch.float32, 16, [(3, 1, 1), (5, 1, 2)], rows=1, layers=2)
    vars(given_)[name][0] = bogus
    written = given_.written(interpret=True)
    expected = Pass(**{**vars(given_), "q_len": ints([0, 1])}).written(interpret=True)
    for actual, cache in zip(written, expected, strict=True):
        assert torch.equal(actual, cache)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("fp8_cache", [False, True])
def test_the_reference_is_what_models_write(fp8_cache: bool, has_norm: bool) -> None:
    where, rows = [(3, 4, 2), (9, 4, 0)], 4
    given_ = random_pass(
        torch.float32, 32, where, rows=rows, layers=2, kv_heads=3, has_norm=has_norm, fp8_cache=fp8_cache
    )
    keys, values = given_.written(interpret=False)
    ops, table = TorchOps(), RotaryTable(given_.cos, given_.sin)
    span = Span(given_.slots.long(), given_.kv_len.long()[:, None] + torch.arange(rows), 13)
    for layer in range(2):
        k, v = (part[:, :, layer].transpose(1, 2) for part in (given_.keys, given_.values))
        if given_.k_norm is not None:
            k = ops.rms_norm(k, given_.k_norm[layer], 1e-6)
        k = ops.rotary_embedding(k, ops.rotary_rows(table, span))
        scales = (given_.k_scale, given_.v_scale)
        of_layer = LayerCache(
            given_.k_cache[layer].clone(),
            given_.v_cache[layer].clone(),
            *(None if scale is None else scale[layer] for scale in scales),
        )
        expected = ops.kv_cache_update(of_layer, k, v, span)
        # A last bit of float32 may decide which code is nearer.
        tolerance = {"rtol": 2.0**-3, "atol": 0.0} if fp8_cache else {}
        torch.testing.assert_close(keys[layer].float(), expected.keys.float(), **tolerance)
        assert torch.equal(values[layer].float(), expected.values.float())


def test_rounding_of_bfloat16_is_that_of_torch() -> None:
    """The norm rounds to the keys' type, as torch does, before the rotation rounds again; here by an angle of 0."""
    given_ = random_pass(torch.bfloat16, 64, [(0, 16, 0)], rows=16, kv_heads=2)
    given_.cos.fill_(1.0)
    given_.sin.fill_(0.0)
    assert given_.k_norm is not None
    expected = torch.nn.functional.rms_norm(given_.keys[0, :, 0], (64,), given_.k_norm[0], 1e-6)
    assert torch.equal(given_.written(interpret=False)[0][0, 0, :, :16], expected.transpose(0, 1))


@triton.jit
def _encode(x, codes, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(codes + index, e4m3_codes(tl.load(x + index)))


def test_e4m3_is_rounded_to_nearest_ties_to_even() -> None:
    """Every code, the numbers halfway between two and their neighbours, what is too large, and NaN; of both signs."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    halfway = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(torch.inf)
    x = torch.cat(
        (values, halfway, halfway.nextafter(inf), halfway.nextafter(-inf), torch.tensor([449.0, 1e30, 1e-30]))
    )
    x = torch.cat((x, -x, torch.tensor([torch.nan, torch.inf, -torch.inf])))
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    codes = torch.empty(1024, dtype=torch.uint8)
    kernel = Kernel(_encode, {"x": "*fp32", "codes": "*u8"}, {"BLOCK": 1024}, lambda sizes: (1, 1, 1))
    kernel.launch(x, codes)
    assert torch.equal(codes, x.clamp(-448, 448).to(FP8).view(torch.uint8))


@pytest.mark.parametrize("compute_capability", SHARED_MEMORY)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_it_compiles_to_wide_accesses_without_spills(cache_dtype: torch.dtype, compute_capability: int) -> None:
    """16 bytes of 16-bit keys a thread are loaded at once, and stored as they are or as 8 codes."""
    kernel = kv_write_kernel(torch.bfloat16, cache_dtype, 128, has_norm=True, eps=1e-6)
    compiled = kernel.compile(compute_capability)
    assert compiled.spills == 0
    assert compiled.registers <= 64
    assert "ld.global.v4.b32" in compiled.ptx
    assert ("st.global.v2.b32" if cache_dtype == FP8 else "st.global.v4.b32") in compiled.ptx


def test_what_it_does_not_have_is_refused_by_name() -> None:
    where = [(0, 1, 0)]
    with pytest.raises(UserError, match=r"heads are of 24 torch.float32; .* a multiple of 16 up to 256"):
        random_pass(torch.float32, 24, where, rows=1).written(interpret=True)
    with pytest.raises(UserError, match=r"heads are of 32 torch\.float64"):
        random_pass(torch.float64, 32, where, rows=1).written(interpret=True)
    good = random_pass(torch.bfloat16, 32, where, rows=1)
    for changed, message in (
        ({"k_cache": good.k_cache.to(FP8)}, "float8_e4m3fn without scales"),
        ({"k_scale": torch.ones(1)}, "bfloat16 with scales"),
        ({"v_scale": torch.ones(1)}, "bfloat16 with scales"),
        ({"v_cache": good.v_cache.to(FP8), "v_scale": torch.ones(1)}, "keys are cached as torch.bfloat16, values as"),
        ({"cos": good.cos[:-1], "sin": good.sin[:-1]}, r"have shape \(23, 16\), they must have \(24 or more, 16\)"),
        (
            {"cos": good.cos[:, :-1], "sin": good.sin[:, :-1]},
            r"have shape \(24, 15\), they must have \(24 or more, 16\)",
        ),
    ):
        with pytest.raises(UserError, match=message):
            Pass(**{**vars(good), **changed}).written(interpret=True)


@pytest.mark.parametrize("axis_of", [(name, axis) for name, size in AXES.items() for axis in range(size)])
def test_every_size_is_seen_to_fit(axis_of: tuple[str, int]) -> None:
    """A tensor with one row more or a column more than the others say: the kernel would read past one of them."""
    name, axis = axis_of
    good = random_pass(torch.bfloat16, 32, [(0, 1, 0), (2, 1, 1)], rows=2, layers=3, kv_heads=4, fp8_cache=True)
    tensor = vars(good)[name]
    larger = torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
    with pytest.raises(UserError, match=r"kv_write: .* has shape .*, it must have"):
        replace(good, **{name: larger}).written(interpret=True)
    with pytest.raises(UserError, match=r"kv_write: \w+ has shape .*, it must have"):
        replace(good, **{name: tensor[None]}).written(interpret=True)
