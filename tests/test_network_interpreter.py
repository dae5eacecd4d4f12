"""The interpreter itself: what it evaluates, when, of how many ranks, and what it refuses. Layers: test_network_*.py."""

from __future__ import annotations

import pytest
import tensorrt_rtx as trt
import torch
from torch import Tensor

from tests.network_bench import Bench
from tests.network_formats import NetworkFault
from tests.network_interpreter import LAYERS, Evaluate, NetworkInterpreter

SUM = trt.ElementWiseOperation.SUM
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def doubled(bench: Bench, x: trt.ITensor) -> trt.ITensor:
    return bench.network.add_elementwise(x, x, SUM).get_output(0)


def test_a_chain_deeper_than_pythons_stack() -> None:
    bench = Bench()
    x = bench.input(X)
    one = bench.constant([[1.0]], trt.float32)
    for _ in range(3000):
        x = bench.network.add_elementwise(x, one, SUM).get_output(0)
    assert bench.value(x).equal(X + 3000)


def test_only_what_is_asked_for_is_evaluated_and_that_once() -> None:
    bench, calls = Bench(), []

    def counted(evaluate: Evaluate) -> Tensor:
        calls.append("counted")
        return X

    x = bench.input(X)
    bench.given["x0"] = counted
    missing = bench.network.add_input("missing", trt.float32, (2, 3))
    bench.mark(doubled(bench, x))
    bench.mark(bench.network.add_elementwise(bench.network.get_output(0), x, SUM))
    bench.mark(doubled(bench, missing))
    interpreter = NetworkInterpreter([bench.network])
    assert interpreter.run([bench.given], ["y1", "y0"])[0]["y1"].equal(3 * X)
    assert calls == ["counted"]
    with pytest.raises(NetworkFault, match="input missing of rank 0: no value was given"):
        interpreter.run([bench.given])


def test_an_input_may_be_computed_from_other_tensors_of_its_rank() -> None:
    bench = Bench()
    twice = doubled(bench, bench.input(X))
    plugin_output = bench.network.add_input("plugin", trt.float32, (2, 3))
    bench.given["plugin"] = lambda evaluate: evaluate(twice).flip(1)
    assert bench.value(doubled(bench, plugin_output)).equal(4 * X.flip(1))


def test_an_input_that_needs_itself_is_refused() -> None:
    bench = Bench()
    x = bench.input(X)
    twice = doubled(bench, x)
    bench.given["x0"] = lambda evaluate: evaluate(twice)
    with pytest.raises(NetworkFault, match="needs its own result"):
        bench.value(twice)


def collective(
    bench: Bench, x: trt.ITensor, operation: str, reduction: str = "NONE", ranks: int = 2
) -> trt.IDistCollectiveLayer:
    layer = bench.network.add_dist_collective(
        x, trt.CollectiveOperation.__members__[operation], trt.ReduceOperation.__members__[reduction], -1, []
    )
    layer.num_ranks = ranks
    return layer


def ranks_with(operation: str, reduction: str, values: list[Tensor]) -> list[Bench]:
    benches = [Bench() for _ in values]
    for bench, value in zip(benches, values, strict=True):
        layer = collective(bench, bench.input(value, (-1, 3)), operation, reduction, len(values))
        bench.mark(doubled(bench, layer.get_output(0)))
    return benches


def run_together(benches: list[Bench]) -> list[Tensor]:
    results = NetworkInterpreter([bench.network for bench in benches]).run([bench.given for bench in benches])
    return [result["y0"] for result in results]


@pytest.mark.parametrize(
    "reduction, expected",
    [("SUM", [23, 12]), ("MAX", [20, 9]), ("MIN", [1, 1]), ("PROD", [40, 18]), ("AVG", [23 / 3, 4])],
)
def test_all_reduce(reduction: str, expected: list[float]) -> None:
    values = [torch.tensor([[1.0, 2, 0]]), torch.tensor([[2.0, 1, 0]]), torch.tensor([[20.0, 9, 0]])]
    for result in run_together(ranks_with("ALL_REDUCE", reduction, values)):
        assert torch.allclose(result[0, :2], 2 * torch.tensor(expected, dtype=torch.float32))


def test_all_reduce_rounds_once_to_the_type() -> None:
    values = [torch.tensor([[256.0, 1, 1]]), torch.tensor([[1.0, 1, 1]]), torch.tensor([[1.0, 1, 1]])]
    for result in run_together(ranks_with("ALL_REDUCE", "SUM", [value.bfloat16() for value in values])):
        assert result.equal(torch.tensor([[516.0, 6, 6]]).bfloat16())


def test_all_reduce_does_not_depend_on_the_order_of_ranks() -> None:
    values = [torch.tensor([[1e8, 1, -1e8]])[:, list(order)] for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1))]
    for result in run_together(ranks_with("ALL_REDUCE", "SUM", values)):
        assert result.equal(torch.full((1, 3), 2.0))


