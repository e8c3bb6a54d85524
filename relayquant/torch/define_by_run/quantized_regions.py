"""Define-by-run, convert: regions of recorded operators -> compiled integer modules.

Each region goes through the normal pipeline, `relayquant.quantize`, with the inputs that it had
during calibration. Running the tapes again computes these inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import tvm
from tvm import relax

from relayquant.base.qtypes import QParams
from relayquant.config import QConfigMapping, Support
from relayquant.config.mapping import Selector
from relayquant.config.observers import Observer
from relayquant.errors import ConfigError, ModelError
from relayquant.flow.pipeline import prepare_model
from relayquant.flow.quantizer import quantize
from relayquant.flow.settings import PrepareSettings, QuantizeSettings
from relayquant.ir.dialect import qnn
from relayquant.ir.ledger import Ledger, LedgerRow, ledger_attrs, read_ledger
from relayquant.ir.ops.base import make_parameters
from relayquant.ir.rewrite import Emitter, Graph, rewrite_main
from relayquant.ir.rewrite.graph import iterate_results, result_expr
from relayquant.stages.compilation import compile
from relayquant.stages.prepared import PreparedModel
from relayquant.torch.define_by_run.boundaries import (
    OUTSIDE,
    Boundary,
    Port,
    choose_boundaries,
    find_float_reads,
    find_joins,
    name_ports,
)
from relayquant.torch.define_by_run.call_sites import CallSite
from relayquant.torch.define_by_run.graphs import build_graph, find_refused
from relayquant.torch.define_by_run.interface import ModelInterface, find_interface
from relayquant.torch.define_by_run.regions import Input, Region, find_regions
from relayquant.torch.define_by_run.tape import ModelConstants, Tape, TapeStep, replay
from relayquant.torch.define_by_run.tensor_file import TensorFile


@dataclass(frozen=True, eq=False)
class QuantizedRegion:
    """A region as an integer module.

    Attributes:
        region: The operators that it stands for.
        mod: The integer module. Its ledger tells what was quantized.
        executable: The module, compiled for this machine.
        inputs, outputs: Their parameters. None for float values, and for values that are not
            floats.
        exact: Numbers of integer outputs that the module also returns in float. The module returns
            these in float in their place, and as integers after all outputs, in this order.
    """

    region: Region
    mod: tvm.IRModule
    executable: Any
    inputs: tuple[QParams | None, ...]
    outputs: tuple[QParams | None, ...]
    exact: tuple[int, ...] = ()


class RegionData:
    """Inputs of each region, on disk."""

    def __init__(
        self,
        tapes: Sequence[Tape],
        regions: Sequence[Region],
        constants: ModelConstants,
        file: TensorFile,
    ) -> None:
        self._file = TensorFile()
        #: for each region and pass: number of the input -> its number in the file
        self._rows = [[dict[int, int]() for _ in region.passes] for region in regions]
        wanted: dict[tuple[int, int], tuple[int, int, int]] = {}  # (tape, step) -> run, pass, step
        for b, region in enumerate(regions):
            for p, each in enumerate(region.passes):
                wanted.update(((each.tape, i), (b, p, k)) for k, i in enumerate(each.steps))
        for t, tape in enumerate(tapes):

            def observe(i: int, _: TapeStep, tensors: list[torch.Tensor], t: int = t) -> None:
                if (t, i) not in wanted:
                    return
                b, p, k = wanted[t, i]
                row = self._rows[b][p]
                for tensor, source in zip(tensors, regions[b].steps[k].sources, strict=True):
                    if isinstance(source, Input) and source.number not in row:
                        row[source.number] = self._file.append(tensor)

            replay(tape, constants, file, observe)

    def read_port(self, port: Port) -> Iterator[np.ndarray]:
        """Read all arrays that came to one input of a region, except empty ones."""
        for row in self._rows[port.region]:
            array = self._file.read(row[port.number]).numpy()
            if array.size:
                yield array

    def iterate(self, region: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Iterate over the inputs of each pass of a region.

        Inputs without elements, as of an empty batch, are left out unless there are no others.
        """
        is_empty = True
        for row in self._rows[region]:
            arrays = tuple(self._file.read(row[number]).numpy() for number in range(len(row)))
            if all(array.size for array in arrays):
                is_empty = False
                yield arrays
        if is_empty:
            yield tuple(tensor.numpy() for tensor in self.example(region))

    def example(self, region: int) -> list[torch.Tensor]:
        """Return the inputs of the first pass."""
        row = self._rows[region][0]
        return [self._file.read(row[number]) for number in range(len(row))]


