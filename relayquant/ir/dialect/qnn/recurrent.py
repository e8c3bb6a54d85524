"""Dialect: lstm, gru and rnn, which run a recurrent layer over all steps in one operator.

The inputs of all steps are multiplied by their weights before, as one ordinary product. The
operator adds the product of the hidden state in each step. With an int8 weight, the hidden state is
quantized in each step, row by row as by `quantize_rows`, and the sums are exact integers. Gates,
hidden state and cell are float32. `reference.qnn.recurrent` defines the arithmetic.

The order of the gates is ONNX's: input, output, forget, cell (lstm); update, reset, hidden (gru).
An operand that a call leaves out has rank 0. It is the same number for all samples and units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Attrs, Call
from tvm.relax import BlockBuilder
from tvm.script.ir_builder import tirx as T

from relayquant.errors import QnnError
from relayquant.ir.dialect.construct import Operand, Parameter, make_call
from relayquant.ir.dialect.loops import emit_loops, name_hint
from relayquant.ir.dialect.operands import (
    Argument,
    CheckedOperand,
    check_attribute,
    get_operands,
    is_known_different,
    scale_argument,
    show_dimension,
    show_shape,
)
from relayquant.ir.dialect.operator import Operator, define_attrs
from relayquant.ir.reference.row_arithmetic import (
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST,
    POWERS,
    ROUND_TO_EXPONENT,
)
from relayquant.ir.rewrite.graph import constant_value

__all__ = ["gru", "lstm", "rnn"]

#: Activations of gates and states.
ACTIVATIONS = ("sigmoid", "tanh", "relu")
#: Length of a sequence that is not shorter than the data.
ALL_STEPS = 2**31 - 1
#: Largest magnitude of a quantized hidden state.
ROW_LIMIT = 127

PRODUCT = (Argument("data"), Argument("weight"), scale_argument("weight_scale"))
STATE, LENGTHS = Argument("hidden", "float32"), Argument("lengths", "int32")


@define_attrs("relayquant.attrs.QRnnAttrs")
class QRnnAttrs(Attrs):
    """Attributes of qnn.rnn."""

    activations: tvm_ffi.Array
    clip: float
    is_reversed: bool


@define_attrs("relayquant.attrs.QGruAttrs")
class QGruAttrs(Attrs):
    """Attributes of qnn.gru."""

    activations: tvm_ffi.Array
    clip: float
    is_reversed: bool
    linear_before_reset: bool


@define_attrs("relayquant.attrs.QLstmAttrs")
class QLstmAttrs(Attrs):
    """Attributes of qnn.lstm."""

    activations: tvm_ffi.Array
    clip: float
    is_reversed: bool
    input_forget: bool
    cell_clip: float = 0.0


@dataclass(frozen=True)
class RecurrentCell:
    """What the three operators differ in.

    Attributes:
        gates: Number of gates.
        states: Number of states: the hidden state, and the cell of an LSTM.
        activations: Default activations, in ONNX's order.
        operands: All operands.
        attrs: Type of the attributes.
    """

    gates: int
    states: int
    activations: tuple[str, ...]
    operands: tuple[Argument, ...]
    attrs: type

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the operands that a call may leave out, in order."""
        return tuple(operand.name for operand in self.operands[len(PRODUCT) :])


CELLS = {
    "lstm": RecurrentCell(
        4,
        2,
        ("sigmoid", "tanh", "tanh"),
        (*PRODUCT, STATE, Argument("cell", "float32"), Argument("peepholes", "float32"), LENGTHS),
        QLstmAttrs,
    ),
    "gru": RecurrentCell(
        3,
        1,
        ("sigmoid", "tanh"),
        (*PRODUCT, STATE, Argument("hidden_bias", "float32"), LENGTHS),
        QGruAttrs,
    ),
    "rnn": RecurrentCell(1, 1, ("tanh",), (*PRODUCT, STATE, LENGTHS), QRnnAttrs),
}


# ---------------------------------------------------------------- constructors


def list_activations(operator: str, names: Sequence[str]) -> tvm_ffi.Array:
    return tvm_ffi.Array([str(name) for name in names or CELLS[operator].activations])


