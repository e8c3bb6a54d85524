"""TensorFlow Lite's operators as numpy computes them, with constants in every place; graphs that
call graphs; variables.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tflite_models import Operator, Subgraph, Tensor, write_model
from tflite_operator_cases import Case, all_cases

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.formats.readers import import_tflite
from relayquant.ir import reference

pytest.importorskip("tflite")

CASES = all_cases()
KINDS = sorted({case.kind for case in CASES})
#: Why an operand has to be constant.
LATE = r"computed at run time; supported: constants|runtime|requires a constant|dynamic"
#: Operators whose first operand is no data.
SECOND = ("SPLIT", "TRANSPOSE_CONV", "CONV_3D_TRANSPOSE")
#: Operators and types that are refused whatever is constant.
REFUSED = {
    "WHERE": "as many rows as the run time finds",
    "uint16": "has the type UINT16; supported: FLOAT32",
}


def check_case(case: Case, constant: frozenset[int], path: Path) -> None:
    """The choice of constants gives what numpy gives, or is refused by name; with all operands
    behind the first constant, it gives it.
    """
    inputs = case.write(path, constant)
    if any(each.dtype.kind == "c" for each in inputs.values()):
        return
    reason = next((text for key, text in REFUSED.items() if key in str(case)), None)
    try:
        mod, message = import_tflite(path)[0], ""
    except ModelError as error:
        mod, message = None, str(error)
    label = f"{case} {sorted(constant)} {message}"
    if mod is None:
        assert re.search(reason or LATE, message), label
        places = {at for at, each in enumerate(case.operands) if each is not None}
        data = min(places - {0}, default=0) if case.kind in SECOND else 0
        assert reason or not constant >= places - {data}, label
        return
    assert reason is None, label
    for made, value in zip(reference.run(mod, inputs), case.results(), strict=True):
        if value.dtype.kind == "c":
            value = value.view("float32").reshape(*value.shape, 2)
        check_close(case, made, value, label)


def check_close(case: Case, made: np.ndarray, value: np.ndarray, label: str) -> None:
    """Integers of a scale may be a step apart: kernels round in other places."""
    assert (made.dtype, made.shape) == (value.dtype, value.shape), label
    step = 1 if case.scales and not case.is_stored and value.dtype.kind in "iu" else case.atol
    wide = np.result_type(value, "float64")
    made, value = made.astype(wide), value.astype(wide)
    np.testing.assert_allclose(made, value, rtol=1e-4, atol=step, err_msg=label)


@pytest.mark.sample(18)
@pytest.mark.parametrize("kind", KINDS)
def test_operator__as_numpy_computes_it(kind, tmp_path):
    """Data at the run time and all else constant, and all constant."""
    for case in CASES:
        if case.kind == kind:
            *_, behind_first, every = [frozenset(range(n, len(case.operands))) for n in (1, 0)]
            for constant in (behind_first, every):
                check_case(case, constant, tmp_path / "model.tflite")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operator__constants_in_every_place(kind, tmp_path):
    for case in CASES:
        for constant in case.choices() if case.kind == kind else ():
            check_case(case, constant, tmp_path / "model.tflite")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_expectations__are_those_of_the_interpreter(kind, tmp_path):
    """Only where TFLite itself is installed: what the cases expect is what its kernels compute."""
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    plain = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    for case in CASES:
        if case.kind != kind:
            continue
        inputs = case.write(tmp_path / "model.tflite", frozenset(range(1, len(case.operands))))
        try:
            machine = litert.Interpreter(
                str(tmp_path / "model.tflite"), experimental_op_resolver_type=plain
            )
            machine.allocate_tensors()
        except (RuntimeError, ValueError):
            continue  # of a type or an attribute that its kernels do not have
        for place in machine.get_input_details():
            machine.set_tensor(place["index"], inputs[place["name"]])
        machine.invoke()
        for place, value in zip(machine.get_output_details(), case.results(), strict=True):
            made = machine.get_tensor(place["index"])
            assert (made.dtype, made.shape) == (value.dtype, value.shape), str(case)
            if case.scales and not case.is_stored and value.dtype.kind in "iu":
                assert np.abs(made.astype(int) - value.astype(int)).max(initial=0) <= 1, str(case)
            else:
                np.testing.assert_allclose(
                    made, value, rtol=1e-4, atol=case.atol, err_msg=str(case)
                )


# -- how operators stand in a file -----------------------------------------------------------------

X = np.linspace(-2, 2, 6, dtype="float32").reshape(2, 3)


def load(path, *arguments, **keywords):
    mod, _ = import_tflite(write_model(path / "model.tflite", *arguments, **keywords))
    return mod


def tensor(name: str, values=None, shape=X.shape, dtype="float32") -> Tensor:
    if values is not None:
        values = np.asarray(values)
        shape, dtype = values.shape, str(values.dtype)
    return Tensor(name, shape, dtype, values)


def test_tensors__of_the_same_name(tmp_path):
    """TFLite goes by numbers; names may repeat or be missing."""
    tensors = [tensor("t"), tensor("t"), tensor(""), tensor("")]
    mod = load(
        tmp_path,
        tensors,
        [("ABS", [0], 1), ("NEG", [1], 2), ("ABS", [0], 3)],
        [0],
        [2, 3],
    )
    made = reference.run(mod, [X])
    np.testing.assert_array_equal(made[0], -np.abs(X))
    np.testing.assert_array_equal(made[1], np.abs(X))


@pytest.mark.parametrize("axis", [0, 3])
def test_scale__of_one_channel_has_any_axis(tmp_path, axis):
    """Of a depthwise weight of one channel, converters write the axis of the channels."""
    tensors = [
        Tensor("x", (1, 3, 3, 1), "int8", scale=(0.05, 3)),
        Tensor("w", (1, 1, 1, 1), "int8", np.full((1, 1, 1, 1), 100), scale=(0.01, 0, axis)),
        Tensor("y", (1, 3, 3, 1), "int8", scale=(0.05, 3)),
    ]
    fields = {"StrideH": 1, "StrideW": 1, "DepthMultiplier": 1}
    call = Operator("DEPTHWISE_CONV_2D", ["x", "w"], ["y"], "DepthwiseConv2DOptions", fields)
    x = np.arange(-9, 18, 3, dtype="int8").reshape(1, 3, 3, 1)
    (made,) = reference.run(load(tmp_path, tensors, [call], ["x"], ["y"]), [x])
    np.testing.assert_array_equal(made, x)


def test_sizes__computed_in_the_file(tmp_path):
    """SHAPE, STRIDED_SLICE, PACK, RESHAPE: what Keras writes for a batch of any size."""
    int32 = {"dtype": "int32"}
    one = np.array([1], "int32")
    tensors = [
        tensor("x"), tensor("shape", shape=[2], **int32), tensor("rows", shape=[], **int32),
        tensor("zero", np.array([0], "int32")), tensor("one", one), tensor("y", shape=[2, 3, 1]),
        tensor("sizes", shape=[3], **int32), tensor("width", np.array(3, "int32")),
        tensor("last", np.array(1, "int32")),
    ]  # fmt: skip
    mod = load(
        tmp_path,
        tensors,
        [
            Operator("SHAPE", ["x"], ["shape"], "ShapeOptions", {"OutType": 2}),
            Operator(
                "STRIDED_SLICE",
                ["shape", "zero", "one", "one"],
                ["rows"],
                "StridedSliceOptions",
                {"ShrinkAxisMask": 1},
            ),
            Operator(
                "PACK", ["rows", "width", "last"], ["sizes"], "PackOptions", {"ValuesCount": 3}
            ),
            ("RESHAPE", ["x", "sizes"], "y"),
        ],
        ["x"],
        ["y"],
    )
    np.testing.assert_array_equal(reference.run(mod, [X])[0], X[..., None])


def test_result__of_another_shape_than_the_file_says(tmp_path):
    with pytest.raises(ModelError, match=r"ABS .*'y' has shape \(2, 3\), the file says \(3, 2\)"):
        load(
            tmp_path, [tensor("x"), tensor("y", shape=(3, 2))], [("ABS", ["x"], "y")], ["x"], ["y"]
        )


@pytest.mark.parametrize("function", ["TANH", "SIGN_BIT"])
def test_fused_activation__that_no_kernel_computes(tmp_path, function):
    tflite = pytest.importorskip("tflite")
    fields = {"FusedActivationFunction": getattr(tflite.ActivationFunctionType, function)}
    call = Operator("ADD", ["x", "x"], ["y"], "AddOptions", fields)
    with pytest.raises(ModelError, match=f"fused activation is {function}; supported: NONE, RELU"):
        load(tmp_path, [tensor("x"), tensor("y")], [call], ["x"], ["y"])


@pytest.mark.parametrize("kind", ["MUL", "NEG", "TRANSPOSE", "EXPAND_DIMS"])
def test_complex_numbers__are_not_taken_for_pairs_of_numbers(tmp_path, kind):
    others = {"MUL": ["x"], "TRANSPOSE": ["order"], "EXPAND_DIMS": ["axis"]}.get(kind, [])
    shapes = {"TRANSPOSE": (3, 2), "EXPAND_DIMS": (2, 3, 1)}
    tensors = [
        tensor("x", dtype="complex64"),
        tensor("y", shape=shapes.get(kind, (2, 3)), dtype="complex64"),
        tensor("order", np.array([1, 0], "int32")),
        tensor("axis", np.array(-1, "int32")),
    ]
    match = rf"{kind}.*it reads complex numbers; supported: CAST, COMPLEX_ABS, IMAG, REAL, SQUEEZE"
    with pytest.raises(ModelError, match=match):
        load(tmp_path, tensors, [(kind, ["x", *others], "y")], ["x"], ["y"])


def test_complex_numbers__are_not_made_by_casts(tmp_path):
    tensors = [tensor("x"), tensor("y", dtype="complex64")]
    with pytest.raises(ModelError, match=r"CAST.*its result is complex; supported: real numbers"):
        load(tmp_path, tensors, [("CAST", ["x"], "y")], ["x"], ["y"])


@pytest.mark.parametrize("kind", ["RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"])
def test_random_numbers__are_refused(tmp_path, kind):
    tensors = [tensor("x"), tensor("sizes", np.array([2, 3], "int32")), tensor("y")]
    with pytest.raises(ModelError, match=f"{kind}.*random numbers. Make them an input"):
        load(tmp_path, tensors, [(kind, ["sizes"], "y")], ["x"], ["y"])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_constant_indices__out_of_range(tmp_path, dtype):
    """As TFLite's kernels refuse them when they run; constants are not clamped."""
    for kind, index in (("GATHER", [0, 2]), ("GATHER", [-1, 0]), ("GATHER_ND", [[1, 3]])):
        index = np.array(index, dtype)
        made = X[: len(index), :3] if kind == "GATHER" else X[0, :1]
        options = ("GatherOptions", {"Axis": 0}) if kind == "GATHER" else ()
        tensors = [tensor("x"), tensor("i", index), tensor("y", shape=made.shape)]
        call = Operator(kind, ["x", "i"], ["y"], *options)
        with pytest.raises(ModelError, match=r"its indices are -?\d to \d, for axes of"):
            load(tmp_path, tensors, [call], ["x"], ["y"])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_of_integers__with_a_float_input(tmp_path, dtype):
    """Dynamic range quantization: the weights are the numbers that they stand for."""
    values = np.random.default_rng(0).integers(-7, 8, (5, 3))
    weight = Tensor("w", (5, 3), dtype, values, None, (0.5, 0))
    tensors = [tensor("x"), weight, tensor("y", shape=(2, 5))]
    call = Operator("FULLY_CONNECTED", ["x", "w"], ["y"], "FullyConnectedOptions")
    mod = load(tmp_path, tensors, [call], ["x"], ["y"])
    np.testing.assert_allclose(reference.run(mod, [X])[0], X @ (values.T * 0.5), rtol=1e-5)


