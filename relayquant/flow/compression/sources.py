"""Weight sources: module and `params` -> its tensors without a copy. Compression reads them one
at a time, because models have gigabytes of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax

from relayquant.base.runtime import view_constant
from relayquant.errors import ModelError, format_count, suggest_name
from relayquant.ir.rewrite.constants import LARGEST, count_huge, holds_constant
from relayquant.ir.rewrite.function import list_functions

#: Address of a tensor, or name of a parameter. A second number is the matrix of a stack, or -1 for
#: all matrices as rows.
SourceKey: TypeAlias = int | str | tuple[int | str, int]


@dataclass(frozen=True, eq=False)
class WeightSource:
    """A tensor that functions read: a constant, or the value of a parameter.

    Attributes:
        key: Equal for uses of the same tensor.
        shape, dtype: Shape and dtype of the values.
        read: Returns the values. A mapping that loads on access loads them each time.
        counted: Number of values that are not finite and number of values beyond `LARGEST`, if
            known.
        is_stack: Whether each row is a matrix of a product and not a row of a table.
    """

    key: SourceKey
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    counted: tuple[int, int] | None = None
    is_stack: bool = False

    @property
    def array(self) -> np.ndarray:
        """Return the values. They are read-only, a view or freshly loaded. Do not keep them."""
        array = self.read().view()
        array.flags.writeable = False
        return array

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Number of values that are NaN or infinite, and number of finite values beyond
        `LARGEST`.
        """
        return count_unusable(self.array) if self.counted is None else self.counted

    @property
    def not_finite(self) -> int:
        """Number of values that are NaN or infinite."""
        return self.counts[0]


def count_unusable(array: np.ndarray) -> tuple[int, int]:
    """Count values that are NaN or infinite, and finite values beyond `LARGEST`."""
    low, high = array.min(initial=0), array.max(initial=0)  # NaN fails both comparisons
    if low >= -LARGEST and high <= LARGEST:
        return 0, 0
    return int((~np.isfinite(array)).sum()), count_huge(array)


def read_constant(tensor: tvm.runtime.Tensor) -> WeightSource:
    """Read a TVM tensor."""
    shape = tuple(map(int, tensor.shape))
    return WeightSource(tensor.data_ptr(), shape, str(tensor.dtype), partial(view_constant, tensor))


def read_value(params: Mapping[str, Any], name: str) -> np.ndarray:
    """Read a value of `params` as an array, without a copy if it is in memory."""
    value = params[name]
    tensor = find_tensor(value)
    return np.asarray(value) if tensor is None else view_constant(tensor)


def find_tensor(value: Any) -> tvm.runtime.Tensor | None:
    """Return the TVM tensor of a value of `params`, if it has one."""
    for each in (value, getattr(value, "data", None)):  # a parameter of relax.frontend.nn holds one
        if isinstance(each, tvm.runtime.Tensor):
            return each
    return None


def open_params(
    mod: tvm.IRModule, params: Mapping[str, Any] | None
) -> dict[relax.Var, WeightSource]:
    """Map the parameters of the module's functions to their values. Each value is read once.

    `relax.frontend.nn` lists "layers.0.weight" where functions may have "layers_0_weight". Both are
    accepted. So is {function: [values in order]}, which `tvm.relax.frontend.detach_params` returns.

    Raises:
        ModelError: no function has a parameter of that name, or its shape or dtype differ.
    """
    if not params:
        return {}
    params = name_params(mod, params)
    names = {name.replace(".", "_"): name for name in params} | {name: name for name in params}
    found: dict[relax.Var, WeightSource] = {}
    sources: dict[str, WeightSource] = {}
    known: set[str] = set()
    functions = list_functions(mod).values()
    for func in functions:
        attrs = dict(func.attrs.items()) if func.attrs else {}
        for param in func.params[int(attrs.get("num_input", 0)) :]:
            known.add(param.name)
            name = names.get(param.name)
            if name is None:
                continue
            if name not in sources:
                sources[name] = look_at(params, name)
            found[param] = sources[name]
        for param in func.params:
            if param in found:
                check_param(param, names[param.name], found[param])
    for name in params:
        if name not in sources and not holds_constant(functions, params[name]):
            raise ModelError(
                f"params has {name!r}, which no function takes. "
                f"{suggest_name(name, sorted(known))} No constant of the module has its value.",
                code="RQ103",
            )
    return found


