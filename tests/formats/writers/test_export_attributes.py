"""Every attribute that an exported operator may have is in the file, or the operator is refused.

Right is what ONNX Runtime computes from the file: it must be what the float module computes.
"""

from __future__ import annotations

import numpy as np
import pytest
from attribute_calls import VARIED, build_models, pick_result
from onnx_runtime import run_onnxruntime
from tvm import relax, tirx

import relayquant as rq
from relayquant.flow.testing.draw import draw_inputs
from relayquant.ir.rewrite.function import make_main

runtime = pytest.importorskip("onnxruntime")

#: attributes that ONNX has no form for
REFUSED = {
    "out_layout",
    "out_dtype=float16",
    "out_dtype=float64",
    "roi extrapolation_value",
    "cubic_alpha=1.05",
    "cubic_exclude=1",
    "mode=nan",
    "method=cubic",
}
#: and those that are refused for other reasons: repeats of new axes, ties to even,
#: ONNX's softplus without attributes
REFUSED_OF = {
    ("relax.tile", "repeats=[2, 1, 2]"),
    ("relax.image.resize2d", "rounding_method=round"),
    ("relax.nn.softplus", "beta=-0.7"),
    ("relax.nn.softplus", "threshold=-19.7"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", VARIED)
def test_attributes__are_written_or_refused(name, tmp_path):
    builder, values, mod, _ = build_models(name)
    inputs = draw_inputs(builder, 1)[0]
    expected = rq.reference.run(mod, inputs)
    refused = set()
    for index, what in enumerate(values):
        try:
            path = rq.export_onnx(pick_result(mod, index), tmp_path / "model.onnx")
        except rq.ModelError:
            refused.add(what)
            continue
        session = runtime.InferenceSession(str(path))
        fed = {node.name: inputs[node.name] for node in session.get_inputs()}
        (have,) = session.run(None, fed)
        np.testing.assert_allclose(have, expected[index], 1e-4, 1e-4, err_msg=what)
    wanted = REFUSED & values.keys() | {what for op, what in REFUSED_OF if op == name}
    assert refused == wanted


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("method", ["nearest_neighbor", "linear"])
def test_resize__of_any_batch(method, layout, tmp_path):
    batch = tirx.Var("n", "int64")
    sizes = [batch, 3, 4, 5] if layout == "NCHW" else [batch, 4, 5, 3]
    x = relax.Var("x", relax.TensorType(sizes, "float32"))
    mod = make_main(
        [x],
        lambda _: relax.op.image.resize2d(
            x, relax.ShapeExpr([7, 10]), layout=layout, method=method,
            coordinate_transformation_mode="asymmetric", rounding_method="floor",
        ),
    )  # fmt: skip
    data = np.random.default_rng(0).normal(size=(2, *sizes[1:])).astype("float32")
    path = rq.export_onnx(mod, tmp_path / "model.onnx")
    (got,) = run_onnxruntime(path, {"x": data})
    np.testing.assert_allclose(got, rq.reference.run(mod, [data])[0], 1e-5, 1e-5)