def lstm(
    data: Operand,
    weight: Operand,
    weight_scale: Parameter = 1.0,
    hidden: Parameter = 0.0,
    cell: Parameter = 0.0,
    peepholes: Parameter = 0.0,
    lengths: Parameter = ALL_STEPS,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    is_reversed: bool = False,
    input_forget: bool = False,
    cell_clip: float = 0.0,
) -> Call:
    """Run an LSTM: data (T, B, 4 * H) and weight (H, 4 * H) -> float32 (2 + T, B, H).

    The result is the last hidden state, the last cell, and then the hidden state of each step.

    i, o, f = f(gates + peepholes * c); c' = f * c + i * g(gates); h' = o * h(c')

    Args:
        data: float32, the products of the inputs with their weights, with all biases.
        weight: Multiplies the hidden state: float32 with weight_scale 1, or int8.
        weight_scale: () or (4 * H,).
        hidden, cell: Initial states, () or (B, H).
        peepholes: () or (3, H), of input, output and forget gate.
        lengths: Number of steps, () or (B,). Later steps keep the states, and give 0.
        activations: f, g and h: "sigmoid", "tanh" or "relu".
        clip: Bound of the operands of f and g, 0 for none.
        is_reversed: Whether the last step is computed first.
        input_forget: Whether the forget gate is 1 - input gate.
        cell_clip: Bound of c', 0 for none.
    """
    values = (data, weight, weight_scale, hidden, cell, peepholes, lengths)
    names = list_activations("lstm", activations)
    attrs = QLstmAttrs(names, float(clip), bool(is_reversed), bool(input_forget), float(cell_clip))
    return make_call("lstm", CELLS["lstm"].operands, values, attrs)


def gru(
    data: Operand,
    weight: Operand,
    weight_scale: Parameter = 1.0,
    hidden: Parameter = 0.0,
    hidden_bias: Parameter = 0.0,
    lengths: Parameter = ALL_STEPS,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    is_reversed: bool = False,
    linear_before_reset: bool = False,
) -> Call:
    """Run a GRU: data (T, B, 3 * H) and weight (H, 3 * H) -> float32 (1 + T, B, H).

    The result is the last hidden state, then the hidden state of each step. Other operands are
    those of `lstm`.

    z, r = f(gates); n = g(gates + (r * h) @ W); h' = (1 - z) * n + z * h

    With linear_before_reset: n = g(gates + r * (h @ W + hidden_bias)), hidden_bias () or (H,).
    """
    values = (data, weight, weight_scale, hidden, hidden_bias, lengths)
    names = list_activations("gru", activations)
    attrs = QGruAttrs(names, float(clip), bool(is_reversed), bool(linear_before_reset))
    return make_call("gru", CELLS["gru"].operands, values, attrs)


def rnn(
    data: Operand,
    weight: Operand,
    weight_scale: Parameter = 1.0,
    hidden: Parameter = 0.0,
    lengths: Parameter = ALL_STEPS,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    is_reversed: bool = False,
) -> Call:
    """Run a simple recurrent layer: data (T, B, H) and weight (H, H) -> float32 (1 + T, B, H).

    The result is the last hidden state, then the hidden state of each step. Other operands are
    those of `lstm`.

    h' = f(gates)
    """
    values = (data, weight, weight_scale, hidden, lengths)
    attrs = QRnnAttrs(list_activations("rnn", activations), float(clip), bool(is_reversed))
    return make_call("rnn", CELLS["rnn"].operands, values, attrs)


# ---------------------------------------------------------------- types


def get_cell(call: Call) -> RecurrentCell:
    return CELLS[call.op.name.removeprefix("relax.qnn.")]