def look_at(params: Mapping[str, Any], name: str) -> WeightSource:
    """Load a value of `params` once to find its properties."""
    tensor = find_tensor(value := params[name])
    if tensor is not None:
        return read_constant(tensor)
    array = np.asarray(value)
    is_weight = array.ndim in (2, 3) and array.dtype == "float32"
    counted = count_unusable(array) if is_weight else None  # so it need not be loaded again
    read = partial(read_value, params, name)
    return WeightSource(name, array.shape, str(array.dtype), read, counted)


def name_params(mod: tvm.IRModule, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `params` by name; {function: [values in order]} is resolved.

    Raises:
        ModelError: a function has more or fewer parameters, or two values have the same name.
    """
    functions = {gvar.name_hint: func for gvar, func in mod.functions_items()}
    lists = {
        key: value
        for key in params
        if key in functions and isinstance(value := params[key], list | tuple)
    }
    if not lists:
        return params
    named = {key: params[key] for key in params if key not in lists}
    for key, value in lists.items():
        func = functions[key]
        weights = func.params[int(func.attrs.get("num_input", len(func.params))) :]
        if len(weights) != len(value):
            raise ModelError(
                f"params[{key!r}] holds {format_count(len(value), 'value')}, {key} has "
                f"{format_count(len(weights), 'parameter')} behind its inputs. Pass what "
                "detach_params returned with this module.",
                code="RQ204",
            )
        for weight, array in zip(weights, value, strict=True):
            if named.setdefault(weight.name, array) is not array:
                raise ModelError(
                    f"params has two values for {weight.name!r}, which several functions take; "
                    "rename one of these parameters.",
                    code="RQ204",
                )
    return named


def check_param(param: relax.Var, name: str, source: WeightSource) -> None:
    """Raise ModelError unless a tensor has the declared type of a parameter."""
    sizes = [int(size) if isinstance(size, tvm.tirx.IntImm) else None for size in param.ty.shape]
    fits = len(sizes) == len(source.shape) and all(
        size in (None, have) for size, have in zip(sizes, source.shape, strict=True)
    )
    if not fits or str(param.ty.dtype) != source.dtype:
        raise ModelError(
            f"params[{name!r}] is {source.dtype} of shape {source.shape}; the module "
            f"wants {param.ty.dtype} of shape {tuple(param.ty.shape)}.",
            code="RQ204",
        )


def bind_params(mod: tvm.IRModule, params: Mapping[relax.Var, WeightSource]) -> tvm.IRModule:
    """Bind these parameters. The ones that functions still read become constants, one tensor for
    each, which all readers share.
    """
    tensors: dict[SourceKey, tvm.runtime.Tensor] = {}
    functions = dict(mod.functions_items())
    for gvar, func in list_functions(mod).items():
        own = [param for param in func.params if param in params]
        read = set(relax.analysis.free_vars(func.body))
        kept = [param for param in func.params if param not in params or param in read]
        if len(kept) < len(func.params):
            functions[gvar] = relax.Function(
                kept, func.body, func.ret_ty, func.is_pure, func.attrs, func.span
            )
        for param in own:
            key = params[param].key
            if param in read and key not in tensors:
                tensors[key] = tvm.runtime.tensor(np.ascontiguousarray(params[param].array))
    mod = tvm.IRModule(functions, attrs=mod.attrs)
    names = {
        gvar.name_hint: {p.name: tensors[params[p].key] for p in func.params if p in params}
        for gvar, func in list_functions(mod).items()
    }
    for name, own in names.items():
        if own:
            mod = relax.transform.BindParams(name, own)(mod)
    return mod
