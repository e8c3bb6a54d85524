"""Golden outputs of TVM v0.19's QNN operators against numpy and against the compiled operators.

Every recorded case is either equal bit for bit or listed below by a rule with its reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relayquant.base.qtypes import INTEGER_LIMITS, Arithmetic, QParams, Rounding
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.errors import QnnError
from relayquant.ir import dialect
from relayquant.ir.reference import UNARY_FUNCTIONS, build_table
from relayquant.ir.reference import qnn as numpy_qnn

RECORDED = Path(__file__).parents[2] / "recorded" / "qnn"

#: Operators whose recorded meaning is not ours at all.
NOT_OURS = {
    "qnn.softmax": "not in our set: softmax stays in float",
}
#: Flags of the index that mark single cases as no part of the meaning.
FLAGS = {
    "undefined_behaviour": "int32 overflow, undefined in v0.19",
    "hw_saturating_path": "int16 saturation of pmaddubsw, not what conv2d means",
}

#: Single cases where ours is different on purpose.
DIFFERENT = {
    "qnn_quantize_046": "quantize to int32 of values beyond int32: v0.19 casts 2^31 (undefined, "
    "INT_MIN on x86), ours saturates",
}

UNARY = ("tanh", "exp", "sqrt", "rsqrt", "erf", "sigmoid", "log", "abs", "hardswish")
OPERATORS = (
    "qnn.quantize",
    "qnn.dequantize",
    "qnn.requantize",
    "qnn.conv2d",
    "qnn.conv2d_transpose",
    "qnn.dense",
    "qnn.batch_matmul",
    "qnn.add",
    "qnn.subtract",
    "qnn.mul",
    "qnn.concatenate",
    "qnn.leaky_relu",
    "qnn.avg_pool2d",
    "qnn.simulated_quantize",
    "qnn.simulated_dequantize",
    "composite.conv2d_bias_requantize_clip",
    "composite.dense_bias_requantize",
    *(f"qnn.{name}" for name in UNARY),
)

#: Operators whose recorded cases share few functions when all their parameters are variables.
SHARED_FUNCTIONS = (
    "qnn.conv2d",
    "qnn.conv2d_transpose",
    "qnn.dense",
    "qnn.batch_matmul",
    "qnn.avg_pool2d",
    "qnn.simulated_quantize",
    "qnn.simulated_dequantize",
)

PREVIOUS = object()  #: operand that stands for the result of the step before


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of a case. `variables` are the positions of operands that are no constants."""

    name: str
    operands: list[Any]
    attrs: dict[str, Any]
    variables: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    steps: list[Step]
    expected: np.ndarray
    tolerance: float = 0.0


# Reading the golden data ---------------------------------------------------------------------


def get_modes(attrs: dict[str, Any]) -> dict[str, Any]:
    """Rounding and arithmetic of a case, with Relay's defaults for `llvm` without SSE4.1."""
    rounding, compute = attrs["rounding"], attrs["compute_dtype"]
    return {
        "rounding": Rounding(rounding if rounding not in (None, "None") else "UPWARD"),
        "compute_dtype": Arithmetic(compute if compute not in (None, "None") else "int64"),
    }


