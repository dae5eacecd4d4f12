"""The kernels in the interpreter against their reference, and both against a softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.plugins.attention_combine import block_attention_combine_kernel
from dflash_trt.plugins.attention_partial import BlockAttention, block_attention_partial_kernel
from dflash_trt.plugins.attention_shares import Shares, filling_programs
from dflash_trt.plugins.block_attention import block_attention, launch_block_attention
from dflash_trt.plugins.gpus import MULTIPROCESSORS, SHARED_MEMORY
from tests.closeness import last_places

FP8 = torch.float8_e4m3fn
CLOSE = {torch.float32: last_places(96)["atol"], torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Of the largest value: weights and results are rounded to the type, and a query may be to either neighbour."""

AXES = {
    "q_norm": 1,
    "cos": 2,
    "sin": 2,
    "kv_len": 1,
    "q_len": 1,
    "slots": 1,
    "k_scale": 1,
    "v_scale": 1,
    "v_cache": 4,
    "sinks": 1,
}
"""The axes of each argument that another one's size depends on."""


@dataclass(frozen=True)
class Pass:
    """Arguments of `block_attention`."""

    q: Tensor
    q_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    kv_len: Tensor
    q_len: Tensor
    slots: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    sinks: Tensor | None
    causal: bool
    window: int

    def attended(self, *, interpret: bool, programs: int = 1) -> Tensor:
        return block_attention(**vars(self), eps=1e-6, interpret=interpret, programs=programs)

    def configuration(self, **changes: Any) -> BlockAttention:
        return BlockAttention(
            **{
                "dtype": self.q.dtype,
                "cache_dtype": self.k_cache.dtype,
                "head_dim": self.q.shape[3],
                "ratio": self.q.shape[2] // self.k_cache.shape[1],
                "causal": self.causal,
                "window": self.window,
                "has_norm": self.q_norm is not None,
                "eps": 1e-6,
                "most_rows": self.q.shape[1],
                "compute_capability": 90,
                "programs": filling_programs(MULTIPROCESSORS[90]),
                "ahead_of_time": False,
                **changes,
            }
        )

    def tensors(self) -> list[Any]:
        return list(vars(self).values())[:-2]

    @property
    def counts(self) -> Tensor:
        """[B, T] which rows mean something: they are the sequence's, and inside the cache."""
        steps = torch.arange(self.q.shape[1])
        return (steps < self.q_len[:, None]) & (self.kv_len[:, None] + steps < self.k_cache.shape[2])

    def with_unseen_unknown(self) -> Pass:
        """NaN wherever no row of the pass can see, other slots included, and in rows that mean nothing."""
        caches = [torch.full(cache.shape, torch.nan).to(cache.dtype) for cache in (self.k_cache, self.v_cache)]
        for length, count, slot in zip(self.kv_len.tolist(), self.q_len.tolist(), self.slots.tolist(), strict=True):
            seen = slice(max(0, length - self.window + 1) if self.window else 0, length + count)
            for unknown, known in zip(caches, (self.k_cache, self.v_cache), strict=True):
                unknown[slot, :, seen] = known[slot, :, seen]
        q = self.q.masked_fill(~self.counts[..., None, None], torch.nan)
        return replace(self, q=q, k_cache=caches[0], v_cache=caches[1])


