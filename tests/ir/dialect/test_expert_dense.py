"""Products whose weights each row chooses: loop nests and numpy against einsum, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from qnn_testing import make_module, run_module, type_of
from tvm import relax

from relayquant.base.grouping import GroupFormat, quantize_groups
from relayquant.errors import QnnError
from relayquant.ir.dialect import qnn
from relayquant.ir.reference import qnn as numpy_qnn
from relayquant.ir.reference import run

EXPERTS, UNITS, FEATURES = 5, 6, 20


def draw(rng, rows):
    """Data with these leading sizes, choices of any sign, and the weights of all experts."""
    data = rng.normal(size=(*rows, FEATURES)).astype("float32")
    chosen = rng.integers(-EXPERTS, 2 * EXPERTS, (*rows[:-1], 3)).astype("int32")
    return data, chosen, rng.normal(size=(EXPERTS * UNITS, FEATURES)).astype("float32")


def multiply(data, chosen, weight):
    """The product by einsum, in float64."""
    each = weight.reshape(EXPERTS, UNITS, FEATURES)[chosen % EXPERTS].astype("float64")
    rows = np.broadcast_to(data, (*chosen.shape, FEATURES)).astype("float64")
    return np.einsum("...k,...nk->...n", rows, each)


@pytest.mark.parametrize("rows", [(4, 3), (4, 1), (2, 2, 3), (2, 0, 1)], ids=str)
def test_expert_dense__is_the_product_by_the_chosen_weight(rows):
    data, chosen, weight = draw(np.random.default_rng(0), rows)
    expected = multiply(data, chosen, weight)
    found = numpy_qnn.expert_dense(data, chosen, weight, experts=EXPERTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    module = make_module(
        lambda *args: qnn.expert_dense(*args, EXPERTS), [type_of(a) for a in (data, chosen, weight)]
    )
    compiled = run_module(module, [data, chosen, weight])
    np.testing.assert_allclose(compiled, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(4, 3), (4, 1)], ids=["rows", "one row"])
@pytest.mark.parametrize("form", [GroupFormat(4, 8), GroupFormat(3, 20, False)], ids=["4", "3"])
@pytest.mark.parametrize("kind", ["float32", "int8", "int8 with scales of groups"])
def test_grouped_expert_dense__is_the_product_by_the_chosen_decoded_weight(rows, form, kind):
    data, chosen, weight = draw(np.random.default_rng(0), rows)
    grouped = quantize_groups(weight, form)
    attrs = (form.bits, grouped.group_size, FEATURES, EXPERTS)
    scale = np.array(1, "float32")
    if kind != "float32":
        scale = np.abs(data[..., : 1 if kind == "int8" else grouped.scale.shape[1]]) + 1
        data = (40 * data).astype("int8")
    arrays = [data, scale, chosen, grouped.codes, grouped.scale, grouped.zero_point]
    module = make_module(
        lambda *args: qnn.grouped_expert_dense(*args, *attrs), [type_of(a) for a in arrays]
    )
    size = FEATURES if scale.shape[-1:] in ((), (1,)) else grouped.group_size
    real = data * np.repeat(np.atleast_1d(scale), size, -1)[..., :FEATURES]
    expected = multiply(real, chosen, grouped.decode())
    np.testing.assert_allclose(run(module, arrays)[0], expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(run_module(module, arrays), expected, rtol=1e-4, atol=1e-3)


def tensor(shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(shape, dtype))


@pytest.mark.parametrize(
    ("data", "chosen", "weight", "experts", "message"),
    [
        (((2, 3, 4), "int8"), ((2, 3),), (10, 4), 5, "'data' has dtype int8"),
        (((2, 3, 4),), ((2, 3), "float32"), (10, 4), 5, "'chosen' has dtype float32"),
        (((2, 3, 4),), ((2, 4),), (10, 4), 5, r"'chosen' has shape \(2, 4\).*\(2, 3\)"),
        (((2, 3, 4),), ((6,),), (10, 4), 5, "'chosen' has rank 1; allowed: 2, one choice"),
        (((2, 3, 4),), ((2, 3),), (10, 5), 5, r"'data' has shape \(2, 3, 4\).*\(..., 5\)"),
        (
            ((2, 3, 4),),
            ((2, 3),),
            (11, 4),
            5,
            "'weight' has 11 rows; allowed: a multiple of the number of experts, 5",
        ),
        (((2, 3, 4),), ((2, 3),), (10, 4), 0, "experts=0; allowed: an integer from 1 on"),
        (((4,),), ((),), (10, 4), 5, "'data' has rank 1"),
    ],
    ids=str,
)
def test_expert_dense__refused(data, chosen, weight, experts, message):
    choices = tensor(*chosen) if len(chosen) > 1 else tensor(*chosen, "int32")
    call = qnn.expert_dense(tensor(*data), choices, tensor(weight), experts)
    with pytest.raises(QnnError, match=message):
        relax.BlockBuilder().normalize(call)


def test_grouped_expert_dense__refused():
    weight = tensor((10, 2), "uint8"), tensor((10, 1)), np.array(8, "uint8")
    rows = tensor((2, 3, 4), "int8"), tensor((2, 3, 1))
    for chosen, experts, message in (
        (
            tensor((2, 3), "int32"),
            3,
            "'weight' has 10 rows; allowed: a multiple of the number of experts, 3",
        ),
        (tensor((2, 2), "int32"), 5, "'chosen' has shape"),
    ):
        call = qnn.grouped_expert_dense(*rows, chosen, *weight, 4, 4, 4, experts)
        with pytest.raises(QnnError, match=message):
            relax.BlockBuilder().normalize(call)
