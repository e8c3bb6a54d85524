"""Linear operators without a bias get one for calibration to correct."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import tvm
from float_models import Chain, build_model, draw_batches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import draw_configurations, draw_models
from tvm import relax

import relayquant as rq
from relayquant.analysis.sensitivity import add_lines
from relayquant.config import BiasCorrection, FitSettings, WeightRounding
from relayquant.ir import reference
from relayquant.stages.annotation import add_biases, annotate
from relayquant.stages.backends import resolve_backend

op = relax.op

#: operator -> (shape of its input, channels, what emits it)
LINEAR = {
    "conv2d": ((2, 4, 5, 5), 6, lambda e, x: op.nn.conv2d(x, e.constant(6, 4, 3, 3))),
    "conv2d_nhwc": (
        (2, 5, 5, 4),
        6,
        lambda e, x: op.nn.conv2d(
            x, e.constant(3, 3, 4, 6), data_layout="NHWC", kernel_layout="HWIO"
        ),
    ),
    "grouped": ((2, 4, 5, 5), 6, lambda e, x: op.nn.conv2d(x, e.constant(6, 2, 3, 3), groups=2)),
    "depthwise": ((2, 4, 5, 5), 4, lambda e, x: op.nn.conv2d(x, e.constant(4, 1, 3, 3), groups=4)),
    "conv1d": ((2, 4, 9), 6, lambda e, x: op.nn.conv1d(x, e.constant(6, 4, 3))),
    "transposed": ((2, 4, 5, 5), 6, lambda e, x: op.nn.conv2d_transpose(x, e.constant(4, 6, 3, 3))),
    "dense": ((6, 8), 6, lambda e, x: op.matmul(x, e.constant(8, 6))),
    "dense of rank 3": ((2, 3, 8), 6, lambda e, x: op.matmul(x, e.constant(8, 6))),
}

#: what is added behind the operator -> values of it
BIASES = {"none": None, "zeros": np.zeros, "one number": lambda shape: np.float32(0.25)}

COARSE = rq.QSpec("int8", quant_min=-3, quant_max=3)


def make_model(kind: str, bias: str, activation: bool = True):
    shape, channels, linear = LINEAR[kind]

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        y = emit("linear", linear(emit, x))
        if BIASES[bias] is not None:
            is_last = kind.startswith("dense") or kind.endswith("nhwc")
            shape = (channels,) if is_last else (channels, *[1] * (y.ty.ndim - 2))
            values = np.asarray(BIASES[bias](shape), "float32")
            y = emit("sum", op.add(y, relax.const(values)))
        if activation:
            y = emit("act", op.nn.relu(y))
        return emit("out", op.sigmoid(y))

    return build_model(body, shape), channels


def prepare(mod, **options) -> rq.PreparedModel:
    default = rq.get_backend_config("x86").default_qconfig
    config = replace(default, weight=rq.TensorConfig(COARSE, rq.observers.MinMax()))
    return rq.prepare(mod, None, qconfig_mapping=rq.QConfigMapping().set_global(config), **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("kind", LINEAR)
def test_prepare__every_fitted_operator_has_a_bias_per_channel(kind: str, bias: str) -> None:
    mod, channels = make_model(kind, bias, activation=bias == "none")
    prepared = prepare(mod)
    (point,) = prepared.graph.fits
    assert prepared.graph.constants[f"{point.operator}:bias"].value.size == channels
    # The same function, under the names that it had.
    plain = prepare(mod, effort="fast")
    assert [op.name for op in prepared.plan.operators] == [op.name for op in plain.plan.operators]
    for batch in draw_batches(mod, 2):
        want, got = (reference.run(m, batch)[0] for m in (mod, prepared.mod))
        np.testing.assert_array_equal(got, want)
    # Nothing is left to do, also for who begins with the prepared module.
    given = prepared.mod, prepared.plan
    mod, plan = add_biases(*given, prepared.backend, prepared.mapping)
    assert mod is prepared.mod
    assert plan is prepared.plan
    again = prepare(prepared.mod)
    assert set(again.graph.constants) == set(prepared.graph.constants)


@pytest.mark.parametrize("bias", ["none", "zeros"])
def test_calibrate__the_mean_error_of_rounded_weights_is_taken_back(bias: str) -> None:
    mod, _ = make_model("dense", bias, activation=False)
    data = [{"x": np.abs(batch["x"])} for batch in draw_batches(mod, 64)]
    errors = {}
    for correction in BiasCorrection:
        prepared = prepare(mod)
        prepared = rq.calibrate(prepared, data, fit=FitSettings(WeightRounding.NEAREST, correction))
        qmod = rq.convert_to_reference(prepared)
        # Of the sums before the sigmoid, in float64 and not by our own kernels.
        name = prepared.graph.fits[0].operator
        sums = [reference.run_values(m, b)[name] for b in data for m in (prepared.mod, qmod)]
        wide = np.stack(sums).astype("float64").reshape(len(data), 2, -1, 6)
        errors[correction] = np.abs((wide[:, 1] - wide[:, 0]).mean(axis=(0, 1))).max()
    assert errors[BiasCorrection.WEIGHT] < errors[BiasCorrection.NONE] / 5


def test_prepare__fast_adds_nothing_and_the_ledger_says_what_was_not_corrected() -> None:
    mod, _ = make_model("dense", "none")
    prepared = prepare(mod, effort="fast")
    assert not any(key.endswith(":bias") for key in prepared.graph.constants)
    prepared = rq.calibrate(prepared, draw_batches(mod, 2), fit=FitSettings())
    assert "not of 1 operator without a bias" in prepared.choices["weights"]
    prepared = rq.calibrate(prepare(mod), draw_batches(mod, 2))
    assert prepared.choices["weights"].endswith("bias correction weight")


def test_prepare__backend_without_a_row_for_it_keeps_its_integers() -> None:
    mod, _ = make_model("dense", "none", activation=False)
    rows = tuple(
        row for row in rq.get_backend_config("x86").patterns if "bias" not in row.pattern.name
    )
    prepared = rq.prepare(mod, None, backend=replace(rq.get_backend_config("x86"), patterns=rows))
    assert prepared.plan.operator("linear").quantized
    assert "linear:bias" not in prepared.graph.constants


def test_prepare__line_for_a_pattern_still_decides() -> None:
    mod, _ = make_model("dense", "none")
    coarse = replace(
        rq.get_backend_config("x86").default_qconfig,
        weight=rq.TensorConfig(COARSE, rq.observers.MinMax()),
    )
    mapping = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)
    prepared = rq.prepare(mod, None, qconfig_mapping=mapping.set_object_type("dense_relu", coarse))
    assert prepared.plan.group("act:weight").info.spec == COARSE


@pytest.mark.parametrize("kind", ["conv2d", "dense"])
def test_search__mapping_of_a_prepared_module_makes_it_again(kind: str) -> None:
    """Also where it has to name operators by their place."""
    shape, _, linear = LINEAR[kind]

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        y = emit("block", linear(emit, x))
        return emit("out", op.nn.relu(emit("block.sum", op.multiply(y, op.sigmoid(y)))))

    mod = build_model(body, shape)
    prepared = prepare(mod)
    mapping = add_lines(prepared, {"block": None}, prepared.mapping)
    with pytest.warns(UserWarning, match="Nothing is quantized"):
        again = rq.prepare(mod, None, qconfig_mapping=mapping)
    assert not again.plan.operator("block").quantized
    assert mapping == add_lines(again, {"block": None}, prepared.mapping)


def test_prepare__added_product_shares_the_source_of_its_sum() -> None:
    mod, _ = make_model("dense", "none")
    note = '{"linear": {"node": "fc/MatMul", "op": "MatMul"}}'
    mod["main"] = mod["main"].with_attr("relayquant.sources", note)
    prepared = prepare(mod)
    assert {"fc/MatMul"} <= set(prepared.plan.operator("act").sources)
    kept = prepared.mod["main"].attrs["relayquant.sources"]
    assert '"linear_unbiased": {"node": "fc/MatMul"' in str(kept)


def sum_model() -> tvm.IRModule:
    """Two convolutions without a bias, then two sums that a line may name by their place."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        def conv(name: str, value: relax.Expr) -> relax.Expr:
            return emit(name, op.nn.conv2d(value, emit.constant(4, 4, 3, 3), padding=1))

        def pool(name: str, value: relax.Expr) -> relax.Expr:
            return emit(name, op.nn.max_pool2d(value, (3, 3), (1, 1), (1, 1)))

        first = conv("first", x)
        second = emit("second", op.nn.relu(conv("second.sum", first)))
        one = emit("one", op.add(second, pool("pool", first)))
        return conv("out", emit("two", op.add(one, pool("pool2", second))))

    return build_model(body, (2, 4, 5, 5))


