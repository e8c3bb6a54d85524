"""Specification of a recurrent layer -> its kernel: all steps of lstm, gru or rnn in one function.

    gates = x[t] + h @ W          integers if W is int8, h quantized in each step
    h, c = cell(gates, h, c)      float32

Samples are independent, and may run on different threads. The steps of one sample stay on one
thread, with the states in its nearest cache. The units of each gate are padded to whole vectors.
Each float operation is rounded separately, in the order of `reference.qnn.recurrent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

from relayquant.codegen.kernels.emit import (
    PARALLEL_THRESHOLD,
    alloc_vectors,
    alloc_workspace,
    broadcast,
    build_kernel,
    ceil_div,
    constant,
    convert_activation,
    emit_shared_loop,
    emit_vector_loop,
    fold_lanes,
    load_vector,
    store_vector,
    vector,
)
from relayquant.codegen.kernels.floating.softmax import emit_exp
from relayquant.codegen.kernels.integer.row_quantize import ROW_LIMIT
from relayquant.codegen.kernels.isa.base import Buffer, Expr, Isa, fence

#: Units that are processed at once. LLVM splits them if registers are narrower.
LANES = 16
#: Columns of a float32 weight whose sums are kept in registers.
FLOAT_COLUMNS = 64
#: Most vectors of integer sums that are kept in registers.
MOST_SUMS = 16
#: Multiply-adds that take as long as the activations of one gate and unit.
GATE_COST = 32

#: Gates of each product with a state: a GRU may multiply twice.
PRODUCTS = {"lstm": ((0, 4),), "gru": ((0, 2), (2, 1)), "rnn": ((0, 1),)}


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer.

    Attributes:
        cell: "lstm", "gru" or "rnn".
        steps, batch: None if known only at run time.
        units: Number of hidden units.
        is_integer: Whether the weight is int8.
        activations: "sigmoid", "tanh" or "relu", in the operator's order.
        clip: Bound of the operands of the first two activations, 0 for none.
        is_reversed: Whether the last step is computed first.
        linear_before_reset: Of a GRU.
        input_forget, cell_clip: Of an LSTM.
        given: Names of the optional operands that there are.
    """

    cell: str
    steps: int | None
    batch: int | None
    units: int
    is_integer: bool
    activations: tuple[str, ...]
    clip: float
    is_reversed: bool
    linear_before_reset: bool
    input_forget: bool
    cell_clip: float
    given: tuple[str, ...]

    @property
    def gates(self) -> int:
        return sum(count for _, count in PRODUCTS[self.cell])

    @property
    def states(self) -> int:
        return 2 if self.cell == "lstm" else 1

    def shape_optional(self, batch: Any) -> dict[str, tuple[Any, ...]]:
        """Return the shapes of optional operands, for so many samples."""
        return {
            "hidden": (batch, self.units),
            "cell": (batch, self.units),
            "peepholes": (3, self.units),
            "hidden_bias": (self.units,),
            "lengths": (batch,),
        }

    @property
    def padded(self) -> int:
        """Units with padding: whole vectors."""
        return ceil_div(self.units, LANES) * LANES


@dataclass(frozen=True)
class RecurrencePlan:
    """How the integer product of a state is computed.

    A panel has `panel` vectors of columns. The packed weights of a product are (panels, words,
    panel, weight vector).
    """

    spec: Recurrence
    isa: Isa

    @property
    def words(self) -> int:
        return ceil_div(self.spec.units, self.isa.products)

    def choose_panel(self, count: int) -> int:
        """Return the vectors of a panel in the product for `count` gates."""
        total = count * self.spec.padded // self.isa.lanes
        most = min(MOST_SUMS, self.isa.accumulators)
        return max(size for size in range(1, most + 1) if total % size == 0)


def plan_recurrence(spec: Recurrence, isa: Isa) -> RecurrencePlan:
    """Make the plan for generator and packer."""
    return RecurrencePlan(spec, isa.companion.for_activations("int8"))


