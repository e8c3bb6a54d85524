"""Stacks of matrices, one for each expert: a product by each of them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tiny_llama import AFFINE_ROWS, GROUPS, ROWS, select_calls
from tvm import relax

import relayquant as rq
from relayquant.base.grouping import GroupFormat, quantize_groups

torch = pytest.importorskip("torch", reason="pip install torch")
nn = torch.nn

EXPERTS, FEATURES, UNITS = 3, 48, 20


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def make_product(shape, stack, *, is_swapped=False):
    """x (of a shape) by a stack that is a constant."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            weight = relax.const(stack)
            if is_swapped:
                weight = builder.emit(relax.op.permute_dims(weight, [0, 2, 1]))
            product = builder.emit(relax.op.matmul(x, weight), "experts")
            out = builder.emit_output(product)
        builder.emit_func_output(out)
    return builder.finalize()


def decode_stack(stack, form):
    """What the codes of (E, K, N) stand for, float64; groups run along K."""
    parts = [quantize_groups(np.ascontiguousarray(part.T), form).decode().T for part in stack]
    return np.stack(parts).astype("float64")


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(EXPERTS, 5, FEATURES), (2, EXPERTS, 5, FEATURES), (1, 5, FEATURES), (5, FEATURES)],
    ids=["own", "batch", "shared", "plain"],
)
def test_experts__products_are_those_of_numpy(shape, is_swapped):
    """In float64, with the weights that the codes stand for; compiled and by the reference."""
    stack, x = draw(EXPERTS, FEATURES, UNITS), draw(*shape, seed=1)
    stored = np.ascontiguousarray(stack.transpose(0, 2, 1)) if is_swapped else stack
    mod = make_product(shape, stored, is_swapped=is_swapped)
    q = rq.compress_weights(mod, group_size=16, activation=None)
    expected = x.astype("float64") @ decode_stack(stack, GroupFormat(4, 16))
    found = rq.reference.run(q, x)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    compiled = rq.Executor(rq.compile(q)).run("main", [x])[0]
    np.testing.assert_allclose(compiled, expected, rtol=1e-5, atol=1e-5)
    rows = rq.ledger(q).rows
    assert [row.name for row in rows] == [f"experts_expert{i}" for i in range(EXPERTS)]
    assert all(row.quantized and row.dtype == "int4" for row in rows)


@pytest.mark.parametrize(
    "activation", [GROUPS, ROWS, AFFINE_ROWS], ids=["groups", "rows", "affine"]
)
def test_experts__rows_of_integers(activation):
    """Near the float product of the same codes; shared data is quantized once."""
    stack, x = draw(EXPERTS, FEATURES, UNITS), draw(5, FEATURES, seed=1)
    q = rq.compress_weights(make_product(x.shape, stack), group_size=16, activation=activation)
    exact = x.astype("float64") @ decode_stack(stack, GroupFormat(4, 16))
    found = rq.reference.run(q, x)[0]
    assert np.square(found - exact).mean() < 2e-4 * np.square(exact).mean()
    compiled = rq.Executor(rq.compile(q)).run("main", [x])[0]
    np.testing.assert_allclose(compiled, found, rtol=1e-5, atol=1e-5)
    assert q.script().count("R.qnn.grouped_dense") == EXPERTS
    assert q.script().count("R.qnn.quantize_rows") == (activation is not AFFINE_ROWS)
    assert all(row.is_dynamic for row in rq.ledger(q).rows)


def make_functions():
    """Two functions that take one stack as a parameter."""
    builder = relax.BlockBuilder()
    for name, rows in (("prefill", tvm.tirx.Var("n", "int64")), ("decode", 1)):
        x = relax.Var("x", relax.TensorType([EXPERTS, rows, FEATURES], "float32"))
        weight = relax.Var("weight", relax.TensorType([EXPERTS, FEATURES, UNITS], "float32"))
        with builder.function(name, [x, weight], attrs={"num_input": 1}):
            builder.emit_func_output(builder.emit(relax.op.matmul(x, weight), "experts"))
    return builder.finalize()


def test_experts__functions_share_one_copy_of_each_matrix():
    """Parameters, which are gone in the result, and any number of rows."""
    stack = draw(EXPERTS, FEATURES, UNITS)
    settings = {"bits": 3, "group_size": 16, "activation": None}
    q = rq.compress_weights(make_functions(), {"weight": stack}, **settings)
    assert [len(q[name].params) for name in ("prefill", "decode")] == [1, 1]
    constants = {
        name: [call.args[2] for call in calls]
        for name, calls in select_calls(q, "relax.qnn.grouped_dense").items()
    }
    assert len(constants["prefill"]) == EXPERTS
    for one, other in zip(constants["prefill"], constants["decode"], strict=True):
        assert one.same_as(other)
    names = [row.name for row in rq.ledger(q).rows]
    assert names[:EXPERTS] == [f"decode.experts1_expert{i}" for i in range(EXPERTS)]
    executor, x = rq.Executor(rq.compile(q)), draw(EXPERTS, 7, FEATURES, seed=2)
    expected = x.astype("float64") @ decode_stack(stack, GroupFormat(3, 16))
    for name, part in (("prefill", slice(None)), ("decode", slice(2, 3))):
        found = executor.run(name, [np.ascontiguousarray(x[:, part])])[0]
        np.testing.assert_allclose(found, expected[:, part], rtol=1e-5, atol=1e-5)