def read_steps(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Step]:
    op, attrs = case["op"].removeprefix("qnn."), dict(case["attrs"])
    if op == "quantize":
        params = [
            arrays["s"] if "s" in arrays else attrs["output_scale"],
            arrays["z"] if "z" in arrays else attrs["output_zero_point"],
        ]
        keep = {"axis": attrs["axis"], "out_dtype": attrs["out_dtype"]}
        variables = (0, 1, 2) if "s" in arrays else (0,)
        keep["rounding"] = Rounding.TONEAREST
        return [Step(op, [arrays["x"], *params], keep, variables)]
    if op == "dequantize":
        params = [attrs["input_scale"], attrs["input_zero_point"]]
        keep = {"axis": attrs["axis"], "out_dtype": attrs["out_dtype"]}
        return [Step(op, [arrays["x"], *params], keep)]
    if op == "requantize":
        params = [attrs[f"{a}_{b}"] for a in ("input", "output") for b in ("scale", "zero_point")]
        keep = {"axis": attrs["axis"], "out_dtype": attrs["out_dtype"], **get_modes(attrs)}
        if "expected compute_dtype=float32" in case["note"]:
            keep["compute_dtype"] = Arithmetic.FLOAT32
        return [Step(op, [arrays["x"], *params], keep)]
    if op in ("conv2d", "conv2d_transpose"):
        weight = arrays["w"]
        if attrs.get("depthwise"):
            # Relay's depthwise kernels have O = input channels, I = multiplier.
            at = attrs["kernel_layout"].index("O")
            shape = list(weight.shape)
            shape[at : at + 2] = [shape[at] * shape[at + 1], 1]
            weight = weight.reshape(shape)
        names = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout")
        keep = {k: attrs[k] for k in (*names, "out_dtype", "output_padding") if k in attrs}
        zeros = [attrs["input_zero_point"], attrs["kernel_zero_point"]]
        return [Step(op, [arrays["d"], weight, *zeros, 1.0, 1.0], keep)]
    if op == "dense":
        zeros = [attrs["input_zero_point"], attrs["kernel_zero_point"]]
        keep = {"out_dtype": attrs["out_dtype"]}
        return [Step(op, [arrays["x"], arrays["w"], *zeros, 1.0, 1.0], keep)]
    if op == "batch_matmul":
        zeros = [attrs["x_zero_point"], attrs["y_zero_point"]]
        keep = {"out_dtype": attrs["out_dtype"]}
        return [Step(op, [arrays["x"], arrays["y"], *zeros, 1.0, 1.0], keep, (0, 1))]
    if op in ("add", "subtract", "mul"):
        params = [
            attrs[f"{a}_{b}"] for a in ("lhs", "rhs", "output") for b in ("scale", "zero_point")
        ]
        keep = {"lhs_axis": attrs["lhs_axis"], "rhs_axis": attrs["rhs_axis"], **get_modes(attrs)}
        return [Step(op, [arrays["a"], arrays["b"], *params], keep, (0, 1))]
    if op == "concatenate":
        data = tuple(arrays[f"x{i}"] for i in range(len(arrays)))
        params = [tuple(attrs["input_scales"]), tuple(attrs["input_zero_points"])]
        params += [attrs["output_scale"], attrs["output_zero_point"]]
        return [Step(op, [data, *params], {"axis": attrs["axis"], **get_modes(attrs)})]
    if op == "leaky_relu":
        params = [attrs[f"{a}_{b}"] for a in ("input", "output") for b in ("scale", "zero_point")]
        return [Step(op, [arrays["x"], *params], {"alpha": attrs["alpha"], **get_modes(attrs)})]
    if op == "avg_pool2d":
        params = [attrs[f"{a}_{b}"] for a in ("input", "output") for b in ("scale", "zero_point")]
        names = ("pool_size", "strides", "dilation", "padding", "ceil_mode", "count_include_pad")
        keep = {k: attrs[k] for k in (*names, "layout")}
        return [Step(op, [arrays["x"], *params], {**keep, **get_modes(attrs)})]
    if op in ("simulated_quantize", "simulated_dequantize"):
        scale = arrays["s"] if "s" in arrays else attrs["output_scale"]
        zero_point = arrays["z"] if "z" in arrays else attrs["output_zero_point"]
        code = arrays["dtype"] if "dtype" in arrays else np.int32(1)  # recorded as "int8"
        keep: dict[str, Any] = {"axis": attrs["axis"]}
        if op == "simulated_quantize":
            keep["rounding"] = Rounding.TONEAREST
        return [Step(op, [arrays["x"], code, scale, zero_point], keep, (0, 1, 2, 3))]
    if op in UNARY:
        return [Step("lookup", [arrays["x"], make_table(op, attrs)], {})]
    if op == "composite.conv2d_bias_requantize_clip":
        zeros = [attrs["input_zero_point"], attrs["kernel_zero_point"]]
        scales = [attrs["input_scale"], attrs["kernel_scale"]]
        out = [attrs["output_scale"], attrs["output_zero_point"]]
        modes = {"axis": 1, "out_dtype": attrs["out_dtype"], **get_modes(attrs)}
        operands = [arrays["d"], arrays["w"], *zeros, *scales]
        return [
            Step("conv2d", operands, {"padding": attrs["padding"]}),
            Step("plus", [PREVIOUS, arrays["b"].reshape(-1, 1, 1)], {}),
            Step("requantize", [PREVIOUS, attrs["bias_scale"], 0, *out], modes),
            Step("clip", [PREVIOUS, *attrs["clip"]], {}),
        ]
    if op == "composite.dense_bias_requantize":
        scales = [attrs["input_scale"], attrs["kernel_scale"]]
        product = np.float32(scales[0]) * np.asarray(scales[1], "float32")
        out = [attrs["output_scale"], attrs["output_zero_point"]]
        operands = [arrays["x"], arrays["w"], attrs["input_zero_point"], 0, *scales]
        return [
            Step("dense", operands, {}),
            Step("plus", [PREVIOUS, arrays["b"]], {}),
            Step("requantize", [PREVIOUS, product, 0, *out], {"axis": 1, **get_modes(attrs)}),
        ]
    raise ValueError(f"no reader for {op}")


