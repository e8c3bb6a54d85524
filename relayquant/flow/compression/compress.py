"""Entry point of compression: float module and parameters -> the same module with grouped
weights.
"""

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
from relayquant.errors import ModelError, format_count
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
from relayquant.flow.compression.settings import (
    GROUPS_OF_ROWS,
    CompressSettings,
    find_data_group,
)
from relayquant.flow.compression.smoothing import smooth_weights
from relayquant.flow.compression.sources import WeightSource, bind_params, open_params
from relayquant.ir.dialect import qnn
from relayquant.ir.dialect.qnn.grouped import GROUPED_FORMS
from relayquant.ir.ledger import Ledger, LedgerRow, attach_ledger, find_ledger
from relayquant.ir.ops.base import IntegerRows
from relayquant.ir.ops.dynamic import (
    Emit,
    ExpertChoice,
    multiply_groups,
    quantize_rows_at_run_time,
)
from relayquant.ir.rewrite.bind import Model, split_model
from relayquant.ir.rewrite.graph import call_name, constant_value, static_size, tensor_shape
from relayquant.ir.rewrite.inline import list_dimensions

#: number of operators that an error names
SHOWN_REFUSALS = 3
#: norms whose constants scale the elements of a row
NORMS = frozenset({"relax.nn.rms_norm", "relax.nn.layer_norm"})