def test_experts__each_is_fitted_to_its_own_data():
    """Which tells more of its weights than nothing does."""
    stack, rng = draw(EXPERTS, FEATURES, UNITS), np.random.default_rng(3)
    mixing = rng.normal(size=(EXPERTS, 12, FEATURES))
    data = [(rng.normal(size=(EXPERTS, 64, 12)) @ mixing).astype("float32") for _ in range(4)]
    mod = make_product(data[0].shape, stack)
    plain, fitted = (
        rq.compress_weights(mod, None, each, bits=3, group_size=16) for each in (None, data)
    )
    exact = data[-1].astype("float64") @ stack
    for i in range(EXPERTS):
        errors = [
            np.square(rq.reference.run(q, data[-1])[0][i] - exact[i]).sum() for q in (fitted, plain)
        ]
        assert errors[0] < 0.3 * errors[1]


def test_experts__are_saved_and_go_out_to_onnx(tmp_path):
    """Packed, and as ONNX's own evaluator reads them."""
    stack, x = draw(EXPERTS, 64, 32), draw(EXPERTS, 5, 64, seed=1)
    q = rq.compress_weights(make_product(x.shape, stack))
    expected = rq.reference.run(q, x)[0]
    again, _ = rq.load(rq.save_module(q, tmp_path / "experts.rqm"))
    np.testing.assert_array_equal(rq.reference.run(again, x)[0], expected)
    rq.export_onnx(q, tmp_path / "experts.onnx")
    session = pytest.importorskip("onnx.reference").ReferenceEvaluator(
        str(tmp_path / "experts.onnx")
    )
    np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5, atol=1e-5)


def compress_torch(model, x, is_symbolic, most_error):
    """A module of PyTorch with 8 bits: compiled as in numpy, and near what PyTorch computes."""
    shapes = {"x": {0: torch.export.Dim("n", min=2, max=64)}} if is_symbolic else None
    program = torch.export.export(model.eval(), (torch.from_numpy(x),), dynamic_shapes=shapes)
    q = rq.compress_weights(*rq.load(program), bits=8)
    expected = model(torch.from_numpy(x)).detach().numpy()
    found = rq.Executor(rq.compile(q)).run("main", [x])[0]
    np.testing.assert_allclose(found, rq.reference.run(q, x)[0], rtol=1e-4, atol=1e-5)
    assert np.square(found - expected).mean() < most_error * np.square(expected).mean()
    return q


