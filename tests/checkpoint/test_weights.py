"""Safetensors by their headers: layouts, mapping, and files that are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_trt.checkpoint.weights import INDEX_FILE, SINGLE_FILE, SafetensorsWeights, finite_in
from dflash_trt.errors import UserError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int8)}


def with_header(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture
def sharded(tmp_path: Path, write_json: Callable[[str, Any], Path]) -> Path:
    """A directory with an index over two shards."""
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    write_json(INDEX_FILE, {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    return tmp_path


def check(weights: SafetensorsWeights) -> None:
    assert sorted(weights.names()) == ["a", "b"]
    assert "a" in weights and "c" not in weights
    for name, tensor in TENSORS.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert weights.dtype(name) == tensor.dtype
        assert torch.equal(weights.read(name), tensor)


@pytest.mark.parametrize("name", [SINGLE_FILE, "other.safetensors"])
def test_one_file(tmp_path: Path, name: str) -> None:
    save_file(TENSORS, tmp_path / name)
    for path in (tmp_path, tmp_path / name, str(tmp_path)):
        weights = SafetensorsWeights(path)
        check(weights)
        assert weights.file_of("a") == tmp_path / name


def test_shards(sharded: Path) -> None:
    weights = SafetensorsWeights(sharded)
    check(weights)
    assert weights.file_of("b") == sharded / "two.safetensors"


def test_an_index_may_name_the_single_file(tmp_path: Path, write_json: Callable[[str, Any], Path]) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    write_json(INDEX_FILE, {"weight_map": dict.fromkeys(TENSORS, SINGLE_FILE)})
    check(SafetensorsWeights(tmp_path))


def test_reading_maps_instead_of_copying(tmp_path: Path) -> None:
    size = 64 << 20
    save_file({"large": torch.zeros(size, dtype=torch.uint8)}, tmp_path / SINGLE_FILE)
    process = psutil.Process()
    before = process.memory_info().rss
    tensor = SafetensorsWeights(tmp_path).read("large")
    assert process.memory_info().rss - before < size // 4
    tensor[0] = 1  # copy-on-write: the file keeps its value
    assert SafetensorsWeights(tmp_path).read("large")[0] == 0


def test_a_tensor_outlives_its_weights(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    tensor = SafetensorsWeights(tmp_path).read("a")
    assert torch.equal(tensor, TENSORS["a"])


def test_refuses_an_unknown_name(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    with pytest.raises(UserError, match="has no tensor c"):
        SafetensorsWeights(tmp_path).read("c")


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_refuses_a_file_cut_short(tmp_path: Path, kept: int) -> None:
    path = tmp_path / SINGLE_FILE
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError) as refusal:
        SafetensorsWeights(tmp_path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "bytes" in str(refusal.value)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{nonsense", "header cannot be read"),
        (b"[1, 2]", "header cannot be read"),
        (b"[" * 200_000, "header cannot be read"),
        (json.dumps({"a": ENTRY | {"shape": [1e400]}}).encode(), "header cannot be read"),
        (
            json.dumps({"a": ENTRY | {"shape": [-1, -2]}}).encode(),
            "header cannot be read (tensor a: a size is negative)",
        ),
        (b'{"a": {"dtype": "F32"}}', "header cannot be read"),
        (json.dumps({"a": ENTRY | {"dtype": "F4"}}).encode(), "tensor a has type F4; supported are F64, F32"),
        (
            json.dumps({"a": ENTRY | {"shape": [3]}}).encode(),
            "tensor a claims bytes 0 to 8, but F32 [3] takes 12",
        ),
        (json.dumps({"a": ENTRY | {"data_offsets": [4, 12]}}).encode(), "tensor a claims bytes 4 to 12"),
        (json.dumps({"a": ENTRY, "b": ENTRY}).encode(), "tensor b claims bytes 0 to 8"),
    ],
)
def test_refuses_a_bad_header(tmp_path: Path, header: bytes, message: str) -> None:
    path = with_header(tmp_path / SINGLE_FILE, header, bytes(8))
    with pytest.raises(UserError) as refusal:
        SafetensorsWeights(tmp_path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert message in str(refusal.value)


def test_refuses_what_is_not_safetensors(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match="not a safetensors file, or cut short: a header of 18446744073709551615"):
        SafetensorsWeights(path)


def test_refuses_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: holds no weights; expected model.safetensors"):
        SafetensorsWeights(tmp_path)
    with pytest.raises(UserError, match="nowhere: no such file or directory"):
        SafetensorsWeights(tmp_path / "nowhere")


def test_refuses_two_files_and_no_index(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(UserError, match=r"several weight files \(x.safetensors, y.safetensors\)"):
        SafetensorsWeights(tmp_path)


def test_refuses_a_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(UserError, match=f"{INDEX_FILE}: names the shard two.safetensors, which is not in"):
        SafetensorsWeights(sharded)


def test_refuses_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    save_file({"c": TENSORS["b"]}, sharded / "two.safetensors")
    with pytest.raises(UserError, match=f"{INDEX_FILE}: says that b is in two.safetensors"):
        SafetensorsWeights(sharded)


def test_refuses_shards_elsewhere(tmp_path: Path, write_json: Callable[[str, Any], Path]) -> None:
    write_json(INDEX_FILE, {"weight_map": {"a": "../one.safetensors"}})
    with pytest.raises(UserError, match=f'{INDEX_FILE}: weight_map.a is "../one.safetensors"'):
        SafetensorsWeights(tmp_path)


def test_refuses_two_checkpoints_in_one_directory(sharded: Path) -> None:
    save_file(TENSORS, sharded / SINGLE_FILE)
    with pytest.raises(UserError, match=f"holds both {SINGLE_FILE} and {INDEX_FILE}"):
        SafetensorsWeights(sharded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_finite_in_finds_one_value_that_is_not(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.randn(1000).to(dtype)
    assert torch.equal(finite_in(tensor, dtype, "w"), tensor)
    tensor[place] = value
    with pytest.raises(UserError, match="w holds NaN or infinity; the checkpoint is damaged"):
        finite_in(tensor, dtype, "w")


def test_finite_in_refuses_what_the_type_cannot_hold() -> None:
    with pytest.raises(UserError, match=r"w holds 7e\+04, beyond float16; choose bfloat16 or float32"):
        finite_in(torch.tensor([1.0, -70000.0]), torch.float16, "w")
    assert finite_in(torch.empty(0, 3), torch.float16, "w").dtype == torch.float16


def values(entry: dict[str, Any]) -> st.SearchStrategy[Any]:
    """A header's entry with anything in any of its places."""
    integers = st.sampled_from([0, 1, 2, 8, -1, 2**31, 2**63, 2**64, 10**30, True, 1.0, "2", None])
    anything = integers | st.lists(integers, max_size=3) | st.sampled_from([{}, "F32", "F4", "U8", "", "f32"])
    return st.fixed_dictionaries(
        {key: st.one_of(st.just(value), st.just(value), anything) for key, value in entry.items()},
        optional={"more": anything},
    )


