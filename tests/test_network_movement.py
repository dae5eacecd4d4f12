"""Layers that move numbers, against torch."""

from __future__ import annotations

import pytest
import tensorrt_rtx as trt
import torch

from tests.network_bench import Bench
from tests.network_formats import NetworkFault

X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


def test_identity_and_cast() -> None:
    bench = Bench()
    x = bench.input(torch.tensor([-1.7, 0.0, 300.5]))
    network = bench.network
    same, half, whole, boolean, back = bench.run(
        network.add_identity(x),
        network.add_cast(x, trt.bfloat16),
        network.add_cast(x, trt.int32),
        network.add_cast(x, trt.bool),
        network.add_cast(bench.constant([1, -2], trt.int64), trt.float16),
    )
    assert same.equal(bench.given["x0"])
    assert half.equal(bench.given["x0"].bfloat16())
    assert whole.tolist() == [-1, 0, 300] and whole.dtype == torch.int32
    assert boolean.tolist() == [True, False, True]
    assert back.equal(torch.tensor([1, -2]).half())


def test_shuffle_transposes_reshapes_and_transposes() -> None:
    bench = Bench()
    layer = bench.network.add_shuffle(bench.input(X, (-1, 3, -1)))
    layer.first_transpose = (0, 2, 1)
    layer.reshape_dims = (0, 2, -1)
    layer.second_transpose = (2, 0, 1)
    assert bench.value(layer).equal(X.transpose(1, 2).reshape(2, 2, 6).permute(2, 0, 1))


def test_shuffle_to_a_shape_that_is_computed() -> None:
    bench = Bench()
    x = bench.input(X, (-1, -1, 4))
    layer = bench.network.add_shuffle(x)
    dims = bench.network.add_gather(bench.network.add_shape(x).get_output(0), bench.constant([0, 2, 1]), 0)
    layer.set_input(1, dims.get_output(0))
    assert bench.value(layer).equal(X.reshape(2, 4, 3))


def test_shuffle_where_zero_is_a_size() -> None:
    bench = Bench()
    layer = bench.network.add_shuffle(bench.input(torch.zeros(0, 3)))
    layer.zero_is_placeholder = False
    layer.reshape_dims = (5, 0)
    assert bench.value(layer).shape == (5, 0)


def test_shuffle_of_eight_bit_floats_and_to_a_scalar() -> None:
    bench = Bench()
    codes = X.to(torch.float8_e4m3fn)
    moved = bench.network.add_shuffle(bench.input(codes))
    moved.first_transpose = (2, 0, 1)
    scalar = bench.network.add_shuffle(bench.input(torch.tensor([7.0])))
    scalar.reshape_dims = ()
    first, second = bench.run(moved, scalar)
    assert first.view(torch.uint8).equal(codes.permute(2, 0, 1).contiguous().view(torch.uint8))
    assert second.equal(torch.tensor(7.0))


def test_shape_squeeze_and_unsqueeze() -> None:
    bench = Bench()
    x = bench.input(X[:1], (-1, 3, 4))
    shape, squeezed, unsqueezed = bench.run(
        bench.network.add_shape(x),
        bench.network.add_squeeze(bench.input(X[:1]), bench.constant([0])),
        bench.network.add_unsqueeze(x, bench.constant([-1, 1])),
    )
    assert shape.equal(torch.tensor([1, 3, 4]))
    assert squeezed.equal(X[0])
    assert unsqueezed.equal(X[:1, None, :, :, None])


def test_slice_with_strides() -> None:
    bench = Bench()
    layer = bench.network.add_slice(bench.input(X, (-1, 3, 4)), (1, 0, 3), (1, 2, 2), (1, 2, -2))
    assert bench.value(layer).equal(X[1:2, 0:3:2][..., [3, 1]])


def test_slice_of_computed_start_and_size_along_one_axis() -> None:
    bench = Bench()
    layer = bench.network.add_slice(bench.input(X, (-1, 3, 4)), (0,), (1,), (1,))
    layer.axes = (1,)
    layer.set_input(1, bench.input(torch.tensor([1], dtype=torch.int32)))
    layer.set_input(2, bench.input(torch.tensor([2], dtype=torch.int32)))
    assert bench.value(layer).equal(X[:, 1:3])


