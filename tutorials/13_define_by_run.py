"""
Models that only run
====================

Python code that decides by what it computes: no graph holds it, ``torch.export`` refuses it. It is
calibrated by calling it, and its regions of operators become integer modules.
PyTorch is not installed with relayquant: ``pip install 'relayquant[torch]'``.
"""

# %%
# A module with an early exit and a loop
# --------------------------------------
# An image that is recognized early is done; another one is looked at again, as often as it takes.

import sys

import relayquant as rq

try:
    import torch
    from torch import nn
except ImportError:
    print("This tutorial needs PyTorch. Run: pip install 'relayquant[torch]'")
    sys.exit(0)


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.refine = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.early, self.late = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        if x.mean() < 0.3:
            return self.early(x.mean((2, 3)))
        while x.amax() > 1:
            x = self.refine(x)
        return self.late(x.mean((2, 3)))


torch.manual_seed(0)
module = EarlyExit().eval()
images = [torch.randn(1, 3, 16, 16) * strength for strength in (0.3, 1.0, 2.0, 4.0) for _ in "12"]

# %%
# Calibrate by calling
# --------------------
# The prepared model gives what the module gives, and records the operators it comes to. An operator
# is known by its module and its place in the code: in the loop it is the same one each time.

prepared = rq.torch.prepare(module, (images[0],), effort="fast")
for image in images[1:]:
    prepared(image)

# %%
# Convert
# -------
# The module's own code runs again. What lies between its decisions are integer modules; where one
# feeds the next, also round the loop, integers pass.

quantized = rq.torch.convert(prepared)
for run in quantized.regions:
    operators = [str(site.module or site.operator) for site in run.region.sites]
    print("run:", ", ".join(operators))
with torch.no_grad():
    for image in images[::2]:
        expected, got = module(image), quantized(image)
        print(
            f"largest difference {(expected - got).abs().max():.3f} of {expected.abs().max():.3f}"
        )

# %%
# What became of each operator
# ----------------------------
# The ledger covers all parts, also what stays in PyTorch.

for row in quantized.ledger.rows:
    print(f"{row.name:20}", "integer" if row.quantized else f"float: {row.reason}")

# %%
# What calibration never came to
# ------------------------------
# A branch that no calibration input took has no ranges. It is an error when it is reached, or with
# ``prepare(..., unseen="float")`` it stays in PyTorch.

narrow = rq.torch.prepare(module, (images[-1],), effort="fast")
try:
    rq.torch.convert(narrow)(images[0])
except ValueError as error:
    print(error)