def infer_recurrent(call: Call, _builder: Any) -> Any:
    """Infer float32 (T, B, G * H), float32 or int8 (H, G * H) -> float32 (states + T, B, H)."""
    cell = get_cell(call)
    operands = get_operands(call, cell.operands)
    data, weight, scale, *others = operands
    data.check_dtype(("float32",), "Cast it first.")
    weight.check_dtype(("float32", "int8"), "Cast it to float32, or quantize it to int8.")
    data.check_rank(3, "steps, batch, gates * hidden")
    weight.check_rank(2, "hidden, gates * hidden")
    if weight.dtype == "float32" and scale.ndim > 0:
        raise scale.fail(
            f"has rank {scale.ndim}", "allowed: rank 0, the number 1, for a float32 weight"
        )
    if len(call.attrs.activations) != len(cell.activations):
        raise QnnError(
            f"{data.operator}: activations={list(call.attrs.activations)}; allowed: "
            f"{len(cell.activations)} names.",
            code="RQ601",
        )
    for name in call.attrs.activations:
        check_attribute(data.operator, "activations", str(name), ACTIVATIONS)
    hidden = weight.dimension(0)
    if data.shape is None or hidden is None:
        return relax.TensorType(None, "float32", data.ty.vdevice, 3)
    steps, batch, width = data.shape
    units = hidden * cell.gates
    for each, size in ((weight, weight.dimension(1)), (data, width)):
        if is_known_different(size, units):
            raise each.fail(
                f"has shape {show_shape(each.shape or [])}",
                f"allowed: {show_dimension(units)} in the last dimension, because dimension 0 of "
                f"'weight' is {show_dimension(hidden)}",
            )
    sizes = list_sizes(batch, hidden, units)
    for each in (scale, *others):
        check_optional(each, sizes[each.name])
    return relax.TensorType([steps + cell.states, batch, hidden], "float32", data.ty.vdevice)