def make_table(op: str, attrs: dict[str, Any]) -> np.ndarray:
    """The look-up table of a case; some recorded zero points lie outside the dtype."""
    dtype = attrs["dtype"]
    low, high = INTEGER_LIMITS[dtype]
    source = (attrs["scale"], attrs["zero_point"])
    target = (attrs["output_scale"], attrs["output_zero_point"])
    function = UNARY_FUNCTIONS[op]
    if low <= source[1] <= high and low <= target[1] <= high:
        inputs = QParams(np.float32(source[0]), np.int32(source[1]), dtype)
        outputs = QParams(np.float32(target[0]), np.int32(target[1]), dtype)
        return build_table(function, inputs, outputs, Rounding.TONEAREST)
    patterns = np.arange(256, dtype="uint8").view(dtype)
    y = function(numpy_qnn.dequantize(patterns, *source))
    return numpy_qnn.quantize(y, *target, out_dtype=dtype, rounding=Rounding.TONEAREST)


@pytest.fixture(scope="module")
def golden() -> dict[str, list[dict[str, Any]]]:
    """Operator -> cases, each with its arrays under "arrays" and "expected"."""
    index = json.loads((RECORDED / "golden_index.json").read_text())
    grouped: dict[str, list[dict[str, Any]]] = {}
    with np.load(RECORDED / "golden.npz") as stored:
        for case in index["cases"]:
            arrays = {name: stored[entry["key"]] for name, entry in case["inputs"].items()}
            case = {**case, "arrays": arrays, "expected": stored[case["output"]["key"]]}
            grouped.setdefault(case["op"], []).append(case)
    return grouped


def get_cases(golden: dict[str, list[dict[str, Any]]], op: str) -> list[Case]:
    """The cases of one operator that must be equal."""
    return [
        Case(case["id"], read_steps(case, case["arrays"]), case["expected"])
        for case in golden[op]
        if case["id"] not in DIFFERENT and not any(case[flag] for flag in FLAGS)
    ]


# Running a case in numpy ---------------------------------------------------------------------


def run_numpy(steps: list[Step]) -> np.ndarray:
    result: Any = None
    for step in steps:
        operands = [result if operand is PREVIOUS else operand for operand in step.operands]
        if step.name == "plus":
            result = operands[0] + operands[1]
        elif step.name == "clip":
            result = np.clip(*operands)
        else:
            result = getattr(numpy_qnn, step.name)(*operands, **step.attrs)
    return result


# Running cases compiled ----------------------------------------------------------------------

#: Operand kinds: d data or weight, s scale, z zero point, c dtype code, n plain number.
KINDS = {
    **dict.fromkeys(("quantize", "dequantize"), "dsz"),
    **dict.fromkeys(("requantize", "concatenate", "leaky_relu", "avg_pool2d"), "dszsz"),
    **dict.fromkeys(("conv2d", "conv2d_transpose", "dense", "batch_matmul"), "ddzzss"),
    **dict.fromkeys(("add", "subtract", "mul"), "ddszszsz"),
    **dict.fromkeys(("simulated_quantize", "simulated_dequantize"), "dcsz"),
    **dict.fromkeys(("lookup", "plus"), "dd"),
    "clip": "dnn",
}
KIND_DTYPES = {"s": "float32", "z": "int32", "c": "int32"}


