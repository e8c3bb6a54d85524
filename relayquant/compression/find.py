"""Which constants of a module are weights of products, or tables that rows are taken of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.dialect.legality import iterate_bindings
from relayquant.errors import ModelError, format_count, suggest_name
from relayquant.rewrite.graph import call_name
from relayquant.runtime import view_constant

#: A constant, and whether its axes are swapped.
WeightKey: TypeAlias = tuple[int, bool]

#: Operators that move a weight on its way to a product.
TRANSPOSE = "relax.permute_dims"

#: Modes of take whose rows `qnn.grouped_take` can give: "fast" reads whatever lies in memory at an
#: index that is not there; as in `quantize` it counts from the end then, as frontends mean it.
BOUNDED_MODES = frozenset({"fast", "wrap", "clip"})


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One operator that reads a constant weight.

    Attributes:
        function: Name of the function it is in.
        name: Name of the value it computes.
        op: "matmul" or "take".
        var: Variable of that value.
        data: The operand that is no weight.
        constant: The weight, as the module has it.
        is_transposed: Whether the rows (outputs) of the weight are the columns of the constant.
        reason: Why it cannot be compressed; "" if it can.
        is_clipped: Whether indices beyond the table read its first or last row.
    """

    function: str
    name: str
    op: str
    var: relax.Var
    data: relax.Expr
    constant: GenericConst
    is_transposed: bool = False
    reason: str = ""
    is_clipped: bool = False

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.op} at {self.name!r} of {self.function!r}"

    @property
    def tensor_key(self) -> int:
        """Equal for uses of one constant, in whatever form."""
        return int(self.constant.value.data_ptr())

    @property
    def key(self) -> WeightKey:
        """Equal for uses that read one constant in one form."""
        return self.tensor_key, self.is_transposed

    def refuse(self, reason: str) -> WeightUse:
        """The use that stays float for a reason."""
        return replace(self, reason=self.reason or reason)

    @property
    def array(self) -> np.ndarray:
        """The weight (N, K): rows are outputs of a product, or the rows that are taken. It lies in
        the memory of the constant and may not be written.
        """
        array = view_constant(self.constant.value)
        return array.T if self.is_transposed else array

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight, without a look at its values."""
        rows, columns = map(int, self.constant.value.shape)
        return (columns, rows) if self.is_transposed else (rows, columns)


def bind_weights(mod: tvm.IRModule, params: Mapping[str, Any] | None) -> tvm.IRModule:
    """The module with `params` as constants in every function that has parameters of their names;
    one tensor for each, whoever reads it.

    `relax.frontend.nn` names "layers.0.weight" in its list of parameters what may be
    "layers_0_weight" in functions: both are taken. {function: [values in order]}, which
    `tvm.relax.frontend.detach_params` gives, is taken too.

    Raises:
        ModelError: no function has a parameter of that name, or shape or dtype are others.
    """
    if not params:
        return mod
    params = name_params(mod, params)
    tensors = {name: make_tensor(value) for name, value in params.items()}
    tensors |= {name.replace(".", "_"): tensor for name, tensor in tensors.items()}
    found: set[str] = set()
    names: set[str] = set()
    for gvar, func in mod.functions_items():
        if not isinstance(func, relax.Function):
            continue
        attrs = dict(func.attrs.items()) if func.attrs else {}
        first = int(attrs.get("num_input", 0))
        own = {p.name: tensors[p.name] for p in func.params[first:] if p.name in tensors}
        names |= {param.name for param in func.params[first:]}
        found |= own.keys()
        for param in func.params:
            if param.name in own:
                check_param(param, own[param.name])
        if own:
            mod = relax.transform.BindParams(gvar.name_hint, own)(mod)
    for name in params:
        if not {name, name.replace(".", "_")} & found:
            raise ModelError(
                f"params has {name!r}, which no function takes. {suggest_name(name, sorted(names))}"
            )
    return mod


def name_params(mod: tvm.IRModule, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` by their names: {function: [values in order]} is resolved.

    Raises:
        ModelError: a function has more or fewer parameters, or others of one name another value.
    """
    named: dict[str, Any] = {}
    functions = {gvar.name_hint: func for gvar, func in mod.functions_items()}
    for key, value in params.items():
        if not isinstance(value, list | tuple) or key not in functions:
            named[key] = value
            continue
        func = functions[key]
        attrs = dict(func.attrs.items()) if func.attrs else {}
        weights = func.params[int(attrs.get("num_input", len(func.params))) :]
        if len(weights) != len(value):
            raise ModelError(
                f"params[{key!r}] holds {format_count(len(value), 'value')}, {key} has "
                f"{format_count(len(weights), 'parameter')} behind its inputs. Pass what "
                "detach_params returned with this module."
            )
        for weight, array in zip(weights, value, strict=True):
            if named.setdefault(weight.name, array) is not array:
                raise ModelError(
                    f"params has two values for {weight.name!r}, which several functions take; "
                    "rename one of these parameters."
                )
    return named


