"""Relay text: syntax, names, where errors are, functions and tuples."""

from __future__ import annotations

import json

import numpy as np
import pytest
from relay_testing import module_text, run_text, value_names

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.ir.rewrite.graph import tensor_shape
from relayquant.relay import from_text
from relayquant.relay.text_reader import parse_text, remove_comments

X = np.array([[1.0, -2.0, 3.0]], "float32")
TENSOR = "Tensor[(1, 3), float32]"

#: A text as TVM prints it, with all kinds of comments, calls and blocks.
PRINTED = f"""#[version = "0.0.5"]
def @double(%x: {TENSOR} /* ty={TENSOR} */) -> {TENSOR} {{
  %0 = multiply(%x, 2f /* ty=float32 */) /* ty={TENSOR} span=a:1:1 */;
  add(%0, 1f)
}}

def @main(
  %data {{virtual_device=VirtualDevice(device_type=1)}}: {TENSOR}
) -> ({TENSOR}, {TENSOR}) {{
  let %twice: {TENSOR} /* ty={TENSOR} */ = @double(%data) /* a /* nested */ comment "%x */;
  %0 = fn (%x1: {TENSOR}, Primitive=1, Composite="my.relu", hash="a/*b*/") -> {TENSOR} {{
    nn.relu(%x1)
  }} /* ty=fn ({TENSOR}) -> {TENSOR} */;
  %1 = (%twice, %data); // a tuple
  %2 = %0(%twice);
  %3 = if (True /* ty=bool */) {{
    %1.0
  }} else {{
    negative(%twice)
  }};
  (%2, %3)
}}
"""


def test_text__as_printed():
    got = rq.reference.run(from_text(PRINTED), [X])
    np.testing.assert_array_equal(got[0], np.maximum(2 * X + 1, 0))
    np.testing.assert_array_equal(got[1], 2 * X + 1)


def test_names__of_the_text():
    """A let has its name, a numbered value its number, an inlined one that of the call before."""
    mod = from_text(PRINTED)
    assert value_names(mod)[:3] == ["twice.0", "twice", "2"]
    assert [param.name for param in mod["main"].params] == ["data"]
    sources = json.loads(mod["main"].attrs["relayquant.sources"])
    assert sources["twice.0"] == {"node": "twice.0", "op": "multiply"}


def test_names__with_dots_colons_and_dashes():
    """PyTorch's names, which TVM prints but cannot read; `%a.0` may also be a field."""
    text = f"""def @main(%layer1.0.weight: {TENSOR}, %in:0: {TENSOR}, %b-c: {TENSOR}) {{
      %0 = (%layer1.0.weight, %in:0);
      let %p = (%0.1, (%b-c, %0.0));
      add(%p.1.0, %p.1.1)
    }}"""
    a, b, c = X, 2 * X, 5 * X
    mod = from_text(text)
    assert [param.name for param in mod["main"].params] == ["layer1.0.weight", "in:0", "b-c"]
    np.testing.assert_array_equal(rq.reference.run(mod, [a, b, c])[0], c + a)


def test_text__one_expression():
    """What astext of an expression prints."""
    mod = from_text(f"free_var %x: {TENSOR};\n%0 = exp(%x);\nadd(%0, %x)")
    np.testing.assert_allclose(rq.reference.run(mod, [X])[0], np.exp(X) + X, 1e-6)
    mod = from_text(f"fn (%x: {TENSOR}) {{ (let %y = negative(%x); %y) }}")
    np.testing.assert_array_equal(rq.reference.run(mod, [X])[0], -X)


def test_text__infix_of_old_versions():
    np.testing.assert_array_equal(
        run_text("%a + %a * %a - %a / 2f", a=X)[0], X + X * X - X / np.float32(2)
    )