class Experts(nn.Module):
    """A gated layer of experts, which all see all rows, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, FEATURES, 2 * UNITS) / 7)
        self.down = nn.Parameter(torch.randn(EXPERTS, FEATURES, UNITS) / 5)

    def forward(self, x):
        share = torch.softmax(self.router(x), -1).T[..., None]
        own = x.repeat(EXPERTS, 1).view(EXPERTS, -1, FEATURES)
        gate, up = torch.bmm(own, self.up).chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
        return (torch.bmm(hidden, self.down.transpose(1, 2)) * share).sum(0)


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_experts__of_torch(is_symbolic):
    """As transformers has Mixtral's and Llama 4's: with 8 bits near what PyTorch computes."""
    torch.manual_seed(0)
    q = compress_torch(Experts(), draw(7, FEATURES, seed=4), is_symbolic, 5e-4)
    assert len(rq.ledger(q).quantized) == 1 + 2 * EXPERTS


def make_gather(stack, *, is_swapped=False, indices="int64", is_symbolic=False):
    """Rows x (n, K), each by the matrix of its own expert i (n,)."""
    builder = relax.BlockBuilder()
    rows = tvm.tirx.Var("n", "int64") if is_symbolic else 5
    x = relax.Var("x", relax.TensorType([rows, 1, FEATURES], "float32"))
    i = relax.Var("i", relax.TensorType([rows], indices))
    with builder.function("main", [x, i]):
        with builder.dataflow():
            weight = relax.const(stack)
            if is_swapped:
                weight = builder.emit(relax.op.permute_dims(weight, [0, 2, 1]))
            own = builder.emit(relax.op.take(weight, i, 0), "own")
            out = builder.emit_output(relax.op.matmul(x, own), "out")
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_experts__that_are_gathered(is_swapped, is_symbolic):
    """In float64, by numpy's own gather of what the codes stand for, with the bits of products and
    not those of tables; nothing of the float stack is left.
    """
    stack, x = draw(EXPERTS, FEATURES, UNITS), draw(5, 1, FEATURES, seed=1)
    stored = np.ascontiguousarray(stack.transpose(0, 2, 1)) if is_swapped else stack
    mod = make_gather(stored, is_swapped=is_swapped, is_symbolic=is_symbolic)
    q = rq.compress_weights(mod, group_size=16)
    form, i = GroupFormat(4, 16), np.array([2, 0, 1, 2, -1])
    codes = quantize_groups(stored.reshape(EXPERTS, -1), form).decode().reshape(stored.shape)
    decoded = codes.transpose(0, 2, 1) if is_swapped else codes
    assert np.abs(decoded - stack).max() < 0.2 * np.abs(stack).max()
    expected = x.astype("float64") @ decoded[i]
    found = rq.reference.run(q, [x, i])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    compiled = rq.Executor(rq.compile(q)).run("main", [x, i])[0]
    np.testing.assert_allclose(compiled, expected, rtol=1e-5, atol=1e-5)
    (row,) = rq.ledger(q).rows
    assert (row.quantized, row.dtype, row.pattern) == (True, "int4", "grouped_take")
    assert not select_calls(q, "relax.take")["main"]
    assert f"({EXPERTS}, {FEATURES}, {UNITS})" not in q.script()


def test_experts__that_are_gathered_are_not_fitted():
    """Data passes them, and they are rounded as without it."""
    mod = make_gather(draw(EXPERTS, FEATURES, UNITS))
    batches = [(draw(5, 1, FEATURES, seed=k), np.arange(5) % EXPERTS) for k in range(2)]
    q = rq.compress_weights(mod, None, batches, group_size=16)
    plain = rq.compress_weights(mod, group_size=16)
    np.testing.assert_array_equal(*(rq.reference.run(m, batches[0])[0] for m in (q, plain)))


class Mixture(nn.Module):
    """Each row by the two experts that its router likes best, whose matrices are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * UNITS, FEATURES) / 7)
        self.down = nn.Parameter(torch.randn(EXPERTS, FEATURES, UNITS) / 5)

    def forward(self, x):
        share, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)
        share = (share / share.sum(-1, keepdim=True))[..., None]
        gate, up = (self.up[chosen] @ x[:, None, :, None])[..., 0].chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
        return ((self.down[chosen] @ hidden[..., None])[..., 0] * share).sum(1)


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_experts__mixture_of_torch(is_symbolic):
    """As Mixtral has it, the experts of each token alone: with 8 bits near what PyTorch gives."""
    torch.manual_seed(1)
    q = compress_torch(Mixture(), draw(7, FEATURES, seed=5), is_symbolic, 1e-3)
    rows = rq.ledger(q).rows
    assert [row.pattern for row in rows].count("grouped_take") == 2
    (router,) = (row for row in rows if not row.quantized)
    assert router.reason.startswith("its results choose experts")


def test_experts__of_a_kernel_of_the_module_stay_float():
    """With the reason and a remedy: what it computes is not known."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([EXPERTS, 5, FEATURES], "float32"))
    with builder.function("main", [x]):
        stack = relax.const(draw(EXPERTS, FEATURES, UNITS))
        y = builder.emit_te(tvm.topi.nn.batch_matmul, x, stack, None, None, False, False)
        weight = relax.const(draw(UNITS, 32))
        builder.emit_func_output(builder.emit(relax.op.matmul(y, weight), "plain"))
    rows = {row.op: row for row in rq.ledger(rq.compress_weights(builder.finalize())).rows}
    assert rows["matmul"].quantized
    assert "a kernel of the module's own, 'batch_matmul'" in rows["call_tir"].reason
    assert "relax.op.matmul" in rows["call_tir"].advice


@pytest.mark.parametrize("case", ["not finite", "symbolic experts", "called"])
def test_experts__stay_float(case):
    """With the reason, beside a weight that is compressed."""
    stack = draw(EXPERTS, FEATURES, UNITS)
    if case == "not finite":
        stack[1, 2, 3] = np.inf
    count = tvm.tirx.Var("e", "int64") if case == "symbolic experts" else EXPERTS
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([count, 5, FEATURES], "float32"))
    inner = relax.Var("x", x.ty)
    with builder.function("experts", [inner], private=case == "called"):
        builder.emit_func_output(builder.emit(relax.op.matmul(inner, relax.const(stack)), "y"))
    with builder.function("main", [x]):
        y = x
        if case == "called":
            y = builder.emit(relax.Call(builder.get().get_global_var("experts"), [x]), "called")
        weight = relax.const(draw(y.ty.shape[-1].value, 32))
        builder.emit_func_output(builder.emit(relax.op.matmul(y, weight), "plain"))
    q = rq.compress_weights(builder.finalize())
    rows = {row.name.split(".")[-1]: row for row in rq.ledger(q).rows}
    assert rows["plain"].quantized
    assert not rows["y"].quantized
    assert "its weight has 3 dimensions" in rows["y"].reason
    assert "A stack (experts, K, N) is split" in rows["y"].advice
