"""Every operation as TensorRT's own Python registers it, describes it and takes its kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tensorrt_rtx as trt
import torch

from dflash_trt.plugins import operations
from dflash_trt.plugins.kernel import parameter_types
from dflash_trt.plugins.operation import Operation
from dflash_trt.plugins.registration import register, registered
from tests.plugins.tensorrt_plugin import Dims, Embedded, ask, static, tensorrt_plugin

TRT_TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "FP8",
    torch.int32: "INT32",
    torch.int64: "INT64",
}


@dataclass(frozen=True)
class Case:
    """Inputs of an operation in a network, and what must come of them."""

    operation: Operation
    inputs: Mapping[str, tuple[torch.dtype, Dims]]
    outputs: tuple[tuple[torch.dtype, tuple[Any, ...]], ...]
    """Types, and shapes for `SIZES`."""
    attributes: Mapping[str, Any] = field(default_factory=dict)


I32, I64, F32, BF16, FP8 = torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn
SIZES = {"B": 3, "v": 5, "T": 16, "chunks": 304, "room": 319}
"""One of the calls."""


def _kv_write(cache: torch.dtype, has_norm: bool) -> Case:
    return Case(
        operations.KV_WRITE,
        {
            **dict.fromkeys(("keys", "values"), (BF16, ("B", "T", 6, 8, 128))),
            "k_norm": (BF16, (6, 128)),
            **dict.fromkeys(("cos", "sin"), (F32, (2064, 64))),
            **dict.fromkeys(("kv_len", "q_len", "slots"), (I32, ("B",))),
            **dict.fromkeys(("k_scale", "v_scale"), (F32, (6,))),
            **dict.fromkeys(("k_cache_in", "v_cache_in"), (cache, (6, 4, 8, 2064, 128))),
        },
        outputs=((cache, (6, 4, 8, 2064, 128)),) * 2,
        attributes={"eps": 1e-6, "has_norm": has_norm},
    )


def _attention(cache: torch.dtype, most_rows: int, placed: tuple[int, int], **attributes: Any) -> Case:
    return Case(
        operations.BLOCK_ATTENTION_PARTIAL,
        {
            "q": (BF16, ("B", "T", 32, 128)),
            "q_norm": (BF16, (1, 128)),
            **dict.fromkeys(("cos", "sin"), (F32, (2064, 64))),
            **dict.fromkeys(("kv_len", "q_len", "slots"), (I32, ("B",))),
            **dict.fromkeys(("k_scale", "v_scale"), (F32, (1,))),
            **dict.fromkeys(("k_cache", "v_cache"), (cache, (1, 4, 8, 2064, 128))),
        },
        outputs=((F32, (*placed, 128)), (F32, placed)),
        attributes={"eps": 1e-6, **attributes, "ratio": 4, "most_rows": most_rows},
    )


def _combine(has_sinks: bool) -> Case:
    return Case(
        operations.BLOCK_ATTENTION_COMBINE,
        {
            "partial": (F32, ("room", 64, 128)),
            "lse": (F32, ("room", 64)),
            "sinks": (F32, (32,)),
            "q": (BF16, ("B", "T", 32, 128)),
        },
        outputs=((BF16, (3, 16, 32, 128)),),
        attributes={"has_sinks": has_sinks, "ratio": 4, "most_rows": 16},
    )


CASES = {
    # 296 thread blocks fill a B300; 3 sequences of 8 KV heads are 24, and where 64 query rows take two, twice as many.
    "block_attention_partial, BF16": _attention(BF16, 16, (24 + 295, 64), has_norm=True, causal=True, window=0),
    "block_attention_partial, FP8": _attention(FP8, 8, (48 + 295, 32), has_norm=False, causal=False, window=1024),
    "block_attention_combine": _combine(False),
    "block_attention_combine, sinks": _combine(True),
    "kv_write, BF16": _kv_write(BF16, True),
    "kv_write, FP8": _kv_write(FP8, False),
    "verify_partial": Case(
        operations.VERIFY_PARTIAL,
        {
            "logits": (BF16, ("B", "v", 18992)),
            "temperature": (F32, ("B",)),
            "seeds": (I64, ("B",)),
            "first": (I32, ("B",)),
            "valid": (I32, (1,)),
            "offset": (I32, (1,)),
        },
        outputs=((F32, (3, 5, 5)), (I32, (3, 5, 5))),
    ),
    "verify_combine": Case(
        operations.VERIFY_COMBINE,
        {
            "scores": (F32, ("B", "v", "chunks")),
            "ids": (I32, ("B", "v", "chunks")),
            "tokens": (I32, ("B", "v")),
            "draft_len": (I32, ("B",)),
        },
        outputs=((I32, (3, 5)), (I32, (3,)), (I32, (3,))),
    ),
}


@pytest.fixture(scope="module")
def trtp() -> Iterator[Any]:
    with tensorrt_plugin() as module:
        yield module


def embed(case: Case, compute_capability: int = 103) -> Embedded:
    """The case's operation in a network."""
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)
    tensors = [
        network.add_input(name, getattr(trt.DataType, TRT_TYPES[dtype]), static(dims))
        for name, (dtype, dims) in case.inputs.items()
    ]
    operation = getattr(registered(), case.operation.name)
    made = operation(*tensors, **case.attributes, compute_capability=compute_capability)
    return ask(made, tensors, [dims for _, dims in case.inputs.values()])


