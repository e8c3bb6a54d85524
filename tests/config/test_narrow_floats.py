"""Islands of float16: which operators are computed so, where values are cast, what comes out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.reference import run_values
from relayquant.rewrite import Graph
from relayquant.rewrite.graph import tensor_dtype
from relayquant.runtime import Executor
from relayquant.testing import observe_parameters

DEFAULT = rq.QConfigMapping().set_global(rq.GENERIC.default_qconfig)
ISLAND = ("mid", "soft", "pool")


def island_model():
    """conv - [conv + bias + relu - softmax - average pool] - conv; the island has two readers."""

    def body(emit, x):
        first = emit.conv("first", x)
        mid = emit("mid", op.nn.relu(emit.conv_bias("mid.b", first)))
        soft = emit("soft", op.nn.softmax(mid, axis=1))
        pool = emit("pool", op.nn.avg_pool2d(soft, (2, 2), (2, 2)))
        last = emit.conv("last", pool)
        return relax.Tuple([last, emit("flat", op.exp(pool))])

    return build_model(body, MAP)


def make_mapping():
    mapping = DEFAULT.set_object_type("exp", None)
    for name in ISLAND:
        mapping = mapping.set_module_name(name, rq.FLOAT16)
    return mapping


def run_island(data):
    prepared = rq.prepare(island_model(), None, make_mapping(), rq.GENERIC, strict=True)
    observe_parameters(prepared, data)
    return prepared, rq.lower(rq.convert_to_reference(prepared), rq.GENERIC)


def find_casts(mod) -> list[tuple[str, str]]:
    graph = Graph(mod)
    names = [b.var for b in graph.bindings if graph.op_name(b.var) == "relax.astype"]
    return [(tensor_dtype(graph.call_of(var).args[0]), tensor_dtype(var)) for var in names]


def test_island__is_cast_at_its_borders_only():
    mod = island_model()
    prepared, qmod = run_island(draw_batches(mod, 2))
    casts = find_casts(qmod)
    # In once and out once; a product is summed in float32 and rounded to float16.
    assert casts == [("float32", "float16"), ("float32", "float16"), ("float16", "float32")]
    rows = {row.name: row for row in rq.ledger(qmod).rows}
    assert [rows[name].dtype for name in ISLAND] == ["float16"] * 3
    assert rows["mid"].reason == "computed in float16 by the configuration (module_name 'mid')"
    assert rows["first"].quantized
    assert rows["last"].quantized
    plan = prepared.plan
    assert rq.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_island__reference_simulation_and_compiled_code():
    mod = island_model()
    data = draw_batches(mod, 2)
    prepared, qmod = run_island(data)
    inputs = data[0]
    values = run_values(qmod, inputs)
    assert values["pool.float16"].dtype == np.float16
    arguments = prepared.graph.arguments(prepared.parameters)
    simulated = run_values(prepared.graph.mod, {**inputs, **arguments})
    np.testing.assert_allclose(simulated["pool"], values["pool"], atol=2e-3)
    compiled = Executor(rq.compile(qmod)).run("main", [inputs["x"]])
    for have, numpy_result, want in zip(
        compiled, rq.reference.run(qmod, inputs), rq.reference.run(mod, inputs), strict=True
    ):
        assert have.dtype == np.float32
        np.testing.assert_allclose(have, numpy_result, atol=0.01 * np.abs(want).max())
        np.testing.assert_allclose(have, want, atol=0.05 * np.abs(want).max())
    # float16 is what it was rounded to, not float32 under another name.
    wide = run_values(island_model(), inputs)["pool"]
    assert (values["pool"] == values["pool"].astype("float16")).all()
    assert (wide != wide.astype("float16")).any()


def test_island__a_backend_without_float16_says_so():
    backend = replace(rq.GENERIC, float_dtypes=())
    with pytest.raises(rq.ConfigError, match=r"soft .nn.softmax, dtype unsupported.*in float16"):
        rq.prepare(island_model(), None, make_mapping(), backend, strict=True)
    assert "backend x86, any operator also in float16" in rq.X86.explain("conv2d")


def test_plain_data__by_name():
    mapping = make_mapping()
    data = json.loads(json.dumps(mapping.to_dict()))
    assert data["module_name"][0]["qconfig"] == "float16"
    assert rq.QConfigMapping.from_dict(data) == mapping
    data["module_name"][0]["qconfig"] = "flaot16"
    with pytest.raises(rq.ConfigError, match=r"qconfig is 'flaot16'. Did you mean 'float16'"):
        rq.QConfigMapping.from_dict(data)
    with pytest.raises(rq.ConfigError, match=r"FloatConfig.dtype is 'float64'"):
        rq.FloatConfig("float64")
