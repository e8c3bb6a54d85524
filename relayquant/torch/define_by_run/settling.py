"""Define-by-run, after calibration: find tensors from outside the calls that are constants.

Parameters and buffers are known before the first call. Any other tensor, in an attribute, a list, a
global or a closure, is seen when an operator reads it, and may be state. It is a constant if the
operator has read the same tensor each time, and if it still exists unchanged. A buffer that has
been replaced or written into is not a constant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch  # pyright: ignore[reportMissingImports]

from relayquant.torch.define_by_run.call_sites import CallSite
from relayquant.torch.define_by_run.tape import (
    ModelConstant,
    ModelConstants,
    Operand,
    OutsideTensor,
    Tape,
    TapeStep,
    ValueForm,
)
from relayquant.torch.define_by_run.tensor_file import TensorFile
from relayquant.torch.state import list_attributes

#: (operator, position among its tensors)
ReadPlace = tuple[CallSite, int]


def settle_constants(
    tapes: Sequence[Tape],
    constants: ModelConstants,
    modules: Mapping[str, torch.nn.Module],
    file: TensorFile,
) -> list[Tape]:
    """Return the tapes with constants marked. `constants` is extended.

    Args:
        tapes: Tapes of all calls. They are not changed.
        modules: Modules of the model, by name.
        file: Stores the tensors of parameters and buffers that have changed.
    """
    found = find_constants(tapes)
    names = name_tensors(modules)
    kept = {id(t) for m in modules.values() for t in (*m.parameters(), *m.buffers())}
    kept &= constants.find_current()
    return [settle_tape(tape, found, constants, names, kept, file) for tape in tapes]


def iterate_operands(tape: Tape) -> Iterator[tuple[TapeStep, int, Operand]]:
    """Yield (step, position, operand) of everything that a tape reads."""
    for step in tape.steps:
        for place, operand in enumerate(step.operands):
            yield step, place, operand


def find_constants(tapes: Sequence[Tape]) -> dict[OutsideTensor, torch.Tensor]:
    """Find tensors that are unchanged and that are read at their places in every call."""
    read: dict[ReadPlace, set[OutsideTensor | None]] = defaultdict(set)
    for tape in tapes:
        for step, place, operand in iterate_operands(tape):
            outside = tape.outside.get(operand) if isinstance(operand, int) else None
            read[step.site, place].add(outside)
    alone = {outside for held in read.values() if len(held) == 1 for outside in held}
    varying = {outside for held in read.values() if len(held) > 1 for outside in held}
    found: dict[OutsideTensor, torch.Tensor] = {}
    for outside in alone - varying:
        tensor = None if outside is None else outside.find()
        if outside is not None and tensor is not None:
            found[outside] = tensor
    return found


def settle_tape(
    tape: Tape,
    found: Mapping[OutsideTensor, torch.Tensor],
    constants: ModelConstants,
    names: Mapping[int, str],
    kept: set[int],
    file: TensorFile,
) -> Tape:
    """Mark the constants of one tape.

    Args:
        found: The constants among the tensors from outside.
        names: id of a tensor -> its name.
        kept: ids of the parameters and buffers that the model still has, unchanged.
    """
    settled = tape.copy()
    values: dict[Operand, Operand] = {}
    for value, outside in tape.outside.items():
        if outside in found:
            tensor = found[outside]
            name = names.get(id(tensor), f"constant_{len(constants.names)}")
            values[value] = constants.add(tensor, name)
            del settled.outside[value]
    for operand in {operand for _, _, operand in iterate_operands(tape)}:
        if isinstance(operand, ModelConstant) and operand.number not in kept:
            tensor = constants.tensors[operand.number]
            value = values[operand] = settled.add_form(ValueForm.of(tensor))
            settled.stored[value] = file.append(tensor)
            settled.outside[value] = constants.note_outside(tensor)
    settled.numbers = [values.get(operand, operand) for operand in tape.numbers]
    return settled


def name_tensors(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Map id of a tensor to the path of the attribute that holds it. "<path>_<number>" for one
    in a list.
    """
    found: dict[int, str] = {}
    for root, module in modules.items():
        for path, held in list_attributes(module).items():
            tensors = [each for each, _ in held if isinstance(each, torch.Tensor)]
            for number, tensor in enumerate(tensors):
                name = path if len(held) == 1 else f"{path}_{number}"
                found.setdefault(id(tensor), f"{root}.{name}" if root else name)
    return found