def numbers(case: Case) -> dict[str, tuple[int, ...]]:
    return {name: tuple(SIZES.get(size, size) for size in dims) for name, (_, dims) in case.inputs.items()}  # type: ignore[call-overload, misc]


@pytest.fixture(scope="module")
def embedded(trtp: Any) -> dict[str, Embedded]:
    return {name: embed(case) for name, case in CASES.items()}


def test_every_operation_has_a_case() -> None:
    assert {case.operation.name for case in CASES.values()} == {operation.name for operation in operations.OPERATIONS}


@pytest.mark.parametrize("name", CASES)
def test_outputs_have_the_types_and_shapes_that_were_agreed_and_are_no_aliases(
    name: str, embedded: dict[str, Embedded]
) -> None:
    case, result = CASES[name], embedded[name]
    assert [kind.name for kind in result.types] == [TRT_TYPES[dtype] for dtype, _ in case.outputs]
    assert [tuple(size.value(SIZES) for size in shape) for shape in result.shapes] == [dims for _, dims in case.outputs]
    assert result.aliases == [-1] * len(case.outputs)


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_taken_as_they_are_and_linear(name: str, embedded: dict[str, Embedded]) -> None:
    case = CASES[name]
    types = [TRT_TYPES[dtype] for dtype, _ in (*case.inputs.values(), *case.outputs)]
    assert [(kind.name, layout.name) for kind, layout in embedded[name].formats] == [(kind, "LINEAR") for kind in types]


@pytest.mark.parametrize("name", CASES)
def test_what_is_passed_is_what_the_ptx_takes(name: str, embedded: dict[str, Embedded]) -> None:
    """TensorRT passes inputs, extra arguments, outputs."""
    case, result = CASES[name], embedded[name]
    passed = ["u64"] * len(case.inputs) + ["u32"] * len(result.arguments) + ["u64"] * len(case.outputs)
    assert list(parameter_types(result.ptx)) == passed
    assert f".entry {result.name}(" in result.ptx
    assert all(argument.dtype.name == "INT32" for argument in result.arguments)