@pytest.mark.parametrize("is_new", [False, True])
def test_files_of_newer_writers(tmp_path, is_new):
    """Values behind the tables, and operators in the newer field alone: MUL, 18, is no ADD, 0."""
    factor = np.array([[1, -2, 3], [4, 5, -6]], "float32")
    tensors = [tensor("x"), tensor("f", factor), tensor("b", factor + 1), *map(tensor, "ay")]
    calls = [
        Operator("MUL", ["x", "f"], ["a"], "MulOptions"),
        Operator("SUB", ["a", "b"], ["y"], "SubOptions"),
    ]
    mod = load(tmp_path, tensors, calls, ["x"], ["y"], is_new=is_new)
    np.testing.assert_array_equal(reference.run(mod, [X])[0], X * factor - (factor + 1))


def test_files_of_newer_writers__a_place_behind_the_end(tmp_path):
    tensors = [tensor("x"), tensor("f", X), tensor("y")]
    path = tmp_path / "model.tflite"
    write_model(path, tensors, [("MUL", ["x", "f"], "y")], ["x"], ["y"], is_new=True)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="RQ502"):
        import_tflite(path)


def test_values_of_4_bits__in_too_few_bytes(tmp_path):
    weight = Tensor("w", (5, 3), "int4", np.ones((4, 3), "int8"), None, (0.5, 0))
    tensors = [tensor("x"), weight, tensor("y", shape=(2, 5))]
    call = Operator("FULLY_CONNECTED", ["x", "w"], ["y"], "FullyConnectedOptions")
    with pytest.raises(ModelError, match="RQ502"):
        load(tmp_path, tensors, [call], ["x"], ["y"])


