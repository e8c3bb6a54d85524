"""Define-by-run, convert: integer inputs and outputs of the model.

An argument of the model crosses a boundary into the regions that read it, and a result crosses a
boundary out to the caller, in the same way as values between two regions (`boundaries`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from relayquant.base.qtypes import QParams
from relayquant.errors import ConfigError, DataError, warn_user
from relayquant.ir.ledger import InterfaceValue
from relayquant.stages.conversion.io_dtypes import shift_qparams
from relayquant.torch.define_by_run.arguments import join_arguments, split_arguments
from relayquant.torch.define_by_run.boundaries import OUTSIDE, Boundary, Port, find_made, find_owned
from relayquant.torch.define_by_run.call_sites import CallSite
from relayquant.torch.define_by_run.deferred import (
    DeferredTensor,
    quantize_tensor,
    replace_tensors,
    take_float,
)
from relayquant.torch.define_by_run.regions import Region
from relayquant.torch.define_by_run.tape import Tape
from relayquant.torch.define_by_run.tensor_file import TensorFile


@dataclass(frozen=True, eq=False)
class QuantizedPort:
    """An integer input or output of the model.

    Attributes:
        number: Number of the tensor among the arguments or results.
        inside: Its parameters in the regions.
        outside: The same in the caller's dtype: the zero point is shifted.
    """

    number: int
    inside: QParams
    outside: QParams

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert the caller's integers to the value that the code gets.

        Raises:
            DataError: they have another dtype.
        """
        check_integers(tensor, self.outside, f"Input {self.number} of the model")
        with torch._C.DisableTorchFunction():
            value = DeferredTensor.make(tensor.shape, torch.float32, None, -1)
            value.integers = move_zero(tensor, self.outside, self.inside), self.inside
        return value

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert the code's result to the caller's integers."""
        if type(tensor) is DeferredTensor and tensor.integers is not None:
            integers, qparams = tensor.integers
            if qparams is self.inside:
                return move_zero(integers, self.inside, self.outside)
        return quantize_tensor(take_float(tensor), self.outside)


@dataclass(frozen=True, eq=False)
class ModelInterface:
    """Inputs and outputs of a converted model.

    Attributes:
        entries, exits: Its integer inputs and outputs.
        inputs, outputs: All inputs and outputs, for the ledger. Empty if all are float.
    """

    entries: Mapping[int, QuantizedPort] = field(default_factory=dict)
    exits: Mapping[int, QuantizedPort] = field(default_factory=dict)
    inputs: tuple[InterfaceValue, ...] = ()
    outputs: tuple[InterfaceValue, ...] = ()

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Convert the caller's arguments to the code's arguments."""
        tensors: list[torch.Tensor] = []
        template = split_arguments((args, kwargs), tensors)
        given = [
            self.entries[i].enter(tensor) if i in self.entries else tensor
            for i, tensor in enumerate(tensors)
        ]
        return join_arguments(template, given)

    def leave(self, result: Any) -> Any:
        """Convert the code's result to the caller's result."""
        numbers = itertools.count()

        def change(tensor: torch.Tensor) -> torch.Tensor:
            passage = self.exits.get(next(numbers))
            return take_float(tensor) if passage is None else passage.leave(tensor)

        return replace_tensors(result, change)


