"""Layers that compute, against plain torch."""

from __future__ import annotations

import math

import pytest
import tensorrt_rtx as trt
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.closeness import close
from tests.network_bench import Bench
from tests.network_formats import NetworkFault

A = torch.tensor([[1.5, -2.0, 0.25], [3.0, 4.0, -0.5]])
B = torch.tensor([[2.0, -2.0, 3.0]])
WIDE = A.double()
"""Results are expected as float64 has them: float32's differ from one vector unit to another."""
ELEMENTWISE = {
    "SUM": A + B,
    "PROD": A * B,
    "MAX": A.maximum(B),
    "MIN": A.minimum(B),
    "SUB": A - B,
    "DIV": A / B,
    "FLOOR_DIV": (A / B).floor(),
    "EQUAL": A == B,
    "GREATER": A > B,
    "LESS": A < B,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    bench = Bench()
    operation = trt.ElementWiseOperation.__members__[name]
    value = bench.value(bench.network.add_elementwise(bench.input(A, (-1, 3)), bench.input(B), operation))
    assert value.dtype == ELEMENTWISE[name].dtype
    assert value.equal(ELEMENTWISE[name])


def test_elementwise_of_integers_powers_and_booleans() -> None:
    bench = Bench()
    network, op = bench.network, trt.ElementWiseOperation
    a, b = (bench.input(torch.tensor(numbers, dtype=torch.int32)) for numbers in ([7, -7, 7], [2, 2, -2]))
    yes, no = bench.input(torch.tensor([True, True, False])), bench.input(torch.tensor([True, False, False]))
    x = bench.input(torch.tensor([2.0, 9.0]))
    results = bench.run(
        *(network.add_elementwise(a, b, each) for each in (op.DIV, op.FLOOR_DIV, op.SUB)),
        *(network.add_elementwise(yes, no, each) for each in (op.AND, op.OR, op.XOR)),
        network.add_elementwise(x, bench.constant([3, 0.5], trt.float32), op.POW),
    )
    assert [result.tolist() for result in results] == [
        *([3, -3, -3], [3, -4, -4], [5, -9, 9]),
        *([True, False, False], [True, True, False], [False, True, False]),
        [8.0, 3.0],
    ]
    assert results[0].dtype == torch.int32


def test_elementwise_rounds_to_the_type_after_every_layer() -> None:
    bench = Bench()
    one, small = torch.ones(1).bfloat16(), torch.full((1,), 2.0**-9).bfloat16()
    x, y = bench.input(one), bench.input(small)
    first = bench.network.add_elementwise(x, y, trt.ElementWiseOperation.SUM).get_output(0)
    assert bench.value(bench.network.add_elementwise(first, x, trt.ElementWiseOperation.SUB)).item() == 0


UNARY = {
    "EXP": WIDE.exp(),
    "SQRT": WIDE.sqrt(),
    "RECIP": 1 / WIDE,
    "ABS": WIDE.abs(),
    "NEG": -WIDE,
    "SIN": WIDE.sin(),
    "COS": WIDE.cos(),
}
UNARY |= {
    "ERF": WIDE.erf(),
    "FLOOR": WIDE.floor(),
    "CEIL": WIDE.ceil(),
    "ROUND": WIDE.round(),
    "SIGN": WIDE.sign(),
    "LOG": WIDE.log(),
}
UNARY |= {"TAN": WIDE.tan(), "ATAN": WIDE.atan(), "ASINH": WIDE.asinh(), "ISNAN": WIDE.isnan(), "ISINF": WIDE.isinf()}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    bench = Bench()
    value = bench.value(bench.network.add_unary(bench.input(A), trt.UnaryOperation.__members__[name]))
    assert close(value.nan_to_num(7), UNARY[name].nan_to_num(7))


def test_not() -> None:
    bench = Bench()
    assert bench.value(bench.network.add_unary(bench.input(A > 0), trt.UnaryOperation.NOT)).equal(A <= 0)


ACTIVATIONS = {
    "RELU": F.relu(WIDE),
    "SIGMOID": WIDE.sigmoid(),
    "TANH": WIDE.tanh(),
    "LEAKY_RELU": F.leaky_relu(WIDE, 0.3),
    "ELU": F.elu(WIDE, 0.3),
    "SELU": 1.2 * F.elu(WIDE, 0.3),
    "SOFTSIGN": F.softsign(WIDE),
    "SOFTPLUS": 0.3 * (1 + (1.2 * WIDE).exp()).log(),
    "CLIP": WIDE.clamp(0.3, 1.2),
    "HARD_SIGMOID": (0.3 * WIDE + 1.2).clamp(0, 1),
    "SCALED_TANH": 0.3 * (1.2 * WIDE).tanh(),
    "THRESHOLDED_RELU": F.threshold(WIDE, 0.3, 0.0),
    "GELU_ERF": F.gelu(WIDE),
    "GELU_TANH": F.gelu(WIDE, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    bench = Bench()
    layer = bench.network.add_activation(bench.input(A), trt.ActivationType.__members__[name])
    layer.alpha, layer.beta = 0.3, 1.2
    assert close(bench.value(layer), ACTIVATIONS[name])


X = torch.linspace(-2, 3, 24).reshape(2, 3, 4)
REDUCE = {
    "SUM": X.double().sum((0, 2)),
    "PROD": X.double().prod(0).prod(1),
    "MAX": X.double().amax((0, 2)),
    "MIN": X.double().amin((0, 2)),
    "AVG": X.double().mean((0, 2)),
}


@pytest.mark.parametrize("name", REDUCE)
def test_reduce(name: str) -> None:
    bench = Bench()
    x, operation = bench.input(X), trt.ReduceOperation.__members__[name]
    flat, kept = bench.run(*(bench.network.add_reduce(x, operation, 0b101, keep) for keep in (False, True)))
    assert close(flat, REDUCE[name])
    assert close(kept, REDUCE[name][None, :, None])


def test_reduce_of_integers() -> None:
    bench = Bench()
    value = bench.value(
        bench.network.add_reduce(bench.input(torch.tensor([[3, 4]])), trt.ReduceOperation.SUM, 2, False)
    )
    assert value.tolist() == [7] and value.dtype == torch.int64


def test_softmax_and_cumulative() -> None:
    bench = Bench()
    x = bench.input(X)
    softmax = bench.network.add_softmax(x)
    softmax.axes = 0b010
    sums = [
        bench.network.add_cumulative(x, bench.constant(2), trt.CumulativeOperation.SUM, exclusive, reverse)
        for exclusive in (False, True)
        for reverse in (False, True)
    ]
    first, forward, backward, before, after = bench.run(softmax, *sums)
    assert close(first, X.double().softmax(1))
    assert close(forward, X.double().cumsum(2))
    assert close(backward, X.double().flip(2).cumsum(2).flip(2))
    assert close(before, X.double().cumsum(2) - X.double())
    assert close(after, X.double().flip(2).cumsum(2).flip(2) - X.double())


def test_top_k_of_a_constant_and_of_a_computed_number() -> None:
    bench = Bench()
    x = bench.input(torch.tensor([[3.0, 9.0, 9.0, -1.0]]).bfloat16())
    most = bench.network.add_topk(x, trt.TopKOperation.MAX, 3, 0b10)
    least = bench.network.add_topk(x, trt.TopKOperation.MIN, 1, 0b10)
    least.set_input(1, bench.input(torch.tensor(2, dtype=torch.int32)))
    values, indices, low, lowest = bench.run(most, most.get_output(1), least, least.get_output(1))
    assert values.tolist() == [[9, 9, 3]] and values.dtype == torch.bfloat16
    assert indices.tolist() == [[1, 2, 0]] and indices.dtype == torch.int32
    assert (low.tolist(), lowest.tolist()) == ([[-1, 3]], [[3, 0]])


def test_fill() -> None:
    bench = Bench()
    line = bench.network.add_fill((4,), trt.FillOperation.LINSPACE, trt.float32)
    line.alpha, line.beta = 0.5, 2.0
    grid = bench.network.add_fill((1, 1), trt.FillOperation.LINSPACE, trt.int32)
    grid.set_input(0, bench.input(torch.tensor([2, 3], dtype=torch.int32), (2,)))
    grid.set_input(1, bench.constant(10))
    grid.set_input(2, bench.constant([100, 1]))
    first, second = bench.run(line, grid)
    assert first.tolist() == [0.5, 2.5, 4.5, 6.5]
    assert second.tolist() == [[10, 11, 12], [110, 111, 112]] and second.dtype == torch.int32


def test_random_numbers_are_refused() -> None:
    bench = Bench()
    with pytest.raises(NetworkFault, match=r"\(FILL\): RANDOM_UNIFORM has no one answer"):
        bench.value(bench.network.add_fill((2,), trt.FillOperation.RANDOM_UNIFORM, trt.float32))


NONE, TRANSPOSE, VECTOR = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE, trt.MatrixOperation.VECTOR


@given(st.booleans(), st.booleans(), st.sampled_from([(1, 1), (1, 3), (3, 1), (3, 3)]), st.integers(0, 2**31))
def test_matrix_multiply(left: bool, right: bool, batches: tuple[int, int], seed: int) -> None:
    a, b = torch.randn(batches[0], 2, 5, generator=torch.manual_seed(seed)), torch.randn(batches[1], 5, 4)
    bench = Bench()
    x, y = bench.input(a.mT.contiguous() if left else a), bench.input(b.mT.contiguous() if right else b)
    layer = bench.network.add_matrix_multiply(x, TRANSPOSE if left else NONE, y, TRANSPOSE if right else NONE)
    assert close(bench.value(layer), a.double() @ b.double())


def test_matrix_multiply_of_vectors_and_einsum() -> None:
    bench = Bench()
    network, a, v, w = bench.network, bench.input(A), bench.input(torch.ones(3)), bench.input(torch.ones(2))
    results = bench.run(
        network.add_matrix_multiply(a, NONE, v, VECTOR),
        network.add_matrix_multiply(w, VECTOR, a, NONE),
        network.add_matrix_multiply(v, VECTOR, v, VECTOR),
        network.add_einsum([a, bench.input(X[:, :, 0])], "ik,jk->ji"),
    )
    expected = [WIDE.sum(1), WIDE.sum(0), torch.tensor(3.0), X[:, :, 0].double() @ WIDE.T]
    assert all(close(result, each) for result, each in zip(results, expected, strict=True))


def test_matrix_multiply_is_rounded_once() -> None:
    bench = Bench()
    row = torch.tensor([[256.0, 1.0, 1.0, 1.0]]).bfloat16()
    layer = bench.network.add_matrix_multiply(bench.input(row), NONE, bench.input(torch.ones(4, 1).bfloat16()), NONE)
    assert bench.value(layer).item() == 260


def test_normalization() -> None:
    bench = Bench()
    weight, bias = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[0.5, 0, 0, 1]])
    x = bench.input(X[0])
    layer = bench.network.add_normalization_v2(x, bench.input(weight), bench.input(bias), 0b10)
    layer.epsilon = 1e-3
    assert close(bench.value(layer), F.layer_norm(X[0].double(), (4,), weight[0].double(), bias[0].double(), 1e-3))


@pytest.mark.parametrize("mode, size", [(trt.ScaleMode.UNIFORM, ()), (trt.ScaleMode.CHANNEL, (3, 1, 1))])
def test_scale(mode: trt.ScaleMode, size: tuple[int, ...]) -> None:
    bench = Bench()
    x = X.abs()[:, :, :, None]
    factor, shift = (torch.arange(math.prod(size)).reshape(size) + start for start in (2.0, 0.5))
    layer = bench.network.add_scale(bench.input(x), mode, shift.numpy(), factor.numpy(), trt.Weights())
    assert close(bench.value(layer), x.double() * factor + shift)
