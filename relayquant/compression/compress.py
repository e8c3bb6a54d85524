"""Entry of compression: float module and parameters -> the same module with grouped weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.arguments import check_arguments
from relayquant.compression.find import WeightKey, WeightUse, bind_weights, find_weights
from relayquant.compression.groups import GroupedWeight, GroupFormat, quantize_groups
from relayquant.dialect import qnn
from relayquant.errors import ConfigError, ModelError
from relayquant.ledger import Ledger, LedgerRow, attach_ledger
from relayquant.packing import CODE_BITS
from relayquant.qtypes import Granularity, QSpec

#: Allowed group sizes; None, one group for each row, is another.
GROUP_SIZES = (16, 256)
SCALE_DTYPES = ("float32", "float16")


@check_arguments
def compress_weights(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    is_symmetric: bool = True,
    scale_dtype: str = "float32",
    activation: QSpec | None = None,
    table_bits: int | None = 8,
) -> tvm.IRModule:
    """A module whose weights of matrix products and embeddings have few bits; no data is needed.

    Every function of the module is worked on; a weight that several functions or operators read is
    held once. All else, also what is no Relax function, stays as it is.

    Args:
        mod: A float module of any frontend; it is not changed.
        params: Values of parameters, which become constants: by name, {function: [values in
            order]} as `detach_params` gives, or the list of (name, value) that
            `relax.frontend.nn` gives with a module. None: they are constants already.
        bits: Of a weight: 2, 3, 4 or 8.
        group_size: Neighbours along the reduction with one scale, 16 to 256; None: one scale for
            each output.
        is_symmetric: No zero points; False: one of them for each scale.
        scale_dtype: "float32" or "float16".
        activation: How rows of data are quantized when the model runs:
            `QSpec("int8", is_dynamic=True, granularity=Granularity.PER_ROW)`. None: they stay
            float32, and the products are float.
        table_bits: Of tables that rows are taken of (embeddings), also where a product reads the
            same table (a classifier): models lose most by these. None: they stay float.

    Returns:
        The module; `relayquant.ledger` has a row for each product and embedding.

    Raises:
        ConfigError: an argument is none of those allowed.
        ModelError: `params` do not fit the module, or nothing in it could be compressed.
    """
    form = GroupFormat(bits, group_size, is_symmetric, scale_dtype)
    check_format(form, table_bits, activation)
    bound = bind_weights(mod, dict(params) if params is not None else None)
    uses = find_weights(bound)
    tables = {use.tensor_key for use in uses if use.op == "take"}
    if table_bits is None:
        uses = [
            use.refuse("tables stay float") if use.tensor_key in tables else use for use in uses
        ]
    wanted = [use for use in uses if not use.reason]
    if not wanted:
        raise ModelError(
            "The module has no product with a constant float32 weight of two dimensions, so that "
            "there is nothing to compress. Weights that are parameters of functions need `params`."
        )
    forms = {
        use.key: replace(form, bits=table_bits or bits) if use.tensor_key in tables else form
        for use in wanted
    }
    weights = compress_all(wanted, forms)
    compressed = replace_weights(bound, wanted, weights, activation is not None)
    names = {use.function for use in uses}
    rows = tuple(
        describe_use(use, weights.get(use.key), len(names) > 1, activation) for use in uses
    )
    return attach_ledger(compressed, Ledger(rows, effort="weights"))


def check_format(form: GroupFormat, table_bits: int | None, activation: QSpec | None) -> None:
    """Raise ConfigError unless operators have all of it."""
    for name, bits in (("bits", form.bits), ("table_bits", table_bits)):
        if bits not in (CODE_BITS if name == "bits" else (None, *CODE_BITS)):
            raise ConfigError(f"compress_weights: {name}={bits}; allowed: 2, 3, 4 or 8.")
    low, high = GROUP_SIZES
    if form.group_size is not None and not low <= form.group_size <= high:
        raise ConfigError(
            f"compress_weights: group_size={form.group_size}; allowed: {low} to {high}, or None "
            "for one scale for each output."
        )
    if form.scale_dtype not in SCALE_DTYPES:
        raise ConfigError(
            f"compress_weights: scale_dtype={form.scale_dtype!r}; allowed: "
            f"{', '.join(SCALE_DTYPES)}."
        )
    if activation is not None and (
        not activation.is_dynamic
        or activation.dtype != "int8"
        or activation.granularity is not Granularity.PER_ROW
    ):
        raise ConfigError(
            f"compress_weights: activation={activation!r}; allowed: None, or QSpec('int8', "
            "is_dynamic=True, granularity=Granularity.PER_ROW), a scale for each row of data."
        )


def compress_all(
    uses: Sequence[WeightUse], forms: Mapping[WeightKey, GroupFormat]
) -> dict[WeightKey, GroupedWeight]:
    """The weight of each use, by its key: each once."""
    weights: dict[WeightKey, GroupedWeight] = {}
    for use in uses:
        if use.key in weights:
            continue
        weight = quantize_groups(use.array, forms[use.key])
        if not np.isfinite(weight.scale).all():
            raise ModelError(
                f"{use.place}: weights up to {np.abs(use.array).max():.3g} have scales beyond "
                f"{np.finfo(weight.scale.dtype).max:.5g}, the largest {weight.scale.dtype}. Use "
                'scale_dtype="float32".'
            )
        weights[use.key] = weight
    return weights


def replace_weights(
    mod: tvm.IRModule,
    uses: Sequence[WeightUse],
    weights: Mapping[WeightKey, GroupedWeight],
    has_rows: bool,
) -> tvm.IRModule:
    """The module with grouped operators in place of `uses`:

        matmul(x, permute_dims(w))  ->  grouped_dense(x, 1, codes, scale, zero point)
        take(w, i, axis=0)          ->  grouped_take(i, codes, scale, zero point)
        take(w, i, 0, mode="clip")  ->  grouped_take(clip(i), codes, scale, zero point)

    With `has_rows` x is quantized row by row first, once for all products that read it.
    """
    constants = {
        key: [relax.const(part) for part in (w.codes, w.scale, w.zero_point)]
        for key, w in weights.items()
    }
    functions = dict(mod.functions_items())
    for gvar, func in functions.items():
        own = {use.var: use for use in uses if use.function == gvar.name_hint}
        if own:
            functions[gvar] = Replacement(own, weights, constants, has_rows).visit_expr(func)
    changed = tvm.IRModule(functions, attrs=mod.attrs)
    return relax.transform.DeadCodeElimination(sorted(g.name_hint for g in functions))(changed)


@relax.expr_functor.mutator
class Replacement(relax.PyExprMutator):
    """Replaces the operators of one function."""

    def __init__(
        self,
        uses: Mapping[Any, WeightUse],
        weights: Mapping[WeightKey, GroupedWeight],
        constants: Mapping[WeightKey, list[relax.Expr]],
        has_rows: bool,
    ) -> None:
        super().__init__()
        self.uses, self.weights, self.constants = uses, weights, constants
        self.has_rows = has_rows
        self.rows: dict[Any, tuple[relax.Expr, relax.Expr]] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        self.rows = {}  # what one block binds, another may not see
        return super().visit_dataflow_block_(block)

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        self.rows = {}
        return super().visit_binding_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        use = self.uses.get(binding.var)
        if use is None:
            super().visit_var_binding_(binding)
            return
        self.builder_.emit_normalized(
            relax.VarBinding(binding.var, self.builder_.normalize(self.make_call(use)))
        )

    def make_call(self, use: WeightUse) -> Call:
        """The grouped operator that computes what `use` did."""
        weight, constants = self.weights[use.key], self.constants[use.key]
        data = self.visit_expr(use.data)
        form = (weight.format.bits, weight.group_size, weight.features)
        if use.op == "take":
            if use.is_clipped:
                data = self.builder_.emit(relax.op.clip(data, 0, len(weight.codes) - 1))
            return qnn.grouped_take(data, *constants, *form)
        if not self.has_rows:
            return qnn.grouped_dense(data, 1.0, *constants, *form)
        return qnn.grouped_dense(*self.quantize_rows(data), *constants, *form)

    def quantize_rows(self, data: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        """Integers and scales of the rows of `data`, bound once."""
        if data not in self.rows:
            name = getattr(data, "name", "data")
            pair = self.builder_.emit(qnn.quantize_rows(data), f"{name}_rows")
            parts = [self.builder_.emit(relax.TupleGetItem(pair, i)) for i in range(2)]
            self.rows[data] = (parts[0], parts[1])
        return self.rows[data]


def describe_use(
    use: WeightUse,
    weight: GroupedWeight | None,
    has_functions: bool,
    activation: QSpec | None,
) -> LedgerRow:
    """The row of one operator; its name begins with its function where there are several."""
    name = f"{use.function}.{use.name}" if has_functions else use.name
    if weight is None:
        return LedgerRow(name, use.op, False, "", str(use.constant.value.dtype), use.reason)
    form = weight.format
    pattern = "grouped_take" if use.op == "take" else "grouped_dense"
    return LedgerRow(
        name,
        use.op,
        True,
        pattern,
        f"int{form.bits}",
        scheme="symmetric" if form.is_symmetric else "affine",
        rule=f"groups of {weight.group_size}, {form.scale_dtype} scales",
        values=(name,),
        is_dynamic=activation is not None and use.op != "take",
    )
