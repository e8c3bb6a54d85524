"""Finite data that a finite weight makes infinite: calibration names the operator and the constant,
not the data.
"""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from float_models import draw_batches, residual_model
from tvm import relax

import relayquant as rq
from relayquant.config.observers.base import NotFiniteError
from relayquant.stages.calibration.overflow import find_cause

pytestmark = pytest.mark.filterwarnings("ignore:The constant:UserWarning")


def make_chain(*layers):
    """x (2, 8) through matmul with arrays, `relax.op` functions of one value, or functions of the
    builder and the value; named v0, v1, ...
    """
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for number, layer in enumerate(layers):
                if isinstance(layer, np.ndarray):
                    call = relax.op.matmul(value, relax.const(layer))
                else:
                    call = layer(value)
                value = builder.emit(call, f"v{number}")
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    return builder.finalize()


def draw(seed: int, shape=(8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def make_weight(value: float) -> np.ndarray:
    weight = draw(3)
    weight[2, 5] = value
    return weight


DATA = [{"x": draw(seed, (2, 8))} for seed in range(4)]


@pytest.mark.parametrize("effort", [rq.config.Effort.BALANCED, rq.config.Effort.BEST])
@pytest.mark.parametrize("value", [1e30, 3e38])
def test_quantize__names_the_operator_and_its_largest_constant(value, effort):
    """Whatever meets the numbers first: an observer, or the fit of a later weight."""
    layers = draw(1), relax.op.nn.relu, make_weight(value), relax.op.nn.relu, draw(4)
    with pytest.raises(rq.DataError) as caught:
        rq.quantize(make_chain(*layers, relax.op.nn.relu, draw(5)), None, DATA, effort=effort)
    message = str(caught.value)
    assert " of operator 'v3' (matmul) gives infinity, NaN or numbers beyond 1.8e+19 in" in message
    # Equalization may have scaled it.
    assert re.search(r"Its largest constant: up to \S+e\+\d\d, with 1 of 64 elements", message)
    assert message.endswith("[RQ302]")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("size", [1e19, 1e25, 1e32])
def test_quantize__data_too_large_gives_no_other_warning(size):
    """The user sees one error about the data, and none of numpy's warnings about overflow."""
    mod = residual_model()
    data = [{"x": batch["x"] * np.float32(size)} for batch in draw_batches(mod, 6)]
    with pytest.raises(rq.DataError, match=r"squares pass what float32 holds.*largest value of"):
        rq.quantize(mod, None, data)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("size", [1e19, 1e25, 1e32])
def test_quantize__a_single_product_of_large_data(size):
    """Nothing is fitted: the integer module is as near the float model as for small data."""
    mod = make_chain(draw(1))
    qmods = [
        rq.quantize(
            mod, None, [{"x": row["x"] * np.float32(factor)} for row in DATA], effort="fast"
        )
        for factor in (1.0, size)
    ]
    x = DATA[0]["x"]
    small, large = (
        rq.reference.run(qmod, [x * np.float32(factor)])[0] / factor
        for qmod, factor in zip(qmods, (1.0, size), strict=True)
    )
    np.testing.assert_allclose(small, x @ draw(1), atol=0.1)
    np.testing.assert_allclose(large, x @ draw(1), atol=0.1)


def test_calibrate__operator_without_constants():
    """exp of large numbers: here the data is to blame."""
    layers = draw(1) * 100, relax.op.exp, draw(4)
    with pytest.raises(rq.DataError, match=r"'v1' \(exp\) .* It reads no constant: check the prep"):
        rq.quantize(make_chain(*layers), None, DATA)


def make_logarithm() -> tuple:
    """A product of sums that cancel, whose logarithm is finite in float: rounding makes some of
    them 0 or less. The data has numbers of very different size.
    """
    sizes = np.geomspace(1e-3, 1e3, 8).astype("float32")
    data = [{"x": np.abs(draw(seed, (2, 8))) * sizes[seed] + 1e-4} for seed in range(8)]
    weight = np.abs(draw(1)) + 0.1 - 0.05 * np.eye(8, dtype="float32")
    return make_chain(weight, relax.op.log, draw(4)), data


def test_quantize__a_logarithm_of_rounded_values():
    """ "best" observes behind rounded values: a logarithm of 0 is no fault of the float model."""
    mod, data = make_logarithm()
    qmod = rq.quantize(mod, None, data, effort="best", guard="off")
    assert rq.ledger(qmod).choices["order"] == "parallel: rounding made a value NaN or infinite"
    assert "order" not in rq.ledger(rq.quantize(mod, None, data, guard="off")).choices


def test_calibrate__an_order_that_was_asked_for_names_the_value():
    mod, data = make_logarithm()
    order = rq.config.Order.TOPOLOGICAL
    with pytest.raises(rq.DataError, match="'v1' holds NaN or infinity once the values before it"):
        rq.calibrate(rq.prepare(mod), data, order=order)


def find(mod, value: str) -> str:
    error = NotFiniteError("as it was", value)
    return str(find_cause(error, rq.prepare(mod), DATA))


def test_find_cause__none_if_the_float_model_is_finite():
    error = NotFiniteError("as it was", "v0")
    assert find_cause(error, rq.prepare(make_chain(draw(1))), DATA) is None


def test_find_cause__through_operators_that_pass_it_on():
    mod = make_chain(make_weight(1e38), relax.op.nn.relu, relax.op.negative, draw(4))
    for value in ("v0", "v1", "v2", "v3"):
        found = f"Value '{value}' cannot be calibrated: 'v0_unbiased' of operator 'v1' (matmul)"
        assert found in find(mod, value)


def test_find_cause__later_batch():
    mod = make_chain(np.eye(8, dtype="float32"), lambda x: relax.op.exp(x))
    data = [{"x": np.full((2, 8), value, "float32")} for value in (1, 2, 90)]
    found = str(find_cause(NotFiniteError("as it was", "v1"), rq.prepare(mod), data))
    assert "'v1' (exp) gives infinity, NaN or numbers beyond 1.8e+19 in batch 2" in found
    assert "finite and within 90" in found


def test_find_cause__masks_elsewhere_are_not_named():
    """Only what the value is computed of is looked at, and softmax makes infinities finite."""
    mask = relax.const(np.array([0, 0, 0, 0, 0, 0, -np.inf, -np.inf], "float32"))
    layers = lambda x: relax.op.add(x, mask), relax.op.nn.softmax, make_weight(3e38)
    assert "'v2' (matmul)" in find(make_chain(*layers), "v2")


def test_find_cause__nothing_to_name():
    """A value of the calibration graph alone."""
    assert find(make_chain(draw(1)), "unknown").startswith("as it was")


def test_find_cause__an_input():
    data = [{"x": np.full((2, 8), 1e30, "float32")}]
    error = NotFiniteError("as it was", "x")
    assert find_cause(error, rq.prepare(make_chain(draw(1))), data) is error


def test_find_cause__data_beyond_squares_is_the_data():
    mod = make_chain(draw(1))
    data = [{"x": np.full((2, 8), 1e30, "float32")}]
    assert str(find_cause(NotFiniteError("as it was", "v0"), rq.prepare(mod), data)).startswith(
        "as it was"
    )


def test_not_finite_error__survives_another_process():
    copied = pickle.loads(pickle.dumps(NotFiniteError("what", "v1")))
    assert (copied.value, str(copied)) == ("v1", str(NotFiniteError("what", "v1")))
