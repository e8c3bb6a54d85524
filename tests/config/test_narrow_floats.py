"""Islands of float16: which operators are computed so, where values are cast, what comes out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from float_models import MAP, build_model, draw_batches
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.flow.testing.check import observe_parameters
from relayquant.ir.reference import run_values
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import tensor_dtype

DEFAULT = rq.QConfigMapping().set_global(rq.get_backend_config("generic").default_qconfig)
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
        mapping = mapping.set_module_name(name, rq.config.FLOAT16)
    return mapping


def run_island(data):
    prepared = rq.prepare(
        island_model(),
        None,
        qconfig_mapping=make_mapping(),
        backend=rq.get_backend_config("generic"),
        strict=True,
    )
    prepared = observe_parameters(prepared, data)
    return prepared, rq.lower(rq.convert_to_reference(prepared), rq.get_backend_config("generic"))


def find_casts(mod) -> list[tuple[str, str]]:
    graph = Graph(mod)
    names = [b.var for b in graph.bindings if graph.op_name(b.var) == "relax.astype"]
    return [(tensor_dtype(graph.call_of(var).args[0]), tensor_dtype(var)) for var in names]


def test_island__is_cast_at_its_borders_only():
    mod = island_model()
    prepared, qmod = run_island(draw_batches(mod, 2))
    casts = find_casts(qmod)
    down, up = ("float32", "float16"), ("float16", "float32")
    # In once and out once; a product is summed in float32 and rounded to float16, and so softmax
    # and the average are: each reads the other's float16 as float32.
    assert casts == [down, down, up, down, up, down, up]
    rows = {row.name: row for row in rq.ledger(qmod).rows}
    assert [rows[name].dtype for name in ISLAND] == ["float16"] * 3
    assert rows["mid"].reason == "computed in float16 by the configuration (module_name 'mid')"
    assert rows["first"].quantized
    assert rows["last"].quantized
    plan = prepared.plan
    assert rq.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.slow
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


#: operators whose float16 code in TVM and in numpy has roundings of its own, as functions of a map
ROUNDING = {
    "mean": lambda x: op.mean(x, axis=[2, 3]),
    "sum": lambda x: op.sum(x, axis=[3]),
    "variance": lambda x: op.variance(x, axis=[1]),
    "softmax": lambda x: op.nn.softmax(x, axis=3),
    "avg_pool": lambda x: op.nn.avg_pool2d(x, (3, 3), (2, 2)),
    "sigmoid": op.sigmoid,
    "tanh": op.tanh,
    "atan": op.atan,
    "gelu": op.nn.gelu,
    "norm": lambda x: op.nn.rms_norm(x, relax.const(np.full(24, 0.3, "float32")), axes=[3]),
}


def test_operators_of_several_roundings__round_to_float16_once():
    # In float64 on operands of float16, and rounded: not what either of the two programs says.
    def body(emit, x):
        return relax.Tuple([emit(name, make(x)) for name, make in ROUNDING.items()])

    mod = build_model(body, (1, 4, 24, 24))
    mapping = DEFAULT.set_global(rq.config.FLOAT16)
    prepared = rq.prepare(
        mod, None, qconfig_mapping=mapping, backend=rq.get_backend_config("generic")
    )
    assert {row.compute for row in prepared.plan.operators} == {"float16"}
    qmod = rq.lower(rq.convert_to_reference(prepared), rq.get_backend_config("generic"))
    x = np.random.default_rng(0).uniform(0.01, 2, (1, 4, 24, 24)).astype("float32")
    y = x.astype("float16").astype("float64")
    inner = np.vectorize(math.erf)(y / np.sqrt(2))
    exponential = np.exp(y - y.max(3, keepdims=True))
    pooled = sum(y[:, :, i : i + 21 : 2, j : j + 21 : 2] for i in range(3) for j in range(3)) / 9
    weight = float(np.float16(0.3))
    exact = {
        "mean": y.mean((2, 3)),
        "sum": y.sum(3),
        "variance": y.var(1),
        "softmax": exponential / exponential.sum(3, keepdims=True),
        "avg_pool": pooled,
        "sigmoid": 1 / (1 + np.exp(-y)),
        "tanh": np.tanh(y),
        "atan": np.arctan(y),
        "gelu": y * 0.5 * (1 + inner),
        "norm": y / np.sqrt((y * y).mean(3, keepdims=True) + 1e-5) * weight,
    }
    runs = Executor(rq.compile(qmod)).run("main", [x]), rq.reference.run(qmod, {"x": x})
    for results in runs:
        for name, have in zip(ROUNDING, results, strict=True):
            want = exact[name].astype("float16")
            assert (have == want).mean() > 0.98, name
            gap = np.abs(have.astype("float64") - exact[name])
            assert (gap <= 0.51 * np.spacing(want)).all(), name


def test_island__a_backend_without_float16_says_so():
    backend = replace(rq.get_backend_config("generic"), float_dtypes=())
    with pytest.raises(rq.ConfigError, match=r"soft .nn.softmax, dtype unsupported.*in float16"):
        rq.prepare(
            island_model(), None, qconfig_mapping=make_mapping(), backend=backend, strict=True
        )
    assert "backend x86, any operator also in float16" in rq.get_backend_config("x86").explain(
        "conv2d"
    )


def test_plain_data__by_name():
    mapping = make_mapping()
    data = json.loads(json.dumps(mapping.to_dict()))
    assert data["module_name"][0]["qconfig"] == "float16"
    assert rq.QConfigMapping.from_dict(data) == mapping
    data["module_name"][0]["qconfig"] = "flaot16"
    with pytest.raises(rq.ConfigError, match=r"qconfig is 'flaot16'. Did you mean 'float16'"):
        rq.QConfigMapping.from_dict(data)
    with pytest.raises(rq.ConfigError, match=r"FloatConfig.dtype is 'float64'"):
        rq.config.FloatConfig("float64")
