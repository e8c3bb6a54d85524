"""
PyTorch modules
===============

From a ``torch.nn.Module`` to an integer model, with layers selected by their names in the module.
PyTorch is not installed with relayquant: ``pip install 'relayquant[torch]'``.
"""

# %%
# A module
# --------
# Any module that ``torch.export`` can export. This one has a residual connection.

import sys

import numpy as np

import relayquant as rq

try:
    import torch
    from torch import nn
except ImportError:
    print("This tutorial needs PyTorch. Run: pip install 'relayquant[torch]'")
    sys.exit(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x + self.block(x)
        return self.head(x.mean((2, 3)))


torch.manual_seed(0)
module = Net()
batches = [torch.randn(4, 3, 16, 16) for _ in range(8)]

# %%
# Quantize
# --------
# The module is exported in evaluation mode. Items of the data set may be torch tensors. Sizes are
# those of the example unless ``dynamic_shapes`` says otherwise, as for ``torch.export.export``.

batch = torch.export.Dim("batch", min=1, max=64)
qmod = rq.torch.quantize(module, (batches[0],), batches, dynamic_shapes=({0: batch},))
for row in rq.ledger(qmod).rows:
    print(f"{row.name:12s} {row.op:12s} {row.pattern:22s} {row.dtype:8s} {row.reason}")

x = torch.randn(3, 3, 16, 16)
expected = module.eval()(x).detach().numpy()
(actual,) = rq.reference.run(qmod, [x.numpy()])
print(f"largest difference {np.abs(actual - expected).max():.4f}")
print(f"compiled code equals numpy: {rq.verify(qmod, [x.numpy()]).is_equal}")

# %%
# Names of the module
# -------------------
# Values are named after the modules that compute them, so a line of a ``QConfigMapping`` selects a
# layer, or all that is below a module.

mapping = (
    rq.QConfigMapping()
    .set_global(rq.get_backend_config("x86").default_qconfig)
    .set_module_name("block.0", None)
)
mixed = rq.torch.quantize(module, (batches[0],), batches, qconfig_mapping=mapping, effort="fast")
print("left in float:", [row.name for row in rq.ledger(mixed).rows if not row.quantized])

# %%
# Files
# -----
# ``rq.load("model.pt2")`` reads what ``torch.export.save`` wrote. Nothing in the file is executed;
# what torch itself would unpickle or evaluate is left out or refused. A program that PT2E quantized
# keeps its parameters: pass it to ``rq.lower``.

program = rq.torch.export(module, (batches[0],))
mod, params = rq.load(program)
print([param.name for param in mod["main"].params], "->", mod["main"].ret_ty)