def list_sizes(batch: Any, hidden: Any, units: Any) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of all operands behind the weight, if they are no numbers."""
    return {
        "weight_scale": (units,),
        "hidden": (batch, hidden),
        "cell": (batch, hidden),
        "peepholes": (tirx.IntImm("int64", 3), hidden),
        "hidden_bias": (hidden,),
        "lengths": (batch,),
    }


def check_optional(operand: CheckedOperand, sizes: tuple[Any, ...]) -> None:
    """Raise QnnError unless an operand has rank 0, or these sizes."""
    if operand.ndim in (-1, 0):
        return
    shape = operand.shape
    if operand.ndim != len(sizes) or (
        shape is not None
        and any(is_known_different(*pair) for pair in zip(shape, sizes, strict=True))
    ):
        found = f"rank {operand.ndim}" if shape is None else f"shape {show_shape(shape)}"
        raise operand.fail(f"has {found}", f"allowed: {show_shape(list(sizes))}, or ()")


# ---------------------------------------------------------------- loop nest


def fence(value: Any) -> Any:
    """Round a value here, so that LLVM contracts no product with the operation after it."""
    return T.call_llvm_pure_intrin("llvm.arithmetic.fence.f32", value, dtype="float32")


def hold(value: Any) -> Any:
    """Store a value in a variable, and read it.

    TVM's simplifier replaces what `T.bind` makes by its value, so chains of these grow without
    bound.
    """
    variable = T.alloc_buffer((1,), "float32")
    T.buffer_store(variable, value, [0])
    return variable[0]


def emit_power(value: Any) -> Any:
    """Emit e^value for a number up to 0, as `row_arithmetic.exponentiate` computes it."""
    number = T.float32
    value = hold(T.Select(value < number(LOWEST), number(LOWEST), value))
    exponent = hold(fence(fence(value * number(LOG2_E)) + number(ROUND_TO_EXPONENT)))
    n = hold(exponent - number(ROUND_TO_EXPONENT))
    rest = hold(value - n * number(LN2_HIGH) - n * number(LN2_LOW))
    power = number(POWERS[0])
    for coefficient in POWERS[1:]:
        power = fence(power * rest) + number(coefficient)
    bits = T.shift_left(T.reinterpret("int32", exponent), T.int32(23))
    return hold(fence(power * T.reinterpret("float32", bits)))


def emit_activation(name: str, value: Any) -> Any:
    """Emit an activation, as `reference.qnn.recurrent` computes it."""
    zero, one, value = T.float32(0), T.float32(1), hold(value)
    if name == "relu":
        return T.Select(value > zero, value, zero)
    factor = T.float32(-1 if name == "sigmoid" else -2)
    power = emit_power(T.abs(value) * factor)
    if name == "sigmoid":
        return T.Select(value >= zero, one, power) / (one + power)
    size = hold((one - power) / (one + power))
    return T.Select(value < zero, -size, size)


def legalize_recurrent(builder: BlockBuilder, call: Call) -> Any:
    """Emit plain loops over samples, steps and units."""
    loops = NaiveRecurrence(call)
    func = emit_loops(loops.name, loops.emit)
    return relax.call_tir(builder.add_func(func, name_hint(call)), list(call.args), call.ty)


class NaiveRecurrence:
    """Plain loops of one call."""

    def __init__(self, call: Call) -> None:
        self.call, self.cell, self.attrs = call, get_cell(call), call.attrs
        self.name = call.op.name.removeprefix("relax.qnn.")
        self.units = int(call.args[1].ty.shape.values[0])
        self.is_integer = str(call.args[1].ty.dtype) == "int8"

    def emit(self) -> None:
        units, width = self.units, self.units * self.cell.gates
        steps, batch = (
            int(size) if isinstance(size, tirx.IntImm) else T.int64()
            for size in self.call.args[0].ty.shape.values[:2]
        )
        known = {"data": (steps, batch, width), "weight": (units, width)}
        known |= list_sizes(batch, units, width)
        self.tensors: dict[str, Any] = {}
        for argument, expr in zip(self.cell.operands, self.call.args, strict=True):
            shape = known[argument.name] if expr.ty.ndim else ()
            buffer = T.Buffer(shape, str(expr.ty.dtype))
            self.tensors[argument.name] = T.arg(argument.name, buffer)
        out = (steps + self.cell.states, batch, units)
        self.out = T.arg("out", T.Buffer(out, "float32"))
        self.states = [T.alloc_buffer((units,), "float32") for _ in range(self.cell.states)]
        self.gates, self.next = (
            T.alloc_buffer((width,), "float32"),
            T.alloc_buffer((units,), "float32"),
        )
        self.levels = T.alloc_buffer((units,), "int32" if self.is_integer else "float32")
        self.scale = T.alloc_buffer((1,), "float32")
        self.sums = T.alloc_buffer((1,), "int32" if self.is_integer else "float32")
        with T.serial(batch) as row:
            with T.serial(units) as j:
                for state, name in zip(self.states, ("hidden", "cell"), strict=False):
                    T.buffer_store(state, self.read(name, row, j), [j])
            with T.serial(steps) as index:
                step = T.bind(steps - 1 - index if self.attrs.is_reversed else index)
                with T.If(step < T.Cast("int64", self.read("lengths", row))):
                    with T.Then():
                        self.emit_step(step, row)
                    with T.Else(), T.serial(units) as j:
                        T.buffer_store(self.out, T.float32(0), [step + self.cell.states, row, j])
            with T.serial(units) as j:
                for i, state in enumerate(self.states):
                    T.buffer_store(self.out, state[j], [i, row, j])

    def read(self, name: str, *index: Any) -> Any:
        """Read an operand. One of rank 0 is the same everywhere."""
        buffer = self.tensors[name]
        return buffer[index] if len(buffer.shape) else buffer[()]

    def quantize(self, read: Callable[[Any], Any]) -> None:
        """Copy the row that is multiplied, as integers if the weight is."""
        if not self.is_integer:
            with T.serial(self.units) as j:
                T.buffer_store(self.levels, read(j), [j])
            return
        T.buffer_store(self.scale, T.float32(0), [0])
        with T.serial(self.units) as j:
            T.buffer_store(self.scale, T.max(self.scale[0], T.abs(read(j))), [0])
        # Not an immediate: the simplifier would multiply by its reciprocal.
        quotient = hold(self.scale[0] / T.Cast("float32", T.int32(ROW_LIMIT)))
        T.buffer_store(self.scale, T.Select(quotient > T.float32(0), quotient, T.float32(1)), [0])
        with T.serial(self.units) as j:
            level, limit = T.nearbyint(read(j) / self.scale[0]), T.float32(ROW_LIMIT)
            level = T.max(T.min(level, limit), -limit)
            T.buffer_store(self.levels, T.Cast("int32", level), [j])

    def multiply(self, first: Any, count: Any, emit: Callable[[Any, Any], None]) -> None:
        """Call emit(n, product of the row with column n) for `count` columns from `first` on."""
        weight = self.tensors["weight"]
        with T.serial(count) as at:
            n = first + at
            T.buffer_store(self.sums, T.Cast(self.sums.dtype, T.int32(0)), [0])
            with T.serial(self.units) as k:
                product = self.levels[k] * T.Cast(self.sums.dtype, weight[k, n])
                T.buffer_store(self.sums, self.sums[0] + product, [0])
            total = self.sums[0]
            if self.is_integer:
                factor = fence(self.scale[0] * self.read("weight_scale", n))
                total = fence(T.Cast("float32", total) * factor)
            emit(n, hold(total))

    def apply(self, at: int, value: Any) -> Any:
        """Emit activation number `at`, after the clip."""
        clip = T.float32(float(self.attrs.clip))
        if float(self.attrs.clip) and at < 2:
            value = T.max(T.min(value, clip), -clip)
        return hold(emit_activation(str(self.attrs.activations[at]), value))

    def emit_step(self, step: Any, row: Any) -> None:
        units, hidden = self.units, self.states[0]
        data, splits = self.tensors["data"], self.name == "gru"

        def add(n: Any, product: Any) -> None:
            T.buffer_store(self.gates, data[step, row, n] + product, [n])

        def keep(n: Any, product: Any) -> None:
            T.buffer_store(self.gates, product, [n])

        self.quantize(lambda j: hidden[j])
        self.multiply(0, (2 if splits else self.cell.gates) * units, add)
        if splits and self.attrs.linear_before_reset:
            self.multiply(2 * units, units, keep)
        elif splits:
            with T.serial(units) as j:
                reset = self.apply(0, self.gates[units + j])
                T.buffer_store(self.next, fence(reset * hidden[j]), [j])
            self.quantize(lambda j: self.next[j])
            self.multiply(2 * units, units, keep)
        with T.serial(units) as j:
            parts = [hold(self.gates[g * units + j]) for g in range(self.cell.gates)]
            values = getattr(self, f"emit_{self.name}")(parts, step, row, j)
            for state, value in zip(self.states, values, strict=True):
                T.buffer_store(state, value, [j])
            T.buffer_store(self.out, hidden[j], [step + self.cell.states, row, j])

    def emit_rnn(self, parts: list[Any], step: Any, row: Any, j: Any) -> list[Any]:
        return [self.apply(0, parts[0])]

    def emit_gru(self, parts: list[Any], step: Any, row: Any, j: Any) -> list[Any]:
        update, reset, product = parts
        hidden, update = hold(self.states[0][j]), self.apply(0, update)
        if self.attrs.linear_before_reset:
            product = product + self.read("hidden_bias", j)
            product = fence(self.apply(0, reset) * product)
        new = self.apply(1, self.tensors["data"][step, row, 2 * self.units + j] + product)
        return [hold(fence((T.float32(1) - update) * new) + fence(update * hidden))]

    def emit_lstm(self, parts: list[Any], step: Any, row: Any, j: Any) -> list[Any]:
        entry, exit_, forget, new = parts
        cell = hold(self.states[1][j])

        def look(value: Any, at: int, state: Any) -> Any:
            return value + fence(self.read("peepholes", at, j) * state)

        entry = self.apply(0, look(entry, 0, cell))
        forget = (
            T.float32(1) - entry
            if self.attrs.input_forget
            else self.apply(0, look(forget, 2, cell))
        )
        cell = hold(fence(forget * cell) + fence(entry * self.apply(1, new)))
        if float(self.attrs.cell_clip):
            bound = T.float32(float(self.attrs.cell_clip))
            cell = hold(T.max(T.min(cell, bound), -bound))
        return [hold(self.apply(0, look(exit_, 1, cell)) * self.apply(2, cell)), cell]


def is_left_out(name: str, operand: relax.Expr) -> bool:
    """Whether a call leaves out the optional operand `name`: it is the default number."""
    array = constant_value(operand)
    return array is not None and not array.ndim and array == (ALL_STEPS if name == "lengths" else 0)


def has_integer_weight(call: Call) -> bool:
    """Whether a call is a recurrent layer whose weight is quantized."""
    is_recurrent = getattr(call.op, "name", "") in RECURRENT_OPERATORS
    return is_recurrent and str(call.args[1].ty.dtype) == "int8"


#: Operators on real data. They are no sign that a model is quantized.
RECURRENT_OPERATORS = frozenset(f"relax.qnn.{name}" for name in CELLS)

OPERATORS: tuple[Operator, ...] = tuple(
    Operator(name, cell.attrs, cell.operands, infer_recurrent, legalize_recurrent)
    for name, cell in CELLS.items()
)