def random_pass(
    dtype: torch.dtype,
    head_dim: int,
    where: list[tuple[int, int, int]],
    *,
    rows: int,
    kv_heads: int = 1,
    ratio: int = 1,
    positions: int,
    causal: bool = True,
    window: int = 0,
    has_norm: bool = True,
    has_sinks: bool = False,
    fp8_cache: bool = False,
    seed: int = 0,
) -> Pass:
    """Of sequences of length, rows and slot as in `where`."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    kv_len, q_len, slots = (torch.tensor(each, dtype=torch.int32) for each in zip(*where, strict=True))
    angles = normal(positions, head_dim // 2)
    cache = (max(slots.tolist()) + 2, kv_heads, positions, head_dim)
    cache_dtype = FP8 if fp8_cache else dtype
    return Pass(
        q=normal(len(where), rows, kv_heads * ratio, head_dim).to(dtype),
        q_norm=normal(head_dim).to(dtype) if has_norm else None,
        cos=angles.cos(),
        sin=angles.sin(),
        kv_len=kv_len,
        q_len=q_len,
        slots=slots,
        k_scale=normal(1).exp2() if fp8_cache else None,
        v_scale=normal(1).exp2() if fp8_cache else None,
        k_cache=normal(*cache).to(cache_dtype),
        v_cache=normal(*cache).to(cache_dtype),
        sinks=normal(kv_heads * ratio) if has_sinks else None,
        causal=causal,
        window=window,
    )


def exact(given: Pass, sequence: int) -> tuple[Tensor, Tensor]:
    """Of one sequence in float64, a row, a head and a key at a time where it matters: what its rows make of the cache
    [rows, H, d], and their logarithms of sums of exponentials, without sinks [rows, H]."""
    length, slot = int(given.kv_len[sequence]), int(given.slots[sequence])
    rows = int(given.counts[sequence].sum())
    heads, head_dim = given.q.shape[2:]
    out, lse = torch.zeros(rows, heads, head_dim).double(), torch.zeros(rows, heads).double()
    for row in range(rows):
        x = given.q[sequence, row].double()
        if given.q_norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * given.q_norm.double()
            x = x.to(given.q.dtype).double()
        turn = torch.complex(given.cos[length + row].double(), given.sin[length + row].double())
        turned = torch.complex(*x.chunk(2, -1)) * turn
        x = torch.cat((turned.real, turned.imag), -1).to(given.q.dtype).double()
        keys = [
            key
            for key in range(min(length + int(given.q_len[sequence]), given.k_cache.shape[2]))
            if not (given.causal and key > length + row)
            and not (given.window and abs(length + row - key) >= given.window)
        ]
        for head in range(heads):
            kv_head = head * given.k_cache.shape[1] // heads
            k, v = (cache[slot, kv_head, keys].double() for cache in (given.k_cache, given.v_cache))
            k, v = (
                k * (1 if given.k_scale is None else given.k_scale),
                v * (1 if given.v_scale is None else given.v_scale),
            )
            weights = (k @ x[head] / head_dim**0.5).exp()
            sink = 0 if given.sinks is None else given.sinks[head].double().exp()
            out[row, head] = weights @ v / (weights.sum() + sink)
            lse[row, head] = weights.sum().log()
    return out, lse


def assert_attends(actual: Tensor, given: Pass) -> None:
    assert actual.dtype == given.q.dtype
    assert actual.isfinite().all()
    largest = float(given.v_cache.float().abs().max() * (1 if given.v_scale is None else given.v_scale))
    for sequence, counts in enumerate(given.counts):
        error = actual[sequence][counts].double() - exact(given, sequence)[0]
        assert error.abs().max().item() <= CLOSE[given.q.dtype] * largest if counts.any() else True


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    rows = draw(st.integers(1, 16))
    positions = draw(st.integers(1, 160))
    window = draw(st.sampled_from([0, 0, 1, 7, 64]))
    slots = draw(st.permutations(range(4)))[: draw(st.integers(1, 2))]
    # Nothing, one token, the edges of a window, of a block of keys and of the cache, and anything between.
    edges = [0, 1, window - 1, window, 63, 64, 65, positions - rows, positions - 1]
    lengths = st.sampled_from([edge for edge in edges if 0 <= edge < positions]) | st.integers(0, positions - 1)
    return random_pass(
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        draw(st.sampled_from([16, 32, 64, 80, 96, 128])),
        [(draw(lengths), draw(st.integers(0, rows)), slot) for slot in slots],
        rows=rows,
        kv_heads=draw(st.integers(1, 2)),
        ratio=draw(st.integers(1, 4)),
        positions=positions,
        causal=draw(st.booleans()),
        window=window,
        has_norm=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
        fp8_cache=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


@given(passes())
@settings(max_examples=40)
def test_the_reference_is_a_softmax(given: Pass) -> None:
    assert_attends(given.attended(interpret=False), given)


@given(passes(), st.sampled_from([1, 5, 16]))
@settings(max_examples=40)
def test_the_kernels_are_a_softmax_of_what_can_be_seen(given: Pass, programs: int) -> None:
    """Whatever the keys are split into, and whatever stands where no row sees."""
    actual = given.with_unseen_unknown().attended(interpret=True, programs=programs)
    assert_attends(actual, given)
    expected = given.attended(interpret=False)
    largest = float(given.v_cache.float().abs().max() * (1 if given.v_scale is None else given.v_scale))
    difference = (actual.double() - expected.double())[given.counts]
    assert (difference.abs() <= CLOSE[given.q.dtype] * largest).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 2, 5, 64, 65, 66])
def test_edges_of_windows_and_of_blocks_of_keys(window: int, causal: bool) -> None:
    """Rows stand on either side of key 64, where a block of keys ends, windows begin on either side of key 0, and two
    rows stand past the end of the cache."""
    for length in (*range(60, 68), 78):
        given = random_pass(
            torch.float32, 16, [(length, 4, 0)], rows=5, positions=80, causal=causal, window=window, seed=length
        )
        assert_attends(given.with_unseen_unknown().attended(interpret=True), given)


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_key_of_nan_is_in_no_row_before_it(dtype: torch.dtype, fp8_cache: bool) -> None:
    """As `kv_write` writes a position that is not finite; to the bit, and rows that see it are NaN."""
    given = random_pass(dtype, 32, [(37, 6, 0), (3, 6, 1)], rows=6, ratio=2, positions=64, fp8_cache=fp8_cache)
    expected = given.attended(interpret=True)
    given.k_cache[0, :, 40] = torch.full((32,), torch.nan).to(given.k_cache.dtype)
    given.v_cache[0, :, 40] = 0
    for interpret in (False, True):
        actual = given.attended(interpret=interpret)
        assert actual[0, 3:].isnan().all() and actual[0, :3].isfinite().all() and actual[1].isfinite().all()
    assert torch.equal(actual[0, :3], expected[0, :3]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [0, 37])
def test_a_prefill_is_taken_in_parts(length: int, causal: bool, window: int) -> None:
    """70 rows of 4 heads are three times the rows of a program; the second sequence's fill one of these."""
    given = random_pass(
        torch.float32,
        16,
        [(length, 70, 1), (3, 9, 0)],
        rows=70,
        ratio=4,
        positions=112,
        causal=causal,
        window=window,
        has_sinks=True,
    )
    assert given.configuration().tiles(70) == 3
    torch.testing.assert_close(
        given.attended(interpret=True, programs=12)[given.counts], given.attended(interpret=False)[given.counts]
    )


