"""Inputs are looked at once, before anything runs; kernels behind that check nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant.codegen.checks.inputs import check_inputs
from relayquant.codegen.kernels.isa.target import resolve_target
from relayquant.codegen.library.host_functions import IS_INNER
from relayquant.ir.rewrite.function import make_main

SHAPE = (8, 16)


def make_module(compute, *types):
    """main(x0, x1, ...) of one dataflow block."""
    params = [relax.Var(f"x{i}", ty) for i, ty in enumerate(types)]
    return make_main(params, lambda _: compute(*params))


def tensor(*shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


def place(array, offset):
    """A tensor with the values of an array, `offset` bytes behind a multiple of 64."""
    raw = np.empty(array.nbytes + 128, "uint8")
    start = -raw.ctypes.data % 64 + offset
    placed = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return give(placed)


def give(array):
    """An array as other libraries hand theirs over: where it lies, as it lies."""
    return tvm_ffi.from_dlpack(array, require_alignment=0, require_contiguous=False)


def run(mod, *args):
    return relax.VirtualMachine(rq.compile(mod), tvm.cpu())["main"](*args).numpy()


def values(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def test_input__that_is_aligned_is_used_where_it_lies():
    x = values(*SHAPE)
    mod = make_module(lambda x: relax.op.add(x, x), tensor(*SHAPE))
    np.testing.assert_array_equal(run(mod, place(x, 0)), x + x)
    np.testing.assert_array_equal(run(mod, place(x, 64)), x + x)


@pytest.mark.parametrize("offset", [4, 16, 32])
def test_input__whose_data_begin_elsewhere(offset):
    """Code for aligned vectors would end the process, as here that of a product."""
    mod = make_module(relax.op.matmul, tensor(32, 64), tensor(64, 128))
    x, y = values(32, 64), values(64, 128)
    np.testing.assert_allclose(run(mod, place(x, 0), place(y, 0)), x @ y, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"input 'x1' of 'main': .* multiple of 64 bytes.* copy"):
        run(mod, place(x, 0), place(y, offset))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: relax.op.add(x, x),
        lambda x: relax.op.reshape(x, (128,)),
        lambda x: relax.op.permute_dims(x),
        lambda x: relax.op.nn.softmax(relax.op.reshape(x, (16, 8))),
    ],
)
def test_input__that_is_not_compact(compute):
    mod = make_module(compute, tensor(*SHAPE))
    with pytest.raises(ValueError, match=r"Mismatched x0\.strides .*\n.*main_inputs.*\n.*compact"):
        run(mod, give(values(16, 8).T))


def test_input__of_a_size_known_at_run_time():
    n = tvm.tirx.Var("n", "int64")
    mod = make_module(lambda x, y: relax.op.add(x, y), tensor(n, 16), tensor(n, 16))
    x = values(3, 16)
    np.testing.assert_array_equal(run(mod, place(x, 0), place(x, 0)), x + x)
    with pytest.raises(ValueError, match="input 'x0' of 'main'"):
        run(mod, place(x, 4), place(x, 0))
    empty = tvm.runtime.tensor(x[:0])
    assert run(mod, empty, empty).shape == (0, 16)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "float16", "float64", "int64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5)])
def test_input__of_any_type_and_number_of_dimensions(dtype, shape):
    x = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    mod = make_module(
        lambda x: relax.op.where(relax.op.equal(x, x), x, x), tensor(*shape, dtype=dtype)
    )
    np.testing.assert_array_equal(run(mod, place(np.asarray(x), 0)), x)
    with pytest.raises(ValueError, match="input 'x0' of 'main'"):
        run(mod, place(np.asarray(x), 8))


def test_input__of_unknown_sizes():
    mod = make_module(
        lambda x: relax.op.nn.relu(relax.op.reshape(x, (8, 16))),
        relax.TensorType(None, "float32", ndim=2),
    )
    x = values(16, 8)
    np.testing.assert_array_equal(run(mod, place(x, 0)), np.maximum(x.reshape(8, 16), 0))
    with pytest.raises(ValueError, match="input 'x0' of 'main'"):
        run(mod, place(x, 4))
    with pytest.raises(ValueError, match="compact"):
        run(mod, give(values(8, 16).T))


def test_library__checks_its_inputs(tmp_path):
    mod = make_module(lambda x: relax.op.add(x, x), tensor(*SHAPE))
    rq.compile(mod).export_library(str(tmp_path / "lib.so"))
    main = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "lib.so")), tvm.cpu())
    x = values(*SHAPE)
    np.testing.assert_array_equal(main["main"](place(x, 0)).numpy(), x + x)
    with pytest.raises(ValueError, match="input 'x0' of 'main'"):
        main["main"](place(x, 4))


@I.ir_module
class Mixed:
    @T.prim_func(private=True, s_tir=True)
    def inner(x: T.Buffer((8, 16), "float32"), y: T.Buffer((8, 16), "float32")):
        for i, j in T.grid(8, 16):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = x[vi, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def strict(x: T.Buffer((8, 16), "float32"), y: T.Buffer((8, 16), "float32")):
        for i, j in T.grid(8, 16):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                assert x[vi, vj] < T.float32(9), "the first is 9 or more"
                y[vi, vj] = x[vi, vj] + T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def outer(x: T.Buffer((8, 16), "float32"), y: T.Buffer((8, 16), "float32")):
        for i, j in T.grid(8, 16):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = x[vi, vj] + T.float32(4)

    @T.prim_func(s_tir=True)
    def public(x: T.Buffer((8, 16), "float32"), y: T.Buffer((8, 16), "float32")):
        for i, j in T.grid(8, 16):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = x[vi, vj] + T.float32(8)

    @R.function(pure=False)
    def main(x: R.Tensor((8, 16), "float32")) -> R.Tensor((8, 16), "float32"):
        cls = Mixed
        a = R.call_tir(cls.inner, (x,), out_ty=R.Tensor((8, 16), "float32"))
        b = R.call_tir(cls.strict, (a,), out_ty=R.Tensor((8, 16), "float32"))
        c = R.call_tir(cls.public, (b,), out_ty=R.Tensor((8, 16), "float32"))
        d = R.call_packed("tests.same", c, ty_args=[R.Tensor((8, 16), "float32")])
        return R.call_tir(cls.outer, (d,), out_ty=R.Tensor((8, 16), "float32"))


def test_check_inputs__inner_kernels_are_those_whose_arguments_are_known():
    checked = check_inputs(Mixed, resolve_target(None))
    names = {gv.name_hint: func for gv, func in checked.functions_items()}
    assert set(names) == {"inner", "strict", "outer", "public", "main", "main_inputs"}
    assert {name for name, func in names.items() if IS_INNER in (func.attrs or {})} == {"inner"}
    first = names["main"].body.blocks[0].bindings[0].value
    assert first.op.name_hint == "main_inputs"
    assert [arg.name for arg in first.args] == ["x"]


@I.ir_module
class Rows:
    @T.prim_func(private=True, s_tir=True)
    def add(px: T.handle, pz: T.handle, py: T.handle):
        n = T.int64()
        x = T.match_buffer(px, (n, 16), "float32")
        z = T.match_buffer(pz, (n, 16), "float32")
        y = T.match_buffer(py, (n, 16), "float32")
        for i, j in T.grid(n, 16):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = x[vi, vj] + z[vi, vj]

    @R.function
    def main(x: R.Tensor(("a", 16), "float32"), z: R.Tensor(("b", 16), "float32")) -> R.Tensor(
        ("a", 16), "float32"
    ):
        a = T.int64()
        with R.dataflow():
            y = R.call_tir(Rows.add, (x, z), out_ty=R.Tensor((a, 16), "float32"))
            R.output(y)
        return y


def test_compile__rows_that_only_the_kernel_compares():
    """Types leave open that both have as many."""
    x = values(4, 16)
    np.testing.assert_array_equal(run(Rows, place(x, 0), place(x, 0)), x + x)
    with pytest.raises(ValueError, match=r"Mismatched z\.shape\[0\]"):
        run(Rows, place(x, 0), place(x[:3], 0))


@pytest.mark.parametrize("rows", [8, None])
def test_check_inputs__kernels_of_operators_are_inner(rows):
    """Of sizes known when they run too, those in expressions among them."""
    n = tvm.tirx.Var("n", "int64") if rows is None else rows
    mod = make_module(
        lambda x: relax.op.nn.softmax(relax.op.nn.relu(relax.op.concat([x, x], 0))), tensor(n, 16)
    )
    lowered = rq.get_pipeline()(mod)
    kernels = {
        gv.name_hint: IS_INNER in (func.attrs or {})
        for gv, func in lowered.functions_items()
        if isinstance(func, tvm.tirx.PrimFunc) and not gv.name_hint.startswith("relayquant_")
    }
    assert kernels.pop("main_inputs") is False
    kernels.pop("shape_func", None)  # of the virtual machine, for sizes
    assert kernels
    assert all(kernels.values()), kernels


def test_check_inputs__a_private_function_has_none():
    private = Mixed["main"].without_attr("global_symbol")
    mod = tvm.IRModule({**Mixed.functions, Mixed.get_global_var("main"): private})
    checked = check_inputs(mod, resolve_target(None))
    assert not any(IS_INNER in (func.attrs or {}) for func in checked.functions.values())
    assert "main_inputs" not in {gv.name_hint for gv in checked.functions}


def test_compile__asserts_of_kernels_stay():
    @tvm.register_global_func("tests.same", override=True)
    def same(x):
        return x

    x = np.zeros(SHAPE, "float32")
    np.testing.assert_array_equal(run(Mixed, place(x, 0)), x + 15)
    x[0, 0] = 8
    with pytest.raises(RuntimeError, match="the first is 9 or more"):
        run(Mixed, place(x, 0))


def test_compile__a_result_of_other_code_is_checked():
    @tvm.register_global_func("tests.same", override=True)
    def transposed(x):
        return give(np.ascontiguousarray(x.numpy().T).T)

    with pytest.raises(ValueError, match=r"strides .*\n.*outer"):
        run(Mixed, place(np.zeros(SHAPE, "float32"), 0))


@pytest.mark.slow
@pytest.mark.optimized
def test_compile__kernels_of_a_network_check_nothing(convolutions):
    """Only what looks at the inputs can fail."""
    source = rq.compile(convolutions).mod.imports[0].inspect_source("ll")
    failing, name = set(), ""
    for line in source.splitlines():
        if line.startswith("define "):
            name = line.split("@")[1].split("(")[0]
        elif "call " in line and "__tvm_set_raised" in line:
            failing.add(name)
    assert failing == {"__tvm_ffi_main_inputs", "main_inputs_compute_"}
    assert "__tvm_ffi_qnn_conv2d" in source


@pytest.fixture
def convolutions():
    """A quantized network of two convolutions."""
    rng = np.random.default_rng(0)
    weights = [relax.const(rng.standard_normal((16, 16, 3, 3)).astype("float32")) for _ in "12"]

    def compute(x):
        for weight in weights:
            x = relax.op.nn.relu(relax.op.nn.conv2d(x, weight, padding=1))
        return x

    mod = make_module(compute, tensor(1, 16, 8, 8))
    return rq.quantize(mod, None, [{"x0": values(1, 16, 8, 8)}], effort="fast")


@pytest.mark.optimized
@pytest.mark.parametrize(
    "triple", ["aarch64-linux-gnu", "armv7a-linux-gnueabihf", "i686-linux-gnu"]
)
def test_compile__checks_for_other_machines(triple):
    mod = make_module(lambda x: relax.op.add(x, x), tensor(*SHAPE))
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    source = rq.compile(mod, target).mod.imports[0].inspect_source("ll")
    assert "main_inputs" in source
    assert "not begin at a multiple of 64 bytes" in source