def make_arrays(operand: Any, kind: str, step: Step) -> Any:
    """An operand as an array, or as a tuple of arrays."""
    if isinstance(operand, tuple):
        return tuple(make_arrays(element, kind, step) for element in operand)
    array = np.asarray(operand)
    array = array.astype(KIND_DTYPES.get(kind, array.dtype))
    if kind in "sz" and array.size == 1 and not step.name.startswith("simulated"):
        # v0.19 took a vector of length 1 for a scalar; ours wants the scalar.
        return array.reshape(())
    return array


def prepare_operands(case: Case, constants: bool) -> tuple[list[list[Any]], list[np.ndarray]]:
    """Operands of every step with a relax.Var for each argument, and the arguments.

    With `constants`, weights, scales and zero points are constants unless inputs of the case.
    """
    arrays: list[np.ndarray] = []

    def declare(value: Any) -> Any:
        if isinstance(value, tuple):
            return relax.Tuple([declare(element) for element in value])
        arrays.append(value)
        ty = relax.TensorType(value.shape, value.dtype.name)
        return relax.Var(f"p{len(arrays) - 1}", ty)

    prepared = []
    for step in case.steps:
        operands = list(step.operands)
        for position, kind in enumerate(KINDS[step.name]):
            if operands[position] is PREVIOUS or kind == "n":
                continue
            value = make_arrays(operands[position], kind, step)
            is_input = step is case.steps[0] and position in step.variables
            operands[position] = value if constants and not is_input else declare(value)
        prepared.append(operands)
    return prepared, arrays


def find_vars(operands: list[list[Any]]) -> list[Any]:
    """The variables among the operands, in the order of the arguments."""
    found = []
    for operand in (operand for step in operands for operand in step):
        if isinstance(operand, relax.Tuple):
            found.extend(operand.fields)
        elif isinstance(operand, relax.Var):
            found.append(operand)
    return found


def build_function(builder: Any, name: str, case: Case, constants: bool) -> None:
    """Add a Relax function that does the steps of a case."""
    prepared, _ = prepare_operands(case, constants)
    with builder.function(name, find_vars(prepared)):
        result: Any = None
        for step, operands in zip(case.steps, prepared, strict=True):
            operands = [result if operand is PREVIOUS else operand for operand in operands]
            if step.name == "plus":
                bias = operands[1]
                call = relax.op.add(
                    operands[0], bias if isinstance(bias, relax.Expr) else relax.const(bias)
                )
            elif step.name == "clip":
                call = relax.op.clip(*operands)
            else:
                # qnn products accumulate in int32 only; the recorded int64 ones fit.
                wide = {"out_dtype": "int32"} if step.attrs.get("out_dtype") == "int64" else {}
                call = getattr(dialect.qnn, step.name)(*operands, **{**step.attrs, **wide})
            result = builder.emit(call)
        builder.emit_func_output(result)


def get_signature(case: Case, arrays: list[np.ndarray]) -> str:
    """What the function of a case with variable parameters depends on."""
    plain = [s.operands[1:] for s in case.steps if s.name == "clip"]
    types = [(array.shape, array.dtype.name) for array in arrays]
    return repr([[(s.name, s.attrs) for s in case.steps], types, plain])