@check_arguments
def compress_weights(
    mod: Model,
    params: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    dataset: Any = None,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    is_symmetric: bool = True,
    scale_dtype: str = "float32",
    activation: QSpec | None = GROUPS_OF_ROWS,
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
    """Compress the weights of matrix products and embeddings to few bits.

    Every function of the module is processed. A weight that several functions or operators read is
    stored once. A product with a stack of matrices, (E, K, N) for E experts, becomes one product
    per matrix. If matrices of a stack are gathered by index, the gathered ones become float32 at
    run time. Everything else stays, including functions that are not Relax functions.

    No data is needed. With data, weights are rounded so that the results of their products change
    least on it. The weights are fitted one after the other, each behind the weights compressed
    before it. Before that, columns of weights are scaled, and their data the other way around,
    where this makes both easier to round.

    Args:
        mod: A float module of any frontend; it is not changed.
        params: Values of parameters, which become constants: by name, {function: [values in order]}
            as `detach_params` returns, or the list of (name, value) that `relax.frontend.nn`
            returns with a module, whose functions may take all parameters in one tuple. None: they
            are constants already. Weights are read one at a time and not copied, so a mapping that
            loads arrays on access (`numpy.load` of a .npz) is never in memory as a whole.
        dataset: Inputs of one function, as for `quantize`. About ten thousand rows (tokens) are
            enough. Intermediate values of all rows are held in memory. Weights that this function
            does not reach are rounded without data, and the ledger says so.
        bits: Bits of a weight: 2, 3, 4 or 8.
        group_size: Neighbours along the reduction that share one scale, 16 to 256. None: one scale
            for each output.
        is_symmetric: True: no zero points. False: one zero point for each scale.
        scale_dtype: "float32" or "float16".
        activation: How rows of data are quantized at run time: by default `QSpec("int8",
            Scheme.SYMMETRIC, Granularity.PER_GROUP, is_dynamic=True)`, a scale for each group of a
            row, where the weight has whole groups; else, and with PER_ROW, a scale for each row.
            With an affine scheme, rows of one sign have twice as many steps. None: rows stay
            float32 and the products are float.
        embedding_bits: Bits of embedding tables, also if a product reads the same table (a
            classifier). Models lose most accuracy by these. None: they stay float.
        effort: How data is used. "fast": scales are chosen so that weights with large inputs count
            more. "balanced": later codes compensate for the rounding of earlier ones, and scales
            are adapted. "best": scales and codes are improved alternately until little changes, and
            each product compensates for the changes of weights before it, which takes twice the
            time and memory. Without data all levels are the same.
        function: The function that `dataset` is for; None: the model, see `quantize`.
        max_loss: Weights keep 8 bits if fewer bits change the result of their product by more than
            this share (error over result, mean squares). Without data the weight itself is
            compared.
        max_size: Largest number of bytes of all compressed weights together, including scales.
            Weights that lose most keep 8 bits while there is room.
        max_bits: The same limit as a mean number of bits per weight.
        checkpoint: A folder that each finished weight is written to. A stopped run continues from
            it if it is started again with the same arguments. Deleted at the end.
        workers: A `concurrent.futures` executor of processes that fit rows of weights to data. It
            changes no bit of the result. None: threads of this process.
        callbacks: Called with each finished weight.

    Returns:
        The module; `relayquant.ledger` has a row for each product and embedding.

    Raises:
        ConfigError: an argument is not allowed.
        ModelError: `params` do not fit the module, or nothing in it can be compressed.
        DataError: the data does not fit the function.
        WorkerError: the executor's workers fail, or hang.
    """
    settings = CompressSettings.read_call(locals())
    mod, params = split_model(mod, params)
    before = find_ledger(mod)
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
        if before is not None and before.quantized:
            advice = (
                f"It has {format_count(len(before.quantized), 'quantized operator')} already: "
                "run it as it is, or compress the float model."
            )
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
    wanted, data = smooth_weights(wanted, forms, data)
    forms, kept = choose_formats(wanted, forms, data)
    found = fit_weights(wanted, forms, data)
    found.kept.update(kept)
    compressed = replace_weights(mod, sources, wanted, found, settings.activation)
    has_functions = len({use.function for use in uses}) > 1
    rows = tuple(describe_use(use, found, has_functions, settings) for use in uses)
    choices = {"weights": describe_fit(wanted, found, settings)}
    return attach_ledger(compressed, Ledger(rows, effort="weights", choices=choices))


def describe_refusals(uses: Sequence[WeightUse]) -> str:
    """List the reasons of the first operators that read weights, for a message; "" if there are
    none.
    """
    reasons = "; ".join(f"{use.place}: {use.reason}" for use in uses[:SHOWN_REFUSALS])
    return f" ({reasons}{'; ...' if len(uses) > SHOWN_REFUSALS else ''})" if reasons else ""


def replace_weights(
    mod: tvm.IRModule,
    params: Mapping[relax.Var, WeightSource],
    uses: Sequence[WeightUse],
    found: FoundWeights,
    activation: QSpec | None,
) -> tvm.IRModule:
    """Return the module without `params`, with grouped operators instead of `uses`:

        matmul(x, permute_dims(w))  ->  grouped_dense(x, 1, codes, scale, zero point)
        expert_dense(x, i, w)       ->  grouped_expert_dense(x, 1, i, codes, scale, zero point)
        take(w, i, axis=0)          ->  grouped_take(i, codes, scale, zero point)
        take(w, i, 0, mode="clip")  ->  grouped_take(clip(i), codes, scale, zero point)

    With an `activation`, x is first quantized row by row, once for all products that read it.
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
    # Unused parameters are removed before the rest is bound. Of a bound parameter perhaps only the
    # size was read.
    return clean(bind_params(clean(changed), params))


def move_to_constants(weight: GroupedWeight) -> tuple[GroupedWeight, list[relax.Expr]]:
    """Return a weight that is a view of its constants, and the constants. There is one copy of
    the data.
    """
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
        self.begin_block()

    def begin_block(self) -> None:
        """Forget what was bound: a block must not use the bindings of another block."""
        self.rows: dict[tuple[Any, int | None], IntegerRows] = {}
        self.smoothed: dict[tuple[Any, int], relax.Expr] = {}
        self.sized: dict[tuple[Any, int], relax.Expr] = {}

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        self.begin_block()
        return super().visit_dataflow_block_(block)

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        self.begin_block()
        return super().visit_binding_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        use = self.uses.get(binding.var)
        if use is None:
            super().visit_var_binding_(binding)
            return
        self.builder_.emit_normalized(
            relax.VarBinding(
                binding.var, self.builder_.normalize(self.make_call(use, binding.value))
            )
        )

    def visit_call_(self, op: Call) -> relax.Expr:
        """Replace known sizes by constants. Otherwise a query of a weight's size, which TVM's ONNX
        frontend emits before a gather, would keep the whole weight.

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

    def make_call(self, use: WeightUse, call: Call) -> relax.Expr:
        """Return the grouped operator that replaces the `call` of a use."""
        weight, constants = self.weights[use.key], self.constants[use.key]
        data = self.visit_expr(use.data)
        if use.op == "take":
            if use.is_clipped:
                data = self.builder_.emit(relax.op.clip(data, 0, len(weight.codes) - 1))
            return qnn.grouped_take(data, *constants, **weight.attributes)
        data = self.size_rows(data, weight.features, use.name)
        if use.smoothing is not None:
            data = self.smooth(data, use.smoothing)
        if self.activation is not None:
            data = self.quantize_rows(data, self.activation, weight)
        choice = None
        if use.op == "expert_dense":
            choice = ExpertChoice(self.visit_expr(call.args[1]), int(call.attrs.experts))
        return multiply_groups(self.emitter(use.name), data, weight, constants, choice)

    def size_rows(self, data: relax.Expr, features: int, product: str) -> relax.Expr:
        """Return rows of a symbolic size as rows of a weight's size, bound once for all weights.
        Compiled code compares the two, and its error says the name: that of the first product.

            x (3, n) for a weight (64, 48)  ->  reshape(x, (3, 64))
        """
        *lead, size = list_dimensions(data.ty)
        if static_size(size) is not None:
            return data
        if (data, features) not in self.sized:
            sized = relax.op.reshape(data, [*lead, features])
            self.sized[data, features] = self.builder_.emit(sized, f"{product}.rows")
        return self.sized[data, features]

    def smooth(self, data: relax.Expr, factors: np.ndarray) -> relax.Expr:
        """Return data divided by factors, bound once for all weights that have them. The constants
        of a norm take the factors.

            rms_norm(x, w) / s  ->  rms_norm(x, w / s)
        """
        key = data, id(factors)
        if key not in self.smoothed:
            value = self.lookup_binding(data) if isinstance(data, relax.Var) else None
            name = getattr(data, "name", "data")
            divided = divide_norm(value, factors)
            if divided is None:
                divided = relax.op.multiply(data, relax.const(1 / factors))
            self.smoothed[key] = self.builder_.emit(divided, f"{name}.smooth")
        return self.smoothed[key]

    def quantize_rows(
        self, data: relax.Expr, activation: QSpec, weight: GroupedWeight
    ) -> IntegerRows:
        """Return the rows of `data` as integers, bound once for weights of the same groups."""
        size = find_data_group(activation, weight.group_size, weight.features)
        if (data, size) not in self.rows:
            emit = self.emitter(getattr(data, "name", "data"))
            self.rows[data, size] = quantize_rows_at_run_time(emit, data, activation, size)
        return self.rows[data, size]

    def emitter(self, name: str) -> Emit:
        """Return an emitter for values whose names start with this name."""
        return lambda expr, suffix: self.builder_.emit(expr, f"{name}.{suffix}")


def divide_norm(value: relax.Expr | None, factors: np.ndarray) -> relax.Expr | None:
    """Return a norm along the last axis whose constants are divided by factors; None if the value
    is no such norm.
    """
    if not isinstance(value, Call) or call_name(value) not in NORMS:
        return None
    data, *vectors = value.args
    places = [int(axis) % value.ty.ndim for axis in value.attrs.axes]
    if places != [value.ty.ndim - 1] or not getattr(value.attrs, "scale", True):
        return None
    arrays = [constant_value(vector) for vector in vectors]
    if any(array is None or array.shape != factors.shape for array in arrays):
        return None
    divided = [relax.const((array / factors).astype("float32")) for array in arrays]
    return Call(value.op, [data, *divided], value.attrs)


def describe_use(
    use: WeightUse,
    found: FoundWeights,
    has_functions: bool,
    settings: CompressSettings,
) -> LedgerRow:
    """Return the ledger row of one operator. If there are several functions, its name starts
    with the function's name.
    """
    name = f"{use.function}.{use.name}" if has_functions else use.name
    if use.reason:
        return LedgerRow(name, use.op, False, "", use.source.dtype, use.reason, use.advice)
    weight = found.weights[use.key]
    form = weight.format
    pattern = GROUPED_FORMS[use.op]
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
