"""What the package leaves of TVM's own operators: everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Before and after, in one process: every kind of attribute that an operator of TVM 0.27 has, and
#: its operands. Attributes that are functions are compared as objects.
PROGRAM = """
import numpy as np
import tvm
from tvm import relax
from tvm.ir import Op

KINDS = '''
    FCallPacked FDataDependent FInferMixedPrecision FInferType FLegalize FLowerBuiltin FNormalize
    FPrimalGradient FPurity FRelaxInferLayout FValidate RequiresArgumentShapes TAllocator
    TCallEffectKind TDeviceIntrinsicNamespace TGlobalSymbol TIRxOpCategory TMixedPrecisionPolicy
    TScriptDtypePrintLocation TScriptPrinterName TVectorizable
'''.split()
OPS = Op.list_op_names()
KEYS = [(op, key) for op in OPS for key in KINDS if Op.get(op).has_attr(key)]

def look():
    values = {(op, key): Op.get(op).get_attr(key) for op, key in KEYS}
    for op in OPS:
        found = Op.get(op)
        fields = [(a.name, a.type_info, a.description) for a in found.arguments]
        values[op, "fields"] = (found.num_inputs, found.support_level, found.description, fields)
    return values

def is_same(old, new):
    return old.same_as(new) if hasattr(old, "same_as") else old == new

def check(when):
    after = look()
    changed = [key for key, old in before.items() if not is_same(old, after[key])]
    added = [op for op in Op.list_op_names() if op not in OPS and not op.startswith("relax.qnn.")]
    new_keys = [
        (op, key) for op in OPS for key in KINDS
        if (op, key) not in known and Op.get(op).has_attr(key)
    ]
    print(when, changed, added, new_keys)

known = set(KEYS)
before = look()
print(len(OPS) > 300, {key for _, key in KEYS} == set(KINDS))
import relayquant as rq
check("import")
builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((1, 3, 6, 6), "float32"))
weight = relax.const(np.ones((3, 3, 2, 2), "float32"))
with builder.function("main", [x]):
    with builder.dataflow():
        y = builder.emit(relax.op.nn.conv2d(x, weight))
        y = builder.emit(relax.op.nn.conv2d_transpose(y, weight))
        y = builder.emit_output(relax.op.nn.rms_norm(y, relax.const(np.ones(6, "float32")), [-1]))
    builder.emit_func_output(y)
mod = builder.get()
rq.compile(mod)
check("compile")
wanted = relax.transform.ConvertLayout({"relax.nn.conv2d_transpose": ["NHWC", "IHWO"]})
print("IHWO" in wanted(mod).script())
"""


@pytest.mark.slow
def test_import_and_compile__leave_tvm_as_it_is():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "True True",
        "import [] [] []",
        "compile [] [] []",
        "True",
    ], done.stderr
