"""State of a module: values that one call gives and the next call takes, described by name.

    main(x, h) -> (y, h')     with state "h": the next call takes h' as h

Readers attach the description, stages keep it, and compiled code carries it to whoever runs it.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relayquant.base.arguments import check_arguments, check_fields
from relayquant.errors import ModelError, format_count
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.entry import attach_attrs, find_attrs
from relayquant.ir.rewrite.function import add_functions, list_functions
from relayquant.ir.rewrite.graph import iterate_results, result_expr

#: Attribute of the model function, or of a module with several: JSON text, a list of values.
STATE_ATTR = "relayquant.state"


@check_fields
@dataclass(frozen=True, eq=False)
class StateValue:
    """A value that lives from call to call.

    Attributes:
        name: Name of the parameter in every function that takes the value.
        shape: Its sizes. They are known, because the first call needs a value.
        dtype: Its dtype, such as "float32".
        initial: What the first call takes, an array of this shape and dtype. None: zeros.

    Raises:
        ConfigError: an attribute is of another type.
        ModelError: `initial` has another shape or dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    initial: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        name = self.dtype.__name__ if isinstance(self.dtype, type) else str(self.dtype)
        object.__setattr__(self, "dtype", name)
        given = np.asarray(self.initial) if isinstance(self.initial, np.generic) else self.initial
        object.__setattr__(self, "initial", given)
        if given is None:
            return
        if tuple(given.shape) != self.shape or str(given.dtype) != self.dtype:
            raise ModelError(
                f"State {self.name!r}: its initial value is {given.dtype} of shape "
                f"{tuple(given.shape)}; allowed: {self.dtype} of shape {self.shape}.",
                code="RQ204",
            )
        if not np.frombuffer(given.tobytes(), "uint8").any():  # of bytes: -0.0 is no zero
            object.__setattr__(self, "initial", None)

    @property
    def value(self) -> np.ndarray:
        """A new array with the initial value."""
        return np.zeros(self.shape, self.dtype) if self.initial is None else self.initial.copy()


@dataclass(frozen=True)
class StatePlace:
    """Where a function has state.

    Attributes:
        first: Number of the parameter that is the first state.
        names: The states that the function takes, in order. As many of its last results are their
            new values.
    """

    first: int
    names: tuple[str, ...]


@check_arguments
def with_state(mod: tvm.IRModule, values: Sequence[StateValue]) -> tvm.IRModule:
    """Return the module with a description of its state. `mod` is not changed.

    Every function with parameters of the states' names takes them side by side, in the order of
    `values`, as the last ones before its weights, and its last results are their new values.

    Args:
        values: The state. [] removes the description.

    Raises:
        ModelError: a name is given twice or no function has it, or the parameters or results of a
            function do not fit.
    """
    names = [value.name for value in values]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(
            f"State {twice[0]!r} is given twice. Give each state its own name.", code="RQ204"
        )
    places = find_places(mod, values)
    for name in names:
        if not any(name in place.names for place in places.values()):
            functions = ", ".join(gvar.name_hint for gvar in list_functions(mod))
            raise ModelError(
                f"State {name!r} is no parameter of {functions}. Name a parameter, or leave the "
                "state out.",
                code="RQ204",
            )
    if values:
        return attach_attrs(mod, {STATE_ATTR: json.dumps([to_plain(each) for each in values])})
    cleared = {
        gvar: func.without_attr(STATE_ATTR)
        for gvar, func in mod.functions_items()
        if STATE_ATTR in (func.attrs or {})
    }
    return add_functions(mod.without_attr(STATE_ATTR), cleared)


@check_arguments
def get_state(mod: tvm.IRModule) -> tuple[StateValue, ...]:
    """Return the state of a module, in order. () if it has none."""
    text = find_attrs(mod).get(STATE_ATTR)
    return () if text is None else tuple(from_plain(each) for each in json.loads(str(text)))


def find_places(mod: tvm.IRModule, values: Sequence[StateValue]) -> dict[str, StatePlace]:
    """Find where each function has state: function name -> place.

    Raises:
        ModelError: parameters or results of a function do not fit the state.
    """
    places = {}
    for gvar, func in list_functions(mod).items():
        found = find_place(gvar.name_hint, func, values)
        if found is not None:
            places[gvar.name_hint] = found
    return places