def test_literals__values_and_dtypes():
    body = "(1.5f, 2f16, 3f64, 7, 7i64, -7i16, inff, -inff, nanf, 1e-30f, True, -3, 0.25)"
    got = rq.reference.run(from_text(f"def @main() {{ {body} }}"), [])
    want = [
        np.float32(1.5),
        np.float16(2),
        np.float64(3),
        np.int32(7),
        np.int64(7),
        np.int16(-7),
        np.float32(np.inf),
        np.float32(-np.inf),
        np.float32(np.nan),
        np.float32(1e-30),
        np.bool_(True),
        np.int32(-3),
        np.float32(0.25),
    ]
    for value, expected in zip(got, want, strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


METADATA = """
#[metadata]
{
  "root": 1,
  "nodes": [
    {"type_key": ""},
    {"type_key": "Map", "keys": ["relay.Constant", "runtime.BoxInt"], "data": [2, 3]},
    {"type_key": "Array", "data": [4]},
    {"type_key": "Array", "data": [5]},
    {"type_key": "relay.Constant", "attrs": {"data": "0"}},
    {"type_key": "runtime.BoxInt", "repr_str": "3"}
  ],
  "b64ndarrays": ["P6G0lvBAXt0AAAAAAAAAAAEAAAAAAAAAAAAAAAAIAQABAAAAAAAAAAc="],
  "attrs": {"tvm_version": "0.19.0"}
}
"""


def test_metadata__constants_and_boxed_numbers():
    body = (
        "%0 = split(%x, indices_or_sections=meta[runtime.BoxInt][0], axis=1);"
        " (%0.2, meta[relay.Constant][0] /* ty=int8 */)"
    )
    got = rq.reference.run(from_text(module_text(body, x=X) + METADATA), [X])
    np.testing.assert_array_equal(got[0], X[:, 2:])
    assert got[1].dtype == "int8"
    assert got[1] == 7


def test_metadata__omitted():
    with pytest.raises(ModelError, match=r"line 3, column 16.*show_meta_data=True.*save_json"):
        from_text(module_text("add(%x, meta[relay.Constant][0])", x=X))


@pytest.mark.parametrize("reference", ["meta[relay.Constant][1]", "meta[other][0]"])
def test_metadata__no_such_entry(reference):
    with pytest.raises(ModelError, match=r"line 3, column.*The metadata section has"):
        from_text(module_text(f"add(%x, {reference})", x=X) + METADATA)


def test_shape__open_dimensions():
    text = "def @main(%x: Tensor[(?, 3), float32]) -> Tensor[(?, 3), float32] { exp(%x) }"
    mod = from_text(text)
    assert "x_dim0" in str(mod["main"].params[0].ty)
    np.testing.assert_allclose(
        rq.reference.run(mod, [np.tile(X, (4, 1))])[0][3], np.exp(X)[0], 1e-6
    )
    fixed = from_text(text, shapes={"x": (2, 3)})
    assert tensor_shape(fixed["main"].params[0]) == (2, 3)
    with pytest.raises(ModelError, match=r"shapes\['x'\] is \(2, 4\)"):
        from_text(text, shapes={"x": (2, 4)})


# -- parameters ------------------------------------------------------------------------------------

DENSE = module_text("nn.dense(%x, %w)", x=X, w=np.zeros((2, 3), "float32"))


def test_params__become_constants():
    weight = np.array([[1, 2, 3], [0, 1, 0]], "float32")
    mod = from_text(DENSE, {"w": weight})
    assert [param.name for param in mod["main"].params] == ["x"]
    np.testing.assert_array_equal(rq.reference.run(mod, [X])[0], X @ weight.T)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"v": np.zeros((2, 3), "float32")}, "params has 'v', which is not a parameter"),
        (
            {"w": np.zeros((3, 3), "float32")},
            r"line 2, column 40.*\(3, 3\).*wants Tensor\[\(2, 3\)",
        ),
        ({"w": np.zeros((2, 3), "float64")}, "is float64"),
    ],
)
def test_params__refused(params, message):
    with pytest.raises(ModelError, match=message):
        from_text(DENSE, params)


# -- errors ----------------------------------------------------------------------------------------


def test_unsupported__all_listed_with_their_lines():
    text = f"""def @main(%x: {TENSOR}) {{
      %0 = vision.nms(%x);
      %1 = exp(%0);
      %2 = vision.nms(%1);
      dyn.reshape(%2)
    }}
    def @unused(%x: {TENSOR}) {{ vision.other(%x) }}
    """
    with pytest.raises(ModelError) as raised:
        from_text(text)
    message = str(raised.value)
    assert "Not supported, 2 operators of the Relay module:" in message
    assert "vision.nms: line 2, column 12, line 4, column 12" in message
    assert "dyn.reshape: line 5, column 7" in message
    assert "vision.other" not in message


