"""QNN module -> scheduled TIR for a target. `passes` is the way from top to bottom.

rewrites/      the forms that kernels are made for: layout, types, sizes
lowering/      operators -> calls of kernels, which `kernels/` generates
legalization/  operators without a kernel -> loop nests
schedule/      loop nests -> what is fused, scheduled loops, memory
checks/        what a compiled function checks when it runs
threads/       the thread pool
library/       what a shared library holds beside kernels
tuning/        schedules chosen by time
eager/         float functions that run without being compiled
"""

from relayquant.codegen.passes import make_pipeline
from relayquant.codegen.tuning.tuner import open_tuner

__all__ = ["make_pipeline", "open_tuner"]
