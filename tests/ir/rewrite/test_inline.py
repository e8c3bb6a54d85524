"""Calls of other functions of a module: their bodies become part of main, with names of their own.

What main computes is checked against TVM's own compilation of the module that calls.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.ir.rewrite.inline import inline_functions

RNG = np.random.default_rng(3)
WEIGHTS = {name: (RNG.standard_normal((16, 16)) * 0.3).astype("float32") for name in ("w1", "w2")}


@I.ir_module
class Nested:
    """main calls a block of symbolic batch twice, a block another function, which gives a tuple."""

    @R.function
    def both(a: R.Tensor(("n", 16), "float32")):
        with R.dataflow():
            positive = R.nn.relu(a)
            rows = R.reshape(positive, R.shape([n, 4, 4]))
            R.output(positive, rows)
        return (positive, rows)

    @R.function
    def block(x: R.Tensor(("n", 16), "float32"), w: R.Tensor((16, 16), "float32")):
        cls = Nested
        with R.dataflow():
            product = R.matmul(x, w)
            pair = cls.both(product)
            rows = pair[1]
            flat = R.reshape(rows, R.shape([n, 16]))
            total = R.add(flat, pair[0])
            R.output(total)
        return total

    @R.function
    def other(x: R.Tensor((2, 16), "float32")):
        return x

    @R.function
    def main(
        x: R.Tensor((4, 16), "float32"),
        w1: R.Tensor((16, 16), "float32"),
        w2: R.Tensor((16, 16), "float32"),
    ):
        cls = Nested
        with R.dataflow():
            first = cls.block(x, w1)
            second = cls.block(first, w2)
            y = R.add(first, second)
            R.output(y)
        return y


def hide_functions(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with all functions but main private."""
    functions = {
        gvar: func if gvar.name_hint == "main" else func.without_attr("global_symbol")
        for gvar, func in mod.functions_items()
    }
    return tvm.IRModule(functions)


def run_tvm(mod: tvm.IRModule, *inputs: np.ndarray) -> np.ndarray:
    """Result of main as TVM alone compiles it."""
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("mod", [Nested, hide_functions(Nested)], ids=["public", "private"])
def test_inline__prepared_module_computes_what_the_calls_compute(mod):
    before = tvm.ir.save_json(mod)
    x = RNG.standard_normal((4, 16)).astype("float32")
    canonical = rq.prepare(mod, WEIGHTS).mod
    assert [gvar.name_hint for gvar in canonical.get_global_vars()] == ["main"]
    want = run_tvm(mod, x, *WEIGHTS.values())
    np.testing.assert_allclose(run_tvm(canonical, x), want, rtol=1e-5, atol=1e-6)
    assert tvm.ir.save_json(mod) == before


def test_inline__each_call_names_its_values():
    main = inline_functions(Nested)
    names = [binding.var.name for block in main.body.blocks for binding in block.bindings]
    for call in ("first", "second"):
        assert {f"{call}.product", f"{call}.pair.positive", f"{call}.flat"} <= set(names)
    assert len(set(names)) == len(names)


def test_inline__a_call_is_selected_by_its_name():
    data = [RNG.standard_normal((4, 16)).astype("float32") for _ in range(8)]
    mapping = rq.QConfigMapping().set_global(rq.get_backend_config("generic").default_qconfig)
    mapping = mapping.set_module_name("first", None)
    qmod = rq.quantize(Nested, WEIGHTS, data, backend="generic", qconfig_mapping=mapping)
    rows = rq.ledger(qmod).to_dict()["operators"]
    products = {
        row["name"].split(".")[0]: row["quantized"] for row in rows if row["op"] == "matmul"
    }
    assert products == {"first": False, "second": True}


@I.ir_module
class CallsItself:
    @R.function
    def step(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = CallsItself
        less = R.negative(x)
        again: R.Tensor((2,), "float32") = cls.step(less)
        return again

    @R.function
    def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = CallsItself
        y: R.Tensor((2,), "float32") = cls.step(x)
        return y


@I.ir_module
class CallsEachOther:
    @R.function
    def step(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = CallsEachOther
        there: R.Tensor((2,), "float32") = cls.back(x)
        return there

    @R.function
    def back(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = CallsEachOther
        again: R.Tensor((2,), "float32") = cls.step(x)
        return again

    @R.function
    def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = CallsEachOther
        y: R.Tensor((2,), "float32") = cls.step(x)
        return y


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (CallsItself, r"calls step within step.*\(step -> step\).*Unroll it"),
        (CallsEachOther, r"calls step within step.*\(step -> back -> step\).*Unroll it"),
    ],
    ids=["direct", "through another"],
)
def test_inline__recursion_is_refused(mod, message):
    with pytest.raises(ModelError, match=message):
        rq.prepare(mod)


def test_inline__unknown_dimension_is_refused():
    @I.ir_module
    class Before:
        @R.function
        def block(x: R.Tensor(("n", 2), "float32")) -> R.Tensor(("n", 2), "float32"):
            y = R.exp(x)
            return y  # noqa: RET504

        @R.function
        def main(x: R.Tensor("float32", ndim=2)) -> R.Tensor("float32", ndim=2):
            cls = Before
            y: R.Tensor("float32", ndim=2) = cls.block(x)
            return y

    with pytest.raises(
        ModelError, match=r"'y' of main calls block.*dimension 'n' of 'x'.*match_cas"
    ):
        rq.prepare(Before)