def test_a_window_ends_inside_a_program_that_looks_both_ways() -> None:
    """Its last rows see a whole block of keys of which its first rows see none."""
    given = random_pass(torch.float32, 16, [(0, 200, 0)], rows=200, positions=200, causal=False, window=64)
    torch.testing.assert_close(given.attended(interpret=True), given.attended(interpret=False))


@pytest.mark.parametrize("length", [0, 5, 300])
def test_splits_share_the_keys_that_there_are(length: int) -> None:
    """Each sum of exponentials belongs to other keys, a split without keys says so, and what it leaves is unread."""
    given = random_pass(torch.float32, 32, [(length, 3, 0)], rows=4, kv_heads=2, ratio=2, positions=320)
    configuration = given.configuration(programs=14)
    splits = configuration.splits(1, 4, 2)
    assert splits == 7
    room, block = configuration.room(1, 4, 2), configuration.block_m
    assert (room, block) == (15, 16), "one program more than there are"
    partial, lse = torch.full((room, block, 32), torch.nan), torch.full((room, block), torch.nan)
    # Without a norm or scales: the kernel does not read those.
    pointers = [given.cos if each is None else each for each in given.tensors()[:-1]]
    block_attention_partial_kernel(configuration).launch(*pointers, 1, 4, 2, 2, 320, splits, partial, lse)
    assert partial[-1].isnan().all() and lse[-1].isnan().all()

    def by_row(x: Tensor) -> Tensor:
        """Splits, KV heads and rows of the 2 heads of each -> splits, rows that count, heads."""
        return x[:-1, :8].unflatten(0, (splits, 2)).unflatten(2, (4, 2)).transpose(1, 2).flatten(2, 3)[:, :3]

    seen, parts = by_row(lse), by_row(partial)
    saw = seen.isfinite()
    assert (seen[~saw] == -torch.inf).all()
    assert saw.flatten(1).any(1).sum() == {0: 1, 5: 1, 300: 5}[length], "64 keys each"
    assert torch.equal(parts.isfinite().all(-1), saw)
    out, expected = exact(given, 0)
    torch.testing.assert_close(seen.double().logsumexp(0), expected, **last_places(96))
    result = torch.empty_like(given.q)
    combine = block_attention_combine_kernel(torch.float32, 32, has_sinks=False)
    combine.launch(partial, lse, given.cos, given.q, 1, 4, 4, 2, block, splits, result)
    torch.testing.assert_close(result[0, :3].double(), out, **last_places(96))


