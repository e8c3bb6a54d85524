"""On the board: run the folder, compare with the PC, and measure.

    python3 predict.py digits-pi

Needs numpy and apache-tvm-ffi; the rest is in the folder.
"""

import sys
import time
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder / "python"))
from relayquant_runtime import Library  # noqa: E402 (the folder has it)

library = Library(folder)
print(library.describe())
with np.load(folder / "check.npz") as check:
    images, expected = check["image"], check["logits"]
(logits,) = library.run("main", [images])
print(f"digits: {' '.join(map(str, logits.argmax(axis=1)))}")
print(f"the same bits as on the PC: {'yes' if np.array_equal(logits, expected) else 'no'}")

times = []
for _ in range(50):
    start = time.perf_counter()
    library.run("main", [images[:1]])
    times.append(time.perf_counter() - start)
print(f"one digit: {1e3 * min(times):.3f} ms (best of {len(times)} runs)")