def run_compiled(cases: list[Case], constants: bool) -> list[np.ndarray]:
    """All cases from one module, compiled once; cases of one signature share a function."""
    builder = relax.BlockBuilder()
    names: dict[str, str] = {}
    calls = []
    for number, case in enumerate(cases):
        _, arrays = prepare_operands(case, constants)
        signature = str(number) if constants else get_signature(case, arrays)
        if signature not in names:
            names[signature] = f"case{number}"
            build_function(builder, names[signature], case, constants)
        calls.append((names[signature], arrays))
    # For this machine's CPU: its fused multiply-add must not change a bit.
    machine = relax.VirtualMachine(tvm.compile(builder.get(), resolve_target(None)), tvm.cpu())
    results = []
    for case, (name, arrays) in zip(cases, calls, strict=True):
        tensors = [tvm.runtime.tensor(np.array(array, order="C")) for array in arrays]
        result = machine[name](*tensors).numpy()
        if case.expected.dtype == np.int64 and result.dtype == np.int32:
            result = result.astype("int64")
        results.append(result)
    return results


def has_legal_zero_points(case: Case) -> bool:
    """Whether constants would be accepted: a zero point outside its dtype is refused."""
    builder = relax.BlockBuilder()
    try:
        build_function(builder, "probe", case, True)
    except QnnError as error:
        if "zero_point" not in str(error):
            raise
        return False
    return True


def find_differences(cases: list[Case], results: list[np.ndarray]) -> list[str]:
    """One line per case that differs in dtype, shape or any bit."""
    lines = []
    for case, result in zip(cases, results, strict=True):
        want = case.expected
        if result.dtype != want.dtype or result.shape != want.shape:
            lines.append(f"{case.name}: {result.dtype}{result.shape}, not {want.dtype}{want.shape}")
        elif case.tolerance:
            gap = np.abs(result.astype("float64") - want).max()
            if gap > case.tolerance:
                lines.append(f"{case.name}: {gap} apart")
        elif result.tobytes() != want.tobytes():
            wrong = np.flatnonzero(result != want)
            lines.append(f"{case.name}: {wrong.size} of {want.size} values differ")
    return lines


@pytest.mark.parametrize("op", OPERATORS)
def test_golden__numpy(op, golden):
    cases = get_cases(golden, op)
    assert cases
    assert find_differences(cases, [run_numpy(case.steps) for case in cases]) == []


@pytest.mark.slow
@pytest.mark.sample(16)
@pytest.mark.parametrize("op", OPERATORS)
def test_golden__compiled(op, golden):
    """Every case, its parameters constants or variables, whichever compiles faster for `op`."""
    cases = get_cases(golden, op)
    as_constants = [
        case for case in cases if op not in SHARED_FUNCTIONS and has_legal_zero_points(case)
    ]
    as_variables = [case for case in cases if case not in as_constants]
    for some, constants in ((as_constants, True), (as_variables, False)):
        if some:
            assert find_differences(some, run_compiled(some, constants)) == []


@pytest.mark.sample(6)
@pytest.mark.parametrize("op", OPERATORS)
def test_golden__compiled_the_other_way(op, golden):
    """A part of the cases with parameters the other way: the loop nests are the same."""
    legal = [case for case in get_cases(golden, op) if has_legal_zero_points(case)][::6]
    assert legal
    constants = op in SHARED_FUNCTIONS
    assert find_differences(legal, run_compiled(legal, constants)) == []


def test_golden__every_case_is_tested_or_listed(golden):
    assert set(golden) == set(OPERATORS) | set(NOT_OURS)
    tested = sum(len(get_cases(golden, op)) for op in OPERATORS)
    listed = sum(len(golden[op]) for op in NOT_OURS)
    flagged = sum(any(c[flag] for flag in FLAGS) for op in OPERATORS for c in golden[op])
    assert tested + listed + flagged + len(DIFFERENT) == sum(map(len, golden.values())) == 872
    assert flagged == 11


def test_quantize__saturates_to_int32(golden):
    (case,) = [c for c in golden["qnn.quantize"] if c["id"] == "qnn_quantize_046"]
    result = run_numpy(read_steps(case, case["arrays"]))
    x = case["arrays"]["x"]
    # The largest float32 below 2^31 is 2^31 - 128.
    np.testing.assert_array_equal(result, np.where(x > 0, 2**31 - 128, -(2**31)))


# Literals of TVM's own unit tests ------------------------------------------------------------

RELAY_DEFAULT = {"rounding": Rounding.UPWARD, "compute_dtype": Arithmetic.INT64}


