"""On the emulated side: `run_kernels.py LIBRARY IN.npz OUT.npz` calls each function once.

IN.npz holds "function:number" arrays, the arguments; OUT.npz gets them as they are afterwards.
"""

import sys

import numpy as np
import tvm

library, source, destination = sys.argv[1:]
module = tvm.runtime.load_module(library)
arrays = np.load(source)
arguments: dict[str, dict[int, tvm.runtime.Tensor]] = {}
for key in arrays.files:
    name, number = key.rsplit(":", 1)
    arguments.setdefault(name, {})[int(number)] = tvm.runtime.tensor(arrays[key])
results = {}
for name, numbered in arguments.items():
    args = [numbered[i] for i in range(len(numbered))]
    module[name](*args)
    results.update({f"{name}:{i}": arg.numpy() for i, arg in enumerate(args)})
np.savez(destination, **results)