@pytest.mark.parametrize(
    "mode, expected",
    [
        (trt.SampleMode.WRAP, [2, 3, 0, 1, 2, 3, 0, 1]),
        (trt.SampleMode.CLAMP, [0, 0, 0, 1, 2, 3, 3, 3]),
        (trt.SampleMode.REFLECT, [2, 1, 0, 1, 2, 3, 2, 1]),
        (trt.SampleMode.FILL, [9, 9, 0, 1, 2, 3, 9, 9]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_slice_beyond_the_end(mode: trt.SampleMode, expected: list[int]) -> None:
    bench = Bench()
    layer = bench.network.add_slice(bench.input(torch.arange(4.0)), (-2,), (8,), (1,))
    layer.mode = mode
    if mode == trt.SampleMode.FILL:
        layer.set_input(4, bench.constant(9, trt.float32))
    assert bench.value(layer).tolist() == expected


def test_a_strict_slice_beyond_the_end_is_refused() -> None:
    bench = Bench()
    layer = bench.network.add_slice(bench.input(X, (-1, 3, 4)), (1, 0, 0), (2, 3, 4), (1, 1, 1))
    with pytest.raises(NetworkFault, match="indices from 1 to 2 into a dimension of 2"):
        bench.value(layer)


def test_concatenation() -> None:
    bench = Bench()
    layer = bench.network.add_concatenation([bench.input(X, (2, -1, 4)), bench.input(-X[:, :1], (2, -1, 4))])
    layer.axis = 1
    assert bench.value(layer).equal(torch.cat((X, -X[:, :1]), dim=1))


INDICES = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)


def test_gather_replaces_an_axis_by_the_indices_shape() -> None:
    bench = Bench()
    layer = bench.network.add_gather(bench.input(X), bench.input(INDICES, (-1, 2)), 1)
    assert bench.value(layer).equal(X[:, INDICES.long()])


def test_gather_sequence_by_sequence() -> None:
    bench = Bench()
    layer = bench.network.add_gather_v2(bench.input(X), bench.input(INDICES), trt.GatherMode.DEFAULT)
    layer.axis, layer.num_elementwise_dims = 1, 1
    assert bench.value(layer).equal(torch.stack([X[0][INDICES[0].long()], X[1][INDICES[1].long()]]))


def test_gather_by_element() -> None:
    bench = Bench()
    layer = bench.network.add_gather_v2(bench.input(X[0]), bench.input(INDICES), trt.GatherMode.ELEMENT)
    layer.axis = 1
    assert bench.value(layer).equal(X[0].gather(1, INDICES.long()))


def test_gather_by_points() -> None:
    bench = Bench()
    points = torch.tensor([[1, 2], [0, 1]], dtype=torch.int64)
    whole = bench.network.add_gather_v2(bench.input(X), bench.input(points), trt.GatherMode.ND)
    each = bench.network.add_gather_v2(bench.input(X), bench.input(points), trt.GatherMode.ND)
    each.num_elementwise_dims = 1
    first, second = bench.run(whole, each)
    assert first.equal(torch.stack([X[1, 2], X[0, 1]]))
    assert second.equal(torch.stack([X[0, 1, 2], X[1, 0, 1]]))


def test_gather_past_the_end_is_refused() -> None:
    bench = Bench()
    layer = bench.network.add_gather(bench.input(X), bench.input(INDICES + 2), 1)
    with pytest.raises(NetworkFault, match=r"\(GATHER\): indices from 2 to 4 into a dimension of 3"):
        bench.value(layer)


def test_scatter() -> None:
    bench = Bench()
    x = bench.input(X[0])
    points = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32)
    nd = bench.network.add_scatter(x, bench.input(points), bench.input(torch.tensor([-1.0, -2.0])), trt.ScatterMode.ND)
    updates = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    indices = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    element = bench.network.add_scatter(x, bench.input(indices), bench.input(updates), trt.ScatterMode.ELEMENT)
    element.axis = 1
    first, second = bench.run(nd, element)
    expected = X[0].clone()
    expected[2, 1], expected[0, 3] = -1, -2
    assert first.equal(expected)
    assert second.equal(X[0].scatter(1, indices.long(), updates))


def test_select_broadcasts() -> None:
    bench = Bench()
    condition = torch.tensor([True, False, True])[None, :, None]
    layer = bench.network.add_select(bench.input(condition), bench.input(X), bench.constant([[[5]]], trt.float32))
    assert bench.value(layer).equal(torch.where(condition, X, 5.0))


def test_one_hot_and_non_zero() -> None:
    bench = Bench()
    indices, values = bench.input(torch.tensor([2, 0], dtype=torch.int32)), bench.constant([-1, 5], trt.float32)
    hot, found = bench.run(
        bench.network.add_one_hot(indices, values, bench.constant(3), 0),
        bench.network.add_non_zero(bench.input(torch.tensor([[0.0, 3.0], [2.0, 0.0]]))),
    )
    assert hot.tolist() == [[-1, 5], [-1, -1], [5, -1]]
    assert found.tolist() == [[0, 1], [1, 0]]