def test_integer_operator__that_reads_a_tensor_twice(tmp_path):
    data = np.array([[-8, -1, 0], [1, 5, 7]], "int8")
    tensors = [Tensor(name, (2, 3), "int8", None, None, (0.5, 0)) for name in "xy"]
    mod = load(tmp_path, tensors, [("SQUARED_DIFFERENCE", ["x", "x"], "y")], ["x"], ["y"])
    np.testing.assert_array_equal(reference.run(mod, [data])[0], data * 0)
    mod = load(tmp_path, tensors, [("MAXIMUM", ["x", "x"], "y")], ["x"], ["y"])
    np.testing.assert_array_equal(reference.run(mod, [data])[0], data)


def test_options__missing(tmp_path):
    with pytest.raises(ModelError, match=r"SOFTMAX .*lacks its options \(SoftmaxOptions\)"):
        load(tmp_path, [tensor("x"), tensor("y")], [("SOFTMAX", ["x"], "y")], ["x"], ["y"])


@pytest.mark.parametrize(
    ("bounds", "fields", "fault"),
    [
        (([2, 0], [3, 1], [1, 1]), {"ShrinkAxisMask": 1}, "its index is 2; supported: less than 2"),
        (([0, 0], [2, 1], [1, 0]), {}, "its stride is 0; supported: positive"),
        (([1, 0], [0, 1], [-1, 1]), {"ShrinkAxisMask": 1}, "its stride is -1; supported: pos"),
        (([0] * 3, [1] * 3, [1] * 3), {}, "3 indices and 0 ellipses for an operand of rank 2"),
        (([0] * 3, [1] * 3, [1] * 3), {"EllipsisMask": 5}, "1 index and 2 ellipses"),
        (([0] * 3, [1] * 3, [1] * 3), {"EllipsisMask": 2}, "one ellipsis that stands for an axis"),
    ],
)
def test_slice__that_no_kernel_computes(tmp_path, bounds, fields, fault):
    constants = [tensor(n, np.array(v, "int32")) for n, v in zip("bes", bounds, strict=True)]
    call = Operator("STRIDED_SLICE", ["x", "b", "e", "s"], ["y"], "StridedSliceOptions", fields)
    with pytest.raises(ModelError, match=rf"STRIDED_SLICE .*{fault}"):
        load(tmp_path, [tensor("x"), *constants, tensor("y", shape=(1, 1))], [call], ["x"], ["y"])


