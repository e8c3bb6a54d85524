"""Interpreter: executes function `main` of any Relax module in numpy, binding by binding.

`run` returns the outputs, `run_values` returns every bound value by name. Operators of `relax.qnn`
compute as in `reference.qnn`. Other Relax operators are rows of `relax.OPERATORS`. Calls without a
row (another operator, `call_tir` of a PrimFunc, a packed function) are compiled alone with TVM for
the generic `llvm` target. Any module that compiles therefore also runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.qtypes import Arithmetic, Rounding
from relayquant.base.runtime import view_constant
from relayquant.errors import ModelError, RelayQuantError, suggest_name
from relayquant.ir.reference import qnn
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.inputs import bind_input, bind_inputs, check_input
from relayquant.ir.reference.relax import OPERATORS
from relayquant.ir.reference.single_call import compile_call, describe_operator, get_tensor_dtype
from relayquant.ir.rewrite.attributes import read_attributes
from relayquant.ir.rewrite.bind import Model, bind_model
from relayquant.ir.rewrite.entry import name_main
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.function import find_free_name
from relayquant.ir.rewrite.lifetimes import find_ends

Array = np.ndarray[Any, Any]


def run(mod: Model, inputs: Any) -> list[Array]:
    """Run function `main` and return its outputs as arrays.

    If no function is called main, the model function is run. A tuple is returned as several arrays.

    Args:
        mod: Any Relax module. The parameters of `main` are its inputs.
        inputs: Arrays by parameter name, arrays in the order of the parameters, or a single array.

    Raises:
        DataError: Inputs do not match the parameters in number, name, dtype or shape.
        ModelError: No function of the module is the model, or a call cannot be executed.
    """
    return flatten_value(execute_main(mod, inputs, None))


def run_values(
    mod: Model, inputs: Any, settle: Callable[[ExecutedBinding], Any] | None = None
) -> dict[str, Array]:
    """Run `main` and return every value that it binds, by variable name, in order.

    Arguments and errors are the same as for `run`. Element i of a tuple is "name.i". A second
    variable with the same name is "name#1", and so on. `settle` is called with each executed step.
    Its result replaces the value of the step.
    """
    values: dict[str, Array] = {}
    execute_main(mod, inputs, values, settle)
    return values


def execute_main(
    mod: Model,
    inputs: Any,
    record: dict[str, Array] | None,
    settle: Callable[[ExecutedBinding], Any] | None = None,
) -> Any:
    """Execute `main` and return its value. Bound values go into `record`, if there is one."""
    mod = name_main(bind_model(mod))
    main = mod["main"]
    frame = Frame(mod, settle=settle)
    bind_inputs(frame, main.params, inputs)
    with np.errstate(all="ignore"):
        return execute_function(frame, main, record)


# Execution -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExecutedBinding:
    """An executed binding of `main`, and its value."""

    binding: Any
    value: Any
    frame: Frame

    def evaluate(self, expr: Any) -> Any:
        """Return the value of an operand."""
        return evaluate(self.frame, expr, self.binding.var.name)

    def recompute(self, operand: Any, array: Array) -> Any:
        """Compute the value again with `array` as the value of one operand variable."""
        frame = Frame(self.frame.mod, {**self.frame.values, operand: array}, self.frame.symbols)
        return execute_binding(frame, self.binding)


@dataclass(frozen=True)
class Closure:
    """A function as a value, with the outer values that it reads."""

    function: relax.Function
    frame: Frame


def execute_function(frame: Frame, function: relax.Function, record: Any) -> Any:
    """Execute a function with parameters that are bound in `frame`, and return its value."""
    return execute_body(frame, function.body, record)


def execute_body(frame: Frame, body: Any, record: dict[str, Array] | None) -> Any:
    """Execute bindings and return the result. Without a record, values are freed after their last
    use.
    """
    if not isinstance(body, relax.SeqExpr):
        return evaluate(frame, body, "result")
    bindings = list(list_bindings(body))
    if record is not None:
        for binding in bindings:
            record_value(record, binding.var.name, execute_binding(frame, binding))
        return evaluate(frame, body.body, "result")
    # Free only values that this body binds. An outer body may still need the others.
    bound = {binding.var for binding in bindings}
    used = ([binding.var, *relax.analysis.free_vars(binding.value)] for binding in bindings)
    ends = find_ends(
        (bound.intersection(each) for each in used), relax.analysis.free_vars(body.body)
    )
    for binding, ended in zip(bindings, ends, strict=True):
        execute_binding(frame, binding)
        for var in ended:
            frame.values.pop(var, None)
    return evaluate(frame, body.body, "result")


def execute_binding(frame: Frame, binding: Any) -> Any:
    """Evaluate one binding and store its value."""
    name = binding.var.name
    if isinstance(binding.value, relax.Function):
        outer = relax.analysis.free_vars(binding.value)
        held = {var: frame.values[var] for var in outer if var in frame.values}
        value: Any = Closure(binding.value, Frame(frame.mod, held, dict(frame.symbols)))
    else:
        value = evaluate(frame, binding.value, name)
    if isinstance(binding, relax.MatchCast):
        value = check_input(frame, name, binding.ty, value)
    elif isinstance(binding.value, tvm.ir.Call):
        value = conform_value(frame, binding.var.ty, value, name, binding.value)
    if frame.settle is not None:
        value = frame.settle(ExecutedBinding(binding, value, frame))
    frame.values[binding.var] = value
    if isinstance(binding.var.ty, tvm.ir.PrimType):
        frame.symbols[binding.var] = value
    return value


def record_value(record: dict[str, Array], name: str, value: Any) -> None:
    """Put the arrays of a value under unique names into `record`."""
    if isinstance(value, tuple) and not is_shape(value):
        for i, element in enumerate(value):
            record_value(record, f"{name}.{i}", element)
        return
    if isinstance(value, Closure):
        return
    record[find_free_name(name, record, "#")] = np.asarray(value)


def is_shape(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is a shape, which holds numbers instead of values."""
    return bool(value) and all(isinstance(element, int) for element in value)


