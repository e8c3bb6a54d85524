"""Call of an operator -> a step whose operands and attributes are read from TVM once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, Op, PrimType

from relayquant.base.runtime import view_constant
from relayquant.codegen.eager.operand import (
    ConstantOperand,
    Operand,
    TupleOperand,
    Variable,
    find_static_type,
)
from relayquant.codegen.eager.steps.aligned import ALIGNED
from relayquant.errors import RelayQuantError
from relayquant.ir.reference import qnn
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.interpreter import conform_value, execute_binding, read_keywords
from relayquant.ir.reference.relax import OPERATORS, OperatorFunction
from relayquant.ir.reference.single_call import SingleCall
from relayquant.ir.rewrite.expressions import static_sizes


class CallStep:
    """An operator whose operands, attributes and type are read once. It runs in its numpy form, or
    as TVM compiles it.

    The interpreter has the last word: it computes what the function refuses, and says what is
    wrong with values that it does not take.
    """

    def __init__(
        self, binding: Any, result: relax.Var, function: OperatorFunction, operands: list[Operand]
    ) -> None:
        self.binding, self.result, self.function = binding, result, function
        self.attrs, self.operands = KnownAttributes(binding.value.attrs), operands
        self.known = find_static_type(result)

    @staticmethod
    def of(binding: Any, find_object: Callable[[relax.Var], relax.Var]) -> CallStep | None:
        """Return the step of a binding, which reads and writes the objects that `find_object`
        returns for variables. None if only the interpreter can evaluate it.
        """
        call = binding.value
        if isinstance(binding, relax.MatchCast) or not isinstance(call, Call):
            return None
        if not isinstance(call.op, Op) or isinstance(call.ty, PrimType):
            return None
        function = find_function(call, binding.var.name)
        operands = find_operands(call.args, find_object)
        if function is None or operands is None:
            return None
        return CallStep(binding, find_object(binding.var), function, operands)

    def run(self, frame: Frame) -> None:
        """Compute the value."""
        try:
            value = self.function([operand.read(frame) for operand in self.operands], self.attrs)
        except (RelayQuantError, IndexError, TypeError, ValueError):
            value = NotImplemented
        if value is NotImplemented:
            execute_binding(frame, self.binding)
            return
        if not isinstance(value, np.ndarray) or (value.shape, value.dtype) != self.known:
            var = self.result
            value = conform_value(frame, var.ty, value, var.name, self.binding.value)
        frame.values[self.result] = value


def find_function(call: Call, name: str) -> OperatorFunction | None:
    """Return the function of a call's operator: in numpy, or compiled if numpy has no form of it.
    `name` is of the value. None if only the interpreter can evaluate the call.
    """
    operator = call.op.name.removeprefix("relax.")
    if operator in ALIGNED:
        return ALIGNED[operator]
    if operator in OPERATORS:
        return OPERATORS[operator]
    if operator.startswith("qnn."):
        function = qnn.OPERATORS.get(operator.removeprefix("qnn."))
        if function is None:
            return None
        keywords = read_keywords(call)
        return lambda args, attrs: function(*args, **keywords)
    if call.ty_args:
        return None
    single = SingleCall(tvm.IRModule(), call, name)
    return lambda args, attrs: single.run(args)


class KnownAttributes:
    """The attributes of a call. Each is read from TVM once; arrays are tuples."""

    def __init__(self, attrs: Any) -> None:
        self._attrs = attrs

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._attrs, name)
        value = tuple(value) if isinstance(value, tvm_ffi.Array) else value
        setattr(self, name, value)
        return value


def find_operands(
    exprs: Sequence[relax.Expr], find_object: Callable[[relax.Var], relax.Var]
) -> list[Operand] | None:
    """Return the operands of expressions. None if one depends on symbolic sizes, or is a dtype."""
    found: list[Operand] = []
    for expr in exprs:
        if isinstance(expr, relax.Var) and not isinstance(expr.ty, PrimType):
            found.append(Variable(find_object(expr)))
        elif isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType):
            found.append(ConstantOperand(view_constant(expr.value)))
        elif isinstance(expr, tirx.IntImm | tirx.FloatImm):
            found.append(ConstantOperand(expr.value))
        elif isinstance(expr, relax.ShapeExpr):
            sizes = static_sizes(list(expr.values))
            if sizes is None:
                return None
            found.append(ConstantOperand(tuple(sizes)))
        elif isinstance(expr, relax.Tuple):
            fields = find_operands(expr.fields, find_object)
            if fields is None:
                return None
            found.append(TupleOperand(tuple(fields)))
        else:
            return None
    return found
