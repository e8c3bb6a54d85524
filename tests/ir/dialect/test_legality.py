"""Which operators are legal at which stage."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from qnn_testing import make_module
from tvm import relax

from relayquant.errors import ModelError
from relayquant.ir.dialect import OPERATORS, qnn
from relayquant.ir.dialect.legality import LEGAL_STAGES, Stage, check_stage

FLOAT = relax.TensorType((2, 4), "float32")
INT8 = relax.TensorType((2, 4), "int8")
WEIGHT = np.ones((3, 4), "int8")

MODULES = {
    "float": (lambda x: relax.op.nn.relu(x), FLOAT, set(Stage)),
    "simulated_quantize": (
        lambda x: qnn.simulated_quantize(x, 1, 0.1, 0),
        FLOAT,
        {Stage.SIMULATED},
    ),
    "simulated_dequantize": (
        lambda x: qnn.simulated_dequantize(x, 1, 0.1, 0),
        FLOAT,
        {Stage.SIMULATED},
    ),
    "quantize": (lambda x: qnn.quantize(x, 0.1, 0), FLOAT, set(Stage) - {Stage.FLOAT}),
    "dequantize": (lambda x: qnn.dequantize(x, 0.1, 0), INT8, set(Stage) - {Stage.FLOAT}),
    "requantize": (
        lambda x: qnn.requantize(x, 0.1, 0, 0.2, 0),
        INT8,
        {Stage.QNN, Stage.LOWERED},
    ),
    "dense": (
        lambda x: qnn.dense(x, WEIGHT, 0, 0, 0.1, 0.2),
        INT8,
        {Stage.QNN, Stage.LOWERED},
    ),
}


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("name", MODULES)
def test_check_stage(name, stage):
    make_call, ty, legal = MODULES[name]
    module = make_module(make_call, [ty])
    if stage in legal:
        check_stage(module, stage)
        return
    with pytest.raises(ModelError, match=rf"qnn\.{name} computes value .* at stage {stage.name}"):
        check_stage(module, stage)


@pytest.mark.parametrize("name", MODULES)
def test_check_stage__with_integers_allows_those_of_the_qnn_form_alone(name):
    make_call, ty, legal = MODULES[name]
    module = make_module(make_call, [ty])
    if Stage.QNN in legal:
        check_stage(module, Stage.FLOAT, with_integers=True)
        return
    with pytest.raises(ModelError, match=rf"qnn\.{name} computes value .* at stage FLOAT"):
        check_stage(module, Stage.FLOAT, with_integers=True)


def test_check_stage__message_names_value_function_and_stages():
    builder = relax.BlockBuilder()
    x = relax.Var("x", INT8)
    with builder.function("main", [x]):
        with builder.dataflow():
            call = builder.normalize(qnn.dense(x, WEIGHT, 0, 0, 0.1, 0.2))
            value = relax.DataflowVar("block1/fc:0", call.ty)
            builder.emit_normalized(relax.VarBinding(value, call))
            result = builder.emit_output(qnn.dequantize(value, 0.1, 0))
        builder.emit_func_output(result)
    with pytest.raises(
        ModelError,
        match=r"qnn\.dense computes value 'block1/fc:0' of function 'main', but is not allowed at "
        r"stage REFERENCE; allowed: QNN, LOWERED\. The reference form computes in float",
    ):
        check_stage(builder.finalize(), Stage.REFERENCE)


def test_check_stage__looks_into_branches():
    builder = relax.BlockBuilder()
    x, condition = relax.Var("x", FLOAT), relax.Var("c", relax.TensorType((), "bool"))

    def make_branch(call):
        inner = relax.BlockBuilder()
        var = relax.Var("inside", inner.normalize(call).ty)
        block = relax.BindingBlock([relax.VarBinding(var, inner.normalize(call))])
        return relax.SeqExpr([block], var)

    branches = [make_branch(c) for c in (qnn.simulated_quantize(x, 1, 0.1, 0), relax.op.exp(x))]
    with builder.function("main", [x, condition]):
        builder.emit_func_output(builder.emit(relax.If(condition, *branches)))
    with pytest.raises(ModelError, match=r"qnn\.simulated_quantize computes value 'inside'"):
        check_stage(builder.finalize(), Stage.QNN)


def test_check_stage__malformed_module():
    x, other = relax.Var("x", FLOAT), relax.Var("other", FLOAT)
    body = relax.BlockBuilder().normalize(relax.op.add(x, other))
    var = relax.Var("y", FLOAT)
    block = relax.BindingBlock([relax.VarBinding(var, body)])
    function = relax.Function([x], relax.SeqExpr([block], var), FLOAT)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with pytest.raises(ValueError, match="not well formed at stage FLOAT"):
        check_stage(module, Stage.FLOAT)


def test_legal_stages__every_operator_has_a_row():
    assert set(LEGAL_STAGES) == {operator.full_name for operator in OPERATORS}