@pytest.mark.parametrize("name", CASES)
def test_launch_is_the_kernel_s_own(name: str, embedded: dict[str, Embedded]) -> None:
    """Sizes, thread blocks and memory as a launch under torch has them."""
    case, result = CASES[name], embedded[name]
    types = {name: dtype for name, (dtype, _) in case.inputs.items()}
    given = numbers(case), types, {**case.attributes, "compute_capability": 103}
    kernel = case.operation.kernel(*given)
    sizes = case.operation.arguments(kernel, *given)
    assert [argument.expr.value(SIZES) for argument in result.arguments] == list(sizes.values())
    launch = result.launch
    grid = [side.expr.value(SIZES) for side in (launch.grid_x, launch.grid_y, launch.grid_z)]
    assert tuple(grid) == kernel.grid(sizes)
    compiled = kernel.compile(103)
    block = [side.expr.value({}) for side in (launch.block_x, launch.block_y, launch.block_z)]
    assert block == [compiled.threads, 1, 1]
    assert f".reqntid {block[0]}" in result.ptx
    assert launch.shared_mem.expr.value({}) == compiled.shared


def test_kernels_are_for_the_gpu_that_is_asked_for(trtp: Any) -> None:
    for compute_capability in (90, 120):
        result = embed(CASES["verify_combine"], compute_capability)
        assert f".target sm_{compute_capability}" in result.ptx


def test_an_input_of_another_type_than_the_kernel_s_is_refused() -> None:
    case = CASES["verify_partial"]
    types = {name: dtype for name, (dtype, _) in case.inputs.items()}
    with pytest.raises(ValueError, match=r"verify_partial takes first as \*i32, it is torch.int64"):
        case.operation.kernel(numbers(case), {**types, "first": I64}, {})


def test_registering_again_changes_nothing(trtp: Any) -> None:
    operation = registered().verify_combine
    assert registered().verify_combine is operation


def test_the_validator_refuses_what_it_cannot_keep(trtp: Any) -> None:
    wrong = replace(operations.VERIFY_COMBINE, name="wrong_attribute", attributes={"levels": list})
    with pytest.raises(ValueError, match="'levels' of type <class 'list'> is not a supported serializable type"):
        register(trtp, wrong)
    with pytest.raises(ValueError, match=r"cannot have any '\.'"):
        register(trtp, replace(operations.VERIFY_COMBINE, name="verify.combine"))


def test_the_validator_refuses_an_implementation_with_other_inputs(trtp: Any) -> None:
    Desc, implementation = trtp.TensorDesc, tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]

    def describe(a, b):
        return a.like()

    def implement(b, a, outputs, tactic):
        raise AssertionError("what is refused is not called")

    describe.__annotations__ = {"a": Desc, "b": Desc, "return": tuple[Desc]}
    implement.__annotations__ = {"return": implementation}
    trtp.register("dflash::swapped")(describe)
    with pytest.raises(ValueError, match="does not match the expected input arg schema"):
        trtp.aot_impl("dflash::swapped")(implement)


def test_a_kernel_with_other_arguments_than_tensorrt_passes_is_refused(trtp: Any) -> None:
    case = CASES["verify_combine"]
    swapped = replace(case.operation, inputs=("ids", "scores", "tokens", "draft_len"))
    types = {name: dtype for name, (dtype, _) in case.inputs.items()}
    with pytest.raises(ValueError, match=r"verify_combine takes \['scores', 'ids'.*TensorRT passes \['ids', 'scores'"):
        swapped.kernel(numbers(case), types, {})
    shuffled = replace(case.operation, sizes=lambda shapes, types, attributes: {"rows": 5, "batch": 3, "chunks": 304})
    with pytest.raises(ValueError, match=r"verify_combine takes the sizes \('batch', 'rows', 'chunks'\), \('rows', "):
        shuffled.arguments(shuffled.kernel(numbers(case), types, {}), numbers(case), types, {})


def test_tensorrt_rtx_is_whole_afterwards() -> None:
    with tensorrt_plugin():
        pass
    import tensorrt_rtx

    assert tensorrt_rtx.Builder(tensorrt_rtx.Logger(tensorrt_rtx.Logger.ERROR)).create_network(0).num_layers == 0