def quantize_regions(
    tapes: Sequence[Tape], constants: ModelConstants, file: TensorFile, settings: QuantizeSettings
) -> tuple[list[QuantizedRegion], ModelInterface]:
    """Quantize the regions of all tapes that hold something to quantize. Also return the model's
    inputs and outputs.

    Operators that stay in PyTorch have the reason at their site.

    Raises:
        ConfigError: a line of the mapping has no effect in any region; or an input or output of the
            model cannot be integer.
    """
    inputs, outputs = (
        {int(k): dtype for k, dtype in (asked or {}).items()}
        for asked in (settings.input_dtypes, settings.output_dtypes)
    )
    regions, graphs, data = build_graphs(tapes, constants, file)
    mapping = settings.qconfig_mapping
    if mapping is not None:
        rules = tuple(replace(rule, optional=True) for rule in mapping.rules)
        settings = replace(settings, qconfig_mapping=QConfigMapping(rules))

    def plan_region(mod: tvm.IRModule, output_dtypes: Mapping[int, str]) -> PreparedModel:
        quiet = PrepareSettings(effort=settings.level, output_dtypes=output_dtypes or None)
        backend = settings.backend
        return prepare_model(mod, None, None, settings.qconfig_mapping, backend, quiet)

    plans = {number: plan_region(mod, {}) for number, mod in graphs.items()}
    for number, prepared in plans.items():
        if not any(operator.quantized for operator in prepared.plan.operators):
            reasons = {op.reason: op.advice for op in prepared.plan.operators if op.reason}
            reason, advice = next(iter(reasons.items()), ("it is not quantized", ""))
            for site in regions[number].sites:
                site.reason, site.advice = site.reason or reason, site.advice or advice
            del graphs[number]
    observer = settings.observer if isinstance(settings.observer, Observer) else None

    def read_port(port: Port) -> Iterator[np.ndarray]:
        if port.region != OUTSIDE:
            yield from data.read_port(port)
            return
        for tape in tapes:  # results of the model
            array = file.read(tape.given[port.number]).numpy()
            if array.size:
                yield array

    joins = find_joins(tapes, regions, inputs, outputs)
    floats = find_float_reads(tapes, regions, outputs)
    dtype = settings.backend.activation_dtype
    boundaries = choose_boundaries(joins, graphs, plan_region, observer, read_port, floats, dtype)
    interface = find_interface(tapes, regions, graphs, boundaries, file, inputs, outputs)
    quantized = [
        quantize_region(number, regions[number], mod, plans[number], boundaries, data, settings)
        for number, mod in graphs.items()
    ]
    if mapping is not None:
        check_rules(mapping, plans.values())
    return quantized, interface


def build_graphs(
    tapes: Sequence[Tape], constants: ModelConstants, file: TensorFile
) -> tuple[list[Region], dict[int, tvm.IRModule], RegionData]:
    """Build the regions, the Relax module of each by its number, and their data."""
    eager: set[CallSite] = set()
    known: dict[tuple[CallSite, ...], tuple[tuple[int, ...], tvm.IRModule]] = {}
    while True:
        regions = find_regions(tapes, eager)
        data = RegionData(tapes, regions, constants, file)
        graphs: dict[int, tvm.IRModule] = {}
        is_refused = False
        for b, region in enumerate(regions):
            outputs, mod = known.get(region.sites, ((), None))
            if mod is None or outputs != region.outputs:
                shapes = [form.shape for form in region.inputs]
                try:
                    mod = build_graph(
                        region.steps, region.outputs, constants, data.example(b), shapes
                    )
                except ModelError as error:
                    refuse_region(region, constants, data.example(b), error, eager)
                    is_refused = True
                    continue
                known[region.sites] = region.outputs, mod
            graphs[b] = mod
        if not is_refused:
            return regions, graphs, data


def refuse_region(
    region: Region,
    constants: ModelConstants,
    inputs: Sequence[torch.Tensor],
    error: ModelError,
    eager: set[CallSite],
) -> None:
    """Move operators of a region that no graph can hold to PyTorch.

    These are the operators that no graph can hold alone, or all of them if there are none.
    """
    found = find_refused(region, constants, inputs)
    for i, site in enumerate(region.sites):
        if i in found or not found:
            site.reason = str(found.get(i, error)).split("\n")[0]
            site.advice = "Write it with other operators, or leave it in PyTorch."
            eager.add(site)


