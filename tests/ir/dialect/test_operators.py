"""The table of operators: printing, parsing, JSON, purity, and calls that cannot be legalized."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys

import numpy as np
import pytest
import tvm
import tvm_ffi
from qnn_testing import make_module, run_module
from tvm import relax
from tvm.ir import Op
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant.ir.dialect
from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.ir.dialect import OPERATORS, qnn, register_operators
from relayquant.ir.reference import qnn as numpy_qnn

MODES = {"rounding": Rounding.UPWARD, "compute_dtype": Arithmetic.INT64}
X = ((2, 3, 6, 6), "int8")
F = ((2, 3, 6, 6), "float32")
W = ((5, 3, 3, 3), "int8")
A = ((4, 6), "int8")
P = (((), "float32"), ((), "int32"))
GROUPED = (((5, 3), "uint8"), ((5, 3), "float16"), ((5, 3), "uint8"))
ROWS, LENGTHS = ((2, 3), "float32"), ((2,), "int32")
STATES = (ROWS, ROWS, ((3, 3), "float32"), LENGTHS)
QUERY, CACHE = ((2, 3, 4, 4), "float32"), ((2, 2, 9, 4), "float16")
GRU = (ROWS, ((3,), "float32"), LENGTHS)

#: Operator -> (types of the variables, call with no attribute at its default value).
EXAMPLES = {
    "quantize": (
        [F, ((3,), "float32"), ((), "int32")],
        lambda x, s, z: qnn.quantize(x, s, z, 1, "uint8", rounding=Rounding.TONEAREST),
    ),
    "dequantize": ([X], lambda x: qnn.dequantize(x, [0.1, 0.2, 0.3], 3, -3, "float16")),
    "requantize": (
        [X, *P, *P],
        lambda x, *p: qnn.requantize(x, *p, axis=2, out_dtype="int16", **MODES),
    ),
    "simulated_quantize": (
        [F, ((2,), "int32"), ((3,), "float32"), ((), "int32")],
        lambda *a: qnn.simulated_quantize(*a, axis=1, rounding=Rounding.TONEAREST),
    ),
    "simulated_dequantize": ([F], lambda x: qnn.simulated_dequantize(x, 1, 0.1, 3, axis=1)),
    "conv1d": (
        [((2, 9, 4), "uint8"), ((3, 2, 6), "int8")],
        lambda x, w: qnn.conv1d(x, w, 3, 1, 0.1, 0.2, 2, (1, 2), 2, 2, "NWC", "WIO"),
    ),
    "conv2d": (
        [((2, 9, 8, 4), "uint8"), ((3, 3, 2, 6), "int8")],
        lambda x, w: qnn.conv2d(
            x, w, 3, 1, 0.1, 0.2, (2, 1), (1, 2, 3, 4), (1, 2), 2, "NHWC", "HWIO"
        ),
    ),
    "conv2d_transpose": (
        [((2, 5, 4, 4), "uint8"), ((3, 3, 4, 6), "int8")],
        lambda x, w: qnn.conv2d_transpose(
            x, w, 3, 1, 0.1, 0.2, (2, 3), (1, 0, 1, 1), (1, 0), (1, 2), 2, "NHWC", "HWIO"
        ),
    ),
    "dense": ([A, ((7, 6), "int8")], lambda x, w: qnn.dense(x, w, 3, [1] * 7, 0.1, [0.2] * 7)),
    "batch_matmul": (
        [((2, 4, 6), "int8"), ((5, 6), "uint8")],
        lambda x, y: qnn.batch_matmul(x, y, 3, 1, 0.1, 0.2),
    ),
    **{
        name: (
            [X, ((3, 1, 1), "uint8")],
            lambda a, b, name=name: getattr(qnn, name)(
                a, b, [0.1, 0.2, 0.3], 3, 0.2, 4, 0.5, 5, 1, 0, "int16", **MODES
            ),
        )
        for name in ("add", "subtract", "mul")
    },
    "concatenate": (
        [A, ((4, 2), "int8")],
        lambda a, b: qnn.concatenate([a, b], [0.1, 0.2], [3, 4], 0.5, 5, axis=-1, **MODES),
    ),
    "avg_pool2d": (
        [((2, 6, 6, 3), "int8")],
        lambda x: qnn.avg_pool2d(
            x, 0.1, 3, 0.2, 4, (2, 3), (2, 1), (1, 2), (1, 0, 0, 1), True, True, "NHWC", **MODES
        ),
    ),
    "mean": (
        [X],
        lambda x: qnn.mean(
            x, 0.1, 3, 0.2, 4, axes=[1, -1], keepdims=True, out_dtype="int16", **MODES
        ),
    ),
    "leaky_relu": ([X], lambda x: qnn.leaky_relu(x, 0.1, 3, 0.2, 4, alpha=0.3, **MODES)),
    "prelu": ([X], lambda x: qnn.prelu(x, 0.1, 3, 0.2, 4, np.array(0.5), axis=2)),
    "lookup": ([X], lambda x: qnn.lookup(x, np.arange(256).astype("uint8"))),
    "quantize_rows": ([F], qnn.quantize_rows),
    "grouped_dense": (
        [A, ((4, 1), "float32"), *GROUPED],
        lambda *a: qnn.grouped_dense(*a, 3, 2, 6),
    ),
    "grouped_take": ([((2, 3), "int64"), *GROUPED], lambda *a: qnn.grouped_take(*a, 3, 2, 6)),
    "expert_dense": (
        [((2, 3, 6), "float32"), ((2, 3), "int64"), ((10, 6), "float32")],
        lambda *a: qnn.expert_dense(*a, 5),
    ),
    "grouped_expert_dense": (
        [((4, 1, 6), "int8"), ((4, 1, 1), "float32"), ((4, 2), "int32"), *GROUPED],
        lambda *a: qnn.grouped_expert_dense(*a, 3, 2, 6, 5),
    ),
    "lstm": (
        [((4, 2, 12), "float32"), ((3, 12), "int8"), ((12,), "float32"), *STATES],
        lambda *a: qnn.lstm(*a, ["relu", "tanh", "sigmoid"], 0.5, True, True, 0.25),
    ),
    "gru": (
        [((4, 2, 9), "float32"), ((3, 9), "int8"), ((9,), "float32"), *GRU],
        lambda *a: qnn.gru(*a, ["relu", "tanh"], 0.5, True, True),
    ),
    "rnn": (
        [((4, 2, 3), "float32"), ((3, 3), "float32")],
        lambda *a: qnn.rnn(*a, activations=["relu"], clip=0.5, is_reversed=True),
    ),
    "rotate": ([QUERY, *[((9, 2), "float32")] * 2, LENGTHS], qnn.rotate),
    "update_cache": ([CACHE, ((2, 3, 2, 4), "float32"), LENGTHS], qnn.update_cache),
    "cached_attention": (
        [QUERY, CACHE, CACHE, LENGTHS],
        lambda q, k, v, p: qnn.cached_attention(q, k, 1, v, 1, p, 0.5, 3, 2.0),
    ),
    "gated_delta": (
        [
            *[((2, 3, 2, 4), "float32")] * 2,
            ((2, 3, 4, 5), "float32"),
            *[((2, 3, 4), "float32")] * 2,
            ((2, 4, 4, 5), "float32"),
            LENGTHS,
            ((2,), "int64"),
        ],
        lambda *a: qnn.gated_delta(*a, is_tiled=True),
    ),
    "dft": ([((2, 60, 1), "float32")], lambda x: qnn.dft(x, 64, False, True)),
}


def make_example(name):
    types, make_call = EXAMPLES[name]
    return make_module(make_call, [relax.TensorType(shape, dtype) for shape, dtype in types])


def get_call(module):
    (binding,) = (b for block in module["main"].body.blocks for b in block.bindings[:1])
    return binding.value


def list_fields(attrs):
    return [] if attrs in (None, type(None)) else attrs.__tvm_ffi_type_info__.fields


def test_examples__every_operator_has_one():
    assert list(EXAMPLES) == [operator.name for operator in OPERATORS]
    named = [name for family in qnn.FAMILIES for name in family.__all__]
    assert sorted(EXAMPLES) == sorted(named)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_operator__registered(operator):
    op = Op.get(operator.full_name)
    assert op.get_attr("FPurity")
    assert op.get_attr("TMixedPrecisionPolicy") == 2
    assert [argument.name for argument in op.arguments] == [
        each.name for each in operator.arguments
    ]
    assert getattr(R.qnn, operator.name) is getattr(qnn, operator.name)
    module = make_example(operator.name)
    assert module["main"].is_pure
    call = get_call(module)
    assert call.op.name == operator.full_name
    assert len(call.args) == len(operator.arguments)
    assert operator.attrs is None or isinstance(call.attrs, operator.attrs)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.name)
def test_operator__constructor_and_numpy_meaning_take_what_is_declared(operator):
    """Operands first, by their declared names, then the attributes; all others have defaults."""
    operands = [argument.name for argument in operator.arguments]
    fields = [field.name for field in list_fields(operator.attrs)]
    for function in (getattr(qnn, operator.name), numpy_qnn.OPERATORS[operator.name]):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(operands)] == operands
        assert sorted(list(parameters)[len(operands) :]) == sorted(fields)


def test_operators__each_has_a_numpy_meaning_and_no_other():
    assert set(numpy_qnn.OPERATORS) == {operator.name for operator in OPERATORS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_operator__print_and_parse(name):
    module = make_example(name)
    text = module.script(show_meta=True)
    assert f"R.qnn.{name}(" in text
    tvm_ffi_equal = tvm_ffi.structural_equal
    assert tvm_ffi_equal(module, tvm.script.from_source(text), map_free_vars=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_operator__json(name):
    module = make_example(name)
    loaded = tvm.ir.load_json(tvm.ir.save_json(module))
    assert tvm_ffi.structural_equal(module, loaded)
    call = get_call(loaded)
    for field in list_fields(type(call.attrs)):
        expected = getattr(get_call(module).attrs, field.name)
        assert tvm_ffi.structural_equal(getattr(call.attrs, field.name), expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_operator__compiles_and_inferred_type_is_that_of_the_result(name):
    module = make_example(name)
    arrays = [np.ones(shape, dtype) for shape, dtype in EXAMPLES[name][0]]
    result, ty = run_module(module, arrays), get_call(module).ty
    pairs = zip(result, ty.fields, strict=True) if isinstance(result, tuple) else [(result, ty)]
    for value, expected in pairs:
        assert value.shape == tuple(map(int, expected.shape))
        assert value.dtype == str(expected.dtype)


def test_operator__attributes_take_part_in_equality():
    x = relax.Var("x", relax.TensorType(*F))
    one, other = (qnn.quantize(x, 0.1, 0, axis=axis).attrs for axis in (0, 1))
    assert not tvm_ffi.structural_equal(one, other)


def test_operator__unknown_shape_stays_as_it_is():
    module = make_module(
        lambda x: qnn.dequantize(x, 0.1, 0), [relax.TensorType(None, "int8", ndim=2)]
    )
    lowered = relax.transform.LegalizeOps()(module)
    assert "R.qnn.dequantize" in lowered.script()


def test_script__decorator():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")):
            with R.dataflow():
                q = R.qnn.quantize(x, R.const(0.5, "float32"), R.const(1, "int32"), axis=1)
                y = R.qnn.dequantize(q, 0.5, 1)
                R.output(y)
            return y

    x = np.array([[0.5, -1.0, 0.74, 100.0]], "float32")
    np.testing.assert_array_equal(run_module(Module, [x]), [[0.5, -1.0, 0.5, 63.0]])


def test_register_operators__again_changes_nothing():
    register_operators(OPERATORS)
    importlib.reload(relayquant.ir.dialect)
    assert R.qnn is relayquant.ir.dialect.qnn


@pytest.mark.slow
def test_import__again_from_scratch():
    """In a process of its own: the modules are forgotten, what TVM knows is not."""
    program = (
        "import sys, relayquant.ir.dialect\n"
        "for name in list(sys.modules):\n"
        "    if name.startswith('relayquant'): del sys.modules[name]\n"
        "from relayquant.ir.dialect import qnn\n"
        "from tvm import relax\n"
        "x = relax.Var('x', relax.TensorType((3,), 'int8'))\n"
        "print(relax.BlockBuilder().normalize(qnn.dequantize(x, 0.5, 0)).ty)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "float32" in done.stdout, done.stderr


def test_register_operators__one_row_is_enough():
    """A user's operator: a row with functions of an existing one."""
    (row,) = (operator for operator in OPERATORS if operator.name == "lookup")
    register_operators([dataclasses.replace(row, name="test_only_lookup")])
    x = relax.Var("x", relax.TensorType((3,), "uint8"))
    call = tvm.ir.Call(
        Op.get("relax.qnn.test_only_lookup"), [x, relax.const(np.arange(256, dtype="int8"))]
    )
    assert str(relax.BlockBuilder().normalize(call).ty.dtype) == "int8"


@pytest.mark.slow
def test_import__dialect_alone_compiles_a_saved_module(tmp_path):
    path = tmp_path / "module.json"
    path.write_text(tvm.ir.save_json(make_example("conv2d")))
    program = (
        "import sys, tvm, relayquant.ir.dialect\n"
        "module = tvm.ir.load_json(open(sys.argv[1]).read())\n"
        "tvm.compile(module, 'llvm')\n"
        "print('compiled')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr


def test_json__of_a_file_before_an_attribute_existed():
    """LSTMs were written without a bound of the cell before they had one."""
    types, make = EXAMPLES["lstm"]
    given = [relax.Var(f"x{at}", relax.TensorType(*each)) for at, each in enumerate(types)]
    found = json.loads(tvm.ir.save_json(make(*given).attrs))
    assert found["nodes"][found["root_index"]]["data"].pop("cell_clip") == 0.25
    attrs = tvm.ir.load_json(json.dumps(found))
    assert (attrs.cell_clip, attrs.clip, attrs.input_forget) == (0.0, 0.5, True)
