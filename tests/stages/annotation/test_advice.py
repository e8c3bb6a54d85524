"""Advice about QConfigs is code. Each advice is run here, and does what it promises."""

from __future__ import annotations

import ast
import dataclasses
import re
import warnings
from dataclasses import replace

import pytest
from float_models import MAP, Chain, build_model, draw_batches
from package_sources import SOURCES, list_nodes
from tvm import relax
from tvm.relax import op

import relayquant as rq
from relayquant.config.backend import BUILTIN_NAMES
from relayquant.stages.backends import ARM, BACKENDS, GENERIC, X86

DEFAULT = X86.default_mapping


def ask(dtype: str, **more) -> rq.QConfig:
    observer = None if more else rq.observers.MinMax()
    activation = rq.TensorConfig(rq.QSpec(dtype, **more), observer)
    return rq.QConfig(activation, X86.default_qconfig.weight)


ROWS = ask("int8", granularity=rq.config.Granularity.PER_ROW, is_dynamic=True)
GROUPS = rq.QConfig(None, rq.TensorConfig(rq.QSpec("int4", group_size=16)))
#: hardware of the user, whose name is none of ours
OWN = replace(ARM, name="own")


def convolutions(emit: Chain, x: relax.Expr) -> relax.Var:
    return emit.conv("out", emit("relu", op.nn.relu(emit.conv_bias("first", x))))


def product(emit: Chain, x: relax.Expr) -> relax.Var:
    return emit.dense("out", emit("flat", op.reshape(emit.conv("first", x), (1, 144))), 16)


def moved_sums(emit: Chain, x: relax.Expr) -> relax.Var:
    return emit("out", op.reshape(emit.conv("first", x), (1, 144)))


def beside_float(emit: Chain, x: relax.Expr) -> relax.Var:
    total = emit("total", op.cumsum(x, axis=1))
    return emit("last", op.multiply(emit("clamped", op.nn.relu(total)), emit.conv("first", x)))


#: what asks for what a row cannot run -> model, backend, mapping, a part of the reason
CASES = {
    "dtype": (convolutions, X86, DEFAULT.set_module_name("out", ask("uint16")), "runs uint8"),
    "default": (convolutions, X86, rq.QConfigMapping().set_global(ask("uint16")), "runs uint8"),
    "own backend": (convolutions, OWN, DEFAULT.set_module_name("out", ask("uint16")), "runs int8"),
    "no line": (convolutions, X86, rq.QConfigMapping().set_object_type("add", None), "no line"),
    "groups": (convolutions, GENERIC, DEFAULT.set_module_name("out", GROUPS), "group"),
    "rows": (convolutions, X86, DEFAULT.set_module_name("out", ROWS), "granularity per_row"),
    "moved sums": (moved_sums, X86, DEFAULT, "stay exact"),
    "float16": (
        convolutions,
        replace(OWN, float_dtypes=()),
        rq.QConfigMapping().set_module_name("out", rq.config.FLOAT16),
        "does not compute in float16",
    ),
}