@pytest.mark.parametrize("place", [0, 1])
def test_prepare__lines_count_the_operators_of_the_model_alone(place: int) -> None:
    """Added biases are no sums that a line by place could mean."""
    line = rq.QConfigMapping().set_global(rq.get_backend_config("x86").default_qconfig)
    line = line.set_module_name_object_type_order("", "add", place, None)
    rows = {}
    for effort in ("fast", "balanced"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a line that decides nothing would be one
            prepared = rq.prepare(
                sum_model(), None, qconfig_mapping=line, backend="x86", effort=effort
            )
        again = annotate(prepared.mod, prepared.backend, line)
        assert again.to_dict() == prepared.plan.to_dict()
        rows[effort] = [(row.name, row.quantized, row.rule) for row in again.operators]
    assert rows["balanced"] == rows["fast"]
    chosen = [name for name, _, rule in rows["fast"] if "order" in rule]
    assert chosen == [("one", "two")[place]]


def test_prepare__a_sum_of_the_backend_is_no_bias() -> None:
    """Where no row takes a product with its bias, the bias would be an operator more."""
    names = ("add", "conv2d", "conv2d_relu")
    rows = tuple(row for row in rq.get_backend_config("x86").patterns if row.pattern.name in names)
    assert len(rows) == len(names)
    prepared = rq.prepare(
        block_model(), None, backend=replace(rq.get_backend_config("x86"), patterns=rows)
    )
    assert [row.values for row in prepared.plan.operators if row.quantized] == [("linear", "act")]


def block_model() -> tvm.IRModule:
    return make_model("conv2d", "none")[0]


@pytest.mark.parametrize("shared_first", [True, False])
def test_add_biases__reader_of_two_sums_is_planned_anew(shared_first: bool) -> None:
    """conv + (conv + bias) reads two sums once both have a bias; only one of them is its own."""

    def body(emit: Chain, x: relax.Expr) -> relax.Expr:
        shared = emit.conv("shared", x)
        own = emit.conv_bias("own", emit("act", op.nn.relu(shared)))
        total = emit("sum", op.add(*((shared, own) if shared_first else (own, shared))))
        return emit("out", op.nn.relu(total))

    prepared = prepare(build_model(body, (1, 4, 6, 6)))
    rows = {row.name: row for row in prepared.plan.operators}
    assert rows["shared"].values == ("shared_unbiased", "shared")
    assert rows["out"].values == ("own.conv", "own", "sum", "out")
    again = annotate(prepared.mod, prepared.backend, prepared.mapping)
    assert prepared.plan.to_dict() == again.to_dict()


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw_models(), st.data())
def test_add_biases__plan_is_that_of_the_changed_module(mod: tvm.IRModule, data) -> None:
    """The refined plan says what a new one of the module with biases would say."""
    backend, mapping = data.draw(draw_configurations(mod))
    mapping = mapping or rq.QConfigMapping().set_global(
        resolve_backend(backend).default_qconfig
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = rq.prepare(mod, None, qconfig_mapping=mapping, backend=backend, effort="fast")
    changed, plan = add_biases(plain.mod, plain.plan, plain.backend, mapping)
    assert plan.to_dict() == annotate(changed, plain.backend, mapping).to_dict()