def make_tensor(value: Any) -> tvm.runtime.Tensor:
    """A value of `params` as a tensor of TVM; one that is none is copied."""
    if isinstance(value, tvm.runtime.Tensor):
        return value
    data = getattr(value, "data", None)  # a parameter of relax.frontend.nn
    if isinstance(data, tvm.runtime.Tensor):
        return data
    return tvm.runtime.tensor(np.ascontiguousarray(value))


def check_param(param: relax.Var, tensor: tvm.runtime.Tensor) -> None:
    """Raise ModelError unless a tensor is what a parameter is declared to be."""
    sizes = [int(size) if isinstance(size, tvm.tirx.IntImm) else None for size in param.ty.shape]
    fits = len(sizes) == len(tensor.shape) and all(
        size in (None, have) for size, have in zip(sizes, tensor.shape, strict=True)
    )
    if not fits or str(param.ty.dtype) != str(tensor.dtype):
        raise ModelError(
            f"params[{param.name!r}] is {tensor.dtype} of shape {tuple(tensor.shape)}; the module "
            f"wants {param.ty.dtype} of shape {tuple(param.ty.shape)}."
        )


def find_weights(mod: tvm.IRModule) -> list[WeightUse]:
    """Every operator of every function that reads a weight, in the order of functions' names."""
    uses: list[WeightUse] = []
    functions = sorted(mod.functions_items(), key=lambda item: item[0].name_hint)
    for gvar, func in functions:
        if isinstance(func, relax.Function):
            uses += find_in_function(gvar.name_hint, func)
    return uses


def find_in_function(function: str, func: relax.Function) -> Iterator[WeightUse]:
    """Those of one function."""
    values: dict[relax.Var, relax.Expr] = {}
    for binding in iterate_bindings(func):
        value = binding.value
        values[binding.var] = value
        if not isinstance(value, Call):
            continue
        op = call_name(value)
        if op == "relax.matmul":
            found = resolve(values, value.args[1])
            if found is not None:
                constant, is_swapped = found
                # The constant of a product has its outputs last.
                reason = explain_matmul(value, constant)
                yield WeightUse(
                    function, binding.var.name, "matmul", binding.var, value.args[0], constant,
                    not is_swapped, reason,
                )  # fmt: skip
        elif op == "relax.take":
            found = resolve(values, value.args[0])
            if found is not None and len(found[0].value.shape) == 2:
                yield WeightUse(
                    function, binding.var.name, "take", binding.var, value.args[1], found[0],
                    found[1], explain_take(value, found[0]), str(value.attrs.mode) == "clip",
                )  # fmt: skip


def resolve(values: Mapping[Any, Any], expr: relax.Expr) -> tuple[GenericConst, bool] | None:
    """(the float constant that an operand is, whether its two axes are swapped), else None."""
    is_swapped = False
    while isinstance(expr, relax.Var):
        value = values.get(expr)
        if isinstance(value, relax.Var):
            expr = value
        elif isinstance(value, Call) and call_name(value) == TRANSPOSE:
            axes = value.attrs.axes
            if len(value.args[0].ty.shape) != 2 or (axes and [int(a) % 2 for a in axes] != [1, 0]):
                return None
            expr, is_swapped = value.args[0], not is_swapped
        elif isinstance(value, GenericConst):
            expr = value
        else:
            return None
    if not isinstance(expr, GenericConst) or not isinstance(expr.value, tvm.runtime.Tensor):
        return None
    return (expr, is_swapped) if str(expr.value.dtype).startswith("float") else None


def explain_matmul(call: Call, constant: GenericConst) -> str:
    """Why a product by a constant cannot be compressed; "" if it can."""
    if len(constant.value.shape) != 2:
        return f"its weight has {format_count(len(constant.value.shape), 'dimension')}, not 2"
    if {str(call.ty.dtype), str(call.args[0].ty.dtype), str(constant.value.dtype)} != {"float32"}:
        return "it does not compute in float32"
    if call.args[0].ty.ndim < 1:
        return "the rank of its data is not known"
    return explain_values(constant)


def explain_take(call: Call, constant: GenericConst) -> str:
    """Why rows of a constant cannot be taken of codes; "" if they can."""
    axis = call.attrs.axis
    if axis is None or int(axis) != 0:
        return "it does not take rows"
    if str(constant.value.dtype) != "float32":
        return f"its table is {constant.value.dtype}"
    if str(call.args[1].ty.dtype) not in ("int32", "int64"):
        return f"its indices are {call.args[1].ty.dtype}"
    if str(call.attrs.mode) not in BOUNDED_MODES:
        return f"its indices are bounded by mode {str(call.attrs.mode)!r}"
    return explain_values(constant)


def explain_values(constant: GenericConst) -> str:
    """Why no codes can stand for the values of a weight; "" if they can."""
    array = view_constant(constant.value)
    if not array.size:
        return "its weight is empty"
    # the sum is not finite where a value is none, and reads the weight without a copy
    if np.isfinite(array.sum(dtype="float64")):
        return ""
    return f"its weight has {format_count(int((~np.isfinite(array)).sum()), 'value')} not finite"