@pytest.mark.parametrize("kind", ["SUM", "MEAN", "REDUCE_MAX", "REDUCE_ANY"])
def test_reduction__of_axes_that_do_not_exist(tmp_path, kind):
    dtype = "bool" if kind == "REDUCE_ANY" else "float32"
    tensors = [tensor("x", dtype=dtype), tensor("a", np.array([0, 2], "int32"))]
    tensors.append(tensor("y", shape=(3,), dtype=dtype))
    call = Operator(kind, ["x", "a"], ["y"], "ReducerOptions")
    with pytest.raises(ModelError, match=rf"{kind} .*its axes are \[0, 2\]; supported: -2 to 1"):
        load(tmp_path, tensors, [call], ["x"], ["y"])


def test_segments__of_other_rows_than_the_data(tmp_path):
    tensors = [tensor("x"), tensor("s", np.zeros(3, "int32")), tensor("n", np.array(4, "int32"))]
    with pytest.raises(
        ModelError, match=r"its segments have shape \[3\]; supported: the first axe"
    ):
        load(
            tmp_path,
            [*tensors, tensor("y", shape=(4, 3))],
            [("UNSORTED_SEGMENT_SUM", ["x", "s", "n"], "y")],
            ["x"],
            ["y"],
        )


@pytest.mark.parametrize(("source", "target"), [("int8", "float32"), ("float32", "int8")])
def test_cast__takes_integers_as_they_are_stored(tmp_path, source, target):
    """Whatever scale the file gives them, as LiteRT's kernel does."""
    scale = {"int8": (0.5, 3), "float32": None}
    tensors = [Tensor("x", (3,), source, None, None, scale[source])]
    tensors.append(Tensor("y", (3,), target, None, None, scale[target]))
    mod = load(tmp_path, tensors, [("CAST", ["x"], "y")], ["x"], ["y"])
    data = np.array([-128, 3, 127], source)
    (made,) = reference.run(mod, [data])
    assert made.dtype == target
    np.testing.assert_array_equal(made, data.astype(target))


def test_scatter__of_integers_with_a_zero_point_fills_with_stored_zeros(tmp_path):
    tensors = [
        tensor("i", np.array([[2], [0]], "int32")),
        Tensor("x", (2,), "int8", None, None, (0.5, 3)),
        tensor("n", np.array([4], "int32")),
        Tensor("y", (4,), "int8", None, None, (0.5, 3)),
    ]
    mod = load(tmp_path, tensors, [("SCATTER_ND", ["i", "x", "n"], "y")], ["x"], ["y"])
    (made,) = reference.run(mod, [np.array([7, -5], "int8")])
    np.testing.assert_array_equal(made, np.array([-5, 0, 7, 0], "int8"))


@pytest.mark.parametrize(
    "kind", ["TANH", "LOGISTIC", "RELU", "MEAN", "SUM", "MUL", "AVERAGE_POOL_2D"]
)
@pytest.mark.parametrize("place", ["x", "y"])
def test_integers_without_a_scale__of_an_operator_of_real_numbers(tmp_path, kind, place):
    """TFLite's kernels refuse them, or take 0 for the scale."""
    shape = (1, 2, 3, 1) if kind == "AVERAGE_POOL_2D" else (2, 3)
    scales = {name: None if name == place else (0.5, 3) for name in "xy"}
    tensors = [Tensor(name, shape, "int8", None, None, scales[name]) for name in "xy"]
    tensors.append(tensor("a", np.array([0], "int32")))
    others = {"MEAN": ["a"], "SUM": ["a"], "MUL": ["x"]}.get(kind, [])
    with pytest.raises(ModelError, match=f"{kind} .*its tensor '{place}' is int8 without a scale"):
        load(tmp_path, tensors, [(kind, ["x", *others], "y")], ["x"], ["y"])


@pytest.mark.parametrize("kind", ["AVERAGE_POOL_2D", "MAX_POOL_2D", "RESIZE_BILINEAR"])
def test_operator_of_one_scale__with_two(tmp_path, kind):
    tensors = [Tensor("x", (1, 2, 3, 1), "int8", None, None, (0.5, 3))]
    tensors.append(Tensor("y", (1, 2, 3, 1), "int8", None, None, (0.25, 3)))
    match = f"{kind} .*scale 0.5 and the zero point 3, its result the scale 0.25 and the zero"
    with pytest.raises(ModelError, match=match):
        load(tmp_path, tensors, [(kind, ["x"], "y")], ["x"], ["y"])


# -- graphs that call graphs -----------------------------------------------------------------------


def body(kind: str, *operands: str, constants=()) -> Subgraph:
    """One operator of float values; "a" is the input."""
    tensors = [tensor("a"), tensor("b"), *constants]
    return Subgraph(tensors, [Operator(kind, list(operands), ["b"])], ["a"], ["b"])


