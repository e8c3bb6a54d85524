"""What a QConfigMapping does to the plan: operators kept in float, lines that select nothing."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from float_models import MAP, build_model
from tvm.relax import op

import relayquant as rq
from relayquant.analysis.sensitivity import add_lines
from relayquant.stages.annotation import annotate
from relayquant.stages.backends import GENERIC, X86
from relayquant.stages.preparation import prepare_module

CONFIG = X86.default_qconfig
DEFAULT = rq.QConfigMapping().set_global(CONFIG)


def two_convs():
    def body(emit, x):
        first = emit("net.first", op.nn.relu(emit.conv("net.first.conv", x)))
        second = emit.conv("net.second", first)
        return emit("head", op.matmul(emit("flat", op.reshape(second, (1, 144))),
                                      emit.constant(144, 3)))  # fmt: skip

    return prepare_module(build_model(body, MAP))


def floats(mapping, backend=X86) -> dict[str, str]:
    """Operators that stay in float, with their reasons."""
    plan = annotate(two_convs(), backend, mapping)
    return {row.name: row.reason for row in plan.operators if not row.quantized}


def test_mapping__default_quantizes_all():
    assert floats(DEFAULT) == {}


@pytest.mark.parametrize(
    ("mapping", "expected", "reason"),
    [
        (DEFAULT.set_module_name("net.second", None), {"net.second"}, "module_name 'net.second'"),
        (DEFAULT.set_module_name("net.first.conv", None), {"net.first"}, "net.first.conv"),
        (DEFAULT.set_module_name("net", None), {"net.first", "net.second"}, "module_name 'net'"),
        (
            DEFAULT.set_module_name_regex(r"net\..*", None),
            {"net.first", "net.second"},
            "module_name_regex",
        ),
        (DEFAULT.set_object_type("matmul", None), {"head"}, "object_type 'matmul'"),
        (DEFAULT.set_object_type("relax.nn.conv2d", None), {"net.first", "net.second"}, "conv2d"),
        (DEFAULT.set_object_type("conv2d_relu", None), {"net.first"}, "conv2d_relu"),
    ],
)
def test_mapping__none_keeps_in_float_with_the_reason(mapping, expected, reason):
    found = floats(mapping)
    kept = {name for name, text in found.items() if text.startswith("kept in float by the conf")}
    assert kept == expected
    assert all(reason in found[name] for name in expected)


def test_mapping__name_wins_over_regex_over_type_over_global():
    mapping = (
        rq.QConfigMapping()
        .set_module_name("net.first", CONFIG)
        .set_module_name_regex("net.*", None)
        .set_object_type("conv2d", CONFIG)
        .set_global(None)
    )
    plan = annotate(two_convs(), X86, mapping)
    assert plan.operator("net.first").quantized
    assert "module_name_regex 'net.*'" in plan.operator("net.second").reason
    assert "(global" in plan.operator("head").reason


def test_mapping__no_line_selects_the_operator():
    found = floats(rq.QConfigMapping().set_object_type("conv2d", CONFIG))
    assert "no line" in found["head"]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (DEFAULT.set_module_name("net.frist", None), "module_name 'net.frist' selects no operator"),
        (DEFAULT.set_module_name_regex("block.*", None), r"'block.\*' selects no operator"),
        (DEFAULT.set_object_type("conv3d", None), "Known: relax.matmul, relax.nn.conv2d"),
    ],
)
def test_mapping__line_that_selects_nothing(mapping, message):
    with pytest.raises(rq.ConfigError, match=message):
        annotate(two_convs(), X86, mapping)


def prepare(mapping, **more):
    return rq.prepare(two_convs(), None, qconfig_mapping=mapping, **more)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            DEFAULT.set_module_name_regex("net.*", None).set_module_name_regex(".*second", CONFIG),
            "module_name_regex '.*second': module_name_regex 'net.*' decides",
        ),
        (
            DEFAULT.set_object_type("matmul", None).set_module_name("head", CONFIG),
            "object_type 'matmul': module_name 'head' decides",
        ),
        (
            DEFAULT.set_module_name("net.first", None).set_module_name("net.first.conv", CONFIG),
            "module_name 'net.first': module_name 'net.first.conv' decides",
        ),
    ],
)
def test_mapping__a_line_that_decides_nothing_is_reported(mapping, message):
    with pytest.warns(UserWarning, match="^1 line of the QConfigMapping decides for no") as seen:
        prepare(mapping)
    assert len(seen) == 1
    assert message in str(seen[0].message)
    with pytest.raises(rq.ConfigError) as error:
        prepare(mapping, strict=True)
    assert message in str(error.value)


def test_mapping__what_is_put_back_is_put_back_whatever_the_lines_of_the_user():
    """Lines of the search and the guard decide, also against a longer name and one that counts."""
    mapping = (
        DEFAULT.set_module_name("net.first.conv", CONFIG)
        .set_module_name_object_type_order("net.second", "conv2d", 0, CONFIG)
        .set_module_name_object_type_order("net.first.conv", "conv2d", 0, CONFIG)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two lines for one operator
        prepared = prepare(mapping)
    names = ["net.first", "net.second"]
    changed = add_lines(prepared, dict.fromkeys(names), mapping)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no line is left that decides nothing
        plan = prepare(changed, strict=True).plan
    assert {op.name for op in plan.operators if not op.quantized} == set(names)
    assert plan.operator("head").quantized


def quiet(mapping, **more) -> rq.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return prepare(mapping, **more).plan


NO_DEFAULT = replace(X86, default_qconfig=None)


@pytest.mark.parametrize(
    ("mapping", "backend", "message"),
    [
        (None, NO_DEFAULT, "backend 'x86' has no default_qconfig, and there is no QConfigMapping"),
        (rq.QConfigMapping(), X86, "the QConfigMapping has no line"),
        (rq.QConfigMapping().set_object_type("matmul", None), X86, "no line says how the other"),
        (rq.QConfigMapping().set_object_type("reshape", CONFIG), X86, "of 4 operators none can be"),
    ],
)
def test_nothing_quantized__is_one_warning_and_with_strict_an_error(mapping, backend, message):
    with pytest.warns(UserWarning, match=message) as seen:
        plan = prepare(mapping, backend=backend).plan
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert not any(op.quantized for op in plan.operators)
    with pytest.raises(rq.ConfigError, match=message):
        prepare(mapping, backend=backend, strict=True)


@pytest.mark.parametrize("qconfig", [None, rq.config.FLOAT16])
def test_nothing_quantized__is_no_warning_where_that_is_what_the_mapping_says(qconfig):
    plan = quiet(rq.QConfigMapping().set_global(qconfig))
    assert not any(op.quantized for op in plan.operators)


def test_mapping__operator_inside_a_pattern_is_named():
    """relu was fused into the convolution: the message says into which."""
    with pytest.raises(rq.ConfigError, match=r"nn\.relu is part of 'net\.first' \(conv2d_relu\)"):
        annotate(two_convs(), X86, DEFAULT.set_object_type("nn.relu", None))


def test_mapping__what_the_backend_cannot_run_is_marked():
    wide = replace(CONFIG, activation=rq.TensorConfig(rq.QSpec("uint16"), rq.observers.MinMax()))
    plan = annotate(two_convs(), X86, rq.QConfigMapping().set_global(wide))
    row = plan.operator("net.second")
    assert row.is_unsupported
    assert "activation dtype uint16 is asked for, the backend runs uint8" in row.reason
    assert row.advice.endswith("get_backend_config('x86').find_qconfig('conv2d'))")
    assert not any(op.quantized for op in plan.operators)


def test_mapping__any_of_several_dtypes_serves():
    int8 = replace(CONFIG, activation=rq.TensorConfig(rq.QSpec("int8"), rq.observers.MinMax()))
    assert floats(rq.QConfigMapping().set_global(int8), GENERIC) == {}
    assert "net.first" in floats(rq.QConfigMapping().set_global(int8), X86)


# --- an output of its own -----------------------------------------------------------------------


def with_output(spec: rq.QSpec) -> rq.QConfig:
    return replace(CONFIG, output=rq.TensorConfig(spec, rq.observers.Percentile(99.0)))


def test_output__observer_of_the_producer_wins_as_in_fx():
    """The reader's activation configuration has the same spec, and another observer."""
    mapping = DEFAULT.set_module_name("net.first", with_output(CONFIG.activation.spec))
    plan = annotate(two_convs(), X86, mapping)
    assert plan.value_groups["net.first"] == ("net.first",)
    assert plan.group("net.first").observer == rq.observers.Percentile(99.0)
    assert plan.group("x").observer == CONFIG.activation.observer
    assert plan.group("net.second").observer == CONFIG.activation.observer


def test_output__of_another_dtype_is_requantized_for_the_reader():
    mapping = DEFAULT.set_module_name("net.first", with_output(rq.QSpec("int8")))
    plan = annotate(two_convs(), GENERIC, mapping)
    assert plan.value_groups["net.first"] == ("net.first", "net.first:uint8")
    first, second = plan.group("net.first"), plan.group("net.first:uint8")
    assert (first.info.spec.dtype, first.observer) == ("int8", rq.observers.Percentile(99.0))
    assert (second.info.spec.dtype, second.base) == ("uint8", "net.first")
