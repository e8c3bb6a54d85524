"""Rules of the user's before annotate (`additional_fuser_method_mapping` of FX)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from float_models import build_model, draw_batches
from tvm import relax
from tvm.relax import op
from tvm.relax.dpl import is_op, wildcard

import relayquant as rq
from relayquant.extend import Pattern, Rule, Skip
from relayquant.ir.rewrite.graph import constant_value


def chain_pattern() -> Pattern:
    data, first, second = wildcard(), wildcard(), wildcard()
    inner = is_op("relax.matmul")(data, first)
    parts = {"data": data, "first": first, "second": second}
    return Pattern(is_op("relax.matmul")(inner, second), parts)


def fuse_products(emitter, match):
    """(x @ A) @ B -> x @ (A @ B), constants both: what no operator of ours does."""
    first, second = (constant_value(match.parts[name]) for name in ("first", "second"))
    if first is None or second is None:
        return Skip("a factor is computed")
    product = (first.astype("float64") @ second).astype("float32")
    return op.matmul(emitter.get(match.parts["data"]), relax.const(product))


FUSER = Rule("two products", chain_pattern(), fuse_products)


def model():
    def body(emit, x):
        hidden = emit.dense("b", emit.dense("a", x, 12), 8)
        return emit.dense("d", emit.dense("c", emit("r", op.nn.relu(hidden)), 9), 5)

    return build_model(body, (4, 10))


def test_additional_fuser_method_mapping__a_rule_of_the_user_is_tried_before_annotate():
    mod, backend = model(), rq.get_backend_config("x86").with_fuser(FUSER)
    data = draw_batches(mod, 4)
    plain, fused = (
        [
            row.pattern
            for row in rq.prepare(mod, None, backend=b).plan.operators
            if row.op.endswith("matmul")
        ]
        for b in (rq.get_backend_config("x86"), backend)
    )
    assert len(plain) == 4
    assert fused == ["dense_bias_relu", "dense_bias"], "what is fused is fused with what follows"
    qmod = rq.quantize(mod, None, data, backend=backend)
    assert rq.verify(qmod, data[0]).is_equal
    (want,), (got,) = (rq.reference.run(m, data[0]) for m in (mod, qmod))
    assert np.square(got - want).mean() < 1e-3 * np.square(want).mean()


def test_additional_fuser_method_mapping__as_fuse_fx_does():
    """FX with a fuser of two linear layers, and ours: one layer each, the same function."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("torch.ao.quantization")
    from torch.ao.quantization.backend_config import BackendConfig, BackendPatternConfig
    from torch.ao.quantization.quantize_fx import fuse_fx

    nn = torch.nn
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 12, bias=False), nn.Linear(12, 8, bias=False)).eval()

    def join(is_qat, first, second):
        both = nn.Linear(10, 8, bias=False)
        both.weight = nn.Parameter(second.weight @ first.weight)
        return both

    row = BackendPatternConfig((nn.Linear, nn.Linear)).set_fuser_method(join)
    theirs = fuse_fx(net, backend_config=BackendConfig().set_backend_pattern_config(row))
    assert quantization is not None
    assert sum(isinstance(part, nn.Linear) for part in theirs.modules()) == 1
    x = torch.randn(4, 10)
    mod, params = rq.load(rq.torch.export(net, (x,)))
    prepared = rq.prepare(mod, params, backend=rq.get_backend_config("x86").with_fuser(FUSER))
    assert len(prepared.plan.operators) == 1
    (got,) = rq.reference.run(prepared.mod, [x.numpy()])
    np.testing.assert_allclose(got, theirs(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_with_fuser__replaces_one_of_its_name_and_lives_in_plain_data():
    other = Rule("two products", chain_pattern(), lambda emitter, match: Skip("never"))
    backend = rq.get_backend_config("x86").with_fuser(FUSER).with_fuser(other)
    assert backend.fusers == (other,)
    data = json.loads(json.dumps(backend.to_dict()))
    again = rq.BackendConfig.from_dict(data, rq.extend.BUILTIN_OPS, fusers=[other])
    assert again == backend
    with pytest.raises(rq.ConfigError, match=r"fusers names 'two products', which was not passed"):
        rq.BackendConfig.from_dict(data, rq.extend.BUILTIN_OPS)


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (lambda emitter, match: 1 / 0, "fuser 'mine' raised ZeroDivisionError"),
        (lambda emitter, match: None, "fuser 'mine' returned None; allowed: a Skip"),
        (lambda emitter, match: emitter.get(match.parts["data"]), r"returned float32 \(4, 10\)"),
        (
            lambda emitter, match: op.matmul(
                op.matmul(emitter.get(match.parts["data"]), match.parts["first"]),
                match.parts["second"],
            ),
            "did not settle",
        ),
    ],
)
def test_with_fuser__names_the_rule_that_goes_wrong(rewrite, message):
    backend = rq.get_backend_config("x86").with_fuser(Rule("mine", chain_pattern(), rewrite))
    with pytest.raises(rq.ConfigError, match=message):
        rq.prepare(model(), None, backend=backend)
