"""A Triton kernel with everything that running or compiling it takes.

One declaration serves CUDA under torch, the interpreter on a CPU, and TensorRT, which gets PTX.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dflash_trt.errors import UserError
from dflash_trt.plugins.gpus import SHARED_MEMORY
from dflash_trt.plugins.interpretation import interpret

_PTX_VERSION = {80: 87, 86: 87, 89: 87, 90: 87, 100: 88, 103: 88, 120: 88}
"""Not the newest that Triton knows, so that a driver of CUDA 12.9 or later takes it; 8.8 is the first with sm_103."""

Grid = tuple[Any, Any, Any]
"""Thread blocks in x, y and z: numbers, or TensorRT's symbolic expressions."""

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def pointer(dtype: torch.dtype) -> str:
    """Triton's name of a pointer to `dtype`."""
    return f"*{_TYPES[dtype]}"


def takes(declared: str, dtype: torch.dtype) -> bool:
    """Whether a parameter that is declared so takes tensors of `dtype`: bytes are taken for FP8, to be decoded."""
    return declared == pointer(dtype) or (declared == "*u8" and dtype == torch.float8_e4m3fn)


def cdiv(count: Any, size: int) -> Any:
    """Blocks of `size` that hold `count`, a number or one of TensorRT's symbolic expressions."""
    return (count + (size - 1)) // size


@dataclass(frozen=True)
class CompiledKernel:
    """PTX whose parameters are the kernel's own, and what launching it takes."""

    name: str
    ptx: str
    parameters: tuple[str, ...]
    """PTX types in order: u64 for a pointer, u32 for an int32."""
    threads: int
    """In a block, all along x."""
    shared: int
    """Bytes of dynamic shared memory of a block."""
    registers: int
    """Of a thread."""
    spills: int
    """Bytes that a thread stores outside registers for want of them."""


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel in one configuration.

    TensorRT passes pointers to inputs, then int32 sizes, then pointers to outputs; the function takes its parameters in
    that order, and constants after them.
    """

    function: Any
    """Decorated by `triton.jit`."""
    parameters: Mapping[str, str]
    """In the function's order, the Triton type of each ("*bf16", "i32"). int32 parameters are sizes. What is declared
    "*u8" takes FP8 tensors too, for kernels that decode FP8 themselves."""
    constants: Mapping[str, Any]
    """The function's constexpr parameters."""
    grid: Callable[[Mapping[str, Any]], Grid]
    """The launch's thread blocks, from the sizes by name, by +, -, * and // with the size on the left."""
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Of a thread, where the compiler would take so many that too few threads fit beside each other."""

    def __post_init__(self) -> None:
        declared = [*self.parameters, *self.constants]
        if list(self.function.arg_names) != declared:
            raise ValueError(f"{self.name} takes {self.function.arg_names}, and {declared} are declared")

    @property
    def name(self) -> str:
        """As in PTX."""
        return str(self.function.fn.__name__)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of the int32 parameters."""
        return tuple(name for name, kind in self.parameters.items() if not kind.startswith("*"))

    @property
    def _options(self) -> dict[str, int | None]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}

    def launch(self, *arguments: Tensor | int) -> None:
        """Run on torch tensors: on CUDA as Triton compiles it, on a CPU in Triton's interpreter, which is slow.

        Args:
            arguments: one for each parameter: contiguous tensors of one device, and ints.

        Raises:
            UserError: a tensor has another type than declared, or gaps.
        """
        prepared = [self._prepare(name, argument) for name, argument in zip(self.parameters, arguments, strict=True)]
        sizes = {name: value for name, value in zip(self.parameters, prepared, strict=True) if name in self.sizes}
        grid = self.grid(sizes)
        if 0 in grid:
            return
        device = next(argument.device for argument in prepared if isinstance(argument, Tensor))
        if device.type == "cpu":
            interpret(self.function, grid, prepared, self.constants)
            return
        with torch.cuda.device(device):
            self.function[grid](*prepared, **self.constants, **self._options)

    def compile(self, compute_capability: int) -> CompiledKernel:
        """Compile ahead of time; no GPU is needed.

        Raises:
            UserError: kernels are not compiled for that compute capability, or it has too little shared memory.
        """
        if compute_capability not in SHARED_MEMORY:
            known = ", ".join(f"sm{each}" for each in SHARED_MEMORY)
            raise UserError(f"{self.name}: no kernels for compute capability sm{compute_capability}; there are {known}")
        source = ASTSource(
            self.function,
            signature={**self.parameters, **dict.fromkeys(self.constants, "constexpr")},
            constexprs=dict(self.constants),
            # TensorRT's tensors begin at multiples of 256 bytes.
            attrs={
                (i,): [["tt.divisibility", 16]] for i, kind in enumerate(self.parameters.values()) if kind[0] == "*"
            },
        )
        options = {**self._options, "ptx_version": _PTX_VERSION[compute_capability]}
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.disable_line_info = True  # it names the files of this machine
            compiled = triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)
        shared, most = compiled.metadata.shared, SHARED_MEMORY[compute_capability] * 1024
        if shared > most:
            raise UserError(
                f"{self.name} takes {shared} bytes of shared memory, sm{compute_capability} has {most}; it takes less"
                " in 16 bits, with smaller heads or fewer rows"
            )
        ptx = _without_scratch(compiled.asm["ptx"], len(self.parameters))
        registers, spills = _assemble(ptx, compute_capability)
        return CompiledKernel(
            name=compiled.metadata.name,
            ptx=ptx,
            parameters=parameter_types(ptx),
            threads=compiled.metadata.num_warps * 32,
            shared=shared,
            registers=registers,
            spills=spills,
        )

    def _prepare(self, name: str, argument: Tensor | int) -> Tensor | int:
        if isinstance(argument, int):
            return argument
        declared = self.parameters[name]
        if not takes(declared, argument.dtype) or not argument.is_contiguous():
            shape, strides = tuple(argument.shape), argument.stride()
            raise UserError(
                f"{self.name}: {name} is {argument.dtype} of shape {shape} and strides {strides},"
                f" it must be contiguous and {declared[1:]}"
            )
        return argument.view(torch.uint8) if declared == "*u8" else argument


def parameter_types(ptx: str) -> tuple[str, ...]:
    """The types of the parameters of a kernel, in order."""
    return tuple(re.findall(r"\.param \.(\w+)", _header(ptx)))


def _header(ptx: str) -> str:
    return ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]


def _without_scratch(ptx: str, count: int) -> str:
    """The PTX with its first `count` parameters; Triton adds pointers to scratch memory, which must not be read."""
    header = _header(ptx)
    body = ptx[ptx.index(header) + len(header) :]
    start, end = header.index("(") + 1, header.rindex(")")
    parameters = [line.strip().rstrip(",") for line in header[start:end].strip().splitlines()]
    for parameter in parameters[count:]:
        name = parameter.split()[-1]
        if re.search(rf"\b{re.escape(name)}\b", body):
            raise ValueError(f"the kernel reads {name}, scratch memory that TensorRT does not give it")
    kept = ",\n".join(f"\t{parameter}" for parameter in parameters[:count])
    return ptx.replace(header, f"{header[:start]}\n{kept}\n{header[end:]}")


@cache
def _assemble(ptx: str, compute_capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, from the assembler that comes with Triton."""
    tools = triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if compute_capability >= 100 else tools.ptxas
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler.path, "-v", f"--gpu-name={architecture[1]}", source, "-o", source.with_suffix(".cubin")]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None and spills is not None, log
    return int(registers[1]), int(spills[1])
