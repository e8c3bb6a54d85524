"""Prints and runs Relay texts; a script for the Python of a TVM that still has Relay, not pytest.

    PYTHON print_and_run.py FOLDER

For each `name.relay` in the folder, with inputs in `name.npz`: what TVM prints goes to `name.text`,
what it saves to `name.json`, what it computes at opt_level 3 to `name.outputs.npz`, or what failed
to `name.error`. Each in a process of its own: some texts crash the compiler.
"""

import os
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
    from tvm.parser import parse


def run(path):
    mod = relay.transform.InferType()(parse(path.read_text()))
    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(mod, "llvm")
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    for name, array in np.load(path.with_suffix(".npz")).items():
        executor.set_input(name, array)
    executor.run()
    count = executor.get_num_outputs()
    outputs = [executor.get_output(i).numpy() for i in range(count)]
    path.with_suffix(".text").write_text(mod.astext())
    path.with_suffix(".json").write_text(tvm.ir.save_json(mod))
    np.savez(path.with_suffix(".outputs.npz"), *outputs)


for path in sorted(Path(sys.argv[1]).glob("*.relay")):
    path.with_suffix(".error").write_text("crashed")
    process = os.fork()
    if not process:
        try:
            run(path)
            path.with_suffix(".error").unlink()
        except BaseException:
            path.with_suffix(".error").write_text(traceback.format_exc())
        os._exit(0)
    os.waitpid(process, 0)