def list_tensors(result: Any) -> list[torch.Tensor]:
    """List the tensors of a model's result in the order of their numbers."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    replace_tensors(result, note)
    return found


def check_integers(tensor: torch.Tensor, qparams: QParams, what: str) -> None:
    """Check that a tensor has the expected integer dtype.

    Raises:
        DataError: it has another one.
    """
    dtype = getattr(torch, qparams.dtype)
    if tensor.dtype != dtype:
        raise DataError(
            f"{what} is {str(tensor.dtype).removeprefix('torch.')}; the converted model takes "
            f"{qparams.dtype}: round(x / {float(qparams.scale)!r}) + {int(qparams.zero_point)}, "
            "within its bounds, as its ledger says.",
            code="RQ302",
        )


def move_zero(tensor: torch.Tensor, have: QParams, want: QParams) -> torch.Tensor:
    """Convert integers to another dtype of the same width."""
    if have.dtype == want.dtype:
        return tensor
    moved = tensor.to(torch.int32) + (int(want.zero_point) - int(have.zero_point))
    return moved.to(getattr(torch, want.dtype))


def find_interface(
    tapes: Sequence[Tape],
    regions: Sequence[Region],
    quantized: Collection[int],
    boundaries: Sequence[Boundary],
    file: TensorFile,
    input_dtypes: Mapping[int, str],
    output_dtypes: Mapping[int, str],
) -> ModelInterface:
    """Find the inputs and outputs of a model whose regions have these boundaries.

    `quantized` are the numbers of the regions that are integer modules.

    Raises:
        ConfigError: a requested integer input or output cannot be integer.
    """
    if not input_dtypes and not output_dtypes:
        return ModelInterface()
    first, owned = tapes[0], find_owned(tapes, [regions[number] for number in quantized])
    qparams_of = {port: boundary.qparams for boundary in boundaries for port in boundary.ports}
    entries = {
        k: find_entry(tapes, owned, qparams_of, k, dtype)
        for k, dtype in sorted(input_dtypes.items())
    }
    exits = {
        k: find_exit(tapes, regions, qparams_of, k, dtype)
        for k, dtype in sorted(output_dtypes.items())
    }
    inputs = describe_values("input", first.inputs, file, entries)
    return ModelInterface(
        entries, exits, inputs, describe_values("output", first.given, file, exits)
    )


def describe_values(
    what: str, numbers: Sequence[int], file: TensorFile, ports: Mapping[int, QuantizedPort]
) -> tuple[InterfaceValue, ...]:
    """Describe inputs or outputs as rows of the ledger. `values` are from the first call."""

    def describe(k: int, number: int) -> InterfaceValue:
        if k not in ports:
            dtype = str(file.read(number).dtype).removeprefix("torch.")
            return InterfaceValue(f"{what} {k}", dtype)
        qparams = ports[k].outside
        return InterfaceValue(f"{what} {k}", qparams.dtype, qparams.dtype).with_qparams(qparams)

    return tuple(describe(k, number) for k, number in enumerate(numbers))


def check_number(what: str, number: int, count: int) -> None:
    """Raise ConfigError for a number of an input or output that does not exist."""
    if not 0 <= number < count:
        allowed = f"0 to {count - 1}" if count else "none, as it has no tensors there"
        raise ConfigError(
            f"PrepareCustomConfig: the model has no {what} {number}; allowed: {allowed}.",
            code="RQ103",
        )


def find_entry(
    tapes: Sequence[Tape],
    owned: Sequence[set[int]],
    qparams_of: Mapping[Port, QParams],
    number: int,
    dtype: str,
) -> QuantizedPort:
    """Find an integer input. Warns about operators in PyTorch that read it.

    Raises:
        ConfigError: no region reads it as integers.
    """
    for tape in tapes:
        check_number("input", number, len(tape.inputs))
    readers: dict[CallSite, None] = {}
    for steps, tape in zip(owned, tapes, strict=True):
        values = {value for value, k in tape.entries.items() if k == number}
        for i, step in enumerate(tape.steps):
            if i not in steps and not values.isdisjoint(step.operands):
                readers[step.site] = None
    listed = "; ".join(map(str, readers))
    qparams = qparams_of.get(Port(OUTSIDE, True, number))
    if qparams is None:
        cause = f"PyTorch reads it, in {listed}, and " if readers else ""
        raise ConfigError(
            f"set_input_quantized_indexes: input {number} of the model cannot be integer: "
            f"{cause}no region reads it as integers with one set of parameters. Leave it out, or "
            "quantize the operators that read it; the ledger of the converted model says why "
            "they stay in float.",
            code="RQ103",
        )
    if readers:
        warn_user(
            f"Input {number} of the model is integer, but is read in PyTorch by {listed}: there "
            "it is converted to float in each call.",
            code="RQ208",
        )
    return QuantizedPort(number, qparams, shift_qparams(qparams, dtype, f"input {number}"))


def find_exit(
    tapes: Sequence[Tape],
    regions: Sequence[Region],
    qparams_of: Mapping[Port, QParams],
    number: int,
    dtype: str,
) -> QuantizedPort:
    """Find an integer output.

    Raises:
        ConfigError: in a call of calibration, no region computed it as integers.
    """
    for tape in tapes:
        check_number("output", number, len(tape.results))
    made = find_made(tapes, regions)
    qparams = qparams_of.get(Port(OUTSIDE, False, number))

    def is_integer(t: int, value: int | None) -> bool:
        port = None if value is None else made.get((t, value))
        return qparams is not None and port is not None and qparams_of.get(port) is qparams

    floats = [t for t, tape in enumerate(tapes) if not is_integer(t, tape.results[number])]
    if qparams is None or floats:
        tape = tapes[floats[0]]
        value = tape.results[number]
        maker = next((s for s in tape.steps if value is not None and value in s.results), None)
        what = "a value from outside the model" if maker is None else str(maker.site)
        raise ConfigError(
            f"set_output_quantized_indexes: output {number} of the model cannot be integer: it is "
            f"{what}, which no region computes as integers with one set of parameters. Leave it "
            "out, or quantize the operators that compute it; the ledger of the converted model "
            "says why they stay in float.",
            code="RQ103",
        )
    return QuantizedPort(number, qparams, shift_qparams(qparams, dtype, f"output {number}"))
