"""Layer-by-layer execution of a float function: batches -> the data that each weight receives.
All batches run up to one weight before any runs further.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst

from relayquant.base.qtypes import QSpec
from relayquant.base.runtime import limit_blas, map_on_threads
from relayquant.errors import DataError, ModelError
from relayquant.flow.compression.find import TRANSPOSE, WeightUse
from relayquant.flow.compression.fit import Gram
from relayquant.flow.compression.settings import find_data_group
from relayquant.flow.compression.sources import WeightSource
from relayquant.ir import reference
from relayquant.ir.dialect.qnn.grouped import ROW_LIMIT
from relayquant.ir.reference.frame import Frame
from relayquant.ir.reference.inputs import bind_input
from relayquant.ir.reference.interpreter import evaluate, execute_binding
from relayquant.ir.rewrite.expressions import list_bindings
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.rewrite.lifetimes import find_ends

#: operator that reads a weight -> the place of the weight among its operands
WEIGHT_OPERANDS = {"take": 0, "expert_dense": 2}
#: rows of data that one product computes, at most, unless one batch has more
MOST_ROWS = 1024
#: rows whose second moments are summed up at once, at most, unless one batch has more
MOST_GRAM_ROWS = 4096

#: Returns the weight (N, K) to compute with from here on, given the operator and the data that it
#: reads (None for a table).
Meet: TypeAlias = Callable[[WeightUse, Gram | None], np.ndarray]


@dataclass(frozen=True, eq=False)
class LayerSubgraph:
    """Bindings from one weight up to the next, and the values that nothing reads after them. The
    first binding computes `use`. At the start of the function `use` is None.
    """

    use: WeightUse | None
    bindings: tuple[Any, ...]
    dead: tuple[relax.Var, ...]


def walk_weights(
    mod: tvm.IRModule,
    name: str,
    batches: Iterable[Mapping[str, np.ndarray]],
    params: Mapping[relax.Var, WeightSource],
    uses: Mapping[relax.Var, WeightUse],
    group_size: int | None,
    activation: QSpec | None,
    meet: Meet,
    *,
    with_float: bool,
) -> None:
    """Run function `name` on `batches`. All batches run up to one weight before any runs further.

    Between two weights, memory holds three things: the values of all batches that later operators
    read, the working memory of one batch, and the float values of one weight. Weights in branches
    and in called functions are not visited.

    Args:
        params: Values of the parameters that are not inputs.
        uses: Operators by the variable of their value.
        group_size: Group size of the weights: see `Gram`.
        activation: How rows are quantized at run time, if they are.
        meet: Called for every operator, in order. Returns the weight to compute with.
        with_float: Whether the batches also run through the float function. Then grams know the
            data without the changes of earlier weights. Takes twice the time and memory.
    """
    func, rounding = mod[name], RowRounding(activation, group_size)
    subgraphs = cut_subgraphs(func, uses)
    read = {var for s in subgraphs for b in s.bindings for var in find_read(b, uses)}
    values = {param: source.array for param, source in params.items() if param in read}
    frames = [start_frame(mod, func, batch, params, values) for batch in batches]
    floats = [Frame(mod, dict(f.values), dict(f.symbols)) for f in frames] if with_float else []
    grams: dict[relax.Expr, Gram] = {}
    for subgraph in subgraphs:
        use, weight = subgraph.use, None
        if use is not None:
            gram = None
            if use.op == "matmul":
                if use.data not in grams:  # products that read one value are consecutive
                    gram = collect_gram(frames, floats, use, group_size, rounding)
                    grams = {use.data: gram}
                gram = grams[use.data]
            weight = meet(use, gram)
        if subgraph is subgraphs[-1] and use is not None and use.op == "matmul":
            break  # nothing reads its result
        run_subgraph(frames, subgraph, weight, rounding, name)
        weight = use.array if use is not None and floats else None
        run_subgraph(floats, subgraph, weight, FLOAT_ROWS, name)


def start_frame(
    mod: tvm.IRModule,
    func: relax.Function,
    batch: Mapping[str, np.ndarray],
    params: Mapping[relax.Var, WeightSource],
    values: Mapping[relax.Var, np.ndarray],
) -> Frame:
    """Return a frame with the inputs and `values` of other parameters."""
    frame = Frame(mod, dict(values))
    for param in func.params:
        if param not in params:
            bind_input(frame, param, param.name, param.ty, batch[param.name])
    return frame


def find_read(binding: Any, uses: Mapping[relax.Var, WeightUse]) -> Sequence[relax.Var]:
    """Return the variables that a binding reads. A weight that is visited is not among them."""
    use = uses.get(binding.var)
    if use is None:
        return relax.analysis.free_vars(binding.value)
    others = list(binding.value.args) if use.op in WEIGHT_OPERANDS else [use.data]
    if use.op in WEIGHT_OPERANDS:
        del others[WEIGHT_OPERANDS[use.op]]
    return relax.analysis.free_vars(relax.Tuple(others))


def is_move(value: Any) -> bool:
    """Whether a binding only moves a weight towards a product and computes nothing."""
    return isinstance(value, relax.Var | GenericConst) or (
        isinstance(value, Call) and call_name(value) == TRANSPOSE
    )


def drop_moves(bindings: Sequence[Any], uses: Mapping[relax.Var, WeightUse]) -> list[Any]:
    """Drop bindings that move visited weights, because evaluating them would load the weight."""
    kept, read = [], set()
    for binding in reversed(bindings):
        if binding.var in read or not is_move(binding.value):
            kept.append(binding)
            read.update(find_read(binding, uses))
    return kept[::-1]


@dataclass(frozen=True)
class RowRounding:
    """What quantizing at run time makes of the rows that products read."""

    activation: QSpec | None = None
    group_size: int | None = None  #: of the weights

    def round(self, values: np.ndarray) -> np.ndarray:
        """Return float32 rows (n, K) as products read them."""
        if self.activation is None:
            return values
        if not self.activation.is_symmetric:
            return round_rows(values)
        columns = values.shape[-1]
        size = find_data_group(self.activation, self.group_size or columns, columns)
        integers, scale = reference.qnn.quantize_rows(values.reshape(-1, size or columns))
        return (integers.astype("float32") * scale).reshape(values.shape)


FLOAT_ROWS = RowRounding()


def cut_subgraphs(func: relax.Function, uses: Mapping[relax.Var, WeightUse]) -> list[LayerSubgraph]:
    """Split the bindings of a function before each weight, up to the last one."""
    bindings = list(list_bindings(func))
    cuts = [i for i, binding in enumerate(bindings) if binding.var in uses]
    bindings = drop_moves(bindings[: cuts[-1] + 1] if cuts else [], uses)
    cuts = [i for i, binding in enumerate(bindings) if binding.var in uses]
    ends = find_ends((binding.var, *find_read(binding, uses)) for binding in bindings)
    subgraphs = []
    for start, stop in zip([0, *cuts], [*cuts, cuts[-1] + 1 if cuts else 0], strict=True):
        if start == stop:
            continue
        dead = tuple(itertools.chain.from_iterable(ends[start:stop]))
        own = tuple(bindings[start:stop])
        subgraphs.append(LayerSubgraph(uses.get(own[0].var), own, dead))
    return subgraphs


def collect_gram(
    frames: Sequence[Frame],
    floats: Sequence[Frame],
    use: WeightUse,
    group_size: int | None,
    rounding: RowRounding,
) -> Gram:
    """Collect the gram of the data of a product, as it and its siblings read it. `floats` hold the
    value in the float model.
    """
    gram: Gram | None = None
    for some in cut_frames(frames, use.data, MOST_GRAM_ROWS):
        rows = read_all(frames[some], use, rounding)
        if gram is None:
            columns = rows.shape[-1]
            gram = Gram(columns, group_size or columns, with_shift=bool(floats))
        gram.add(rows, read_all(floats[some], use, FLOAT_ROWS) if floats else None)
    assert gram is not None  # a data set has at least one batch
    return gram


def cut_frames(frames: Sequence[Frame], data: Any, most: int) -> Iterator[slice]:
    """Group frames into parts with at most `most` rows of a value, or with one larger frame.
    Products of few rows take twice as long per row.
    """
    start = count = 0
    for i, frame in enumerate(frames):
        rows = math.prod(evaluate(frame, data, "data").shape[:-1])
        if start < i and count + rows > most:
            yield slice(start, i)
            start, count = i, 0
        count += rows
    yield slice(start, len(frames))


def read_all(frames: Sequence[Frame], use: WeightUse, rounding: RowRounding) -> np.ndarray:
    """Return the data of a product in all frames as it reads them, (n, K)."""
    parts = [evaluate(frame, use.data, "data") for frame in frames]
    values = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
    return rounding.round(values if use.smoothing is None else values / use.smoothing)


def round_rows(data: np.ndarray) -> np.ndarray:
    """Round float32 (..., K) to int8 in -127..127 and back to float32. Each row has a scale and a
    zero point that cover its values and 0.

    scale = (max(row, 0) - min(row, 0)) / 254, 1 where that is 0; zero point = clip(round(-127 -
    min(row, 0) / scale)): what `quantize_rows_at_run_time` computes.
    """
    data, limit = np.asarray(data, "float32"), np.float32(ROW_LIMIT)
    low = np.minimum(data.min(axis=-1, keepdims=True, initial=np.float32(0)), 0)
    span = data.max(axis=-1, keepdims=True, initial=np.float32(0)) - low
    step = span / (2 * limit)
    scale = np.where(step > 0, step, np.float32(1)).astype("float32")
    zero_point = np.clip(np.rint(-limit - low / scale), -limit, limit)
    integers = np.clip(np.rint(data / scale) + zero_point, -limit, limit)
    return (integers - zero_point) * scale


def run_subgraph(
    frames: Sequence[Frame],
    subgraph: LayerSubgraph,
    weight: np.ndarray | None,
    rounding: RowRounding,
    name: str,
) -> None:
    """Compute the values of a subgraph of function `name` in all frames, with some frames on each
    thread, and drop the values that nothing reads afterwards.

    Raises:
        DataError: a batch does not fit the function.
    """
    use, bindings = subgraph.use, subgraph.bindings

    def run(some: slice) -> None:
        rest = bindings
        if use is not None and weight is not None and use.op == "matmul":
            run_product(frames[some], use, weight, rounding)
            rest = bindings[1:]
        for i in range(some.start, some.stop):
            try:
                run_bindings(frames[i], subgraph, rest, weight)
            except ModelError as error:
                if isinstance(error.__cause__, DataError | IndexError):
                    raise DataError(
                        f"batch {i} of the data does not fit {name!r}: {error}", code="RQ302"
                    ) from error
                raise

    parts = (slice(i, i + 1) for i in range(len(frames)))
    if frames and use is not None and use.op == "matmul":
        parts = cut_frames(frames, use.data, MOST_ROWS)
    with limit_blas():
        for _ in map_on_threads(run, list(parts)):
            pass


def run_product(
    frames: Sequence[Frame], use: WeightUse, weight: np.ndarray, rounding: RowRounding
) -> None:
    """Compute the product with `weight` instead of the operator's weight, in all frames at once."""
    found, start = read_all(frames, use, rounding) @ weight.T, 0
    for frame in frames:
        shape = evaluate(frame, use.data, "data").shape[:-1]
        stop = start + math.prod(shape)
        frame.values[use.var] = found[start:stop].reshape(*shape, len(weight))
        start = stop


def run_bindings(
    frame: Frame, subgraph: LayerSubgraph, bindings: Sequence[Any], weight: np.ndarray | None
) -> None:
    """Compute the values of bindings. `weight` replaces the one of a table, or of experts."""
    use = subgraph.use
    with np.errstate(all="ignore"):
        if use is not None and weight is not None and use.op != "matmul":
            frame.values[use.var] = run_with(frame, use, bindings[0].value, weight)
            bindings = bindings[1:]
        for binding in bindings:
            execute_binding(frame, binding)
    for var in subgraph.dead:
        frame.values.pop(var, None)


def run_with(frame: Frame, use: WeightUse, call: Call, weight: np.ndarray) -> Any:
    """Run the operator, with other values of its weight."""
    values = weight.T if use.is_transposed else weight
    own = relax.Var("weight", relax.TensorType(values.shape, "float32"))
    inner = Frame(frame.mod, {**frame.values, own: values}, frame.symbols)
    operands = list(call.args)
    operands[WEIGHT_OPERANDS[use.op]] = own
    return evaluate(inner, Call(call.op, operands, call.attrs, call.ty_args), use.name)