#: Body -> part of the message.
WRONG = {
    "add(%x, %x": "line 4, column 1: '}' is not expected",
    "add(%x, $y)": "line 3, column 11: '$' is not expected",
    "add(%x, %y)": "line 3, column 11: %y is not defined",
    "@other(%x)": "line 3, column 3: there is no function @other",
    "%0 = (%x, %x); %0.2": "line 3, column 20: there is no field 2",
    "%x(%x)": "but is not a function",
    "let %y: Tensor[(2), float32] = %x; %y": "line 3, column 7: %y is Tensor[(1, 3), float32]",
    "%0 = fn (%y: int32) { %y }; %0(%x)": "is Tensor[(1, 3), float32], declared is int32",
    "%0 = fn (%y) { %y }; %0(%x, %x)": "a function of 1 parameter is called with 2 arguments",
    "add(%x, 7i9)": "unknown suffix",
    "add(%x, 300i8)": "300 does not fit into int8",
    "if (%x) { %x } else { %x }": "known at run time only",
    "fn (%y: int32) { %y }": "returns a function",
    "add(%x, concatenate)": "concatenate, which is not called: line 3, column 11",
    "exp(" * 200 + "%x" + ")" * 200: "nested deeper than",
    "/* %x": "inside a comment that starts in line 3",
}


@pytest.mark.parametrize("body", WRONG, ids=lambda body: body[:30])
def test_error__names_line_and_column(body):
    with pytest.raises(ModelError) as raised:
        from_text(module_text(body, x=X))
    assert WRONG[body] in str(raised.value)


def test_error__declared_result():
    text = module_text("exp(%x)", x=X).replace(") {", ") -> Tensor[(1, 3), int8] {")
    with pytest.raises(ModelError, match=r"@main returns Tensor\[\(1, 3\), float32\], declared is"):
        from_text(text)


def test_error__types_that_do_not_fit():
    """Relax's own words, without its dumps of operators."""
    with pytest.raises(ModelError) as raised:
        from_text(module_text("add(%x, %y)", x=X, y=np.zeros((1, 4), "float32")))
    assert "dim 1 is 3 and the second input shape at dim 1 is 4" in str(raised.value)
    assert "ir.Op" not in str(raised.value)


def test_error__no_main():
    with pytest.raises(ModelError, match="no function @main, only: f"):
        from_text("def @f() { 1f }")


def test_error__twice_the_same_name():
    with pytest.raises(ModelError, match="@f is defined twice"):
        from_text("def @f() { 1f } def @f() { 2f }")
    with pytest.raises(ModelError, match="two parameters are called %x"):
        from_text("def @main(%x: int32, %x: int32) { %x }")


def test_recursion__refused():
    text = "def @f(%x: int32) { @f(%x) } def @main(%x: int32) { @f(%x) }"
    with pytest.raises(ModelError, match="calls itself"):
        from_text(text)


@pytest.mark.slow
def test_inlining__that_explodes_is_refused():
    calls = "".join(
        f"def @f{i}(%x: float32) {{ %0 = @f{i - 1}(%x); @f{i - 1}(%0) }}\n" for i in range(1, 40)
    )
    text = f"def @f0(%x: float32) {{ %x }}\n{calls}def @main(%x: float32) {{ @f39(%x) }}"
    with pytest.raises(ModelError, match="makes more than"):
        from_text(text)


def test_comments__keep_positions():
    text = 'a /* b\n /* c */ d */ e // f\n"/* g */" h'
    assert remove_comments(text) == 'a     \n              e     \n"/* g */" h'


def test_parse__long_lists_do_not_nest():
    """Two thousand statements are no deeper than one."""
    lines = "".join(f"%{i + 1} = exp(%{i});" for i in range(2000))
    module = parse_text(f"def @main(%x: float32) {{ %0 = exp(%x); {lines} %2000 }}")
    assert len(module.functions["main"].body.statements) == 2001
