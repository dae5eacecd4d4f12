"""One declaration is interpreted and compiled, in either order, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from dflash_trt.errors import UserError
from dflash_trt.plugins.gpus import SHARED_MEMORY
from dflash_trt.plugins.kernel import Kernel, _without_scratch, cdiv, parameter_types, pointer


@triton.jit
def _positive(x):
    return tl.where(x > 0, x, 0.0)


@triton.jit
def _largest(x, length, out, ids, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    value, index = tl.max(_positive(tl.load(x + columns, mask=columns < length, other=0.0)), 0, return_indices=True)
    tl.store(out + block, value)
    tl.store(ids + block, index)


def largest(**changes: Any) -> Kernel:
    declared: dict[str, Any] = {
        "parameters": {"x": "*fp32", "length": "i32", "out": "*fp32", "ids": "*i32"},
        "constants": {"BLOCK": 32},
        "grid": lambda sizes: (cdiv(sizes["length"], 32), 1, 1),
    }
    return Kernel(_largest, **{**declared, **changes})


def interpret(kernel: Kernel) -> None:
    x = torch.tensor([[-2.0, 5.0, 5.0] + [0.0] * 29 + [-1.0] * 7 + [3.0]])
    out, ids = torch.full((3,), 9.0), torch.full((3,), 9, dtype=torch.int32)
    kernel.launch(x, 40, out, ids)
    assert out.tolist() == [5, 3, 9], "the grid is two blocks"
    assert ids.tolist() == [1, 7, 9]


def test_interpreting_and_compiling_leave_each_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)  # whatever Triton's cache holds
    kernel = largest()
    before = kernel.compile(120)
    interpret(kernel)
    assert kernel.compile(120) == before
    interpret(kernel)
    assert not triton.knobs.runtime.interpret


@pytest.mark.parametrize("compute_capability", SHARED_MEMORY)
def test_ptx_has_the_declared_parameters_and_no_others(compute_capability: int) -> None:
    compiled = largest().compile(compute_capability)
    assert compiled.parameters == ("u64", "u32", "u64", "u64")
    assert parameter_types(compiled.ptx) == compiled.parameters
    assert compiled.name == "_largest" and f".entry {compiled.name}(" in compiled.ptx
    assert f".target sm_{compute_capability}" in compiled.ptx
    assert f".reqntid {compiled.threads}" in compiled.ptx
    assert 0 < compiled.registers < 64 and compiled.spills == 0


def test_ptx_does_not_tell_where_it_was_compiled() -> None:
    assert ".py" not in largest().compile(90).ptx


def test_scratch_memory_that_is_read_is_refused() -> None:
    ptx = ".visible .entry f(\n\t.param .u64 f_param_0,\n\t.param .u64 f_param_1\n)\n{\n ld.param.b64 %rd1, [f_param_1];\n}"
    assert _without_scratch(ptx, 2).count(".param") == 3
    with pytest.raises(ValueError, match="reads f_param_1"):
        _without_scratch(ptx, 1)


def test_an_unknown_compute_capability_is_refused() -> None:
    with pytest.raises(UserError, match="sm75; there are sm80, sm86, sm89"):
        largest().compile(75)


def test_a_declaration_that_is_not_the_function_s_is_refused() -> None:
    with pytest.raises(ValueError, match="are declared"):
        largest(parameters={"length": "i32", "x": "*fp32", "out": "*fp32", "ids": "*i32"})


@pytest.mark.parametrize("wrong", [torch.zeros(40, dtype=torch.float16), torch.zeros(80)[::2]])
def test_a_tensor_of_another_type_or_with_gaps_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(
        UserError, match=r"_largest: x is torch.float\d\d of shape \(40,\).* must be contiguous and fp32"
    ):
        largest().launch(wrong, 40, torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_nothing_runs_where_there_is_nothing() -> None:
    largest().launch(torch.zeros(0), 0, torch.zeros(0), torch.zeros(0, dtype=torch.int32))


def test_pointers_are_named_by_what_they_point_to() -> None:
    assert pointer(torch.bfloat16) == "*bf16" and pointer(torch.float8_e4m3fn) == "*fp8e4nv"
