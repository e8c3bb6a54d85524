"""Dialect: one row per operator with everything that is registered with TVM, and its attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tvm import relax
from tvm.ir import Attrs, Call, Op, register_op_attr
from tvm.relax import BlockBuilder
from tvm_ffi.dataclasses import py_class

from relayquant.ir.dialect.loops import has_known_shape
from relayquant.ir.dialect.operands import Argument

#: TVM's signature of FInferType.
InferFunc = Callable[[Call, Any], Any]
#: TVM's signature of FLegalize.
LegalizeFunc = Callable[[BlockBuilder, Call], Any]
#: TVM's signature of FRelaxInferLayout.
LayoutFunc = Callable[[Call, Mapping[str, Any], Mapping[Any, Any]], Any]

#: Value of TMixedPrecisionPolicy that keeps the operand dtypes.
_MIXED_PRECISION_NEVER = 2


@dataclass(frozen=True)
class Operator:
    """One operator.

    `name` has no prefix. The attributes type is None for an operator without attributes. `infer`
    returns the type or raises QnnError. `legalize` returns the loop nest. `layout` is the rule for
    ConvertLayout.
    """

    name: str
    attrs: type | None
    arguments: tuple[Argument, ...]
    infer: InferFunc
    legalize: LegalizeFunc
    layout: LayoutFunc | None = None  #: None: operands return to their original layout
    #: float_form(call, data): the float Relax call on real `data` that this operator stands for;
    #: only for operators whose operands begin with UNARY_OPERANDS
    float_form: Callable[[Call, relax.Expr], relax.Expr] | None = None
    #: whether each element of the result depends only on the data elements at the same position
    is_elementwise: bool = False

    @property
    def full_name(self) -> str:
        """The operator's name in the IR."""
        return f"relax.qnn.{self.name}"


def _legalize_if_known(function: LegalizeFunc) -> LegalizeFunc:
    """Leave the call unchanged if a shape is unknown: a loop nest needs the shapes."""

    def legalize_known(builder: BlockBuilder, call: Call) -> Any:
        return function(builder, call) if has_known_shape(call) else call

    return legalize_known


def register_operators(operators: Sequence[Operator]) -> None:
    """Register the operators with TVM, except operators that are registered already."""
    known = set(Op.list_op_names())
    for operator in operators:
        if operator.full_name in known:
            continue
        register_op_attr(operator.full_name, "FInferType", operator.infer)
        register_op_attr(operator.full_name, "FPurity", True)
        register_op_attr(operator.full_name, "TMixedPrecisionPolicy", _MIXED_PRECISION_NEVER)
        register_op_attr(operator.full_name, "FLegalize", _legalize_if_known(operator.legalize))
        if operator.layout is not None:
            register_op_attr(operator.full_name, "FRelaxInferLayout", operator.layout)
        op = Op.get(operator.full_name)
        op.set_num_inputs(len(operator.arguments))
        for argument in operator.arguments:
            op.add_argument(argument.name, "Tensor", "")


AttrsType = TypeVar("AttrsType", bound=type)


def define_attrs(type_key: str) -> Callable[[AttrsType], AttrsType]:
    """Register a class of attributes, or return the one registered before.

    A type key is registered once per process, but this module may be imported again. Every field of
    the class is always present: one that came later has a default, which modules take that were
    written before. Rounding and arithmetic are stored as the `.value` of their enums
    (`qtypes.Rounding`, `qtypes.Arithmetic`), because printing and JSON keep only text. A process
    must import this package before it loads a module with these types.
    """
    for known in Attrs.__subclasses__():
        info = getattr(known, "__tvm_ffi_type_info__", None)
        if info is not None and info.type_key == type_key:
            return lambda _cls: known  # type: ignore[return-value]
    return py_class(type_key)


def replace_attrs(attrs: Any, **changes: Any) -> Any:
    """Copy typed attributes with changed values."""
    fields = [field.name for field in type(attrs).__tvm_ffi_type_info__.fields]
    values = {name: getattr(attrs, name) for name in fields}
    return type(attrs)(**{**values, **changes})
