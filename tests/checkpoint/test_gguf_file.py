"""The GGUF reader against the `gguf` package, and files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.gguf_file import GGUFFile, find_gguf
from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.errors import UserError
from tests.checkpoint import tiny_gguf

EVERY_TYPE = {
    "a.flag": True,
    "a.number": 7,
    "a.float": 0.5,
    "a.text": "grüße",
    "a.texts": ["x", "yy"],
    "a.numbers": [3, 1, 2],
    "a.floats": [0.25, -1.0],
}


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType.Q8_0, changes=EVERY_TYPE)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert EVERY_TYPE.items() <= ours.metadata.items()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.type, found.offset, found.nbytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.bytes_of(tensor.name).tobytes() == tensor.data.tobytes()


def test_opens_a_real_model(smollm2: GGUFFile) -> None:
    assert len(smollm2.tensors) == 272
    assert smollm2.metadata["general.architecture"] == "llama"
    assert isinstance(tokens := smollm2.metadata["tokenizer.ggml.tokens"], list) and len(tokens) == 49152


def test_refuses_every_truncation(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for kept in (*range(4, 600, 37), len(whole) // 2, len(whole) - 33):
        cut.write_bytes(whole[:kept])
        with pytest.raises(UserError) as refusal:
            GGUFFile(cut)
        assert str(refusal.value).startswith(f"{cut}: ")
        assert "cut short" in str(refusal.value) or f"of a file of {kept}" in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"not this format", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported; supported are 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + bytes(8) + struct.pack("<I", 99), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cut short"),
    ],
)
def test_refuses_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        GGUFFile(path)
    assert str(refusal.value).startswith(f"{path}: ") and message in str(refusal.value)


def test_refuses_a_part(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", changes={"split.count": 3})
    with pytest.raises(UserError, match="one of 3 parts"):
        GGUFFile(path)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"m\.gguf: no such file"):
        GGUFFile(tmp_path / "m.gguf")


def test_find(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert find_gguf(tmp_path) == find_gguf(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"model\.safetensors: is a file, and no \.gguf; give the directory"):
        find_gguf(tmp_path / "model.safetensors")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").touch()
    assert find_gguf(tmp_path) is None


def read_by_the_package(path: Path) -> dict[str, tuple[int, list[int], bytes]] | None:
    """Tensors as the gguf package reads them: type, shape and bytes; None where it refuses the file."""
    try:
        reader = gguf.GGUFReader(path)
        return {
            tensor.name: (int(tensor.tensor_type), tensor.shape.tolist()[::-1], tensor.data.tobytes())
            for tensor in reader.tensors
        }
    except Exception:  # whatever a damaged file leads to
        return None


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every kind of value in its header."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return tiny_gguf.write(path, kind=gguf.GGMLQuantizationType.Q8_0, changes=EVERY_TYPE).read_bytes()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_read_as_the_package_does_or_refused(
    toy: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    header = toy.index(b"blk.1.ffn_down.weight") + 64
    content = bytearray(toy)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, header))
        new = data.draw(
            st.binary(min_size=1, max_size=4)
            | st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]).map(lambda number: number.to_bytes(8, "little"))
        )
        content[at : at + len(new)] = new
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    try:
        ours = GGUFFile(path)
    except UserError as refusal:
        assert str(refusal).startswith(f"{path}: ")
        return
    theirs = read_by_the_package(path)
    if theirs is not None:
        found = {
            name: (int(tensor.type), list(tensor.shape), ours.bytes_of(name).tobytes())
            for name, tensor in ours.tensors.items()
        }
        assert found == theirs
    try:
        checkpoint = open_target(path)
        for name in checkpoint.weights.names():
            checkpoint.weights.read(name)
    except UserError as refusal:
        assert str(refusal).startswith(f"{path}: ")


def test_refuses_tensors_on_each_other(toy: bytes, tmp_path: Path) -> None:
    at = toy.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8 + 4
    path = tmp_path / "m.gguf"
    path.write_bytes(toy[:at] + bytes(8) + toy[at + 8 :])
    with pytest.raises(UserError, match=r"begins at byte \d+, before another ends"):
        GGUFFile(path)