def quantize_region(
    number: int,
    region: Region,
    mod: tvm.IRModule,
    prepared: PreparedModel,
    boundaries: Collection[Boundary],
    data: RegionData,
    settings: QuantizeSettings,
) -> QuantizedRegion:
    """Quantize a region with the parameters of its boundaries, and compile it."""
    inputs, outputs = name_ports(prepared)
    qparams_of: dict[Port, QParams] = {
        port: boundary.qparams
        for boundary in boundaries
        for port in boundary.ports
        if port.region == number
    }
    exact = sorted(
        port for boundary in boundaries for port in boundary.exact if port.region == number
    )
    planned = {port: qparams for port, qparams in qparams_of.items() if port not in exact}
    dtypes = {port: qparams.dtype for port, qparams in planned.items()}
    qmod = quantize(
        mod,
        None,
        lambda: data.iterate(number),
        qconfig_mapping=settings.qconfig_mapping,
        backend=settings.backend,
        effort=settings.effort,
        observer=settings.observer,
        qparams={
            (outputs if port.is_output else inputs)[port.number]: qparams
            for port, qparams in planned.items()
        },
        input_dtypes={port.number: d for port, d in dtypes.items() if not port.is_output},
        output_dtypes={port.number: d for port, d in dtypes.items() if port.is_output},
    )
    qmod = add_integer_outputs(qmod, {port.number: qparams_of[port] for port in exact})
    return QuantizedRegion(
        region,
        qmod,
        compile(qmod),
        tuple(qparams_of.get(Port(number, False, k)) for k in range(len(region.inputs))),
        tuple(qparams_of.get(Port(number, True, k)) for k in range(len(region.outputs))),
        tuple(port.number for port in exact),
    )


def add_integer_outputs(mod: tvm.IRModule, qparams_of: Mapping[int, QParams]) -> tvm.IRModule:
    """Add integer forms of some outputs, by number, after the results of main.

    return x -> return (x, quantize(x)). The ledger lists them.
    """
    if not qparams_of:
        return mod
    graph, ledger = Graph(mod), read_ledger(mod)
    results = list(iterate_results(result_expr(graph)))
    rows = [
        replace(ledger.outputs[k], requested=qparams.dtype).with_qparams(qparams)
        for k, qparams in qparams_of.items()
    ]
    ledger = replace(ledger, outputs=(*ledger.outputs, *rows))

    def give_both(emitter: Emitter, out: relax.Expr) -> relax.Expr:
        integers = []
        for k, qparams in qparams_of.items():
            real, pair = emitter.get(results[k]), make_parameters(qparams)
            value = qnn.quantize(real, *pair, out_dtype=qparams.dtype)
            integers.append(emitter.emit(value, f"{ledger.outputs[k].name}.boundary"))
        return relax.Tuple([*map(emitter.get, results), *integers])

    return rewrite_main(
        mod, lambda e, b: e.get(b.value), result=give_both, attrs=ledger_attrs(ledger)
    )


def check_rules(mapping: QConfigMapping, plans: Collection[PreparedModel]) -> None:
    """Check that each line of the mapping has an effect on an operator of some region.

    Raises:
        ConfigError: one has none.
    """
    operators = [operator for prepared in plans for operator in prepared.plan.operators]
    used = {operator.rule for operator in operators}
    for rule in mapping.rules:
        is_idle = rule.description not in used and not rule.optional
        if is_idle and rule.kind is not Selector.GLOBAL:
            names = ", ".join(sorted({operator.name for operator in operators}))
            raise ConfigError(
                f"The line {rule.description} of the QConfigMapping matches no operator that "
                f"calibration reached. Their names: {names}.",
                code="RQ103",
            )


def join_ledgers(
    regions: Sequence[QuantizedRegion], sites: Collection[CallSite], alone: Sequence[Ledger]
) -> Ledger:
    """Join the ledgers: the rows of each region and standalone module, and a row for each
    operator in PyTorch.
    """
    ledgers = [*(read_ledger(region.mod) for region in regions), *alone]
    inside = {site for region in regions for site in region.region.sites}
    rows = [row for ledger in ledgers for row in ledger.rows]
    for site in sites:
        if site not in inside:
            rows.append(
                LedgerRow(
                    f"{site.module}.{site.operator}" if site.module else site.operator,
                    site.operator,
                    False,
                    "",
                    "",
                    site.reason or "it stays in PyTorch",
                    site.advice,
                    sources=(site.place,),
                    support=Support.PATTERN_UNKNOWN.value,
                )
            )
    if not ledgers:
        return Ledger(tuple(rows))
    return replace(ledgers[0], rows=tuple(rows), inputs=(), outputs=(), guard=None)