def test_call__is_put_in_place(tmp_path):
    tensors = [tensor("x"), tensor("y"), tensor("z")]
    call = Operator("CALL", ["x"], ["y"], "CallOptions", {"Subgraph": 1})
    again = Operator("CALL", ["y"], ["z"], "CallOptions", {"Subgraph": 1})
    mod = load(tmp_path, tensors, [call, again], ["x"], ["z"], others=[body("SQUARE", "a")])
    np.testing.assert_allclose(reference.run(mod, [X])[0], X**4, rtol=1e-6)
    assert {row["op"] for row in json.loads(mod["main"].attrs["relayquant.sources"]).values()} == {
        "CALL",
        "SQUARE",
    }


@pytest.mark.parametrize("condition", [True, False])
def test_if__takes_the_branch_of_a_constant(tmp_path, condition):
    fields = {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 2}
    call = Operator("IF", ["c", "x"], ["y"], "IfOptions", fields)
    tensors = [tensor("x"), tensor("c", np.array(condition)), tensor("y")]
    others = [body("ABS", "a"), body("NEG", "a")]
    mod = load(tmp_path, tensors, [call], ["x"], ["y"], others=others)
    np.testing.assert_array_equal(reference.run(mod, [X])[0], np.abs(X) if condition else -X)


@pytest.mark.parametrize("shape", [[], [1]])
def test_if__selects_at_run_time(tmp_path, shape):
    fields = {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 2}
    call = Operator("IF", ["c", "x"], ["y"], "IfOptions", fields)
    tensors = [tensor("x"), tensor("c", shape=shape, dtype="bool"), tensor("y")]
    others = [body("ABS", "a"), body("NEG", "a")]
    mod = load(tmp_path, tensors, [call], ["x", "c"], ["y"], others=others)
    for condition, expected in ((True, np.abs(X)), (False, -X)):
        given = [X, np.full(shape, condition)]
        np.testing.assert_array_equal(reference.run(mod, given)[0], expected)
        (got,) = rq.Executor(rq.compile(mod)).run("main", given)
        np.testing.assert_array_equal(got, expected)


def test_if__refuses_branches_of_other_shapes(tmp_path):
    fields = {"ThenSubgraphIndex": 1, "ElseSubgraphIndex": 2}
    call = Operator("IF", ["c", "x"], ["y"], "IfOptions", fields)
    tensors = [tensor("x"), tensor("c", shape=[], dtype="bool"), tensor("y")]
    axes = tensor("axes", np.array([0], "int32"))
    total = Subgraph(
        [tensor("a"), tensor("b", shape=[X.shape[1]]), axes],
        [Operator("SUM", ["a", "axes"], ["b"], "ReducerOptions")],
        ["a"],
        ["b"],
    )
    with pytest.raises(ModelError, match=r"IF .*branches give .*same type and shape"):
        load(tmp_path, tensors, [call], ["x", "c"], ["y"], others=[body("NEG", "a"), total])


def count_to(limit: int, late: bool = False):
    """i = 0; while i < limit: x, i = x * x, i + 1"""
    number = {"shape": [], "dtype": "int32"}
    zero = None if late else np.array(0, "int32")
    tensors = [tensor("x"), Tensor("i", [], "int32", zero), tensor("y"), tensor("n", **number)]
    fields = {"CondSubgraphIndex": 1, "BodySubgraphIndex": 2}
    call = Operator("WHILE", ["x", "i"], ["y", "n"], "WhileOptions", fields)
    last = tensor("limit", np.array(limit, "int32"))
    condition = Subgraph(
        [tensor("a"), tensor("i", **number), last, tensor("c", shape=[], dtype="bool")],
        [Operator("LESS", ["i", "limit"], ["c"])],
        ["a", "i"],
        ["c"],
    )
    one = tensor("one", np.array(1, "int32"))
    step = Subgraph(
        [tensor("a"), tensor("i", **number), one, tensor("b"), tensor("j", **number)],
        [
            Operator("MUL", ["a", "a"], ["b"], "MulOptions"),
            Operator("ADD", ["i", "one"], ["j"], "AddOptions"),
        ],
        ["a", "i"],
        ["b", "j"],
    )
    inputs = ["x", "i"] if late else ["x"]
    return (tensors, [call], inputs, ["y", "n"]), [condition, step]


def test_while__runs_a_fixed_number_of_steps(tmp_path):
    arguments, others = count_to(3)
    made = reference.run(load(tmp_path, *arguments, others=others), [X])
    np.testing.assert_allclose(made[0], X**8, rtol=1e-5)
    assert made[1] == 3
    arguments, others = count_to(3, late=True)
    with pytest.raises(ModelError, match=r"WHILE .*number of steps depends on the input"):
        load(tmp_path, *arguments, others=others)


def test_call__of_itself(tmp_path):
    inner = Operator("CALL", ["a"], ["b"], "CallOptions", {"Subgraph": 1})
    graph = Subgraph([tensor("a"), tensor("b")], [inner], ["a"], ["b"])
    call = Operator("CALL", ["x"], ["y"], "CallOptions", {"Subgraph": 1})
    with pytest.raises(ModelError, match="its graph, number 1, calls itself"):
        load(tmp_path, [tensor("x"), tensor("y")], [call], ["x"], ["y"], others=[graph])


# -- variables -------------------------------------------------------------------------------------


