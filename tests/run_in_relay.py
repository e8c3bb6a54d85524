"""Runs Relay texts; a script for the Python of a TVM that still has Relay, not for pytest.

    PYTHON run_in_relay.py FOLDER [count]

For each `name.relay` in the folder, with parameters in `name.params.npz` and samples in
`name.inputs.npz` (stacked by input), writes `name.outputs.npz` (stacked by output), or what failed
to `name.error`. With `count` it also writes how often each CMSIS-NN pattern matches to
`name.count.json`.
"""

import collections
import json
import sys
import traceback
from pathlib import Path

import numpy as np
import tvm
from tvm import relay
from tvm.contrib import graph_executor

try:
    from tvm.relay import parse
except ImportError:
    from tvm.parser import fromtext as parse


def run_samples(mod, params, inputs):
    """Outputs of all samples, built at opt_level 3."""
    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(mod, "llvm", params=params)
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    found = []
    for sample in range(len(next(iter(inputs.values())))):
        executor.run(**{name: array[sample] for name, array in inputs.items()})
        found.append([executor.get_output(i).numpy() for i in range(executor.get_num_outputs())])
    return [np.stack(each) for each in zip(*found)]  # noqa: B905


def count_patterns(mod, params):
    """How often each pattern of TVM's table for CMSIS-NN matches."""
    from tvm.relay.op.contrib import cmsisnn

    mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
    mod = relay.transform.InferType()(mod)
    mod = relay.transform.MergeComposite(cmsisnn.pattern_table())(mod)
    counts = collections.Counter()

    def visit(expr):
        if isinstance(expr, relay.Function) and expr.attrs and "Composite" in expr.attrs:
            counts[str(expr.attrs["Composite"]).split(".")[-1]] += 1

    relay.analysis.post_order_visit(mod["main"], visit)
    return counts


def main(folder, wants_count):
    for path in sorted(folder.glob("*.relay")):
        params = dict(np.load(path.with_suffix(".params.npz")))
        params = {name: tvm.nd.array(array) for name, array in params.items()}
        inputs = dict(np.load(path.with_suffix(".inputs.npz")))
        try:
            mod = parse(path.read_text())
            outputs = run_samples(mod, params, inputs)
            np.savez(path.with_suffix(".outputs.npz"), *outputs)
            if wants_count:
                counts = count_patterns(parse(path.read_text()), params)
                path.with_suffix(".count.json").write_text(json.dumps(counts))
        except Exception:
            path.with_suffix(".error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]), "count" in sys.argv[2:])