def add_initial_state(mod: tvm.IRModule, inputs: Any) -> Any:
    """Return the inputs of main, by name or in order, with the initial state if they lack it."""
    place = find_places(mod, get_state(mod)).get("main")
    if place is None:
        return inputs
    initial = {value.name: value.value for value in get_state(mod) if value.name in place.names}
    if isinstance(inputs, Mapping):
        return {**initial, **inputs}
    if len(inputs) != len(mod["main"].params) - len(initial):
        return inputs
    return [*inputs[: place.first], *initial.values(), *inputs[place.first :]]


def pair_states(graph: Graph) -> list[tuple[str, str]]:
    """Return (parameter, value that becomes it) of every state of main, by name. A new value that
    is no variable is left out.
    """
    place = find_places(graph.mod, get_state(graph.mod)).get("main")
    if place is None:
        return []
    results = list(iterate_results(result_expr(graph)))
    pairs = zip(place.names, results[len(results) - len(place.names) :], strict=True)
    return [(name, new.name) for name, new in pairs if isinstance(new, relax.Var)]


def find_place(
    function: str, func: relax.Function, values: Sequence[StateValue]
) -> StatePlace | None:
    """Find where a function has state. None if it has no state. ModelError if it does not fit."""
    params = [param.name for param in func.params]
    taken = [value for value in values if value.name in params]
    if not taken:
        return None
    names = tuple(value.name for value in taken)
    first = params.index(names[0])
    if tuple(params[first : first + len(names)]) != names:
        raise ModelError(
            f"{function!r} takes {', '.join(params)}; its state {', '.join(names)} must be "
            "neighbours in this order.",
            code="RQ204",
        )
    types = list(flatten_type(func.ret_ty))
    if len(types) < len(taken):
        raise ModelError(
            f"{function!r} has {format_count(len(types), 'result')} and takes "
            f"{format_count(len(taken), 'state')}. Its last results must be the new values of "
            f"{', '.join(names)}.",
            code="RQ204",
        )
    ends = types[len(types) - len(taken) :]
    for value, param, end in zip(taken, func.params[first:], ends, strict=False):
        for what, ty in (("parameter", param.ty), ("new value", end)):
            if not is_type(ty, value):
                raise ModelError(
                    f"State {value.name!r} is {value.dtype} of shape {value.shape}, and its {what} "
                    f"in {function!r} is {ty}. Both must be the same, with known sizes.",
                    code="RQ204",
                )
    return StatePlace(first, names)


def flatten_type(ty: Any) -> Iterator[Any]:
    """Iterate over the types of a result. Nested tuples are taken apart."""
    if isinstance(ty, relax.TupleType):
        for each in ty.fields:
            yield from flatten_type(each)
    else:
        yield ty


def is_type(ty: Any, value: StateValue) -> bool:
    """Whether a type is a tensor of the dtype and sizes of a state."""
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) != value.dtype:
        return False
    sizes = getattr(ty.shape, "values", None)
    if sizes is None or not all(isinstance(size, tvm.tirx.IntImm) for size in sizes):
        return False
    return tuple(int(size) for size in sizes) == value.shape


def to_plain(value: StateValue) -> dict[str, Any]:
    """Convert to plain data. The bytes of an initial value are written as base64."""
    row: dict[str, Any] = {"name": value.name, "shape": [*value.shape], "dtype": value.dtype}
    if value.initial is not None:
        row["initial"] = base64.b64encode(np.ascontiguousarray(value.initial).tobytes()).decode()
    return row


def from_plain(row: Any) -> StateValue:
    """Convert from plain data.

    Raises:
        ModelError: the data is damaged.
    """
    try:
        name, shape, dtype = str(row["name"]), [int(size) for size in row["shape"]], row["dtype"]
        initial = None
        if "initial" in row:
            data = base64.b64decode(row["initial"], validate=True)
            if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
                raise ValueError(f"{format_count(len(data), 'byte')} for the shape {shape}")
            initial = np.frombuffer(data, dtype).reshape(shape)
        return StateValue(name, tuple(shape), dtype, initial)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"The module's description of its state is damaged: {error}. Attach it again with "
            "with_state.",
            code="RQ204",
        ) from error
