"""The state of a function call in the interpreter: values of variables and symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm

from relayquant.errors import DataError, suggest_sizes


@dataclass
class Frame:
    """The state of one function call: values of variables and symbolic dimensions."""

    mod: tvm.IRModule
    values: dict[Any, Any] = field(default_factory=dict)
    symbols: dict[Any, Any] = field(default_factory=dict)
    #: returns the value to use for an executed binding, as in `interpreter.run_values`
    settle: Callable[[Any], Any] | None = None

    def evaluate_number(self, expr: Any) -> Any:
        """Evaluate a scalar TIR expression to a number, or None if a symbol is unknown."""
        if isinstance(expr, (int, float)):
            return expr
        if isinstance(expr, tvm.tirx.IntImm):
            return int(expr.value)
        if isinstance(expr, tvm.tirx.FloatImm):
            return float(expr.value)
        if isinstance(expr, tvm.tirx.Var):
            return self.symbols.get(expr)
        analyzer = tvm.sym.Analyzer()
        for symbol, size in self.symbols.items():
            analyzer.bind(symbol, tvm.tirx.const(size, str(symbol.ty.dtype)))
        simple = analyzer.simplify(expr)
        return simple.value if isinstance(simple, (tvm.tirx.IntImm, tvm.tirx.FloatImm)) else None


def match_shape(
    frame: Frame, name: str, dims: Sequence[Any], shape: Sequence[int], *, is_input: bool = False
) -> None:
    """Bind symbolic dimensions to the sizes in `shape`. Raise DataError for a different dimension.

    For an input, the message says what to do.
    """
    text = f"({', '.join(str(getattr(dim, 'value', dim)) for dim in dims)})"
    if len(dims) != len(shape):
        raise DataError(f"{name!r} has shape {tuple(shape)}; allowed: {text}.", code="RQ302")
    for dim, size in zip(dims, shape, strict=True):
        if isinstance(dim, tvm.tirx.Var) and dim not in frame.symbols:
            frame.symbols[dim] = int(size)
    for dim, size in zip(dims, shape, strict=True):
        expected = frame.evaluate_number(dim)
        if expected is not None and expected != size:
            known = f" with {dim} = {expected}" if not isinstance(dim, tvm.tirx.IntImm) else ""
            wanted = [int(d) if isinstance(d, tvm.tirx.IntImm) else str(d) for d in dims]
            advice = suggest_sizes(name, wanted, shape) if is_input else ""
            raise DataError(
                f"{name!r} has shape {tuple(shape)}; allowed: {text}{known}.{advice}", code="RQ302"
            )