def read_array(text_or_list: Any, dtype: str) -> np.ndarray:
    """An operand: nested lists, or the text of a numpy expression."""
    if isinstance(text_or_list, str):
        name, _, arguments = text_or_list.rstrip(")").partition("(")
        values = json.loads(f"[{arguments.replace('(', '[').replace(')', ']')}]")
        made = np.full(*values) if name == "full" else np.arange(*values)
        return made.astype(dtype)
    return np.asarray(text_or_list).astype(dtype)


def read_literal_steps(case: dict[str, Any]) -> list[Step]:
    attrs, inputs = case["attrs"], dict(case["inputs"])
    op, *rest = case["op"].removeprefix("qnn.").split("+")
    dtype = inputs.pop("dtype", attrs.get("dtype", "float32"))
    x, *others = (read_array(values, dtype) for values in inputs.values())
    if op in ("add", "subtract"):
        params = [
            attrs[f"{a}_{b}"] for a in ("lhs", "rhs", "output") for b in ("scale", "zero_point")
        ]
        return [Step(op, [x, *others, *params], RELAY_DEFAULT, (0, 1))]
    if op == "quantize":
        keep = {"axis": attrs["axis"], "out_dtype": attrs["out_dtype"]}
        keep["rounding"] = Rounding.TONEAREST
        return [Step(op, [x, attrs["output_scale"], attrs["output_zero_point"]], keep)]
    if op == "dequantize":
        params = [attrs["input_scale"], attrs["input_zero_point"]]
        return [Step(op, [x, *params], {"axis": attrs.get("axis", -1)})]
    if op in ("requantize", "leaky_relu"):
        params = [attrs[f"{a}_{b}"] for a in ("input", "output") for b in ("scale", "zero_point")]
        if op == "leaky_relu":
            return [Step(op, [x, *params], {"alpha": attrs["alpha"], **RELAY_DEFAULT})]
        keep = {"axis": attrs["axis"], "out_dtype": attrs["out_dtype"], **get_modes(attrs)}
        return [Step(op, [x, *params], keep)]
    if op == "concatenate":
        data = (x[None], *(other[None] for other in others))
        scales = (attrs["scale"],) * len(data)
        output = [attrs["scale"], attrs["output_zero_point"]]
        operands = [data, scales, tuple(attrs["input_zero_points"]), *output]
        return [Step(op, operands, {"axis": attrs["axis"], **RELAY_DEFAULT})]
    first, second = ("x", "y") if op == "batch_matmul" else ("input", "kernel")
    zeros = [attrs[f"{first}_zero_point"], attrs[f"{second}_zero_point"]]
    keep = {"strides": attrs.get("strides", [1, 1])} if op == "conv2d" else {}
    steps = [Step(op, [x, *others, *zeros, 1.0, 1.0], keep)]
    for name in rest:
        if name == "nn.bias_add":
            steps.append(Step("plus", [PREVIOUS, np.asarray(attrs["bias"], "int32")], {}))
        else:
            assert name == "qnn.requantize"
            last = attrs["requantize"]
            params = [last["input_scale"], 0, last["output_scale"], last["output_zero_point"]]
            keep = {"out_dtype": last["out_dtype"], **RELAY_DEFAULT}
            steps.append(Step("requantize", [PREVIOUS, *params], keep))
    return steps


@pytest.fixture
def literals(shared_data) -> list[Case]:
    path = shared_data("qnn_test_literals.json")
    cases = []
    for number, case in enumerate(json.loads(path.read_text())["cases"]):
        steps = read_literal_steps(case)
        result = run_numpy(steps)
        expected = np.asarray(case["expected"])
        if expected.size == 1:
            expected = np.full(result.shape, expected)
        expected = expected.reshape(result.shape).astype(result.dtype)
        name = f"{number} {case['source'].rpartition(':')[-1]}"
        cases.append(Case(name, steps, expected, case["tolerance"]))
    return cases


def test_literals__numpy(literals):
    assert len(literals) == 165
    assert find_differences(literals, [run_numpy(case.steps) for case in literals]) == []


@pytest.mark.slow
def test_literals__compiled(literals):
    assert find_differences(literals, run_compiled(literals, True)) == []
