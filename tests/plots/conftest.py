"""One report for all tests: a network whose names are those of an attacker."""

from __future__ import annotations

import pytest
from float_models import build_model, draw_batches
from hostile_names import HOSTILE
from tvm.relax import op

import relayquant as rq

IMAGES = (1, 3, 8, 8)


@pytest.fixture(scope="session")
def hostile():
    """(float module, batches)."""

    def body(emit, x):
        first = emit(HOSTILE[0], op.nn.relu(emit.conv_bias("a", x)))
        second = emit(HOSTILE[1], op.nn.relu(emit.conv_bias("b", first)))
        third = emit("sum", op.add(second, first))
        return emit(HOSTILE[2], op.cumsum(third, axis=1))

    mod = build_model(body, IMAGES)
    return mod, draw_batches(mod, 4)


@pytest.fixture(scope="session")
def report(hostile):
    """All sections: times, a metric, and a second configuration."""
    for package in ("jinja2", "grandalf"):
        pytest.importorskip(package)
    mod, batches = hostile
    qmod = rq.quantize(mod, None, batches, effort="fast", guard=rq.config.Guard.OFF)
    first = rq.ledger(qmod).quantized[0].name
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name(first, None)
    )
    other = rq.quantize(
        mod, None, batches, backend="x86", qconfig_mapping=mapping, effort="fast",
        guard=rq.config.Guard.OFF,
    )  # fmt: skip

    def closeness(expected, got):
        return -float(abs(expected[0] - got[0]).max())

    return rq.report(
        mod, None, qmod, batches, metric=closeness, latency=True, other=other, title="<b>hostile"
    )
