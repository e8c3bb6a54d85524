"""What differs between the releases of TVM that wrote a module: defaults, boxed integers, names,
attributes in the metadata section, data types.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from legacy_json import LegacyJson
from relay_operator_cases import floats, transposed_conv
from relay_testing import compile_and_run, module_text

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.relay import from_json, from_text

X = floats(1, 3, 4, 4)
SQUARE = floats(3, 3, 2, 2)

#: release -> whether a weight without kernel_layout is O, I rather than I, O
OUTPUT_FIRST = {"0.7": False, "0.8": True, "0.10": True, "0.11": True, "0.12": False, "0.19": False}


@pytest.mark.parametrize("release", OUTPUT_FIRST)
def test_conv2d_transpose__default_layout_of_the_release(release):
    text = module_text("nn.conv2d_transpose(%x, %w, channels=3, kernel_size=[2, 2])", x=X, w=SQUARE)
    (got,) = compile_and_run(from_text(text, release=release), {"x": X, "w": SQUARE})
    weight = SQUARE.swapaxes(0, 1) if OUTPUT_FIRST[release] else SQUARE
    np.testing.assert_allclose(got, transposed_conv(X, weight, 1), 1e-5, 1e-5)


@pytest.mark.parametrize("is_output_first", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_conv2d_transpose__the_shape_decides(quantized, is_output_first):
    kind = "int8" if quantized else "float32"
    x, w = (X * 9).astype(kind), (floats(3, 2, 2, 2) * 9).astype(kind)
    given = w.swapaxes(0, 1).copy() if is_output_first else w
    scales = ', 0, 0, 1f, 1f, out_dtype="int32"' if quantized else ""
    name = "qnn.conv2d_transpose" if quantized else "nn.conv2d_transpose"
    text = module_text(f"{name}(%x, %w{scales}, channels=2, kernel_size=[2, 2])", x=x, w=given)
    (got,) = rq.reference.run(from_text(text), [x, given])
    want = transposed_conv(x.astype("float32"), w.astype("float32"), 1)
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def test_conv2d_transpose__asks_for_the_release():
    text = module_text("nn.conv2d_transpose(%x, %w)", x=X, w=SQUARE)
    with pytest.raises(ModelError, match=r"line 3.*older than 0\.12 or not.*release="):
        from_text(text)


@pytest.mark.parametrize("release", ["0.6", "0.20", "1.0", "0.10.0", ""])
def test_release__must_have_had_relay(release):
    with pytest.raises(ModelError, match=r'allowed: "0\.7" to "0\.19"'):
        from_text(module_text("%x", x=X), release=release)


@pytest.mark.parametrize(
    ("release", "is_transposed"), [("0.8", True), ("0.9", False), (None, False)]
)
def test_batch_matmul__square_without_attributes(release, is_transposed):
    x, y = floats(2, 3, 3), floats(2, 3, 3)
    text = module_text("nn.batch_matmul(%x, %y)", x=x, y=y)
    (got,) = rq.reference.run(from_text(text, release=release), [x, y])
    np.testing.assert_allclose(got, x @ (y.swapaxes(1, 2) if is_transposed else y), 1e-5, 1e-5)


# -- JSON ------------------------------------------------------------------------------------------


def conv1d_transpose_json(version: str, layout: str, weight: np.ndarray) -> str:
    graph = LegacyJson()
    x = graph.var("x", graph.type((1, 3, 5)))
    attrs = graph.add(
        "relay.attrs.Conv1DTransposeAttrs",
        kernel_size=graph.ints(2),
        channels=graph.add("IntImm", dtype="int32", span=0, value=3),
        data_layout=graph.text("NCW"),
        kernel_layout=graph.text(layout),
    )
    call = graph.call("nn.conv1d_transpose", [x, graph.constant(weight)], attrs)
    document = json.loads(graph.file(graph.function([x], call)))
    document["attrs"]["tvm_version"] = version
    return json.dumps(document)


@pytest.mark.parametrize(
    ("version", "layout", "is_output_first"),
    [
        ("0.10.0", "OIW", False),
        ("0.11.1", "IOW", True),
        ("0.12.dev9", "OIW", True),
        ("0.19.0", "IOW", False),
    ],
)
def test_json__the_file_says_the_release(version, layout, is_output_first):
    x, w = floats(1, 3, 5), floats(3, 3, 2)
    (got,) = rq.reference.run(from_json(conv1d_transpose_json(version, layout, w)), [x])
    weight = w.swapaxes(0, 1) if is_output_first else w
    want = transposed_conv(x[..., None], weight[..., None], 1)[..., 0]
    np.testing.assert_allclose(got, want, 1e-5, 1e-5)


def test_json__of_a_fork_asks_for_the_release():
    text = conv1d_transpose_json("1.6.0", "OIW", floats(3, 3, 2))
    with pytest.raises(ModelError, match=r"older than 0\.12 or not"):
        from_json(text)
    assert from_json(text, release="0.10")


@pytest.mark.parametrize("axis", range(-3, 3))
@pytest.mark.parametrize("is_boxed", [False, True])
def test_json__stack_axis_boxed_or_in_place(is_boxed, axis):
    graph = LegacyJson()
    graph.add("IRModule")  # the first nodes of a file are its module, its functions and their types
    x = graph.var("x", graph.type((2, 3)))
    boxed = graph.add("IntImm", dtype="int32", span=0, value=axis)
    attrs = graph.add("relay.attrs.StackAttrs", axis=boxed if is_boxed else axis)
    call = graph.call("stack", [graph.add("relay.Tuple", fields=graph.array([x, x]))], attrs)
    array = floats(2, 3)
    (got,) = rq.reference.run(from_json(graph.file(graph.function([x], call))), [array])
    np.testing.assert_array_equal(got, np.stack([array, array], axis))


def test_json__unknown_attributes_are_refused():
    """As in text: what is not known may change the result."""
    graph = LegacyJson()
    x = graph.var("x", graph.type((2, 3)))
    attrs = graph.add("relay.attrs.SoftmaxAttrs", axis=1, temperature=3)
    text = graph.file(graph.function([x], graph.call("nn.softmax", [x], attrs)))
    with pytest.raises(ModelError, match="no attribute 'temperature'"):
        from_json(text)


# -- text ------------------------------------------------------------------------------------------


def test_text__attributes_in_the_metadata_section():
    """TVM 0.10 prints those of broadcast_to and cumsum so."""
    graph = LegacyJson()
    node = graph.add("relay.attrs.InitOpAttrs", dtype="", shape=graph.ints(2, 3, 4))
    metadata = graph.file(graph.map([graph.array([node])], ["relay.attrs.InitOpAttrs"]))
    x = floats(3, 1)
    body = "broadcast_to(%x, meta[relay.attrs.InitOpAttrs][0])"
    mod = from_text(module_text(body, x=x) + f"#[metadata]\n{metadata}")
    np.testing.assert_array_equal(rq.reference.run(mod, [x])[0], np.broadcast_to(x, (2, 3, 4)))
    leaked = module_text("(%x, meta[relay.attrs.InitOpAttrs][0])", x=x)
    with pytest.raises(ModelError, match=r"meta\[relay\.attrs\.InitOpAttrs\]\[0\]: line 3"):
        from_text(leaked + f"#[metadata]\n{metadata}")


PRELUDE = """#[version = "0.0.5"]
type List[A] {
  Cons(A, List[A]),
  Nil,
}

