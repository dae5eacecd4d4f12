"""Kernels for CPUs: LLVM IR written vector by vector, compiled for the processor at hand, run on torch's threads.

The IR says which numbers are added to which, and LLVM may not reorder them, so a kernel's sums have one order on a
machine whatever the shape of a pass. Compiling one takes a fraction of a second, once on a machine.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import torch
from llvmlite import ir

from dflash_trt.ops.cpu.code_cache import code_file, read_code, write_code

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()

Value = Any
"""A value of `llvmlite.ir`, which has no types that mypy knows."""


class Emitter:
    """A kernel while its IR is written. It takes one argument, an array of integers, and runs on several threads.

    The first two integers are shared counters, which start at zero: the next unit of work, and the threads so far.
    """

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
        entry = self.function.append_basic_block("entry")
        self._variables = ir.IRBuilder(entry)
        self.b = ir.IRBuilder(self.function.append_basic_block("body"))
        self._body = self.b.block

    def finish(self) -> str:
        """The IR as text."""
        self.b.ret_void()
        self._variables.branch(self._body)
        return str(self.module)

    def argument(self, index: int) -> Value:
        """The integer at `index` of the arguments."""
        return self.b.load(self._argument(index), typ=I64)

    def pointer(self, index: int) -> Value:
        """The same, an address."""
        return self.b.inttoptr(self.argument(index), POINTER)

    def count(self, index: int, step: Value) -> Value:
        """The value of a shared counter before `step` is added to it."""
        return self.b.atomic_rmw("add", self._argument(index), step, "monotonic")

    def variable(self, value: Value) -> Value:
        """Where a value is kept that changes; LLVM keeps it in a register."""
        place = self._variables.alloca(value.type)
        self.b.store(value, place)
        return place

    def i64(self, value: int) -> Value:
        """A 64-bit constant."""
        return I64(value)

    @contextmanager
    def loop(self, start: Value, end: Value, step: Value) -> Iterator[Value]:
        """While the index that is yielded, from `start` on in steps, is less than `end`."""
        place = self.variable(start)
        head, body, after = (self.function.append_basic_block(part) for part in ("head", "body", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.load(place)
        self.b.cbranch(self.b.icmp_signed("<", index, end), body, after)
        self.b.position_at_end(body)
        yield index
        self.b.store(self.b.add(index, step), place)
        self.b.branch(head)
        self.b.position_at_end(after)

    @contextmanager
    def units(self, size: Value, end: Value) -> Iterator[tuple[Value, Value]]:
        """Parts of 0..end - 1, `size` long but for the last one, each run by the thread that is free for it first."""
        place = self.variable(self.count(0, size))
        head, body, after = (self.function.append_basic_block(part) for part in ("head", "unit", "after"))
        self.b.branch(head)
        self.b.position_at_end(head)
        first = self.b.load(place)
        self.b.cbranch(self.b.icmp_signed("<", first, end), body, after)
        self.b.position_at_end(body)
        yield first, self.smaller(self.b.add(first, size), end)
        self.b.store(self.count(0, size), place)
        self.b.branch(head)
        self.b.position_at_end(after)

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller of two integers."""
        return self.b.select(self.b.icmp_signed("<", a, b), a, b)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger of two integers."""
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def at(self, base: Value, index: Value, size: int = 1) -> Value:
        """The address of element `index` of elements of `size` bytes."""
        offset = index if size == 1 else self.b.mul(index, self.i64(size))
        return self.b.gep(base, [offset], source_etype=I8)

    def load(self, address: Value, type_: Value) -> Value:
        """A value that may lie anywhere."""
        return self.b.load(address, typ=type_, align=1)

    def store(self, value: Value, address: Value) -> None:
        """Write a value that may lie anywhere."""
        self.b.store(value, address, align=1)

    def call(self, name: str, *operands: Value, returns: Value | None = None) -> Value:
        """An intrinsic of LLVM by its whole name; `returns` the type of its first operand unless it is given."""
        declared = self.module.globals.get(name)
        if declared is None:
            types = [operand.type for operand in operands]
            declared = ir.Function(self.module, ir.FunctionType(returns or types[0], types), name)
        return self.b.call(declared, operands)

    def _argument(self, index: int) -> Value:
        return self.b.gep(self.function.args[0], [self.i64(index)], source_etype=I64)


Kernel = Callable[..., None]
"""Runs a kernel on at most so many threads: threads, then its arguments after the counters."""


def compiled(write: Callable[[Emitter], None], name: str) -> Kernel:
    """The kernel that `write` writes."""
    emitter = Emitter(name)
    write(emitter)
    engine = _engine(emitter.finish())
    address = engine.get_function_address(name)
    alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)
    parallel = _openmp_parallel()

    def run(threads: int, *arguments: int) -> None:
        # The kernel counts in it, and nothing else knows of it. A ctypes array takes five times as long to make.
        block = struct.pack(f"{2 + len(arguments)}q", 0, 0, *arguments)
        if threads == 1 or parallel is None:
            alone(block)
        else:
            parallel(address, block, threads, 0)

    run.engine = engine  # type: ignore[attr-defined]  # which owns the code
    return run


def _engine(text: str) -> Any:
    """Machine code of some IR, from the user's cache where it is there."""
    machine = _machine()
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    version = f"llvmlite {llvmlite.__version__}, LLVM {llvm.llvm_version_info}"
    file = code_file(text, version, machine.triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    known = read_code(file)
    if known is None:
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.set_object_cache(lambda _, code: write_code(file, code), lambda _: known)
    engine.finalize_object()
    return engine


def _machine() -> Any:
    """The processor at hand. One for each kernel, which comes to own it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2, jit=True)


@cache
def _openmp_parallel() -> Any:
    """`GOMP_parallel` of the OpenMP that torch runs on, GNU's or LLVM's: one pool of threads for both."""
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel
