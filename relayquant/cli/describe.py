"""`relayquant MODEL`, without a command: what the file is, and what can be done with it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from relayquant.analysis.size import count_constant_bytes
from relayquant.cli.files import bind_weights, load_model
from relayquant.conversion.partial import has_quantized_values
from relayquant.datasets.inputs import describe_inputs
from relayquant.errors import format_count
from relayquant.ledger import find_ledger
from relayquant.report import list_findings, make_console
from relayquant.rewrite.entry import name_main
from relayquant.rewrite.graph import Graph


def run(options: argparse.Namespace) -> int:
    path: Path = options.model
    mod = bind_weights(*load_model(path))
    console = make_console()
    named = name_main(mod)
    ledger = find_ledger(named)
    is_float = ledger is None and not has_quantized_values(named)
    kind = "a float model" if is_float else "a quantized model"
    console.print(
        f"{path}: {kind}, constants of {format_count(count_constant_bytes(named), 'byte')}"
    )
    for info in describe_inputs(named):
        console.print(f"  input {info.name} {info.shape_text} {info.dtype}")
    if ledger is not None:
        count = format_count(len(ledger.rows), "operator")
        console.print(f"  {len(ledger.quantized)} of {count} on integers, for {ledger.backend}")
        for line in list_findings(ledger):
            console.print(f"  {line}")
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
        most = ", ".join(f"{count} {name}" for name, count in counts.most_common(6))
        console.print(f"  {format_count(sum(counts.values()), 'operator')}: {most}")
        steps = [f"relayquant compile {path}"]
        if is_float:
            steps = [
                f"relayquant lint {path} --data DATA",
                f"relayquant quantize {path} --data DATA --report report.html",
                f"relayquant bench {path}",
            ]
    console.print("What can be done (DATA: an .npz, or a folder of pictures with --preprocess):")
    for step in steps:
        console.print(f"  {step}")
    return 0
