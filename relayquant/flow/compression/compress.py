"""Entry of compression: float module and parameters -> the same module with grouped weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from relayquant.base.arguments import check_arguments
from relayquant.base.events import Callback
from relayquant.base.grouping import GroupedWeight, GroupFormat
from relayquant.base.qtypes import QSpec
from relayquant.base.runtime import view_constant
from relayquant.config import Effort
from relayquant.errors import ModelError
from relayquant.flow.compression.bit_allocation import choose_formats
from relayquant.flow.compression.experts import split_experts
from relayquant.flow.compression.find import WeightKey, WeightUse, find_weights
from relayquant.flow.compression.fit_layers import (
    FoundWeights,
    describe_fit,
    fit_weights,
    open_data,
)
from relayquant.flow.compression.packed_params import unpack_params
from relayquant.flow.compression.settings import CompressSettings
from relayquant.flow.compression.sources import WeightSource, bind_params, open_params
from relayquant.ir.dialect import qnn
from relayquant.ir.ledger import Ledger, LedgerRow, attach_ledger
from relayquant.ir.ops.base import IntegerRows
from relayquant.ir.ops.dynamic import Emit, multiply_groups, quantize_rows_at_run_time
from relayquant.ir.rewrite.graph import call_name, tensor_shape

#: Operators that an error names.
SHOWN_REFUSALS = 3


@check_arguments
def compress_weights(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    dataset: Any = None,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    is_symmetric: bool = True,
    scale_dtype: str = "float32",
    activation: QSpec | None = None,
    embedding_bits: int | None = 8,
    effort: Effort | str = Effort.BALANCED,
    function: str | None = None,
    max_loss: float | None = None,
    max_size: int | None = None,
    max_bits: float | None = None,
    checkpoint: str | Path | None = None,
    workers: futures.Executor | None = None,
    callbacks: Iterable[Callback] | Callback = (),
) -> tvm.IRModule:
    """A module whose weights of matrix products and embeddings have few bits.

    Every function of the module is worked on; a weight that several functions or operators read is
    held once. A product by a stack of matrices, (E, K, N) for E experts, becomes a product by each;
    of a stack from which matrices are gathered by their numbers, those that are become float32 when
    the model runs. All else, also what is no Relax function, stays as it is. No data is needed;
    with data, weights are rounded so that the results of their products change least on it, one
    weight after the other, each for what it meets behind those before.

    Args:
        mod: A float module of any frontend; it is not changed.
        params: Values of parameters, which become constants: by name, {function: [values in
            order]} as `detach_params` gives, or the list of (name, value) that
            `relax.frontend.nn` gives with a module, whose functions may take all in one tuple.
            None: they are constants already. Weights are looked at one at a time and not copied: a
            mapping that loads an array each time it is asked for one (`numpy.load` of a .npz) is
            never in memory as a whole.
        dataset: Inputs of one function, as for `quantize`; some ten thousand rows (tokens) tell
            enough, and what its operators hand on is held in memory. Weights that this function
            does not reach are rounded without data, which the ledger says.
        bits: Of a weight: 2, 3, 4 or 8.
        group_size: Neighbours along the reduction with one scale, 16 to 256; None: one scale for
            each output.
        is_symmetric: No zero points; False: one of them for each scale.
        scale_dtype: "float32" or "float16".
        activation: How rows of data are quantized when the model runs:
            `QSpec("int8", Scheme.SYMMETRIC, Granularity.PER_ROW, is_dynamic=True)`, which has
            kernels of its own; affine, rows of one sign have twice the steps. None: they stay
            float32, and the products are float.
        embedding_bits: Of tables that rows are taken of (embeddings), also where a product reads
            the same table (a classifier): models lose most by these. None: they stay float.
        effort: What data is used for. "fast": weights that meet large inputs count more when scales
            are chosen. "balanced": codes make up for one another's rounding, and scales follow.
            "best": both move by turns until little changes, and each product makes up for what
            weights before it have changed, by what it gives in float; twice the time and memory.
            Without data all are the same.
        function: The one that `dataset` is for; None: the model, see `quantize`.
        max_loss: Weights keep 8 bits where fewer change the result of their product by more than
            this share of it (error over result, mean squares); without data the weight itself.
        max_size: Bytes that all compressed weights may take together, scales included; the ones
            that lose most keep 8 bits, as many as there is room for.
        max_bits: The same as a mean number of bits for each weight.
        checkpoint: A folder that each finished weight is written to. A run that was stopped goes on
            from there when it is started again with the same arguments. Deleted in the end.
        workers: A `concurrent.futures` executor of processes, on which rows of weights are fitted
            to data; it changes no bit. None: threads of this process do that.
        callbacks: Told of each finished weight.

    Returns:
        The module; `relayquant.ledger` has a row for each product and embedding.

    Raises:
        ConfigError: an argument is none of those allowed.
        ModelError: `params` do not fit the module, or nothing in it could be compressed.
        DataError: the data does not fit the function.
        WorkerError: the executor's workers fail, or hang.
    """
    settings = CompressSettings(
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        scale_dtype=scale_dtype,
        activation=activation,
        embedding_bits=embedding_bits,
        effort=effort,
        function=function,
        max_loss=max_loss,
        max_size=max_size,
        max_bits=max_bits,
        checkpoint=checkpoint,
        workers=workers,
        callbacks=callbacks,
    )
    given = params if isinstance(params, Mapping) or params is None else dict(params)
    if given:
        mod = unpack_params(mod, list(given), is_ordered=given is not params)
    sources = open_params(mod, given)
    mod, sources = split_experts(mod, sources)
    uses = find_weights(mod, sources)
    tables = {use.source.key for use in uses if use.op == "take" and not use.source.is_stack}
    if settings.embedding_bits is None:
        uses = [
            use.refuse("tables stay float") if use.source.key in tables else use for use in uses
        ]
    wanted = [use for use in uses if not use.reason]
    if not wanted:
        advice = "Weights that are parameters of functions need `params`."
        raise ModelError(
            "The module has no product with a constant float32 weight of two dimensions, so that "
            f"there is nothing to compress{describe_refusals(uses)}. "
            f"{next((use.advice for use in uses if use.advice), advice)}",
            code="RQ204",
        )
    form = GroupFormat(
        settings.bits, settings.group_size, settings.is_symmetric, settings.scale_dtype
    )
    table_form = replace(form, bits=settings.embedding_bits or form.bits)
    forms = {use.key: table_form if use.source.key in tables else form for use in wanted}
    data = open_data(mod, sources, wanted, dataset, settings)
    forms, kept = choose_formats(wanted, forms, data, settings)
    found = fit_weights(wanted, forms, data, settings)
    found.kept.update(kept)
    compressed = replace_weights(mod, sources, wanted, found, settings.activation)
    has_functions = len({use.function for use in uses}) > 1
    rows = tuple(describe_use(use, found, has_functions, settings) for use in uses)
    choices = {"weights": describe_fit(wanted, found, settings)}
    return attach_ledger(compressed, Ledger(rows, effort="weights", choices=choices))


def describe_refusals(uses: Sequence[WeightUse]) -> str:
    """What the first operators that read weights have against it, for a message; "" of none."""
    reasons = "; ".join(f"{use.place}: {use.reason}" for use in uses[:SHOWN_REFUSALS])
    return f" ({reasons}{'; ...' if len(uses) > SHOWN_REFUSALS else ''})" if reasons else ""


def replace_weights(
    mod: tvm.IRModule,
    params: Mapping[relax.Var, WeightSource],
    uses: Sequence[WeightUse],
    found: FoundWeights,
    activation: QSpec | None,
) -> tvm.IRModule:
    """The module without `params`, and with grouped operators in place of `uses`:

        matmul(x, permute_dims(w))  ->  grouped_dense(x, 1, codes, scale, zero point)
        take(w, i, axis=0)          ->  grouped_take(i, codes, scale, zero point)
        take(w, i, 0, mode="clip")  ->  grouped_take(clip(i), codes, scale, zero point)

    With an `activation` x is quantized row by row first, once for all products that read it.
    """
    constants: dict[WeightKey, list[relax.Expr]] = {}
    for key, weight in found.weights.items():
        found.weights[key], constants[key] = move_to_constants(weight)
    functions = dict(mod.functions_items())
    for gvar, func in functions.items():
        own = {use.var: use for use in uses if use.function == gvar.name_hint}
        if own:
            functions[gvar] = Replacement(own, found.weights, constants, activation).visit_expr(
                func
            )
    changed = tvm.IRModule(functions, attrs=mod.attrs)
    clean = relax.transform.DeadCodeElimination(sorted(g.name_hint for g in functions))
    # Parameters that nothing reads any more are gone before the others are bound; of those that
    # are bound, sizes may have been all that was read.
    return clean(bind_params(clean(changed), params))


def move_to_constants(weight: GroupedWeight) -> tuple[GroupedWeight, list[relax.Expr]]:
    """A weight as constants, and what holds them in place of the weight: there is one copy."""
    tensors = [tvm.runtime.tensor(part) for part in (weight.codes, weight.scale, weight.zero_point)]
    codes, scale, zero_point = map(view_constant, tensors)
    held = replace(weight, codes=codes, scale=scale, zero_point=zero_point)
    return held, [relax.const(tensor) for tensor in tensors]


@relax.expr_functor.mutator
class Replacement(relax.PyExprMutator):
    """Replaces the operators of one function."""

    def __init__(
        self,
        uses: Mapping[Any, WeightUse],
        weights: Mapping[WeightKey, GroupedWeight],
        constants: Mapping[WeightKey, list[relax.Expr]],
        activation: QSpec | None,
    ) -> None:
        super().__init__()
        self.uses, self.weights, self.constants = uses, weights, constants
        self.activation = activation
        self.rows: dict[Any, IntegerRows] = {}

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

    def visit_call_(self, op: Call) -> relax.Expr:
        """Sizes that are known become constants: else what asks for those of a weight, as TVM's
        ONNX frontend does before a gather, would keep it whole.

            shape_to_tensor(shape_of(w))  ->  constant
        """
        if call_name(op) == "relax.shape_to_tensor":
            source = op.args[0]
            source = self.lookup_binding(source) if isinstance(source, relax.Var) else source
            if isinstance(source, Call) and call_name(source) == "relax.shape_of":
                sizes = tensor_shape(source.args[0])
                if sizes is not None and all(isinstance(size, int) for size in sizes):
                    return relax.const(np.array(sizes, "int64"), "int64")
        return super().visit_call_(op)

    def make_call(self, use: WeightUse) -> relax.Expr:
        """The grouped operator that computes what `use` did."""
        weight, constants = self.weights[use.key], self.constants[use.key]
        data = self.visit_expr(use.data)
        if use.op == "take":
            if use.is_clipped:
                data = self.builder_.emit(relax.op.clip(data, 0, len(weight.codes) - 1))
            form = (weight.format.bits, weight.group_size, weight.features)
            return qnn.grouped_take(data, *constants, *form)
        if self.activation is not None:
            data = self.quantize_rows(data, self.activation)
        return multiply_groups(self.emitter(use.name), data, weight, constants)

    def quantize_rows(self, data: relax.Expr, activation: QSpec) -> IntegerRows:
        """The rows of `data` as integers, bound once."""
        if data not in self.rows:
            emit = self.emitter(getattr(data, "name", "data"))
            self.rows[data] = quantize_rows_at_run_time(emit, data, activation)
        return self.rows[data]

    def emitter(self, name: str) -> Emit:
        """What binds values of names that begin so."""
        return lambda expr, suffix: self.builder_.emit(expr, f"{name}.{suffix}")


def describe_use(
    use: WeightUse,
    found: FoundWeights,
    has_functions: bool,
    settings: CompressSettings,
) -> LedgerRow:
    """The row of one operator; its name begins with its function where there are several."""
    name = f"{use.function}.{use.name}" if has_functions else use.name
    if use.reason:
        return LedgerRow(name, use.op, False, "", use.source.dtype, use.reason, use.advice)
    weight = found.weights[use.key]
    form = weight.format
    pattern = "grouped_take" if use.op == "take" else "grouped_dense"
    rule = f"groups of {weight.group_size}, {form.scale_dtype} scales"
    return LedgerRow(
        name,
        use.op,
        True,
        pattern,
        f"int{form.bits}",
        scheme="symmetric" if form.is_symmetric else "affine",
        rule="; ".join(filter(None, (rule, found.kept.get(use.key)))),
        values=(name,),
        is_dynamic=settings.activation is not None and use.op != "take",
    )