type tensor_float32_t {
  tensor_nil_float32,
  tensor1_float32(Tensor[(?), float32]),
}

extern type Storage

def @filter[A](%f1: fn (A) -> bool /* ty=fn (A) -> bool */, %xs1: List[A]) -> List[A] {
  match (%xs1) {
    Cons(%x1: A /* ty=A */, %rest: List[A]) => {
      %1 = %f1(%x1);
      if (%1) {
        Cons(%x1, @filter(%f1, %rest))
      } else {
        @filter(%f1, %rest)
      }
    },
    Nil => {
      Nil /* ty=List[A] */
    },
  }
}

def @hd[A](%xs5: List[A]) -> A {
  match? (%xs5) {
    Cons(%x6: A, _) => {
      %x6
    },
  }
}

def @nil(%all: List[tensor_float32_t[]]) -> tensor_float32_t[] {
  @foldr(tensor_nil_float32, %all)
}

def @main(%x: Tensor[(2), float32]) -> Tensor[(2), float32] {
  BODY
}
"""


def test_text__data_types_that_main_does_not_use():
    x = np.array([-1, 2], "float32")
    mod = from_text(PRELUDE.replace("BODY", "nn.relu(%x)"))
    np.testing.assert_array_equal(compile_and_run(mod, {"x": x})[0], [0, 2])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@hd(Cons(%x, Nil))", r"Cons: line 43.*Nil, which is not called: line 43.*match: line 31"),
        ("@nil(%x)", r"tensor_nil_float32, which is not called: line 39"),
    ],
)
def test_text__data_types_that_main_uses(body, message):
    with pytest.raises(ModelError, match=r"(?s)what is not supported.*" + message):
        from_text(PRELUDE.replace("BODY", body))


@pytest.mark.parametrize("name", ["1", "_w", "/conv/w.1:0", "onnx::Conv_12", "blocks.0-w"])
def test_text__names_with_a_v_of_the_printer(name):
    """Names that begin with no letter are printed with a "v"; the params file has them without."""
    printed = name if name[0].isalpha() else f"v{name}"
    params = f"%x: Tensor[(2), float32], %{printed}: Tensor[(2), float32]"
    text = f"def @main({params}) {{\n  add(%x, %{printed})\n}}"
    mod = from_text(text, {name: np.array([1, 2], "float32")})
    assert [param.name for param in mod["main"].params] == ["x"]
    (got,) = rq.reference.run(mod, [np.zeros(2, "float32")])
    np.testing.assert_array_equal(got, [1, 2])
    with pytest.raises(ModelError, match="no parameter of @main"):
        from_text(text, {f"{name}?": np.zeros(2, "float32")})