def pack_recurrence(
    spec: Recurrence, isa: Isa, weight: NDArray[np.int8], scale: NDArray[np.float32]
) -> list[NDArray[Any]]:
    """Pack an int8 weight (H, G * H) and its scale, () or (G * H,), for `build_recurrence`.

    Returns:
        Weights, the number at which each sum starts, and scales, both with padding.
    """
    plan = plan_recurrence(spec, isa)
    isa, units, padded = plan.isa, spec.units, spec.padded
    rows = plan.words * isa.products
    columns = np.zeros((rows, spec.gates, padded), "int8")
    columns[:units, :, :units] = weight.reshape(units, spec.gates, units)
    scales = np.zeros((spec.gates, padded), "float32")
    scales[:, :units] = np.broadcast_to(scale, (spec.gates * units,)).reshape(spec.gates, units)
    packed = []
    for first, count in PRODUCTS[spec.cell]:
        panel = plan.choose_panel(count)
        part = columns[:, first : first + count].reshape(
            plan.words, isa.products, -1, panel, isa.lanes
        )
        packed.append(isa.arrange_weights(part.transpose(2, 0, 3, 4, 1)).reshape(-1))
    shift = isa.zero_point_shift("int8")
    start = -shift * columns.sum(0, dtype="int32")
    return [np.concatenate(packed), start.reshape(-1), scales.reshape(-1)]


def build_recurrence(spec: Recurrence, isa: Isa, name: str) -> PrimFunc:
    """Make the kernel: PrimFunc(x, weights, [optional operands,] y).

    x is float32 (T, B, G * H). The weights are float32 (H, G * H), or what `pack_recurrence`
    returns. y is float32 (states + T, B, H), the last states first.
    """
    return build_planned(plan_recurrence(spec, isa), name)


def build_planned(plan: RecurrencePlan, name: str) -> PrimFunc:
    """Make the kernel of a plan; see `build_recurrence`."""
    return build_kernel(name, lambda: RecurrenceKernel(plan).emit())


