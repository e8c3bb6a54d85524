"""Rows of Relax operators: each attribute of each one, away from its default, in both libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from attribute_calls import PAIRS, draw_base, draw_calls
from tvm import relax

from relayquant.errors import ModelError
from relayquant.flow.testing.draw import ModelBuilder, draw_inputs
from relayquant.ir.reference import interpreter, run, single_call
from relayquant.ir.reference.relax import ROWS
from relayquant.ir.reference.relax.numpy_library import Numpy
from relayquant.ir.rewrite.attributes import read_attributes

#: Operators with attributes that training has too.
SHARED = sorted(row.name for row in ROWS if row.attributes and not row.is_reference_only)
#: Operator -> what is varied in calls that have no meaning in the rows: the reference compiles
#: them, and models with them do not train.
REFUSED = {
    "nn.attention": {"causal_mask=TopLeft", "causal_mask=BottomRight", "window_size=2"},
    "nn.attention_bias": {"causal_mask", "window_size"},
    "nn.batch_norm": {"training=True"},
}
AFFINE = {"center=False", "scale=False"}
LAYOUTS = {"out_layout", "data_layout kernel_layout"}
#: Operator -> what is varied in calls that TVM's own code is wrong for, or has none.
NOT_IN_TVM = {
    "nn.adaptive_avg_pool1d": LAYOUTS,
    "nn.adaptive_avg_pool2d": LAYOUTS,
    "nn.attention": {"window_size=2"},
    "nn.attention_bias": {"window_size"},
    "nn.avg_pool1d": LAYOUTS,
    "nn.avg_pool3d": LAYOUTS,
    "nn.conv1d_transpose": LAYOUTS,
    "nn.conv3d": {"out_layout", "out_dtype=float16"},  # rounds each sum
    "nn.conv3d_transpose": {*LAYOUTS, "out_dtype=float16"},
    "nn.group_norm": AFFINE,  # computes with both
    "nn.instance_norm": {*AFFINE, "channel_axis=-2", "axes=[-1, -2]"},
    "nn.layer_norm": AFFINE,
    "nn.max_pool3d": LAYOUTS,
    "nn.pixel_shuffle": {"upscale_factor=3"},
    "nn.rms_norm": {"axes=[0]", "axes=[-2]"},
}


def list_attributes(name: str) -> set[str]:
    """The attributes that TVM has for an operator."""
    key = tvm.ir.Op.get(f"relax.{name}").attrs_type_key
    if key:
        info = tvm_ffi.core._lookup_or_register_type_info_from_type_key(key)
        return {field.name for field in info.fields}
    return set(read_attributes(draw_base(f"relax.{name}", ModelBuilder(0))))


def make_module(b: ModelBuilder, *calls: relax.Expr) -> tvm.IRModule:
    """main(inputs) -> the values of calls on what `b` has drawn."""
    values = [relax.DataflowVar(f"v{i}", call.ty) for i, call in enumerate(calls)]
    out = relax.Var("out", relax.TupleType([call.ty for call in calls]))
    bound = [relax.VarBinding(var, call) for var, call in zip(values, calls, strict=True)]
    block = relax.DataflowBlock([*b.bindings, *bound, relax.VarBinding(out, relax.Tuple(values))])
    main = relax.Function(b.inputs, relax.SeqExpr([block], out), out.ty)
    mod = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
    return relax.transform.DeadCodeElimination()(mod)


def draw(name: str) -> tuple[ModelBuilder, dict[str, relax.Expr]]:
    """What is varied -> the call."""
    b = ModelBuilder(0)
    drawn = {what: b.builder.normalize(call) for what, (call, _) in draw_calls(f"relax.{name}", b)}
    return b, drawn


def assert_close(what: str, got: Any, wanted: Any) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    loose = got.dtype == np.float16 or "float16" in what
    rtol, atol = (5e-3, 5e-3) if loose else (5e-5, 1e-5)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol, err_msg=what)


@pytest.mark.parametrize("name", [row.name for row in ROWS])
def test_row__names_the_attributes_of_its_operator(name):
    (row,) = [row for row in ROWS if row.name == name]
    assert set(row.attributes) == list_attributes(name)


@pytest.mark.parametrize("name", SHARED)
def test_attributes__in_both_libraries(name):
    """Training computes what the reference computes, or says which attribute it does not have."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    from relayquant.stages.prepared import CalibrationGraph
    from relayquant.torch.interpreter.program import build_program

    b, calls = draw(name)
    (inputs,) = draw_inputs(b, 1)
    for what, call in calls.items():
        mod = make_module(b, call)
        params = tuple(param.name for param in mod["main"].params)
        arrays = [inputs[param] for param in params]
        graph = CalibrationGraph(mod, {}, params)
        if what in REFUSED.get(name, ()):
            with pytest.raises(ModelError, match=what.split("=")[0]):
                build_program(graph)
            continue
        program = build_program(graph)
        tensors = [torch.from_numpy(array) for array in arrays]
        (got,) = program.run(tensors, {}, {}, lambda key, axis, value: value, {})
        got = got if isinstance(got, tuple) else [got]
        wanted = run(mod, arrays)
        assert len(got) == len(wanted)
        for mine, other in zip(got, wanted, strict=True):
            assert_close(what, mine.detach().numpy(), other)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHARED if name != "nn.pixel_shuffle"])
def test_attributes__equal_compiled(name):
    b, calls = draw(name)
    pairs = {what for what, _ in PAIRS.get(f"relax.{name}", ())}
    left_out = pairs | NOT_IN_TVM.get(name, set())
    calls = {what: call for what, call in calls.items() if what not in left_out}
    mod = make_module(b, *calls.values())
    (inputs,) = draw_inputs(b, 1)
    arrays = [inputs[param.name] for param in mod["main"].params]
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    results = single_call.to_numpy(machine["main"](*map(tvm.runtime.tensor, arrays)))
    ours = run(mod, arrays)
    theirs = interpreter.flatten_value(results)
    assert len(ours) == len(theirs)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(f"result {number} of {list(calls)}, float16", mine, other)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "slope", [0.0, 0.3, 1.0, 1.5, -0.2, np.inf, np.nan, [0.1, 0.0, 1.0], [0.2, 0.5, 0.7]]
)
def test_scale_negatives__every_slope_and_value(slope, dtype):
    tiny, large = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    positive = np.array([0, tiny, 3 * tiny, 0.7, large, np.inf], dtype)
    x = np.tile(np.concatenate([positive, -positive, positive[:1] * np.nan])[:, None], (1, 3))
    slopes = np.asarray(slope, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = np.where(x > 0, x, x * slopes)
        np.testing.assert_array_equal(Numpy.scale_negatives(x, slopes), expected)
        if slopes.ndim == 0:
            alone = [Numpy.scale_negatives(each, slopes) for each in map(np.asarray, x[:, 0])]
            np.testing.assert_array_equal(alone, expected[:, 0])