def flatten_value(value: Any) -> list[Array]:
    """Iterate over the arrays of a value, depth first."""
    if isinstance(value, tuple) and not is_shape(value):
        return [array for element in value for array in flatten_value(element)]
    return [np.asarray(value)]


def evaluate(frame: Frame, expr: Any, name: str) -> Any:
    """Evaluate an expression to an array, a tuple, a shape (tuple of ints) or a number."""
    if isinstance(expr, tvm.ir.Call) and not isinstance(expr.ty, tvm.ir.PrimType):
        return evaluate_call(frame, expr, name)
    if isinstance(expr, tvm.ir.Var) and expr in frame.values:
        return frame.values[expr]
    if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.ty, relax.TensorType):
        return view_constant(expr.value)
    if isinstance(expr, relax.Tuple):
        return tuple(evaluate(frame, element, name) for element in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return evaluate(frame, expr.tuple_value, name)[expr.index]
    if isinstance(expr, relax.ShapeExpr):
        return tuple(evaluate(frame, dim, name) for dim in expr.values[:])
    if isinstance(expr, relax.SeqExpr):
        return execute_body(frame, expr, None)
    if isinstance(expr, relax.If):
        condition = bool(np.asarray(evaluate(frame, expr.cond, name)))
        return evaluate(frame, expr.true_branch if condition else expr.false_branch, name)
    if isinstance(expr, tvm.ir.Expr) and isinstance(expr.ty, tvm.ir.PrimType):
        number = frame.evaluate_number(expr)
        if number is not None:
            return number
        raise ModelError(
            f"value {name!r}: {expr} depends on a size that no input determines.", code="RQ206"
        )
    raise ModelError(
        f"value {name!r}: cannot execute a {type(expr).__name__}: {expr}.", code="RQ206"
    )


def evaluate_call(frame: Frame, call: Any, name: str) -> Any:
    """Evaluate a call of an operator or of a function of the module."""
    if isinstance(call.op, tvm.ir.GlobalVar):
        callee = frame.mod[call.op]
        if not isinstance(callee, relax.Function):
            raise ModelError(
                f"value {name!r}: {call.op.name_hint} is called without call_tir.", code="RQ206"
            )
        return call_function(Frame(frame.mod), callee, call, frame, name)
    if isinstance(call.op, tvm.ir.Op):
        operator = call.op.name.removeprefix("relax.")
        result: Any = NotImplemented
        if operator.startswith("qnn."):
            args = [evaluate(frame, arg, name) for arg in call.args[:]]
            return evaluate_qnn(operator.removeprefix("qnn."), args, call, name)
        if operator in OPERATORS:
            args = [widen_bfloat16(evaluate(frame, arg, name)) for arg in call.args[:]]
            try:
                result = OPERATORS[operator](args, call.attrs)
            except (RelayQuantError, IndexError, TypeError, ValueError) as error:
                # numpy raises these for data and types: indices, shapes, unsupported dtypes
                raise ModelError(
                    f"value {name!r}, operator relax.{operator}: {error}", code="RQ206"
                ) from error
        if result is not NotImplemented:
            return result
    if isinstance(call.op, tvm.ir.Var) and isinstance(frame.values.get(call.op), Closure):
        closure = frame.values[call.op]
        inner = Frame(frame.mod, dict(closure.frame.values), dict(closure.frame.symbols))
        inner.values[call.op] = closure
        return call_function(inner, closure.function, call, frame, name)
    return compile_call(frame.mod, call, name, lambda expr: evaluate(frame, expr, name))


def widen_bfloat16(value: Any) -> Any:
    """Cast arrays of bfloat16 to float32, also those in a tuple.

    Operators compute in float32, and the result is rounded once: numpy would round each term of a
    sum.
    """
    if isinstance(value, tuple):
        return tuple(map(widen_bfloat16, value))
    is_narrow = isinstance(value, np.ndarray) and value.dtype.name == "bfloat16"
    return value.astype("float32") if is_narrow else value


def call_function(inner: Frame, callee: Any, call: Any, frame: Frame, name: str) -> Any:
    """Execute a Relax function with its parameters bound in `inner` to the arguments of `call`."""
    for param, arg in zip(callee.params, call.args, strict=True):
        bind_input(inner, param, param.name, param.ty, evaluate(frame, arg, name))
    return execute_function(inner, callee, None)


def evaluate_qnn(operator: str, args: list[Any], call: Any, name: str) -> Any:
    """Evaluate an operator of `relax.qnn` by its function in `reference.qnn`."""
    if operator not in qnn.OPERATORS:
        raise ModelError(
            f"value {name!r}: relax.qnn.{operator} has no numpy form. "
            f"{suggest_name(operator, qnn.OPERATORS)}",
            code="RQ206",
        )
    try:
        return qnn.OPERATORS[operator](*args, **read_keywords(call))
    except RelayQuantError as error:
        raise ModelError(
            f"value {name!r}, operator relax.qnn.{operator}: {error}", code="RQ206"
        ) from error


def read_keywords(call: Any) -> dict[str, Any]:
    """Return the attributes of a call of relax.qnn as keywords of its numpy function."""
    return {key: read_mode(key, value) for key, value in read_attributes(call).items()}


def read_mode(key: str, value: Any) -> Any:
    """Convert an attribute of a qnn operator for its numpy function: a mode becomes its enum."""
    mode = {"rounding": Rounding, "compute_dtype": Arithmetic}.get(key)
    return mode(value) if mode else value


def conform_value(frame: Frame, ty: Any, value: Any, name: str, call: Any) -> Any:
    """Cast `value` to the dtype that TVM infers, and check its shape.

    Raises:
        ModelError: The shape differs from the inferred shape. Type inference or the numpy form is
            wrong.
    """
    if isinstance(ty, tvm.ir.TupleType) and isinstance(value, tuple):
        return tuple(
            conform_value(frame, part, element, name, call)
            for part, element in zip(ty.fields, value, strict=True)
        )
    if not isinstance(ty, relax.TensorType):
        return value
    array = np.asarray(value)
    dtype = get_tensor_dtype(ty)
    if dtype and array.dtype.name != dtype:
        array = array.astype(dtype)
    if isinstance(ty.shape, relax.ShapeExpr):
        sizes = [frame.evaluate_number(dim) for dim in ty.shape.values[:]]
        if len(sizes) != array.ndim or any(
            size is not None and size != actual
            for size, actual in zip(sizes, array.shape, strict=True)
        ):
            raise ModelError(
                f"value {name!r}: {describe_operator(call)} gave shape {array.shape}, TVM infers "
                f"{ty.shape}.",
                code="RQ206",
            )
    return array