def variable_model(*calls: Operator, once: bool = True, name: str = "state"):
    """y = x + v, of a variable that CALL_ONCE sets to 2 where `once`; more calls behind."""
    handle = {"shape": [], "dtype": "resource"}
    name = {"Container": "", "SharedName": name}
    get = Operator("VAR_HANDLE", [], ["h"], "VarHandleOptions", name)
    first = Subgraph(
        [tensor("h", **handle), tensor("two", np.full(X.shape, 2, "float32"))],
        [get, Operator("ASSIGN_VARIABLE", ["h", "two"], [])],
    )
    tensors = [tensor("x"), tensor("h", **handle), tensor("v"), tensor("y")]
    operators = [
        *[Operator("CALL_ONCE", [], [], "CallOnceOptions", {"InitSubgraphIndex": 1})] * once,
        get,
        Operator("READ_VARIABLE", ["h"], ["v"]),
        Operator("ADD", ["x", "v"], ["y"], "AddOptions"),
        *calls,
    ]
    return (tensors, operators, ["x"], ["y"]), [first]


def test_variable__that_nothing_changes(tmp_path):
    arguments, others = variable_model()
    mod = load(tmp_path, *arguments, others=others)
    np.testing.assert_array_equal(reference.run(mod, [X])[0], X + 2)


def test_variable__that_changes_is_state(tmp_path):
    arguments, others = variable_model(Operator("ASSIGN_VARIABLE", ["h", "y"], []))
    mod = load(tmp_path, *arguments, others=others)
    (state,) = rq.get_state(mod)
    assert (state.name, state.shape, state.dtype) == ("state", X.shape, "float32")
    executor = rq.Executor(rq.compile(mod))
    for step in range(1, 4):
        (got,) = executor.run("main", [X])
        np.testing.assert_allclose(got, step * X + 2, rtol=1e-6)
    executor.reset()
    np.testing.assert_array_equal(executor.run("main", [X])[0], X + 2)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_variable__that_a_branch_changes(tmp_path, places, is_first):
    """A variable that the branch taken does not assign keeps its value. The IF stands behind all
    operators that read it, or in front.
    """
    handle = {"shape": [], "dtype": "resource"}
    name = {"Container": "", "SharedName": "state"}

    def branch(kind: str, is_assigning: bool) -> Subgraph:
        tensors = [tensor("a"), tensor("b"), tensor("h", **handle)]
        operators = [Operator(kind, ["a"], ["b"])]
        if is_assigning:
            operators.append(Operator("VAR_HANDLE", [], ["h"], "VarHandleOptions", name))
            operators.append(Operator("ASSIGN_VARIABLE", ["h", "b"], []))
        return Subgraph(tensors, operators, ["a"], ["b"])

    fields = {"ThenSubgraphIndex": 2, "ElseSubgraphIndex": 3}
    choice = Operator("IF", ["c", "x"], ["z"], "IfOptions", fields)
    (tensors, operators, *_), others = variable_model()
    operators.insert(1 if is_first else len(operators), choice)
    others += [branch(kind, at in places) for at, kind in enumerate(("SQUARE", "NEG"))]
    tensors = [*tensors, tensor("c", shape=[], dtype="bool"), tensor("z")]
    mod = load(tmp_path, tensors, operators, ["x", "c"], ["y", "z"], others=others)
    executor, held = rq.Executor(rq.compile(mod)), np.full_like(X, 2)
    for condition in (True, True, False, True, False, False):
        y, z = executor.run("main", [X, np.array(condition)])
        np.testing.assert_array_equal(z, X**2 if condition else -X)
        new = z if int(not condition) in places else held
        np.testing.assert_allclose(y, X + (new if is_first else held), rtol=1e-6)
        held = new


def test_variable__with_the_name_of_an_input(tmp_path):
    arguments, others = variable_model(Operator("ASSIGN_VARIABLE", ["h", "y"], []), name="x")
    mod = load(tmp_path, *arguments, others=others)
    assert [param.name for param in mod["main"].params] == ["x", "x_"]
    executor = rq.Executor(rq.compile(mod))
    for step in range(1, 3):
        np.testing.assert_allclose(executor.run("main", [X])[0], step * X + 2, rtol=1e-6)


def test_variable__what_is_read_behind_an_assignment_is_new(tmp_path):
    again = [
        Operator("ASSIGN_VARIABLE", ["h", "y"], []),
        Operator("READ_VARIABLE", ["h"], ["v2"]),
        Operator("ADD", ["v2", "x"], ["z"], "AddOptions"),
        Operator("ASSIGN_VARIABLE", ["h", "x"], []),
    ]
    (tensors, operators, *_), others = variable_model(*again)
    tensors = [*tensors, tensor("v2"), tensor("z")]
    mod = load(tmp_path, tensors, operators, ["x"], ["y", "z"], others=others)
    assert [param.name for param in mod["main"].params] == ["x", "state"]
    y, z, new = reference.run(mod, [X, X * 3])
    np.testing.assert_allclose(y, X * 4, rtol=1e-6)
    np.testing.assert_allclose(z, X * 5, rtol=1e-6)
    np.testing.assert_array_equal(new, X)