def plan_of(model, backend, mapping, **options):
    mod = build_model(model, MAP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        prepared = rq.prepare(mod, None, backend=backend, qconfig_mapping=mapping, **options)
    return prepared.plan


def run_code(text: str, **names):
    return eval(text, {"relayquant": rq, "dataclasses": dataclasses, **names})


@pytest.mark.parametrize("case", CASES)
def test_advice__of_the_ledger_is_code_that_works(case):
    model, backend, mapping, reason = CASES[case]
    if case == "no line":
        mapping = rq.QConfigMapping().set_object_type("add", None, optional=True)
    row = plan_of(model, backend, mapping, effort="fast").operator("out")
    assert not row.quantized
    assert reason in row.reason
    code = row.advice.partition("; or ")[0]
    changed = run_code(code, mapping=mapping, backend=backend)
    after = plan_of(model, backend, changed, effort="fast").operator("out")
    assert after.quantized == (not code.endswith("None)"))
    assert not after.is_unsupported


def test_advice__without_a_mapping_of_the_user_names_the_backend():
    row = plan_of(moved_sums, X86, None).operator("out")
    assert row.advice.startswith("relayquant.get_backend_config('x86').default_mapping.set_mod")
    changed = run_code(row.advice)
    assert plan_of(moved_sums, X86, changed).operator("out").quantized


@pytest.mark.parametrize("name", ["last", "clamped"])
def test_advice__of_a_neighbour_leads_to_the_cause(name):
    mod = build_model(beside_float, MAP)
    qmod = rq.quantize(mod, None, draw_batches(mod, 4), backend=X86, effort="fast")
    row = rq.ledger(qmod).row(name)
    assert "an operator next to it" in row.reason or "neither its input" in row.reason
    cause = row
    while "is the cause" in row.advice:
        cause = run_code(
            row.advice.removesuffix(" is the cause").removesuffix(".reason"), qmod=qmod
        )
        row = cause
    assert "no pattern for relax.cumsum" in cause.reason


def test_advice__of_an_output_is_an_option():
    def body(emit, x):
        return emit("out", op.add(emit.conv("first", x), emit.conv("second", x)))

    backend = replace(
        X86, patterns=tuple(r for r in X86.patterns if not r.pattern.name.startswith("conv2d_"))
    )
    row = plan_of(body, backend, None).operator("out")
    assert not row.quantized
    options = run_code(f"dict({row.advice.removesuffix(' makes the output integers')})")
    assert plan_of(body, backend, None, **options).operator("out").quantized


MESSAGES = {
    "no default": (replace(OWN, default_qconfig=None), None),
    "empty mapping": (OWN, rq.QConfigMapping()),
    "no global line": (OWN, rq.QConfigMapping().set_object_type("nn.conv2d", None)),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_advice__where_nothing_is_quantized(case):
    backend, mapping = MESSAGES[case]
    mod = build_model(product, MAP)
    with pytest.warns(UserWarning, match="Nothing is quantized") as seen:
        rq.prepare(mod, None, backend=backend, qconfig_mapping=mapping)
    text = str(seen[0].message)
    (option,) = re.findall(r"Pass ((?:backend|qconfig_mapping)=.*?)(?:, or leave|\. \[)", text)
    options = run_code(f"dict({option})", backend=backend, mapping=mapping)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rq.prepare(mod, None, **{"backend": backend, "qconfig_mapping": mapping, **options})


def test_advice__of_strict_keeps_in_float():
    mod = build_model(beside_float, MAP)
    with pytest.raises(rq.ConfigError, match="To keep them in float") as error:
        rq.prepare(mod, None, backend="x86", strict=True)
    (code,) = re.findall(r"pass qconfig_mapping=(.*); or pass strict", str(error.value))
    rq.prepare(mod, None, backend="x86", strict=True, qconfig_mapping=run_code(code))


def test_advice__no_skip_asks_for_a_qconfig_in_prose():
    """Every advice about QConfigs in the package is code, so that the tests above can run it."""
    found = []
    for module in SOURCES:
        for node in list_nodes(module):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("Skip")
                and len(node.args) > 1
            ):
                text = ast.unparse(node.args[1])
                if re.search(r"QConfig(?!\()|set_global|set_object_type", text):
                    found.append((module, node.lineno, text))
    assert found == []


def test_find_qconfig__every_row_of_every_backend():
    for backend in BACKENDS:
        for row in backend.patterns:
            qconfig = backend.find_qconfig(row.pattern.name)
            assert row.find_conflict(backend.adapt_qconfig(qconfig)) is None
    assert GENERIC.find_qconfig("add", "int16").activation.spec.dtype == "int16"
    with pytest.raises(rq.ConfigError, match="runs no static QConfig of int16; allowed: uint8"):
        X86.find_qconfig("batch_matmul", "int16")
    assert tuple(backend.name for backend in BACKENDS) == BUILTIN_NAMES
