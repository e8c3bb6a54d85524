"""Parts of the outputs: which elements of a result come from which value."""

from __future__ import annotations

import numpy as np
import pytest
from float_models import build_model
from tvm import relax, tirx
from tvm.relax import op

import relayquant as rq
from relayquant.ir.rewrite import Graph
from relayquant.stages.calibration.output_parts import find_common_parts, find_parts


def build_detector(emit, x):
    """Two scales of places (2 numbers) and scores (1), as a detector joins them, and the input."""
    scales = []
    for i, cells in enumerate((4, 2)):
        places = emit(
            f"places{i}", op.multiply(emit.dense(f"a{i}", x, 2 * cells), relax.const(9.0))
        )
        scores = emit(f"scores{i}", op.sigmoid(emit.dense(f"b{i}", x, cells)))
        maps = [op.reshape(places, (-1, 2, cells, 1)), op.reshape(scores, (-1, 1, cells, 1))]
        joined = emit(f"scale{i}", op.concat([emit(f"m{i}{k}", m) for k, m in enumerate(maps)], 1))
        scales.append(emit(f"flat{i}", op.squeeze(joined, 3)))
    rows = emit("rows", op.permute_dims(emit("all", op.concat(scales, 2)), (0, 2, 1)))
    return relax.Tuple([rows, emit("twice", op.add(x, x))])


@pytest.mark.parametrize("batch", [1, 3, "n"])
def test_find_parts__of_a_detector_are_what_the_operators_put_there(batch):
    mod = build_model(build_detector, (batch, 5))
    data = {"x": np.random.default_rng(1).normal(size=(3 if batch == "n" else batch, 5))}
    data = {"x": data["x"].astype("float32")}
    values, results = rq.reference.run_values(mod, data), rq.reference.run(mod, data)
    parts = find_parts(Graph(mod), data)
    names = [part.value.name for part in parts]
    assert names == ["places0", "scores0", "places1", "scores1", "twice"]
    for part, name in zip(parts, names, strict=True):
        # A transpose mixes the order within a part, so both are sorted.
        found, expected = part.take(results), values[name]
        np.testing.assert_array_equal(
            np.sort(found, axis=1), np.sort(expected.reshape(found.shape), axis=1)
        )


@pytest.mark.parametrize(
    "join",
    [
        lambda x, y: op.concat([x, y], 0),  # samples are joined
        lambda x, y: op.reshape(op.concat([x, y], 1), (4, 5)),  # a row is not a sample
        lambda x, y: op.negative(op.concat([x, y], 1)),  # something is computed of both
    ],
)
def test_find_parts__is_the_whole_result_where_a_part_has_no_place_in_each_sample(join):
    def body(emit, x):
        first, second = emit.dense("first", x, 5), emit.dense("second", x, 5)
        return relax.Tuple([emit("joined", join(first, second))])

    (part,) = find_parts(Graph(build_model(body, (2, 4))), {"x": np.zeros((2, 4), "float32")})
    whole = np.zeros((4, 5))
    assert part.take([whole]) is whole


def test_find_parts__is_the_whole_result_where_a_part_is_a_constant():
    def body(emit, x):
        head = relax.const(np.ones((2, 3), "float32"))
        parts = [emit.dense("first", x, 5), emit.dense("second", x, 5), head]
        return relax.Tuple([emit("joined", op.concat(parts, 1))])

    (part,) = find_parts(Graph(build_model(body, (2, 4))), {"x": np.zeros((2, 4), "float32")})
    assert part.elements is None


def test_find_parts__is_the_whole_result_where_a_size_is_known_when_main_runs():
    """The number of elements that are not 0 is the size of one part."""

    def body(emit, x):
        count = tirx.Var("count", "int64")
        found = emit("found", op.nonzero(x))
        known = emit.builder.match_cast(found, relax.TensorType((2, count), "int64"))
        parts = [emit("first", op.negative(known)), emit("second", op.abs(known))]
        return relax.Tuple([emit("joined", op.concat(parts, 1))])

    (part,) = find_parts(Graph(build_model(body, (2, 4))), {"x": np.zeros((2, 4), "float32")})
    assert part.elements is None


def test_find_common_parts__of_one_sample_are_those_of_many():
    """A row of one sample holds both values, and one of two samples only one of them."""

    def body(emit, x):
        joined = op.concat([emit.dense("first", x, 2), emit.dense("second", x, 2)], 1)
        columns = emit("columns", op.permute_dims(emit("joined", joined)))
        return relax.Tuple([emit("mixed", op.reshape(columns, (-1, 4))), emit("other", joined)])

    view = Graph(build_model(body, ("n", 4)))
    batches = [{"x": np.zeros((count, 4), "float32")} for count in (2, 1, 3)]
    counts = [len(find_parts(view, batch)) for batch in batches]
    assert counts == [3, 4, 3]
    for parts in find_common_parts(view, batches):
        assert [part.value.name for part in parts] == ["mixed", "first", "second"]


def test_find_parts__is_the_whole_result_where_no_type_says_the_sizes():
    x = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            first, second = builder.emit(op.tanh(x)), builder.emit(op.exp(x))
            both = builder.emit_output(op.concat([first, second], 1))
        builder.emit_func_output(both)
    (part,) = find_parts(Graph(builder.finalize()), {"x": np.zeros((2, 4), "float32")})
    assert part.elements is None