def test_all_gather_is_along_the_first_dimension_in_the_order_of_ranks() -> None:
    for result in run_together(ranks_with("ALL_GATHER", "NONE", [X, -X])):
        assert result.equal(2 * torch.cat((X, -X)))


def test_collectives_in_a_row_meet_in_order() -> None:
    benches = [Bench(), Bench()]
    for bench, value in zip(benches, (X, 10 * X), strict=True):
        first = collective(bench, bench.input(value), "ALL_REDUCE", "SUM").get_output(0)
        own = bench.network.add_elementwise(first, bench.network.get_input(0), SUM).get_output(0)
        bench.mark(collective(bench, own, "ALL_REDUCE", "MAX"))
    assert all(result.equal(21 * X) for result in run_together(benches))


def test_ranks_that_would_not_meet_are_refused() -> None:
    alone, together = ranks_with("ALL_REDUCE", "SUM", [X, X])[0], Bench()
    together.mark(doubled(together, together.input(X)))
    with pytest.raises(NetworkFault, match=r"\[1, 0\] collectives"):
        NetworkInterpreter([alone.network, together.network])
    with pytest.raises(NetworkFault, match="num_ranks is 2, but 1 ranks"):
        run_together([alone])
    other = ranks_with("ALL_REDUCE", "MAX", [X, X])[0]
    with pytest.raises(NetworkFault, match="different things"):
        run_together([alone, other])
    with pytest.raises(NetworkFault, match="no meaning is known for REDUCE_SCATTER SUM"):
        run_together(ranks_with("REDUCE_SCATTER", "SUM", [X, X]))


def test_wrong_inputs_are_refused() -> None:
    bench = Bench()
    bench.mark(doubled(bench, bench.input(X, (-1, 3))))
    interpreter = NetworkInterpreter([bench.network])
    assert interpreter.run([{"x0": X[:1]}])[0]["y0"].equal(2 * X[:1])
    for value, complaint in (
        (X.half(), "input x0 of rank 0: is torch.float16, but TensorRT says FLOAT"),
        (X.T, r"is of shape \[3, 2\], but TensorRT says \[-1, 3\]"),
        (X[0], r"is of shape \[3\], but"),
    ):
        with pytest.raises(NetworkFault, match=complaint):
            interpreter.run([{"x0": value}])
    with pytest.raises(NetworkFault, match=r"no input is named \['x9'\]"):
        interpreter.run([{"x0": X, "x9": X}])
    with pytest.raises(NetworkFault, match=r"no output is named \['logits'\]"):
        interpreter.run([{"x0": X}], ["logits"])
    with pytest.raises(NetworkFault, match="2 mappings of inputs for 1 ranks"):
        interpreter.run([{"x0": X}, {"x0": X}])


def test_what_a_layer_gives_is_held_to_what_tensorrt_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.mark(doubled(bench, bench.input(X)))
    for wrong, complaint in (
        (lambda layer, a, b: a.half(), r"\(ELEMENTWISE\): is torch.float16, but TensorRT says FLOAT"),
        (lambda layer, a, b: a.double().T, r"\(ELEMENTWISE\): is of shape \[3, 2\], but TensorRT says \[2, 3\]"),
        (lambda layer, a, b: [a, b], "2 results for 1 outputs"),
    ):
        monkeypatch.setitem(LAYERS, trt.LayerType.ELEMENTWISE, wrong)
        with pytest.raises(NetworkFault, match=complaint):
            run_together([bench])


def test_a_dynamic_mismatch_names_the_layer() -> None:
    bench = Bench()
    a, b = bench.input(X, (-1, 3)), bench.input(torch.cat((X, X)), (-1, 3))
    layer = bench.network.add_elementwise(a, b, SUM)
    layer.name = "residual of layer 7"
    with pytest.raises(NetworkFault, match=r"layer residual of layer 7 \(ELEMENTWISE\): .*\[2, 3\].*\[4, 3\]"):
        bench.value(layer)


def test_an_unknown_layer_is_refused_by_name() -> None:
    bench = Bench()
    layer = bench.network.add_pooling_nd(bench.input(torch.zeros(1, 1, 4, 4)), trt.PoolingType.MAX, (2, 2))
    layer.name = "pool"
    with pytest.raises(NetworkFault, match=r"layer pool \(POOLING\): no meaning is known"):
        bench.value(layer)


def test_a_layer_that_tensorrt_refuses_is_named() -> None:
    bench = Bench()
    layer = bench.network.add_unary(bench.input(X), trt.UnaryOperation.NOT)
    layer.name = "negation"
    with pytest.raises(NetworkFault, match=r"layer negation \(UNARY\)"):
        bench.value(layer)
