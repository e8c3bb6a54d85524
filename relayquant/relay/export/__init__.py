"""Relay writer: a Relax module -> Relay text and parameters, operator by operator.

Each operator is one row in `float_rows` or `quantized_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call

from relayquant.base.arguments import check_arguments
from relayquant.errors import ModelError, RelayQuantError, format_count
from relayquant.ir.dialect.qnn.recurrent import RECURRENT_OPERATORS
from relayquant.ir.fourier import write_products
from relayquant.ir.rewrite.attributes import find_unmodelled
from relayquant.ir.rewrite.bind import Model, bind_model
from relayquant.ir.rewrite.graph import Graph, call_name, constant_value, tensor_dtype, tensor_shape
from relayquant.relay import syntax
from relayquant.relay.export.base import ExportSite, Statements
from relayquant.relay.export.float_rows import FLOAT_ROWS
from relayquant.relay.export.quantized_rows import QUANTIZED_EXPORTS
from relayquant.relay.export.releases import NEWEST, Release, find_release
from relayquant.relay.export.shapes import fix_shapes
from relayquant.relay.printer import print_module

#: Relax operator name -> its writer.
EXPORTS = {**{op: row.export for op, row in FLOAT_ROWS.items()}, **QUANTIZED_EXPORTS}
#: What to do about layers that compute all steps in one operator.
RECURRENT_ADVICE = (
    ": Relay has no recurrent layers. Write the model with relayquant.export_onnx, or write the "
    "layer as a loop over its steps in the source framework and export the model again"
)


@check_arguments
def to_text(
    mod: Model,
    *,
    exact: bool = True,
    release: str = NEWEST,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[str, dict[str, np.ndarray]]:
    """Write function main in Relay's text form. Returns the text and the constants by parameter
    name.

    The given TVM release reads it with `tvm.relay.parse` (`tvm.parser.fromtext` before 0.14) and
    builds it with `relay.build(mod, target, params=params)`. Scalars are in the text. There is no
    metadata section.

    Args:
        mod: A float or integer module with one dataflow block in main.
        exact: Write half-to-even rounding, which QNN lacks, as float32 arithmetic with the same
            bits. The products stay `qnn.conv2d`, `qnn.dense` and `qnn.batch_matmul`. False: write
            `qnn.quantize`, `qnn.requantize` (TONEAREST), `qnn.add`, ..., which the patterns of back
            ends look for. Values halfway between two integers, and the sums of `qnn.add`, then
            differ by one step.
        release: TVM release, "0.8" to "0.19". Only attributes that it knows are written.
        shapes: {input: shape}, for inputs with symbolic dimensions, which Relay cannot build.

    Raises:
        ConfigError: the release is unknown, or a shape does not fit.
        ModelError: operators cannot be written for the release (all are listed), or a dimension is
            symbolic.
    """
    wanted = find_release(release)
    graph = Graph(fix_shapes(Graph(write_products(bind_model(mod))).mod, shapes or {}))
    names = Statements(())
    params: dict[relax.Var, syntax.Param] = {}
    for var in graph.func.params:
        kind = _tensor_type(var)
        params[var] = syntax.Param(names.unique(var.name), kind)
    out = Statements([param.name for param in params.values()])
    writer = _Writer(graph, out, exact, wanted)
    writer.values.update({var: syntax.Ref(param.name) for var, param in params.items()})
    block, constants = writer.write()
    weights = tuple(
        syntax.Param(name, syntax.TensorType(array.shape, str(array.dtype)))
        for name, array in constants.items()
    )
    main = syntax.Function((*params.values(), *weights), block)
    return print_module(syntax.Module({"main": main})), constants


def _tensor_type(var: relax.Var) -> syntax.TensorType:
    shape = tensor_shape(var)
    if shape is None or not tensor_dtype(var):
        raise ModelError(
            f"Parameter {var.name!r} is not a tensor of known rank, which Relay needs.",
            code="RQ203",
        )
    dims = tuple(dim if isinstance(dim, int) else None for dim in shape)
    return syntax.TensorType(dims, tensor_dtype(var))


class _Writer:
    """Writes the values of main in order, and collects the operators that cannot be written."""

    def __init__(self, graph: Graph, out: Statements, exact: bool, release: Release) -> None:
        self.graph = graph
        self.out = out
        self.exact = exact
        self.release = release
        self.values: dict[relax.Var, Any] = {}
        self.refused: list[str] = []

    def write(self) -> tuple[syntax.Block, dict[str, np.ndarray]]:
        """Return (body of main, constants that it reads)."""
        for binding in self.graph.bindings:
            var, value = binding.var, binding.value
            try:
                self.values[var] = self.expression(var, value)
            except RelayQuantError as error:
                kind = call_name(value) if isinstance(value, Call) else type(value).__name__
                self.refused.append(f"{var.name} ({kind.removeprefix('relax.')}): {error}")
                self.values[var] = syntax.Ref(var.name)
        if self.refused:
            raise ModelError(
                f"{format_count(len(self.refused), 'value')} cannot be written in the Relay of TVM "
                f"{self.release}:\n  " + "\n  ".join(self.refused),
                code="RQ203",
            )
        result = self.operand(self.graph.func.body.body, "output")
        if isinstance(result, tuple):
            result = syntax.TupleExpr(result)
        block = syntax.Block(tuple(self.out.statements), result)
        read = _names_read(block)
        kept = {name: array for name, array in self.out.params.items() if name in read}
        return block, kept

    def expression(self, var: relax.Var, value: relax.Expr) -> Any:
        if var in self.graph.casts:
            raise ModelError("match_cast has no counterpart", code="RQ203")
        if not isinstance(value, Call):
            return self.operand(value, var.name)
        row = EXPORTS.get(call_name(value))
        if row is None:
            advice = RECURRENT_ADVICE if call_name(value) in RECURRENT_OPERATORS else ""
            raise ModelError(f"the operator has no counterpart{advice}", code="RQ203")
        if call_name(value) in FLOAT_ROWS:
            named = FLOAT_ROWS[call_name(value)].attributes
            unwritten = find_unmodelled([value], named.split())
            if unwritten is not None:
                raise ModelError(f"{unwritten}, which is not written", code="RQ203")
        roles = [argument.name for argument in getattr(value.op, "arguments", ())]
        args = tuple(
            self.operand(arg, f"{var.name}_{roles[i] if i < len(roles) else i}")
            for i, arg in enumerate(value.args)
        )
        return row(ExportSite(value, var.name, args, self.out, self.exact, self.release))

    def operand(self, value: Any, hint: str) -> Any:
        """Return an operand in Relay. A tuple is a tuple. An operand that is not a tensor (a shape,
        a bound) is None.
        """
        if isinstance(value, relax.Var):
            return self.values[value]
        array = constant_value(value)
        if array is not None:
            if hint.endswith("zero_point") and array.size and (array == array.flat[0]).all():
                array = array.flat[0]  # one scale for all channels: a literal, as is usual in Relay
            return self.out.constant(array, hint)
        if isinstance(value, relax.Tuple):
            return tuple(self.operand(field, f"{hint}_{i}") for i, field in enumerate(value.fields))
        if isinstance(value, relax.TupleGetItem):
            whole = self.operand(value.tuple_value, hint)
            if isinstance(whole, tuple):
                return whole[value.index]
            return self.out.bind(syntax.GetItem(whole, value.index))
        return None


def _names_read(block: syntax.Block) -> set[str]:
    """Return the names in a block."""
    found: set[str] = set()
    waiting: list[syntax.Expr] = [block]
    while waiting:
        expr = waiting.pop()
        if isinstance(expr, syntax.Ref):
            found.add(expr.name)
        waiting += syntax.children(expr)
    return found
