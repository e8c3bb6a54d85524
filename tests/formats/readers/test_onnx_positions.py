"""An axis or a constant index outside of the data is refused at import, of every operator that has
one, in each of its versions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_onnx
from test_onnx_versions import ROWS, compare, draw, ints, list_versions, make_model, row

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers.onnx.graph.file import MIN_OPSET
from relayquant.formats.readers.onnx.graph.positions import AXIS_NAMES, INDICES

#: Operator -> (least, largest) axis of data of some rank, with one axis.
LIMITS = {
    "Flatten": lambda rank: (-rank, rank),
    "OneHot": lambda rank: (-rank - 1, rank),
    "Unsqueeze": lambda rank: (-rank - 1, rank),
}

#: Operators of ONNX with axes that are not converted at all, or whose axes are no axes of a tensor.
OTHERS = {
    *("CumProd", "DFT", "Scan", "SplitToSequence", "TensorScatter", "Unique"),
    *("ConcatFromSequence", "DequantizeLinear", "QuantizeLinear", "Scatter"),
    *("Tile", "Upsample"),
}

MORE = [
    row("CenterCropPad", {"input_data": draw(3, 4)}, shape=[ints(2)], axes=[[0]]),
    row("Pad", {"data": draw(3, 4)}, pads=[ints(1, 1)], constant_value=[None], axes=[ints(0)]),
    row("Resize", {"X": draw(1, 1, 4, 4)}, scales=[np.array([2.0], "float32")], axes=[[2]]),
]  # fmt: skip


def find_axis_names(op: str, opset: int) -> list[str]:
    """Attributes and inputs that hold axes in a version of an operator."""
    schema = onnx.defs.get_schema(op, opset)
    names = [*schema.attributes, *(one.name for one in schema.inputs)]
    return [name for name in AXIS_NAMES if name in names]


AXIS_CASES = [
    pytest.param(each, opset, name, id=f"{each.op}-{opset}-{name}-{at}")
    for at, each in enumerate([*ROWS, *MORE])
    for opset in list_versions(each.op)
    for name in find_axis_names(each.op, opset)
    if name in each.options
]


@pytest.mark.parametrize(("each", "opset", "name"), AXIS_CASES)
def test_axes__outside_of_the_rank(each, opset, name):
    template = next(value for value in each.options[name] if value is not None)
    rank = next(iter(each.data[0].values())).ndim
    low, high = LIMITS.get(each.op, lambda rank: (-rank, rank - 1))(rank)
    for axis in (low - 1, high + 1, 9, -9):
        far = ints(axis) if name == "axes" else np.full(np.shape(template), axis, "int64")
        options = {**each.options, name: [far if name == "axes" else far.reshape(())]}
        model, _ = make_model(replace(each, options=options), opset, np.random.default_rng(0))
        says = rf"operator {each.op}, opset {opset}\).*(axis {axis} of data|the onnx package says)"
        with pytest.raises(ModelError, match=says):
            rq.load(model)


def test_axes__every_operator_that_has_some():
    newest = onnx.defs.onnx_opset_version()
    having = {
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and not schema.deprecated and schema.since_version <= newest
        for opset in list_versions(schema.name)
        if find_axis_names(schema.name, opset)
    }
    assert having - OTHERS == {case.values[0].op for case in AXIS_CASES}


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "each",
    [
        row("Unsqueeze", {"data": draw(2, 3)}, axes=[ints(3, 2), ints(-4, 1)]),
        row("OneHot", {"indices": ints(0, 2)}, depth=[np.array(4)], values=[draw(2)],
            axis=[1, -2]),
        row("Flatten", {"input": draw(2, 3)}, axis=[2, -2]),
        row("CumSum", {"x": draw(2, 3)}, axis=[np.array(1), np.array(-2)]),
    ],
    ids=lambda each: each.op,
)  # fmt: skip
def test_axes__at_the_bounds(each):
    for opset in list_versions(each.op):
        name = find_axis_names(each.op, opset)[0]
        for value in each.options[name]:
            if opset < 11 and np.min(value) < 0:
                continue
            one = replace(each, options={**each.options, name: [value]})
            assert compare(one, *make_model(one, opset, np.random.default_rng(0))) == "right"


INDEX_CASES = [
    row("Gather", {"data": draw(3, 4, 5)}, indices=[ints(0, 4), ints(-5)], axis=[1]),
    row("GatherElements", {"data": draw(3, 4, 5)}, indices=[ints([[3]]), ints([[-4]])], axis=[0]),
    row("GatherND", {"data": draw(3, 4, 5)}, indices=[ints([0, 4]), ints([-4, 1])]),
    row("GatherND", {"data": draw(5, 4, 5)}, indices=[ints([4], [0], [0], [0], [0])],
        batch_dims=[1]),
    row("ScatterElements", {"data": draw(3, 4)}, indices=[ints([4]), ints([-5])],
        updates=[draw(1, 1)], axis=[1]),
    row("ScatterND", {"data": draw(3, 4, 5)}, indices=[ints([3]), ints([-4])],
        updates=[draw(1, 4, 5)]),
]  # fmt: skip


@pytest.mark.parametrize("each", INDEX_CASES, ids=lambda each: each.op)
def test_indices__outside_of_the_axis(each):
    for opset in list_versions(each.op):
        if "batch_dims" in each.options and opset < 12:
            continue
        for indices in each.options["indices"]:
            one = replace(each, options={**each.options, "indices": [indices]})
            model, _ = make_model(one, opset, np.random.default_rng(0))
            with pytest.raises(ModelError, match=rf"operator {each.op}.*for an axis of size \d"):
                rq.load(model)


def test_indices__every_operator_that_has_some():
    with_indices = {
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and "indices" in [one.name for one in schema.inputs]
    }
    # An index of OneHot may be anything: outside of its depth it is nowhere.
    assert with_indices - {"OneHot"} == set(INDICES)


def test_indices__of_a_symbolic_axis_are_left_to_the_run():
    node = helper.make_node("Gather", ["data", "indices"], ["y"])
    model = make_onnx([node], {"data": ["N", 3]}, "y", {"indices": ints(2, 0)}, MIN_OPSET + 6)
    mod, _ = rq.load(model)
    data = draw(4, 3)
    np.testing.assert_array_equal(rq.reference.run(mod, [data])[0], data[[2, 0]])