def test_variable__without_a_value(tmp_path):
    arguments, others = variable_model(once=False)
    with pytest.raises(ModelError, match=r"READ_VARIABLE .*nothing gives variable 'state' a value"):
        load(tmp_path, *arguments, others=others)


def test_svdf__keeps_a_state(tmp_path):
    state = Tensor("h", (2, 3), variable=True)
    tensors = [tensor("x"), tensor("w", np.eye(3, dtype="float32")), state, tensor("y")]
    tensors.append(tensor("b", np.zeros((3,), "float32")))
    call = Operator("SVDF", ["x", "w", "w", "b", "h"], ["y"], "SVDFOptions", {"Rank": 1})
    with pytest.raises(ModelError, match=r"SVDF .*state from run to run in 'h'"):
        load(tmp_path, tensors, [call], ["x"], ["y"])


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files__are_refused_or_run(tmp_path, seed):
    """Words of the tables replaced by others: whatever comes of it is a model or a ModelError, and
    no size that a file makes up asks for memory.
    """
    rng = np.random.default_rng(seed)
    path, outcomes = tmp_path / "model.tflite", {True: 0, False: 0}
    for _ in range(40):
        case = CASES[rng.integers(len(CASES))]
        case.write(path, frozenset(range(1, len(case.operands))))
        data = bytearray(path.read_bytes())
        at = 4 * int(rng.integers(2, len(data) // 4))
        word = int.from_bytes(data[at : at + 4], "little")
        odd = [0, 1, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, word + 4, word ^ 1, word + 1]
        data[at : at + 4] = (odd[rng.integers(len(odd))] % 2**32).to_bytes(4, "little")
        path.write_bytes(data)
        try:
            mod, _ = import_tflite(path)
        except ModelError:
            mod = None
        outcomes[mod is None] += 1
    assert min(outcomes.values()) > 4


# -- a streaming wake word -------------------------------------------------------------------------

FEATURES, WINDOW, CHANNELS, WORDS = 8, 6, 16, 3


def write_wake_word(path, rng):
    """Keras' streaming form: a variable holds the last frames, a convolution over them, a second
    variable averages its result, and a dense layer decides.
    """
    handle = {"shape": [], "dtype": "resource"}
    sizes = {"frames": (1, WINDOW - 1, FEATURES), "memory": (1, CHANNELS)}

    def get(name):
        fields = {"Container": "", "SharedName": name}
        return Operator("VAR_HANDLE", [], [f"{name}.handle"], "VarHandleOptions", fields)

    def constant(name, *shape, scale=1.0):
        return tensor(name, (rng.normal(size=shape) * scale).astype("float32"))

    once = Subgraph(
        [
            *(tensor(f"{name}.handle", **handle) for name in sizes),
            *(tensor(name, np.zeros(size, "float32")) for name, size in sizes.items()),
        ],
        [
            each
            for name in sizes
            for each in (get(name), Operator("ASSIGN_VARIABLE", [f"{name}.handle", name], []))
        ],
    )
    tensors = [
        tensor("x", shape=(1, 1, FEATURES)),
        *(tensor(f"{name}.handle", **handle) for name in sizes),
        *(tensor(f"{name}.old", shape=size) for name, size in sizes.items()),
        tensor("window", shape=(1, WINDOW, FEATURES)),
        tensor("begin", np.array([0, 1, 0], "int32")),
        tensor("size", np.array(sizes["frames"], "int32")),
        tensor("frames.new", shape=sizes["frames"]),
        tensor("rows", np.array([1, WINDOW * FEATURES], "int32")),
        tensor("flat", shape=(1, WINDOW * FEATURES)),
        constant("w1", CHANNELS, WINDOW * FEATURES, scale=0.2),
        constant("b1", CHANNELS),
        tensor("h", shape=(1, CHANNELS)),
        tensor("keep", np.array(0.9, "float32")),
        tensor("add", np.array(0.1, "float32")),
        *(tensor(name, shape=(1, CHANNELS)) for name in ("kept", "added", "memory.new")),
        constant("w2", WORDS, CHANNELS),
        constant("b2", WORDS),
        *(tensor(name, shape=(1, WORDS)) for name in ("scores", "y")),
    ]
    dense, relu = "FullyConnectedOptions", {"FusedActivationFunction": 1}
    operators = [
        Operator("CALL_ONCE", [], [], "CallOnceOptions", {"InitSubgraphIndex": 1}),
        *(get(name) for name in sizes),
        *(Operator("READ_VARIABLE", [f"{name}.handle"], [f"{name}.old"]) for name in sizes),
        Operator(
            "CONCATENATION", ["frames.old", "x"], ["window"], "ConcatenationOptions", {"Axis": 1}
        ),
        Operator("SLICE", ["window", "begin", "size"], ["frames.new"], "SliceOptions"),
        Operator("ASSIGN_VARIABLE", ["frames.handle", "frames.new"], []),
        Operator("RESHAPE", ["window", "rows"], ["flat"]),
        Operator("FULLY_CONNECTED", ["flat", "w1", "b1"], ["h"], dense, relu),
        Operator("MUL", ["memory.old", "keep"], ["kept"], "MulOptions"),
        Operator("MUL", ["h", "add"], ["added"], "MulOptions"),
        Operator("ADD", ["kept", "added"], ["memory.new"], "AddOptions"),
        Operator("ASSIGN_VARIABLE", ["memory.handle", "memory.new"], []),
        Operator("FULLY_CONNECTED", ["memory.new", "w2", "b2"], ["scores"], dense),
        Operator("SOFTMAX", ["scores"], ["y"], "SoftmaxOptions", {"Beta": 1.0}),
    ]
    return write_model(path / "wake.tflite", tensors, operators, ["x"], ["y"], [once])


def draw_frames(rng, count):
    """Frames that change slowly, as features of sound do."""
    level, frames = np.zeros((1, 1, FEATURES)), []
    for _ in range(count):
        level = 0.95 * level + 0.3 * rng.normal(size=level.shape)
        frames.append(level.astype("float32"))
    return frames


@pytest.mark.nightly
def test_wake_word__decides_as_the_float_model_over_ten_thousand_steps(tmp_path):
    """The state does not drift: the last thousand decisions agree as the first do."""
    rng = np.random.default_rng(0)
    mod, params = rq.load(write_wake_word(tmp_path, rng))
    assert {state.name for state in rq.get_state(mod)} == {"frames", "memory"}
    data = [rq.SampleSequence(draw_frames(rng, 60)) for _ in range(4)]
    qmod = rq.quantize(mod, params, data, effort="fast")
    executors = [rq.Executor(rq.compile(each)) for each in (mod, qmod)]
    answers = np.array(
        [
            [int(executor.run("main", [x])[0].argmax()) for executor in executors]
            for x in draw_frames(rng, 10_000)
        ]
    )
    assert len(np.unique(answers[:, 0])) > 1
    same = answers[:, 0] == answers[:, 1]
    assert same.mean() >= 0.99
    assert same[-1000:].mean() >= 0.98


SAME, VALID = 1, 2  # of the struct of C


def write_transpose_conv_bias(path, x, weight, bias, shape, options):
    """MediaPipe's operator, and beside it what LiteRT knows of the same meaning."""
    given = [Tensor("x", x.shape), Tensor("w", weight.shape, values=weight)]
    given += [Tensor("b", bias.shape, values=bias), Tensor("y", shape)]
    call = Operator("Convolution2DTransposeBias", ["x", "w", "b"], ["y"], custom=options)
    return write_model(path, given, [call], ["x"], ["y"])


@pytest.mark.parametrize("padding", [SAME, VALID])
@pytest.mark.parametrize("kernel", [(2, 2), (3, 4)])
@pytest.mark.parametrize("strides", [(2, 2), (1, 3)])
def test_transpose_conv_bias__is_litert_transpose_conv(strides, kernel, padding, tmp_path):
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    rng = np.random.default_rng(0)
    x, weight, bias = (
        rng.normal(size=shape).astype("float32") for shape in ((1, 4, 6, 3), (5, *kernel, 3), (5,))
    )
    sizes = []
    for size, width, stride in zip((4, 6), kernel, strides, strict=True):
        cut = max(0, width - (size - 1) % stride - 1) if padding == SAME else 0
        sizes.append(stride * (size - 1) + width - cut)
    shape = (1, *sizes, 5)
    options = np.array([padding, *reversed(strides), 0, 0], "<i4").tobytes()
    path = write_transpose_conv_bias(tmp_path / "a.tflite", x, weight, bias, shape, options)
    mod, _ = import_tflite(path)
    fields = {"Padding": padding - 1, "StrideH": strides[0], "StrideW": strides[1]}
    known = write_model(
        tmp_path / "b.tflite",
        [
            Tensor("s", (4,), "int32", np.array(shape)),
            Tensor("x", x.shape),
            Tensor("w", weight.shape, values=weight),
            Tensor("b", bias.shape, values=bias),
            Tensor("t", shape),
            Tensor("y", shape),
        ],
        [
            Operator("TRANSPOSE_CONV", ["s", "w", "x"], ["t"], "TransposeConvOptions", fields),
            ("ADD", ["t", "b"], "y"),
        ],
        ["x"],
        ["y"],
    )
    machine = litert.Interpreter(str(known))
    machine.allocate_tensors()
    machine.set_tensor(machine.get_input_details()[0]["index"], x)
    machine.invoke()
    expected = machine.get_tensor(machine.get_output_details()[0]["index"])
    (computed,) = rq.reference.run(mod, [x])
    (compiled,) = rq.Executor(rq.compile(mod)).run("main", [x])
    for found in (computed, compiled):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (b"\1\0\0\0", r"lacks its options \(padding, stride_width, stride_height\)"),
        (np.array([3, 2, 2], "<i4").tobytes(), r"padding is 3, .* allowed: 1 \(SAME\) and 2"),
        (np.array([1, 0, 2], "<i4").tobytes(), "strides are .0, 2.; allowed: .* from 1 on"),
        (np.array([2, 2, 2], "<i4").tobytes(), r"has shape \(1, 9, 9, 1\), the file says"),
    ],
)
def test_transpose_conv_bias__refused_by_name(options, message, tmp_path):
    x, weight, bias = (np.ones(shape, "float32") for shape in ((1, 4, 4, 1), (1, 3, 3, 1), (1,)))
    path = write_transpose_conv_bias(tmp_path / "a.tflite", x, weight, bias, (1, 8, 8, 1), options)
    with pytest.raises(ModelError, match=message):
        import_tflite(path)
