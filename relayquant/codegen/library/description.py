"""Lowered module -> what a library says about itself: functions, inputs, outputs, target.

The text is plain data, JSON, which whoever deploys a library reads without a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.target import Target

from relayquant.base.storage.files import write_text
from relayquant.codegen.kernels.isa.emitted import list_linux_flags
from relayquant.codegen.kernels.isa.select import list_product_lines
from relayquant.codegen.kernels.isa.target import read_cpu, read_triple
from relayquant.codegen.library.linking import write_object
from relayquant.codegen.library.llvm_text import escape
from relayquant.ir.ledger import InterfaceValue, find_ledger
from relayquant.ir.rewrite.entry import find_entry
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.state import StatePlace, find_places, flatten_type, get_state

#: Data of a library: the JSON text, which ends with a zero byte.
DESCRIPTION_SYMBOL = "relayquant_description"
#: Functions that relayquant adds to a module.
OWN_PREFIX = "relayquant_"
#: LLVM IR of the object file with the text.
SOURCE = """\
target triple = "{triple}"
@{symbol} = constant [{size} x i8] c"{text}\\00", align 1
"""


def describe_module(lowered: tvm.IRModule, target: Target) -> dict[str, Any]:
    """Describe a lowered module as plain data.

    Returns:
        "target": triple, CPU and the flags that Linux names on a machine that can run it (see
        `list_linux_flags`); "products": see `list_product_lines`; "entry": name of the model's
        function, the first one if there are several; "functions": name -> "inputs" and "outputs",
        rows of name, shape and dtype, and for quantized values scale and zero_point. A free size
        is given by its name. "state": rows of name, shape and dtype, which are left out of inputs
        and outputs.
    """
    ledger, state = find_ledger(lowered), get_state(lowered)
    places = find_places(lowered, state)
    named = ((gvar.name_hint, func) for gvar, func in list_functions(lowered).items())
    known = {name: func for name, func in named if is_public(name, func)}
    entry = find_entry(lowered) or min(known, default="")
    rows = ([*ledger.inputs], [*ledger.outputs]) if ledger is not None else ([], [])
    functions = {
        name: describe_function(func, places.get(name), *(rows if name == entry else ([], [])))
        for name, func in known.items()
    }
    return {
        "target": {
            "triple": read_triple(target),
            "cpu": read_cpu(target),
            "flags": list_linux_flags(target),
        },
        "products": list_product_lines(target),
        "entry": entry,
        "functions": functions,
        "state": [
            {"name": value.name, "shape": [*value.shape], "dtype": value.dtype} for value in state
        ],
    }


def is_public(name: str, func: relax.Function) -> bool:
    """Whether a function is the user's, and can be called by name."""
    return "global_symbol" in (func.attrs or {}) and not name.startswith(OWN_PREFIX)


def describe_function(
    func: relax.Function,
    place: StatePlace | None,
    inputs: Sequence[InterfaceValue],
    outputs: Sequence[InterfaceValue],
) -> dict[str, Any]:
    """Describe a function. `inputs` and `outputs`: what the ledger knows of them."""
    held = set() if place is None else {*place.names}
    by_name = {value.name: value for value in inputs}
    params = [param for param in func.params if param.name not in held]
    results = [*flatten_type(func.ret_ty)]
    results = results[: len(results) - len(held)]
    names = [value.name for value in outputs[: len(results)]]
    names += [f"output{i}" for i in range(len(names), len(results))]
    known = [*outputs, *[None] * len(results)]
    return {
        "inputs": [
            {"name": param.name, **describe_value(param.ty, by_name.get(param.name))}
            for param in params
        ],
        "outputs": [
            {"name": name, **describe_value(ty, value)}
            for name, ty, value in zip(names, results, known, strict=False)
        ],
    }


def describe_value(ty: Any, value: InterfaceValue | None) -> dict[str, Any]:
    """Describe a value by its type. A parameter that is a shape has the dtype "shape"."""
    if isinstance(ty, relax.ShapeType):
        return {"shape": [*read_sizes(ty.values)], "dtype": "shape"}
    shape = getattr(getattr(ty, "shape", None), "values", None)
    row = {"shape": None if shape is None else [*read_sizes(shape)], "dtype": str(ty.dtype)}
    if value is not None and value.scale:
        row |= {"scale": [*map(float, value.scale)], "zero_point": [*map(int, value.zero_point)]}
    return row


def read_sizes(sizes: Sequence[Any] | None) -> Iterator[int | str]:
    """Read the sizes of a shape. A free one is given by its name."""
    for size in sizes or ():
        yield int(size) if isinstance(size, int | tvm.tirx.IntImm) else str(size)


def write_description(text: str, target: Target, folder: Path) -> Path:
    """Write an object file with the text as data."""
    source = folder / "description.ll"
    values: Mapping[str, Any] = {
        "triple": read_triple(target),
        "symbol": DESCRIPTION_SYMBOL,
        "size": len(text.encode()) + 1,
        "text": escape(text),
    }
    write_text(source, SOURCE.format(**values))
    return write_object(source)