def taken_by_the_library(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """Types and shapes as safetensors reads them; None where it refuses the file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
            return {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in tensors.items()}
    except Exception:  # TypeError for one, of a type that torch has not
        return None


HEADERS = st.fixed_dictionaries(
    {"a": values(ENTRY)},
    optional={
        "b": values(ENTRY | {"data_offsets": [8, 16]}),
        "": values({"dtype": "U8", "shape": [0], "data_offsets": [8, 8]}),
        "__metadata__": st.sampled_from([{}, {"x": "y"}, {"x": 1}, [], None, "x"]),
    },
).map(json.dumps)


@settings(max_examples=150)
@given(
    header=HEADERS.map(str.encode)
    | st.tuples(HEADERS, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda drawn: drawn[0].encode()[: drawn[1]] + drawn[2] + drawn[0].encode()[drawn[1] :]
    ),
    size=st.sampled_from([0, 8, 16, 17]),
)
def test_a_header_is_taken_only_where_safetensors_takes_it(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, size: int
) -> None:
    path = with_header(tmp_path_factory.getbasetemp() / "drawn.safetensors", header, bytes(size))
    theirs = taken_by_the_library(path)
    try:
        weights = SafetensorsWeights(path)
    except UserError as refusal:
        assert str(refusal).startswith(f"{path}: ")
        assert theirs is None or b"F4" in header
        return
    assert theirs == {name: (str(weights.dtype(name)), list(weights.shape(name))) for name in weights.names()}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": ["2"]},
        {"shape": "2"},
        {"shape": [2.0]},
        {"shape": [True, 2]},
        {"shape": {"0": 2}},
        {"data_offsets": ["0", "8"]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": [0, 8, 8]},
        {"data_offsets": None},
        {"data_offsets": [-8, 0]},
        {"shape": [2**62, 2**2], "data_offsets": [0, 0]},
        {"dtype": 7},
        {"dtype": "f32"},
    ],
)
def test_refuses_an_entry_of_other_types(tmp_path: Path, change: dict[str, Any]) -> None:
    path = with_header(tmp_path / SINGLE_FILE, json.dumps({"a": ENTRY | change}).encode(), bytes(8))
    assert taken_by_the_library(path) is None
    with pytest.raises(UserError, match="tensor a"):
        SafetensorsWeights(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_refuses_a_header_that_is_not_utf8(tmp_path: Path, encoding: str) -> None:
    path = with_header(tmp_path / SINGLE_FILE, json.dumps({"a": ENTRY}).encode(encoding), bytes(8))
    with pytest.raises(UserError, match="its header cannot be read"):
        SafetensorsWeights(path)


def test_refuses_a_header_beyond_the_formats_limit(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(UserError, match="claims 200000000 bytes, the format's limit is 100000000"):
        SafetensorsWeights(path)