@dataclass(frozen=True, eq=False)
class RecurrenceKernel:
    """Statements of one kernel, on flat views of its arguments."""

    plan: RecurrencePlan

    @property
    def spec(self) -> Recurrence:
        return self.plan.spec

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The arguments by name, declared when they are first read."""
        spec, units = self.spec, self.spec.units
        steps, batch = self.extents
        width, padded = spec.gates * units, spec.gates * spec.padded
        shapes: dict[str, tuple[tuple[Any, ...], str]] = {"x": ((steps, batch, width), "float32")}
        if spec.is_integer:
            size = self.plan.words * self.plan.isa.products * padded
            shapes["weight"] = ((size,), self.plan.isa.weight_dtype)
            shapes |= {"start": ((padded,), "int32"), "scale": ((padded,), "float32")}
        else:
            shapes["weight"] = ((units, width), "float32")
        optional = spec.shape_optional(batch)
        for name in spec.given:
            shapes[name] = (optional[name], "int32" if name == "lengths" else "float32")
        shapes["y"] = ((spec.states + steps, batch, units), "float32")
        arguments = {
            name: T.arg(name, T.Buffer(shape, dtype)) for name, (shape, dtype) in shapes.items()
        }
        views = {}
        for name, buffer in arguments.items():
            size: Any = 1
            for extent in shapes[name][0]:
                size = size * extent
            views[name] = T.decl_buffer((size,), buffer.dtype, data=buffer.data)
        return views

    @cached_property
    def extents(self) -> tuple[Any, Any]:
        """Number of steps and of samples."""
        steps, batch = self.spec.steps, self.spec.batch
        return T.int64() if steps is None else steps, T.int64() if batch is None else batch

    def emit(self) -> None:
        """Emit all samples."""
        spec, (steps, batch) = self.spec, self.extents
        assert self.buffers
        work = spec.gates * spec.units * (spec.units + GATE_COST)
        emit_shared_loop(
            batch,
            False if spec.batch == 1 else batch * steps * work >= PARALLEL_THRESHOLD,
            self.emit_sample,
        )

    def emit_sample(self, row: Expr) -> None:
        """Emit all steps of one sample."""
        steps, batch = self.extents
        units, states = self.spec.units, self.spec.states
        sample = SampleEmitter(self, row)
        sample.emit_start()
        y = self.buffers["y"]

        def emit_step(index: Expr) -> None:
            step = T.bind(steps - 1 - index if self.spec.is_reversed else index)
            at = ((step + states) * batch + row) * units
            if "lengths" not in self.spec.given:
                sample.emit_step((step * batch + row) * (self.spec.gates * units), at)
                return
            with T.If(step < T.Cast("int64", self.buffers["lengths"][row])):
                with T.Then():
                    sample.emit_step((step * batch + row) * (self.spec.gates * units), at)
                with T.Else():
                    emit_vector_loop(
                        units,
                        LANES,
                        lambda j, lanes: store_vector(
                            y, constant("float32", 0, lanes), at + j, lanes
                        ),
                    )

        with T.serial(T.int64(0), T.Cast("int64", steps)) as index:
            emit_step(index)
        for i, state in enumerate(sample.states):
            copy_vectors(state, 0, y, (i * batch + row) * units, units)


def copy_vectors(source: Buffer, start: Expr, target: Buffer, first: Expr, size: int) -> None:
    """Copy `size` elements."""

    def copy(at: Expr, lanes: int) -> None:
        store_vector(target, load_vector(source, start + at, lanes), first + at, lanes)

    emit_vector_loop(size, LANES, copy)


def hold(value: Expr, lanes: int = LANES) -> Expr:
    """Store a vector of float32 in a variable, and read it.

    TVM's simplifier replaces what `T.bind` makes by its value, so chains of these grow without
    bound.
    """
    (variable,) = alloc_vectors(1, lanes, "float32")
    store_vector(variable, value, 0, lanes)
    return load_vector(variable, 0, lanes)


def emit_activation(name: str, value: Expr) -> Expr:
    """Emit an activation of a vector, as `reference.qnn.recurrent` computes it."""
    zero, one = constant("float32", 0, LANES), constant("float32", 1, LANES)
    value = hold(value)
    if name == "relu":
        return T.Select(value > zero, value, zero)
    factor = constant("float32", -1 if name == "sigmoid" else -2, LANES)
    power = hold(emit_exp(T.abs(value) * factor, LANES))
    if name == "sigmoid":
        return hold(T.Select(value >= zero, one, power) / (one + power))
    size = hold((one - power) / (one + power))
    return hold(T.Select(value < zero, -size, size))


class SampleEmitter:
    """Workspaces of one sample, and the statements of its steps."""

    def __init__(self, kernel: RecurrenceKernel, row: Expr) -> None:
        self.plan, self.spec, self.row = kernel.plan, kernel.plan.spec, row
        self.buffers, padded = kernel.buffers, kernel.plan.spec.padded
        self.states = [alloc_workspace(padded, "float32") for _ in range(self.spec.states)]
        self.gates = alloc_workspace(self.spec.gates * padded, "float32")
        self.product = alloc_workspace(padded, "float32")  # of the hidden gate of a GRU
        self.reset = alloc_workspace(padded, "float32")
        self.levels = alloc_workspace(padded, self.plan.isa.activation)
        (self.scale,) = alloc_vectors(1, 1, "float32")

    def each_vector(self, emit: Callable[[Expr], None]) -> None:
        """Emit a loop of emit(first unit of a vector)."""
        with T.serial(self.spec.padded // LANES) as index:
            emit(index * LANES)

    def emit_start(self) -> None:
        """Set the states to their initial values, and the padding to 0."""
        zero, units = constant("float32", 0, LANES), self.spec.units
        for buffer in (*self.states, self.product, self.reset):
            self.each_vector(lambda j, buffer=buffer: store_vector(buffer, zero, j, LANES))
        with T.serial(self.spec.gates) as gate:
            base = gate * self.spec.padded
            self.each_vector(lambda j: store_vector(self.gates, zero, base + j, LANES))
        for name, state in zip(("hidden", "cell"), self.states, strict=False):
            if name in self.spec.given:
                copy_vectors(self.buffers[name], self.row * units, state, 0, units)

    def emit_step(self, first: Expr, out: Expr) -> None:
        """Emit one step: the inputs begin at `first`, the result at `out`."""
        spec, hidden = self.spec, self.states[0]
        units, padded = spec.units, spec.padded
        x = self.buffers["x"]
        with T.serial(spec.gates) as gate:
            copy_vectors(x, first + gate * units, self.gates, gate * padded, units)
        self.emit_levels(hidden)
        self.emit_product(0, self.gates, hidden)
        if spec.linear_before_reset:
            self.emit_product(1, self.product, hidden)
        elif spec.cell == "gru":

            def reset(j: Expr) -> None:
                gate = self.apply(0, load_vector(self.gates, padded + j, LANES))
                value = fence(gate * load_vector(hidden, j, LANES), LANES)
                store_vector(self.reset, value, j, LANES)

            self.each_vector(reset)
            self.emit_levels(self.reset)
            self.emit_product(1, self.product, self.reset)
        self.each_vector(
            {"lstm": self.emit_lstm, "gru": self.emit_gru, "rnn": self.emit_rnn}[spec.cell]
        )
        for state in self.states:  # activations make numbers of the padding
            for j in range(units, padded):
                T.buffer_store(state, T.float32(0), [j])
        copy_vectors(hidden, 0, self.buffers["y"], out, units)

    # -- products ------------------------------------------------------------------------------

    def emit_levels(self, state: Buffer) -> None:
        """Quantize the row that is multiplied, as `quantize_rows` does."""
        if not self.spec.is_integer:
            return
        (largest,) = alloc_vectors(1, LANES, "float32")
        store_vector(largest, constant("float32", 0, LANES), 0, LANES)

        def compare(j: Expr) -> None:
            value = T.abs(load_vector(state, j, LANES))
            store_vector(largest, T.max(load_vector(largest, 0, LANES), value), 0, LANES)

        self.each_vector(compare)
        found = fold_lanes(load_vector(largest, 0, LANES), LANES, T.max)
        quotient = hold(found / T.Cast("float32", T.int32(ROW_LIMIT)), 1)
        step = T.Select(quotient > T.float32(0), quotient, T.float32(1))
        T.buffer_store(self.scale, step, [0])

        def convert(j: Expr) -> None:
            limit = constant("float32", ROW_LIMIT, LANES)
            level = load_vector(state, j, LANES) / broadcast(self.scale[0], LANES)
            level = T.max(T.min(T.nearbyint(level), limit), -limit)
            codes = T.Cast(vector("int8", LANES), T.Cast(vector("int32", LANES), level))
            codes = convert_activation(codes, "int8", self.levels.dtype, LANES)
            store_vector(self.levels, codes, j, LANES)

        self.each_vector(convert)

    def emit_product(self, number: int, target: Buffer, state: Buffer) -> None:
        """Add product `number` of the row to `target`, or replace the product of a GRU's gate."""
        emit = self.emit_integers if self.spec.is_integer else self.emit_floats
        emit(number, target, state)

    def emit_integers(self, number: int, target: Buffer, _state: Buffer) -> None:
        plan, isa, padded = self.plan, self.plan.isa, self.spec.padded
        products = PRODUCTS[self.spec.cell]
        first, count = products[number]
        panel = plan.choose_panel(count)
        vectors = sum(n * padded // isa.lanes for _, n in products[:number])
        lanes, size = isa.lanes, isa.lanes * panel
        adds = target.same_as(self.gates)
        sums = alloc_vectors(panel, isa.accumulator_lanes)
        with T.serial(count * padded // size) as index:
            column = index * size
            for v, total in enumerate(sums):
                start = load_vector(
                    self.buffers["start"], first * padded + column + v * lanes, lanes
                )
                store_vector(total, start, 0, lanes)
            with T.serial(plan.words) as word:
                level = isa.load_activation(self.levels, word * isa.products)
                at = vectors * plan.words + (index * plan.words + word) * panel
                for v, total in enumerate(sums):
                    weights = isa.load_weights(self.buffers["weight"], at + v)
                    store_vector(
                        total, isa.dot(load_vector(total, 0, lanes), level, weights), 0, lanes
                    )
            for v, total in enumerate(sums):
                scale = load_vector(
                    self.buffers["scale"], first * padded + column + v * lanes, lanes
                )
                factor = fence(broadcast(self.scale[0], lanes) * scale, lanes)
                real = T.Cast(vector("float32", lanes), load_vector(total, 0, lanes))
                value = fence(real * factor, lanes)
                if adds:
                    value = load_vector(target, column + v * lanes, lanes) + value
                store_vector(target, value, column + v * lanes, lanes)

    def emit_floats(self, number: int, target: Buffer, state: Buffer) -> None:
        units, padded = self.spec.units, self.spec.padded
        first, count = PRODUCTS[self.spec.cell][number]
        adds = target.same_as(self.gates)
        weight, width = self.buffers["weight"], self.spec.gates * units
        sums = alloc_workspace(padded, "float32")
        with T.serial(count) as gate:
            base = (gate + first) * units

            def multiply(j: Expr, lanes: int) -> None:
                (total,) = alloc_vectors(1, lanes, "float32")
                store_vector(total, constant("float32", 0, lanes), 0, lanes)
                with T.serial(units) as k:
                    row = load_vector(weight, k * width + base + j, lanes)
                    value = load_vector(total, 0, lanes) + broadcast(state[k], lanes) * row
                    store_vector(total, value, 0, lanes)
                store_vector(sums, load_vector(total, 0, lanes), j, lanes)

            emit_vector_loop(units, FLOAT_COLUMNS, multiply)

            def add(j: Expr, lanes: int) -> None:
                value = load_vector(sums, j, lanes)
                if adds:
                    value = load_vector(target, gate * padded + j, lanes) + value
                store_vector(target, value, gate * padded + j, lanes)

            with T.serial(padded // LANES) as index:
                add(index * LANES, LANES)

    # -- cells ---------------------------------------------------------------------------------

    def apply(self, at: int, value: Expr) -> Expr:
        """Emit activation number `at`, after the clip."""
        if self.spec.clip and at < 2:
            clip = constant("float32", self.spec.clip, LANES)
            value = T.max(T.min(value, clip), -clip)
        return hold(emit_activation(self.spec.activations[at], value))

    def gate(self, number: int, j: Expr) -> Expr:
        return load_vector(self.gates, number * self.spec.padded + j, LANES)

    def emit_rnn(self, j: Expr) -> None:
        store_vector(self.states[0], self.apply(0, self.gate(0, j)), j, LANES)

    def emit_gru(self, j: Expr) -> None:
        hidden = load_vector(self.states[0], j, LANES)
        product = load_vector(self.product, j, LANES)
        update = self.apply(0, self.gate(0, j))
        if self.spec.linear_before_reset:
            if "hidden_bias" in self.spec.given:
                product = product + self.load_units("hidden_bias", 0, j)
            product = fence(self.apply(0, self.gate(1, j)) * product, LANES)
        new = self.apply(1, self.gate(2, j) + product)
        rest = constant("float32", 1, LANES) - update
        value = fence(rest * new, LANES) + fence(update * hidden, LANES)
        store_vector(self.states[0], value, j, LANES)

    def emit_lstm(self, j: Expr) -> None:
        entry, exit_, forget, new = (self.gate(number, j) for number in range(4))
        cell = load_vector(self.states[1], j, LANES)

        def look(value: Expr, at: int, state: Expr) -> Expr:
            if "peepholes" not in self.spec.given:
                return value
            return value + fence(self.load_units("peepholes", at, j) * state, LANES)

        entry = self.apply(0, look(entry, 0, cell))
        if self.spec.input_forget:
            forget = constant("float32", 1, LANES) - entry
        else:
            forget = self.apply(0, look(forget, 2, cell))
        new = self.apply(1, new)
        cell = hold(fence(forget * cell, LANES) + fence(entry * new, LANES))
        if self.spec.cell_clip:
            bound = constant("float32", self.spec.cell_clip, LANES)
            cell = hold(T.max(T.min(cell, bound), -bound))
        store_vector(self.states[1], cell, j, LANES)
        value = self.apply(0, look(exit_, 1, cell)) * self.apply(2, cell)
        store_vector(self.states[0], value, j, LANES)

    def load_units(self, name: str, row: int, j: Expr) -> Expr:
        """Load a vector of an operand (rows, units), without reading beyond it."""
        units, buffer = self.spec.units, self.buffers[name]
        if units == self.spec.padded:
            return load_vector(buffer, row * units + j, LANES)
        (values,) = alloc_vectors(1, LANES, "float32")
        store_vector(values, constant("float32", 0, LANES), 0, LANES)
        with T.serial(T.min(LANES, units - j)) as at:
            T.buffer_store(values, buffer[row * units + j + at], [at])
        return load_vector(values, 0, LANES)
