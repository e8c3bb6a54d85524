"""Define-by-run, convert: region -> Relax module, through torch.export and its importer.

Values have the same names as in a model that is exported as a whole: they are named after the
user's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import tvm

from relayquant.errors import ModelError
from relayquant.torch.define_by_run.arguments import read_result
from relayquant.torch.define_by_run.regions import Input, Inside, Region, RegionStep
from relayquant.torch.define_by_run.tape import ModelConstants
from relayquant.torch.exporting import export, load

#: name of the submodule that holds the steps; no attribute of the user has it
_STEPS = "relayquant steps"


class StepModule(torch.nn.Module):
    """One step as a module, so that the graph shows which nodes it became."""

    def __init__(self, step: RegionStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        read = read_result(self.step.call.run(tensors))
        return read[1] if read else []


class RegionModule(torch.nn.Module):
    """A region as a module for torch.export: inputs -> the values that are read elsewhere.

    Its attributes have names that no attribute of the user has.
    """

    def __init__(
        self,
        steps: Sequence[RegionStep],
        outputs: Sequence[int],
        constants: ModelConstants,
    ) -> None:
        super().__init__()
        paths: dict[int, str] = {}
        for step in steps:
            for source in step.sources:
                if not isinstance(source, Input | Inside) and source.number not in paths:
                    name = constants.names[source.number]
                    put_constant(self, name, constants.tensors[source.number])
                    paths[source.number] = name
        self.relayquant_run = tuple(steps), tuple(outputs), paths
        self.add_module(_STEPS, torch.nn.ModuleList(map(StepModule, steps)))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        steps, outputs, paths = self.relayquant_run
        values: dict[int, torch.Tensor] = {}
        for step, module in zip(steps, self.get_submodule(_STEPS), strict=True):
            tensors = read_sources(
                step, inputs, values, lambda number: find_constant(self, paths[number])
            )
            values.update(zip(step.results, module(*tensors), strict=True))
        return tuple(values[number] for number in outputs)


def put_constant(root: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Store a tensor in the module under its path in the user's model."""
    *modules, name = path.split(".")
    for part in modules:
        if part not in root._modules:
            root.add_module(part, torch.nn.Module())
        root = root.get_submodule(part)
    root.register_buffer(name, tensor.detach())


def find_constant(root: torch.nn.Module, path: str) -> torch.Tensor:
    """Find the tensor that `put_constant` stored."""
    module, _, name = path.rpartition(".")
    return getattr(root.get_submodule(module), name)


def build_graph(
    steps: Sequence[RegionStep],
    outputs: Sequence[int],
    constants: ModelConstants,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[tuple[int | None, ...]],
) -> tvm.IRModule:
    """Build the Relax module of a region's steps.

    Args:
        steps: The steps.
        outputs: Numbers of the values that main returns.
        constants: Constants of the model.
        inputs: Example inputs.
        sizes: Their sizes, None for a size that differs between calls.

    Raises:
        ModelError: torch.export or the importer does not accept it.
    """
    module = RegionModule(steps, outputs, constants)
    dims = tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if size is None}
        for shape in sizes
    )
    has_dims = any(dims)
    program = export(module, tuple(inputs), dynamic_shapes=(dims,) if has_dims else None)
    name_nodes(program, [step.step.site.module for step in steps])
    mod, _ = load(program)
    return mod


def name_nodes(program: Any, paths: Sequence[str]) -> None:
    """Name the nodes of each step after the module that runs it in the user's model."""
    for node in program.graph.nodes:
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        owner = next((str(path) for path, _ in stack.values() if _STEPS in str(path)), "")
        if not owner:
            continue
        number = owner.partition(_STEPS)[2].strip(".]['\"").split(".")[0]
        parts = paths[int(number)].split(".") if paths[int(number)] else []
        prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
        node.meta["nn_module_stack"] = {path: (path, "") for path in prefixes}


def find_refused(
    region: Region, constants: ModelConstants, inputs: Sequence[torch.Tensor]
) -> dict[int, ModelError]:
    """Find steps of a region that no graph can hold. Each is tried alone on its operands for
    these inputs.
    """
    found: dict[int, ModelError] = {}
    for i, (step, operands) in enumerate(run_steps(region.steps, constants, inputs)):
        kept = [
            (tensor, source)
            for tensor, source in zip(operands, step.sources, strict=True)
            if isinstance(source, Input | Inside)
        ]
        numbers = iter(range(len(kept)))
        sources = tuple(
            Input(next(numbers)) if isinstance(source, Input | Inside) else source
            for source in step.sources
        )
        alone = RegionStep(step.step, sources, step.results)
        tensors = [tensor for tensor, _ in kept]
        try:
            build_graph([alone], step.results, constants, tensors, [t.shape for t in tensors])
        except ModelError as error:
            found[i] = error
    return found


def read_sources(
    step: RegionStep,
    inputs: Sequence[Any],
    values: Mapping[int, torch.Tensor],
    read_constant: Callable[[int], Any],
) -> list[Any]:
    """Return the operands of a step: inputs of the region, results of earlier steps, constants."""
    tensors = []
    for source in step.sources:
        if isinstance(source, Input):
            tensors.append(inputs[source.number])
        elif isinstance(source, Inside):
            tensors.append(values[source.number])
        else:
            tensors.append(read_constant(source.number))
    return tensors


def run_steps(
    steps: Sequence[RegionStep],
    constants: ModelConstants,
    inputs: Sequence[torch.Tensor | None],
    values: dict[int, torch.Tensor] | None = None,
) -> Iterator[tuple[RegionStep, list[Any]]]:
    """Run steps in PyTorch with their operands. Fills `values`."""
    values = {} if values is None else values
    for step in steps:
        tensors = read_sources(step, inputs, values, constants.tensors.__getitem__)
        with torch.no_grad():
            read = read_result(step.call.run(tensors))
        values.update(zip(step.results, read[1] if read else (), strict=True))
        yield step, tensors