@pytest.mark.parametrize("bogus", [-(2**31), -1, 12, 2**31 - 1])
@pytest.mark.parametrize("name", ["kv_len", "q_len", "slots"])
def test_whatever_stands_in_memory_reads_no_other(name: str, bogus: int) -> None:
    """TensorRT times kernels with it; the sequence beside is what it is, and the interpreter's memory is the process's."""
    where = [(3, 2, 1), (9, 3, 0)]
    given = random_pass(torch.float32, 16, where, rows=3, ratio=2, positions=12, causal=False)
    expected = given.attended(interpret=True)
    vars(given)[name][0] = bogus
    assert torch.equal(given.attended(interpret=True, programs=4).isfinite().all(), torch.tensor(True))
    torch.testing.assert_close(given.attended(interpret=True)[1], expected[1])


def test_what_is_no_number_is_not_hidden() -> None:
    """A row of NaN stays one, and those beside it stay what they are."""
    given = random_pass(torch.float32, 16, [(9, 3, 0)], rows=3, positions=12)
    expected = given.attended(interpret=True)
    given.q[0, 1] = torch.nan
    actual = given.attended(interpret=True)
    assert actual[0, 1].isnan().all()
    assert torch.equal(actual[0, ::2], expected[0, ::2])


@pytest.mark.parametrize("compute_capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_of_an_fp8_cache_is_decoded(dtype: torch.dtype, compute_capability: int) -> None:
    """By integers where there is no conversion. One key is seen, so that its value is what comes out."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes[[0x7F, 0xFF]] = 0.0  # NaN
    given = random_pass(dtype, 256, [(0, 1, 0)], rows=1, positions=1, fp8_cache=True)
    given = replace(given, v_cache=codes.expand(2, 1, 1, 256).contiguous(), v_scale=torch.tensor([0.5]))
    configuration = given.configuration(compute_capability=compute_capability, programs=1)
    assert (block_attention_partial_kernel(configuration).parameters["k_cache"] == "*u8") == (compute_capability == 80)
    actual = launch_block_attention(configuration, *given.tensors())
    assert torch.equal(actual[0, 0, 0], (codes.float() * 0.5).to(dtype))
    with_nan = codes.clone()
    with_nan.view(torch.uint8)[3] = 0xFF
    given = replace(given, v_cache=with_nan.expand(2, 1, 1, 256).contiguous())
    actual = launch_block_attention(configuration, *given.tensors())
    assert torch.equal(actual[0, 0, 0].isnan().nonzero().flatten(), torch.tensor([3]))


def test_one_long_sequence_fills_a_gpu_and_many_are_not_split() -> None:
    """Of 8 KV heads: whole waves of 264 thread blocks, and a prefill's rows are enough of them."""
    configuration = random_pass(torch.bfloat16, 128, [(0, 1, 0)], rows=16, ratio=4, positions=1).configuration()
    assert configuration.splits(1, 16, 8) == 33
    assert configuration.splits(8, 16, 8) == 5
    assert configuration.splits(64, 16, 8) == 1
    assert configuration.splits(1, 2048, 8) == 1


@given(
    st.builds(Shares, ratio=st.integers(1, 16), most_rows=st.integers(1, 32), programs=st.integers(1, 400)),
    *[st.integers(1, 300)] * 2,
    st.integers(1, 16),
)
def test_there_is_room_for_every_program_and_more_for_more(shares: Shares, batch: int, rows: int, heads: int) -> None:
    """Memory is reserved for the largest batch, of which keys are split least."""
    room = shares.room(batch, rows, heads)
    assert shares.splits(batch, rows, heads) * shares.tiles(rows) * heads * batch <= room
    assert room <= shares.room(batch + 1, rows, heads) and room <= shares.room(batch, rows + 1, heads)


@pytest.mark.parametrize("compute_capability", SHARED_MEMORY)
def test_it_compiles_within_registers_and_shared_memory(compute_capability: int) -> None:
    """A block of 16 of four heads a KV head over an FP8 cache; keys are copied 16 bytes at a time while others are used."""
    given = random_pass(torch.bfloat16, 128, [(0, 1, 0)], rows=16, ratio=4, positions=1, fp8_cache=True)
    compiled = block_attention_partial_kernel(given.configuration(compute_capability=compute_capability)).compile(
        compute_capability
    )
    assert compiled.spills == 0
    assert compiled.shared <= SHARED_MEMORY[compute_capability] << 10
    assert "cp.async.cg.shared.global" in compiled.ptx
    matrix_unit = {90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma"}.get(compute_capability, "mma.sync")
    assert matrix_unit in compiled.ptx


def test_more_shared_memory_than_a_gpu_has_is_refused_by_name() -> None:
    given = random_pass(torch.float32, 256, [(0, 1, 0)], rows=16, ratio=8, positions=1)
    kernel = block_attention_partial_kernel(given.configuration(compute_capability=86))
    with pytest.raises(UserError, match=r"partial takes \d+ bytes of shared memory, sm86 has 101376; it takes less"):
        kernel.compile(86)


def test_what_it_does_not_have_is_refused_by_name() -> None:
    where = [(0, 1, 0)]
    with pytest.raises(UserError, match=r"heads are of 24 torch.float32; .* a multiple of 16 up to 256"):
        random_pass(torch.float32, 24, where, rows=1, positions=8).attended(interpret=True)
    with pytest.raises(UserError, match=r"heads are of 32 torch\.float64"):
        random_pass(torch.float64, 32, where, rows=1, positions=8).attended(interpret=True)
    good = random_pass(torch.bfloat16, 32, where, rows=1, positions=8, kv_heads=2)
    for changed, message in (
        ({"k_cache": good.k_cache.to(FP8)}, "float8_e4m3fn without scales"),
        ({"k_scale": torch.ones(1)}, "bfloat16 with scales"),
        ({"v_scale": torch.ones(1)}, "bfloat16 with scales"),
        ({"q": good.q[:, :, :1]}, "1 query heads and 2 KV heads; it takes a multiple"),
        ({"cos": good.cos[:-1], "sin": good.sin[:-1]}, r"have shape \(7, 16\), they must have \(8 or more, 16\)"),
    ):
        with pytest.raises(UserError, match=message):
            replace(good, **changed).attended(interpret=True)


@pytest.mark.parametrize("axis_of", [(name, axis) for name, size in AXES.items() for axis in range(size)])
def test_every_size_is_seen_to_fit(axis_of: tuple[str, int]) -> None:
    """A tensor with one row more or a column more than the others say: the kernels would read past one of them."""
    name, axis = axis_of
    where = [(0, 1, 0), (2, 1, 1)]
    good = random_pass(torch.bfloat16, 32, where, rows=2, ratio=2, positions=8, has_sinks=True, fp8_cache=True)
    tensor = vars(good)[name]
    larger = torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
    with pytest.raises(UserError, match=r"block_attention: .* has shape .*, it must have"):
        replace(good, **{name: larger}).attended(interpret=True)
    with pytest.raises(UserError, match=r"block_attention: \w+ has shape .*, it must have"):
        replace(good, **{name: tensor[None]}).attended(interpret=True)
