"""`relayquant MODEL`, without a command: what the file is, and what can be done with it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from relayquant.cli.answer import Answer, ExitCode
from relayquant.cli.arguments import add_model
from relayquant.cli.files import bind_weights, load_model
from relayquant.data.item import describe_inputs
from relayquant.errors import format_count
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.constants import count_constant_bytes
from relayquant.ir.rewrite.entry import name_main
from relayquant.ir.rewrite.graph import Graph
from relayquant.plots import list_findings
from relayquant.stages.conversion.partial import has_quantized_values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of a model."""
    add_model(parser, "a model file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, answer: Answer) -> ExitCode:
    path: Path = options.model
    mod = bind_weights(*load_model(path, options.shape, options.input))
    named = name_main(mod)
    ledger = find_ledger(named)
    is_float = ledger is None and not has_quantized_values(named)
    kind = "a float model" if is_float else "a quantized model"
    answer.say(f"{path}: {kind}, constants of {format_count(count_constant_bytes(named), 'byte')}")
    inputs = describe_inputs(named)
    answer.note(path=path, kind=kind, bytes=count_constant_bytes(named))
    answer.add_table(
        "inputs", [{"name": i.name, "shape": i.shape, "dtype": i.dtype} for i in inputs]
    )
    for info in inputs:
        answer.say(f"  input {info.name} {info.shape_text} {info.dtype}")
    if ledger is not None:
        count = format_count(len(ledger.rows), "operator")
        answer.note(backend=ledger.backend, operators=len(ledger.rows))
        answer.note(quantized=len(ledger.quantized))
        answer.say(f"  {len(ledger.quantized)} of {count} on integers, for {ledger.backend}")
        for line in list_findings(ledger):
            answer.say(f"  {line}")
        steps = [
            f"relayquant compile {path}",
            f"relayquant verify {path} --data DATA",
            f"relayquant export {path} -o {path.with_suffix('.onnx')}",
            f"relayquant inspect {path}",
        ]
    else:
        graph = Graph(named)
        names = (graph.op_name(binding.var) for binding in graph.bindings)
        counts = Counter(name.removeprefix("relax.") for name in names if name)
        answer.note(operators=sum(counts.values()))
        most = ", ".join(f"{count} {name}" for name, count in counts.most_common(6))
        answer.say(f"  {format_count(sum(counts.values()), 'operator')}: {most}")
        steps = [f"relayquant compile {path}"]
        if is_float:
            steps = [
                f"relayquant lint {path} --data DATA",
                f"relayquant quantize {path} --data DATA --report report.html",
                f"relayquant bench {path}",
            ]
    answer.add_table("commands", [{"command": step} for step in steps])
    answer.say("What can be done (DATA: an .npz, or a folder of pictures with --preprocess):")
    for step in steps:
        answer.say(f"  {step}")
    return ExitCode.OK
