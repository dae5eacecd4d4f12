"""Files that the writer writes, read by ours and by the safetensors package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.weights import DTYPES, SafetensorsWeights
from dflash_trt.errors import UserError


def filled(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Arbitrary bytes of that type; booleans must be 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if spec.dtype == torch.bool else 256
    raw = torch.randint(limit, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(spec.dtype).reshape(spec.shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal as bytes, so that NaNs count as themselves."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(list(DTYPES.values())), shapes), max_size=6))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, described: list[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    specs = [TensorSpec(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(described)]
    tensors = [filled(spec, seed) for seed, spec in enumerate(specs)]
    path = tmp_path_factory.mktemp("writer") / "w.safetensors"
    write_safetensors(path, specs, iter(tensors))

    ours = SafetensorsWeights(path)
    with safe_open(path, framework="pt") as theirs:
        assert theirs.metadata() == {"format": "pt"}
        assert set(theirs.keys()) == set(ours.names()) == {spec.name for spec in specs}
        for spec, tensor in zip(specs, tensors, strict=True):
            for read in (theirs.get_tensor(spec.name), ours.read(spec.name)):
                assert read.dtype == spec.dtype and tuple(read.shape) == spec.shape
                assert same_bytes(read, tensor)


def test_writes_transposed_tensors_as_they_read(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write_safetensors(tmp_path / "w.safetensors", [TensorSpec("t", tensor.dtype, (3, 2))], [tensor])
    assert torch.equal(SafetensorsWeights(tmp_path).read("t"), tensor)


def test_takes_one_tensor_at_a_time(tmp_path: Path) -> None:
    """When a tensor is asked for, all before it are in the file."""
    path = tmp_path / "w.safetensors"
    specs = [TensorSpec(f"t{index}", torch.uint8, (1 << 20,)) for index in range(4)]

    def tensors() -> Iterator[torch.Tensor]:
        for index, spec in enumerate(specs):
            assert not path.exists()
            assert path.with_name("w.safetensors.partial").stat().st_size >= index << 20
            yield filled(spec, index)

    write_safetensors(path, specs, tensors())
    assert SafetensorsWeights(path).names() == ("t0", "t1", "t2", "t3")


SPEC = TensorSpec("t", torch.float32, (2,))


@pytest.mark.parametrize(
    ("specs", "tensors"),
    [
        ([SPEC], [torch.zeros(3)]),
        ([SPEC], [torch.zeros(2, dtype=torch.float16)]),
        ([SPEC], []),
        ([SPEC], [torch.zeros(2), torch.zeros(2)]),
        ([SPEC, SPEC], [torch.zeros(2), torch.zeros(2)]),
        ([TensorSpec("__metadata__", torch.float32, (2,))], [torch.zeros(2)]),
        ([TensorSpec("t", torch.complex128, (2,))], [torch.zeros(2, dtype=torch.complex128)]),
    ],
)
def test_a_mismatch_leaves_nothing_behind(tmp_path: Path, specs: list[TensorSpec], tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError):
        write_safetensors(tmp_path / "w.safetensors", specs, tensors)
    assert list(tmp_path.iterdir()) == []


def test_refuses_where_the_system_does(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/w\.safetensors: cannot be written \(No such file or directory\)"):
        write_safetensors(tmp_path / "nowhere" / "w.safetensors", [SPEC], [torch.zeros(2)])
