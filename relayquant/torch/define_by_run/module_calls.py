"""Define-by-run, converted: a call of a PyTorch module stands for a span of a region.

The code of such a module only computes: it prints nothing, counts nothing and keeps nothing. So it
need not run if all its operators at one place of the user's code are neighbours in one region. The
pass continues after them. A call that did run shows how the operators depend on the arguments and
results.

The user's own modules may do anything, so they always run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from relayquant.torch.define_by_run.arguments import (
    FlatArguments,
    ResultForm,
    is_equal,
    read_result,
    split_arguments,
)
from relayquant.torch.define_by_run.call_sites import SiteKey
from relayquant.torch.define_by_run.deferred import DeferredTensor
from relayquant.torch.define_by_run.executing import Place, RegionPass, RegionRunner, RunningCode
from relayquant.torch.define_by_run.forwards import has_own_forward
from relayquant.torch.define_by_run.regions import Input, Inside, Source

#: (id of a module, places around its call)
CallKey = tuple[int, tuple[tuple[int, int], ...]]
#: attributes of every module, for its hooks and its state dict, that are read before `forward`
_HOOKS = frozenset(torch.nn.Module().__dict__) - {"training", "_parameters", "_buffers", "_modules"}
#: number of calls of a place without success before it is given up
ATTEMPTS = 3


@dataclass(frozen=True, eq=False)
class RegionSpan:
    """The operators of a region that a module call stands for: from `start` to before `end`.

    `is_same`: an operator that returns the module's argument itself.
    """

    module: torch.nn.Module
    runner: RegionRunner
    start: int
    end: int
    is_same: bool = False


@dataclass(frozen=True, eq=False)
class Connection:
    """How the arguments and results of a call relate to its operators.

    Attributes:
        template: Its arguments, with slots for tensors.
        flat: The same, if the arguments can be compared directly.
        sources: Source of each tensor among the arguments.
        form: Structure of the result, and the numbers of its values.
        results: Those numbers.
        size: Number of the module's attributes.
        names: Attributes that its `forward` may read.
        state, parameters, buffers: ids of these attributes, its parameters and its buffers.
        held: References to all of these, so that their ids are not reused.
    """

    template: Any
    flat: FlatArguments | None
    sources: tuple[Source, ...]
    form: ResultForm
    results: tuple[int, ...]
    size: int
    names: tuple[str, ...]
    state: tuple[int, ...]
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    held: tuple[Any, ...]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """Return the tensors of a call with these arguments. None for other arguments."""
        if self.flat is not None:
            return self.flat.match(args, kwargs)
        tensors: list[torch.Tensor] = []
        return (
            tensors if is_equal(split_arguments((args, kwargs), tensors), self.template) else None
        )


class KnownCall:
    """A place in the user's code that calls a module, and what is known about it."""

    def __init__(self, span: RegionSpan) -> None:
        self.span = span
        self.connection: Connection | None = None
        self.attempts = 0

    def play(self, caller: RunningCode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's result without running its code.

        None if the code has to run: the arguments differ, the call comes at another position, or
        somebody watches the operators.
        """
        known, span, region_pass = self.connection, self.span, caller.region_pass
        if known is None or not caller.is_innermost():
            return None
        if region_pass is None:
            if span.start:
                return None
            region_pass = RegionPass(span.runner, caller)
        elif region_pass.runner is not span.runner or region_pass.position != span.start:
            return None
        tensors = known.match(args, kwargs)
        if tensors is None or not is_unchanged(span.module, known):
            return None
        if not all(map(region_pass.take_source, tensors, known.sources)):
            return None
        caller.region_pass = region_pass
        if span.is_same:
            return region_pass.advance(tensors)
        return region_pass.pass_over(span.end, known.results, known.form)

    def begin(
        self, caller: RunningCode, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]] | None:
        """Let the module's operators return identifiable values, so that `learn` can connect them.

        None if the connection is known, or was not found in earlier calls.
        """
        if self.connection is not None or self.attempts == ATTEMPTS:
            return None
        self.attempts += 1
        tensors: list[torch.Tensor] = []
        template = split_arguments((args, kwargs), tensors)
        if len(set(map(id, tensors))) != len(tensors):
            return None
        caller.defers = True
        return template, tensors

    def end(self, caller: RunningCode) -> None:
        """End a call. Later values are computed as early as possible again."""
        caller.defers = False

    def learn(self, recorded: tuple[Any, list[torch.Tensor]], result: Any) -> None:
        """Connect the module's arguments and results with the operators."""
        template, tensors = recorded
        span, read = self.span, read_result(result)
        region_pass = getattr(read[1][0], "region_pass", None) if read else None
        if not isinstance(region_pass, RegionPass) or region_pass.runner is not span.runner:
            return
        if read is None or region_pass.position != span.end:
            return
        steps = span.runner.region.steps[span.start : span.end]
        inside = {number for step in steps for number in step.results}
        sources = {
            source
            for step in steps
            for source in step.sources
            if isinstance(source, Input)
            or (isinstance(source, Inside) and source.number not in inside)
        }
        found = [find_source(tensor, region_pass, sources) for tensor in tensors]
        if span.is_same and len(tensors) == len(sources) == 1 and read[1][0] is tensors[0]:
            found = list(sources)  # it has become another value of the region
        if None in found or set(found) != sources:
            return
        results = tuple(getattr(value, "number", -1) for value in read[1])
        is_own = all(getattr(value, "region_pass", None) is region_pass for value in read[1])
        if not is_own or not inside.issuperset(results):
            return
        state = span.module.__dict__
        names = tuple(name for name in state if name not in _HOOKS)
        values = tuple(map(state.get, names))
        parameters = tuple(span.module._parameters.values())
        buffers = tuple(span.module._buffers.values())
        self.connection = Connection(
            template,
            FlatArguments.of(template),
            tuple(source for source in found if source is not None),
            read[0],
            results,
            len(state),
            names,
            tuple(map(id, values)),
            tuple(map(id, parameters)),
            tuple(map(id, buffers)),
            (values, parameters, buffers),
        )


def find_source(
    tensor: torch.Tensor, region_pass: RegionPass, sources: Iterable[Source]
) -> Source | None:
    """Find the value that operators of a pass read when they read a tensor. None if they do not
    read it.
    """
    for source in sources:
        if isinstance(source, Inside):
            is_value = type(tensor) is DeferredTensor and tensor.region_pass is region_pass
            if is_value and tensor.number == source.number:
                return source
        elif isinstance(source, Input) and region_pass.inputs[source.number] is tensor:
            return source
    return None


def is_unchanged(module: torch.nn.Module, known: Connection) -> bool:
    """Whether a module still has the same attributes, parameters and buffers."""
    state = module.__dict__
    return (
        len(state) == known.size
        and tuple(map(id, map(state.get, known.names))) == known.state
        and tuple(map(id, module._parameters.values())) == known.parameters
        and tuple(map(id, module._buffers.values())) == known.buffers
    )


def find_calls(
    modules: Iterable[torch.nn.Module], places: Mapping[SiteKey, Place]
) -> dict[CallKey, KnownCall]:
    """Find module calls that stand for a span of a region with known sizes."""
    own = {id(module): module for module in modules if has_own_forward(module)}
    inside: dict[CallKey, list[Place]] = defaultdict(list)
    for (module, _, _, outer), place in places.items():
        if module in own:
            inside[module, outer].append(place)
    return {
        key: KnownCall(span)
        for key, of_call in inside.items()
        if (span := find_span(own[key[0]], of_call)) is not None
    }


def find_span(module: torch.nn.Module, places: Sequence[Place]) -> RegionSpan | None:
    """Find the span of a call's operators. None if they are no span, or if they write."""
    runner = places[0].runner
    if runner is None or any(place.runner is not runner for place in places):
        return None
    numbers = sorted(place.number for place in places)
    start, end = numbers[0], numbers[-1] + 1
    steps = runner.region.steps[start:end]
    has_sizes = runner.is_fixed and all(None not in form.shape for form in runner.region.inputs)
    is_same = any(step.step.is_same for step in steps)
    is_new = not any(step.step.target for step in steps) and (not is_same or len(steps) == 1)
    if end - start != len(numbers) or not has_sizes or not is_new:
        return None
    return RegionSpan(module, runner, start, end, is_same)
