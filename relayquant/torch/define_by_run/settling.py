"""Define-by-run, after calibration: which tensors from outside of the calls are constants -> tapes
that say so.

Parameters and buffers are known before the first call. A plain tensor that is an attribute, one in
a list, a global, what a closure holds: each is seen when an operator reads it, and may be state as
well. A constant is what an operator has read each time, if it is still there, unchanged. A buffer
that has been replaced or written into is none.
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
    TensorFile,
    ValueForm,
)
from relayquant.torch.state import list_attributes

#: (operator, place among its tensors)
ReadPlace = tuple[CallSite, int]


def settle_constants(
    tapes: Sequence[Tape],
    constants: ModelConstants,
    modules: Mapping[str, torch.nn.Module],
    file: TensorFile,
) -> list[Tape]:
    """The tapes with each constant as one; `constants` knows them too.

    Args:
        tapes: Of all calls; they are not changed.
        modules: What the model is made of, by name.
        file: Takes the tensors of parameters and buffers that have changed.
    """
    found = find_constants(tapes)
    names = name_tensors(modules)
    kept = {id(t) for m in modules.values() for t in (*m.parameters(), *m.buffers())}
    kept &= constants.find_current()
    return [settle_tape(tape, found, constants, names, kept, file) for tape in tapes]


def iterate_operands(tape: Tape) -> Iterator[tuple[TapeStep, int, Operand]]:
    """(step, place, operand) of all that a tape reads."""
    for step in tape.steps:
        for place, operand in enumerate(step.operands):
            yield step, place, operand


def find_constants(tapes: Sequence[Tape]) -> dict[OutsideTensor, torch.Tensor]:
    """The tensors that wherever they are read nothing else is, and that are as they were."""
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
    """One tape, settled.

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
    """id of a tensor -> path of the attribute that holds it; "<path>_<number>" of one in a list."""
    found: dict[int, str] = {}
    for root, module in modules.items():
        for path, held in list_attributes(module).items():
            tensors = [each for each, _ in held if isinstance(each, torch.Tensor)]
            for number, tensor in enumerate(tensors):
                name = path if len(held) == 1 else f"{path}_{number}"
                found.setdefault(id(tensor), f"{root}.{name}" if root else name)
    return found
