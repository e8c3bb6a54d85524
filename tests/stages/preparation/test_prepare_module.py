"""prepare_module as a whole: parameters, several inputs and outputs, what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from declined_rules import hear_declined
from float_models import as_main
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relayquant.errors import ModelError
from relayquant.ir.rewrite.function import make_main
from relayquant.stages.preparation import prepare_module
from relayquant.stages.preparation.canonical import PHASES

RNG = np.random.default_rng(5)


@I.ir_module
class WithParams:
    @R.function
    def main(
        x: R.Tensor(("n", 3), "float32"),
        w: R.Tensor((3, 4), "float32"),
        b: R.Tensor((4,), "float32"),
    ):
        R.func_attr({"num_input": 1, "user.note": "kept"})
        with R.dataflow():
            m = R.matmul(x, w)
            y = R.add(m, b)
            R.output(y)
        return y


VALUES = {
    "w": RNG.standard_normal((3, 4)).astype("float32"),
    "b": RNG.standard_normal(4).astype("float32"),
}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_params__bound(as_tensor):
    values = {k: tvm.runtime.tensor(v) for k, v in VALUES.items()} if as_tensor else VALUES
    main = prepare_module(WithParams, values)["main"]
    assert [param.name for param in main.params] == ["x"]
    assert int(main.attrs["num_input"]) == 1
    assert main.attrs["user.note"] == "kept"
    matmul, add = main.body.blocks[0].bindings
    np.testing.assert_array_equal(matmul.value.args[1].value.numpy(), VALUES["w"])
    np.testing.assert_array_equal(add.value.args[1].value.numpy(), VALUES["b"])


def test_params__attached_by_a_frontend():
    mod = tvm.IRModule(WithParams.functions)
    attached = [tvm.runtime.tensor(VALUES[name]) for name in ("w", "b")]
    mod["main"] = mod["main"].with_attr("params", attached)
    main = prepare_module(mod)["main"]
    assert [param.name for param in main.params] == ["x"]
    assert "params" not in main.attrs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, "no value was given for 'b'"),
        ({"weight": VALUES["w"]}, "params has 'weight'.*Known: 'b', 'w', 'x'"),
        ({"b": VALUES["w"]}, r"params\['b'\] is float32 of shape \(3, 4\).*\(4,\)"),
        ({"b": VALUES["b"].astype("float64")}, r"params\['b'\] is float64"),
    ],
)
def test_params__wrong_ones_named(change, message):
    values = {k: v for k, v in {**VALUES, **change}.items() if v is not None}
    with pytest.raises(ModelError, match=message):
        prepare_module(WithParams, values)


def test_several_inputs_and_outputs__diamond():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), i: R.Tensor((2, 3), "int32")):
            with R.dataflow():
                a = R.nn.relu(x)
                left = R.exp(a)
                right = R.tanh(a)
                b = R.add(left, right)
                f = R.astype(i, "float32")
                c = R.multiply(b, f)
                gv = (c, (a, i), c)
                R.output(gv)
            return gv

    prepared = prepare_module(Before)
    names = [binding.var.name for binding in prepared["main"].body.blocks[0].bindings]
    assert names == ["a", "left", "right", "b", "f", "c", "i.output"]
    body = prepared["main"].body.body
    assert isinstance(body, relax.Tuple)
    assert body.fields[0].same_as(body.fields[2])
    assert not isinstance(body.fields[0], relax.DataflowVar)
    x = RNG.standard_normal((2, 3)).astype("float32")
    i = np.arange(6, dtype="int32").reshape(2, 3)
    machine = relax.VirtualMachine(tvm.compile(prepared, "llvm"), tvm.cpu())
    c, (a, same), again = machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(i))
    np.testing.assert_array_equal(a.numpy(), np.maximum(x, 0))
    np.testing.assert_array_equal(same.numpy(), i)
    expected = (np.exp(a.numpy()) + np.tanh(a.numpy())) * i
    np.testing.assert_allclose(c.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(c.numpy(), again.numpy())


def test_float64__stays(check_prepared):
    @as_main
    def before(x: R.Tensor(("n", 3), "float64")):
        a = R.exp(x)
        return R.add(a, R.const(1.0, "float64"))

    check_prepared(before, before)


def test_several_blocks__merged(check_prepared):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.exp(x)
                R.output(a)
            b = R.tanh(a)
            with R.dataflow():
                y = R.nn.relu(b)
                R.output(y)
            return y

    @as_main
    def expected(x: R.Tensor((2, 3), "float32")):
        a = R.exp(x)
        b = R.tanh(a)
        return R.nn.relu(b)

    check_prepared(Before, expected)


def test_match_cast__survives(check_same_numbers):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 3), "float32"), s: R.Tensor((2,), "int64")):
            n = T.int64()
            m = T.int64()
            with R.dataflow():
                shape = R.tensor_to_shape(s)
                sized = R.match_cast(shape, R.Shape([n, m]))  # noqa: F841
                y = R.reshape(x, R.shape([n, m]))
                R.output(y)
            return y

    check_same_numbers(Before, np.ones((4, 3), "float32"), np.array([6, 2], "int64"))


def test_sources__extended():
    weight = relax.const(RNG.standard_normal((3, 4)).astype("float32"))
    sources = {"m": {"node": "dense", "op": "MatMul"}, "y": {"node": "scale", "op": "Mul"}}
    text = json.dumps(sources)

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x], attrs={"relayquant.sources": text}):
        with builder.dataflow():
            m = builder.emit(relax.op.matmul(x, weight), name_hint="m")
            b = builder.emit(relax.op.add(m, relax.const(np.ones(4, "float32"))), name_hint="b")
            two = relax.const(2.0, "float32")
            y = builder.emit(relax.op.multiply(b, two), name_hint="y")
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    main = prepare_module(builder.finalize())["main"]
    extended = json.loads(main.attrs["relayquant.sources"])
    assert extended == {**sources, "m.folded": sources["m"]}
    assert [b.var.name for b in main.body.blocks[0].bindings] == ["m.folded", "y"]


def test_control_flow__refused():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32"), c: R.Tensor((), "bool")):
            if c:  # noqa: SIM108
                y = R.exp(x)
            else:
                y = R.tanh(x)
            return y

    with pytest.raises(ModelError, match="control flow"):
        prepare_module(Before)


def test_call_of_a_function_value__refused():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            @R.function
            def helper(z: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
                return R.exp(z)

            y: R.Tensor((2,), "float32") = helper(x)
            return y

    with pytest.raises(ModelError, match="'helper' of main is control flow"):
        prepare_module(Before)


def test_no_main__refused():
    with pytest.raises(ModelError, match="no Relax function 'main'"):
        prepare_module(tvm.IRModule())


def test_impure_main__refused():
    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(x: R.Tensor((2,), "float32")):
            _ = R.print(x, format="{}")
            return x

    with pytest.raises(ModelError, match="side effects"):
        prepare_module(Before)


def test_rules__documented_and_listed_once():
    for phase in PHASES:
        assert len({rule.name for rule in phase}) == len(phase)
        for rule in phase:
            assert "->" in rule.rewrite.__doc__, rule.name


def test_prepare_module__says_why_a_rule_did_not_fire():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 4, 4), "float32"), w: R.Tensor((3, 2, 1, 1), "float32")):
            with R.dataflow():
                padded = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], "constant", 0.5)
                conv = R.nn.conv2d(padded, w)
                scaled = R.multiply(conv, R.const(2.0, "float32"))
                out = R.nn.relu(scaled)
                R.output(out)
            return out

    with hear_declined() as heard:
        prepare_module(Before)
    trace = {f"{rule} at {name}: {reason}" for rule, name, reason in heard}
    print(*sorted(trace), sep="\n")
    assert "fold_pad at conv: the pads are not 0" in trace
    assert "canonicalize_clamp at out: it is canonical" in trace
    assert (
        "fold_channel_affine at scaled: no per-channel affine operator behind a product with "
        "constant weight"
    ) in trace


def test_prepare_module__params_as_detach_params_gives_them():
    from tvm.relax.frontend import detach_params

    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3, 4), "float32"))
    built = make_main([x, w], lambda _: relax.op.matmul(x, w))
    values = [tvm.runtime.tensor(np.ones((3, 4), "float32"))]
    func = built["main"].with_attrs({"num_input": 1, "params": values})
    mod, params = detach_params(tvm.IRModule({"main": func}))
    assert set(params) == {"main"}
    prepared = prepare_module(mod, params)
    assert [param.name for param in prepared["main"].params] == ["x"]
    with pytest.raises(ModelError, match="holds 2 values, main has 1 parameter"):
        prepare_module(mod, {"main": [*params["main"], *params["main"]]})
