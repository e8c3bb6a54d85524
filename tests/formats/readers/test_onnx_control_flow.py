"""If, Loop and Scan of ONNX, whose way is known, and constants that are computed while the model is
read, against the reference evaluator and ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_models import make_onnx
from onnx_runtime import run_onnxruntime
from test_onnx import bindings_of, operators_of

import relayquant as rq
from relayquant.base.runtime import Executor
from relayquant.errors import ModelError
from relayquant.formats.readers import import_onnx
from relayquant.ir import reference

X = np.arange(-3, 3, dtype="float32").reshape(2, 3)


def parse(text: str, opset: int = 15) -> onnx.ModelProto:
    """A model from ONNX's text form, whose graph alone is given."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def evaluate(model, feeds):
    return ReferenceEvaluator(model).run(None, feeds)


def check(model, feeds, *, inputs=None, shapes=None, run=evaluate):
    """Import, compare with what `run` computes, return the module."""
    expected = run(model, {**feeds, **(inputs or {})})
    before = model.SerializeToString()
    mod, _ = import_onnx(model, inputs=inputs, shapes=shapes)
    assert model.SerializeToString() == before
    assert [param.name for param in mod["main"].params] == list(feeds)
    for want, got in zip(expected, reference.run(mod, feeds), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    return mod


CHOICE = """
main (float[2, 3] x, int64 rate) => (float[2, 3] y) {
    limit = Constant <value_int = 10000> ()
    is_fast = Greater (rate, limit)
    scaled = If (is_fast) <
        then_branch = fast () => (float[2, 3] a) { a = Relu (x) },
        else_branch = slow () => (float[2, 3] a) { b = Neg (x)  a = Abs (b) }
    >
    y = Exp (scaled)
}"""


@pytest.mark.parametrize("rate", [16000, 8000])
def test_if__on_an_input_that_is_fixed(rate):
    mod = check(parse(CHOICE), {"x": X}, inputs={"rate": np.array(rate)})
    assert operators_of(mod)[0] == ("relax.nn.relu" if rate > 10000 else "relax.negative")
    # The result has the name that it has outside.
    assert [b.var.name for b in bindings_of(mod)][-2:] == ["scaled", "y"]


def test_if__on_a_size_and_with_names_that_branches_share():
    branch = "< then_branch = t () => (float[M, N] a) { b = Neg (x)  a = Exp (b) },"
    branch += " else_branch = e () => (float[M, N] a) { a = Identity (x) } >"
    model = parse(f"""
    main (float[M, N] x) => (float[M, N] y) {{
        shape = Shape (x)
        one = Constant <value = int64[1] {{1}}> ()
        size = Gather (shape, one)
        three = Constant <value = int64[1] {{3}}> ()
        is_three = Equal (size, three)
        first = If (is_three) {branch}
        second = If (is_three) {branch}
        y = Add (first, second)
    }}""")
    mod = check(model, {"x": X}, shapes={"x": ("M", 3)})
    names = [binding.var.name for binding in bindings_of(mod)]
    assert names == ["b", "first", "b.1", "second", "y"]
    assert operators_of(check(model, {"x": X})).count("relax.where") == 2


@pytest.mark.parametrize("rate", [16000, 8000])
def test_if__that_is_computed_at_run_time(rate):
    """Both branches are computed, and the result has the name that it has outside."""
    mod = check(parse(CHOICE), {"x": X, "rate": np.array(rate)})
    operators = operators_of(mod)
    assert {"relax.nn.relu", "relax.negative", "relax.where"} <= set(operators)
    assert [b.var.name for b in bindings_of(mod)][-2:] == ["scaled", "y"]
    compiled = Executor(rq.compile(mod)).run("main", [X, np.array(rate)])
    np.testing.assert_allclose(
        compiled[0], evaluate(parse(CHOICE), {"x": X, "rate": np.array(rate)})[0], rtol=1e-6
    )


RUN_TIME = {
    "two outputs, a value of outside in both": """
main (float[M, N] x, bool c) => (float[M, N] y) {
    w = Exp (x)
    a, b = If (c) <
        then_branch = t () => (float[M, N] p, float[M, N] q) { p = Neg (w)  q = Abs (x) },
        else_branch = e () => (float[M, N] r, float[M, N] s) { r = Relu (x)  s = Identity (w) }
    >
    y = Sub (a, b)
}""",
    "constants": """
main (float[M, N] x, bool c) => (float[M, N] y) {
    f = If (c) <
        then_branch = t () => (float p) { p = Constant <value = float {2.0}> () },
        else_branch = e () => (float q) { q = Constant <value = float {-3.0}> () }
    >
    y = Mul (x, f)
}""",
    "one in another": """
main (float[M, N] x, bool c) => (float[M, N] y) {
    zero = Constant <value = float {0.0}> ()
    y = If (c) <
        then_branch = t () => (float[M, N] p) {
            total = ReduceSum <keepdims = 0> (x)
            d = Less (total, zero)
            p = If (d) <
                then_branch = u () => (float[M, N] v) { v = Neg (x) },
                else_branch = f () => (float[M, N] w) { v1 = Exp (x)  w = Abs (v1) }
            >
        },
        else_branch = e () => (float[M, N] q) { q = Relu (x) }
    >
}""",
    "names that branches share with the outside": """
main (float[M, N] x, bool c) => (float[M, N] y) {
    y = If (c) <
        then_branch = t () => (float[M, N] z) { a = Neg (x)  z = Exp (a) },
        else_branch = e () => (float[M, N] z) { a = Abs (x)  z = Relu (a) }
    >
}""",
    "a condition of one element, from the data": """
main (float[M, N] x, bool c) => (float[M, N] y) {
    shape = Constant <value = int64[1] {1}> ()
    d = Reshape (c, shape)
    e = Not (d)
    y = If (e) <
        then_branch = t () => (float[M, N] p) { p = Neg (x) },
        else_branch = f () => (float[M, N] q) { q = Sqrt (x) }
    >
}""",
    "a loop in a branch": """
main (float[M, N] x, bool c) => (float[M, N] y) {
    count = Constant <value = int64 {3}> ()
    go = Constant <value = bool {1}> ()
    y = If (c) <
        then_branch = t () => (float[M, N] p) {
            p = Loop (count, go, x) <
                body = step (int64 i, bool keep, float[M, N] v) => (bool out, float[M, N] w) {
                    out = Identity (keep)
                    w = Add (v, v)
                }
            >
        },
        else_branch = e () => (float[M, N] q) { q = Neg (x) }
    >
}""",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("text", RUN_TIME)
def test_if__of_the_run_time_in_every_form(text, condition):
    feeds = {"x": X, "c": np.array(condition)}
    model = parse(RUN_TIME[text])
    mod = check(model, feeds)
    names = [binding.var.name for binding in bindings_of(mod)]
    assert len(set(names)) == len(names)
    compiled = Executor(rq.compile(mod)).run("main", list(feeds.values()))
    np.testing.assert_allclose(compiled[0], evaluate(model, feeds)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("q = Flatten (x)", None),
        ("q = Transpose (x)", r"float32 of shape \(2, 3\) and float32 of shape \(3, 2\)"),
        (
            "o = Constant <value = int64[1] {0}> ()  q = Unsqueeze (x, o)",
            r"float32 of shape \(2, 3\) and float32 of shape \(1, 2, 3\)",
        ),
        ("q = Cast <to = 7> (x)", r"float32 of shape \(2, 3\) and int64 of shape \(2, 3\)"),
    ],
)
def test_if__of_branches_that_differ_is_refused(other, message):
    model = parse(f"""
    main (float[2, 3] x, bool c) => (y) {{
        y = If (c) <
            then_branch = t () => (float[2, 3] p) {{ p = Neg (x) }},
            else_branch = e () => (q) {{ {other} }}
        >
    }}""")
    if message is None:
        import_onnx(model)
        return
    with pytest.raises(ModelError, match=rf"branches give {message}; .*inputs={{'c': value}}"):
        import_onnx(model)


def test_if__of_the_run_time_is_quantized_in_both_branches():
    values = ", ".join(f"{(at % 7 - 3) / 8}" for at in range(32))
    model = parse(f"""
    main (float[2, 4] x, bool c) => (float[2, 8] y) <float[4, 8] w = {{{values}}}> {{
        y = If (c) <
            then_branch = t () => (float[2, 8] p) {{ p = MatMul (x, w) }},
            else_branch = e () => (float[2, 8] q) {{ n = Neg (x)  q = MatMul (n, w) }}
        >
    }}""")
    mod, params = import_onnx(model)
    x = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    batches = [{"x": x, "c": np.array(flag)} for flag in (True, False)]
    qmod = rq.quantize(mod, params, batches)
    assert [row.op for row in rq.ledger(qmod).quantized].count("matmul") == 2
    for batch in batches:
        (found,) = reference.run(qmod, list(batch.values()))
        np.testing.assert_allclose(found, evaluate(model, batch)[0], atol=0.05)


def test_if__the_branch_that_is_not_taken_may_hold_anything():
    model = parse(CHOICE.replace("Abs (b)", "Unheard (b)"))
    import_onnx(model, inputs={"rate": 16000})
    with pytest.raises(ModelError, match="1 operator of the model: Unheard"):
        import_onnx(model, inputs={"rate": 8000})


LOOP = """
main (float[2, 3] x, int64 count) => (float[2, 3] y, float[K, 2, 3] steps) {
    go = Constant <value = bool {1}> ()
    y, steps = Loop (count, go, x) <
        body = step (int64 i, bool keep, float[2, 3] v) => (bool out, float[2, 3] w, float[2, 3] s)
        {
            number = Cast <to = 1> (i)
            last = Constant <value_int = 5> ()
            out = Less (i, last)
            s = Add (v, number)
            w = Mul (s, s)
        }
    >
}"""


@pytest.mark.parametrize("count", [1, 3, 100])
def test_loop__of_a_constant_number_of_steps(count):
    # The reference evaluator joins what is collected along an axis that is there.
    inputs = {"count": np.array(count)}
    mod = check(parse(LOOP), {"x": X / 8}, inputs=inputs, run=run_onnxruntime)
    # Its own condition ends it: it goes on from step 5 no more.
    assert operators_of(mod).count("relax.multiply") == min(count, 6)


@pytest.mark.parametrize(
    ("count", "message"),
    [(None, "number of steps is computed from 'count'"), (0, "it takes no step")],
)
def test_loop__refused(count, message):
    inputs = {} if count is None else {"count": count}
    with pytest.raises(ModelError, match=message):
        import_onnx(parse(LOOP), inputs=inputs)


@pytest.mark.slow
def test_loop__without_end():
    model = parse("""
    main (float[2, 3] x) => (float[2, 3] y) {
        go = Constant <value = bool {1}> ()
        y = Loop (, go, x) <
            body = step (int64 i, bool keep, float[2, 3] v) => (bool out, float[2, 3] w) {
                out = Identity (keep)
                w = Identity (v)
            }
        >
    }""")
    with pytest.raises(ModelError, match="more than 4096 steps"):
        import_onnx(model)


@pytest.mark.parametrize(
    "attributes",
    [
        "",
        ", scan_input_directions = [1], scan_output_directions = [1]",
        ", scan_input_axes = [1], scan_output_axes = [1]",
    ],
)
def test_scan(attributes):
    size = 2 if "axes" in attributes else 3
    model = parse(f"""
    main (float[{size}] start, float[2, 3] x) => (float[{size}] last, float[A, B] sums) {{
        last, sums = Scan <num_scan_inputs = 1 {attributes},
            body = step (float[{size}] a, float[{size}] b) => (float[{size}] c, float[{size}] d) {{
                c = Add (a, b)
                d = Neg (c)
            }}
        > (start, x)
    }}""")
    check(model, {"start": np.ones(size, "float32"), "x": X}, run=run_onnxruntime)


def test_scan__of_a_length_that_is_not_known():
    model = parse("""
    main (float[3] start, float[T, 3] x) => (float[3] last) {
        last = Scan <num_scan_inputs = 1,
            body = step (float[3] a, float[3] b) => (float[3] c) { c = Add (a, b) }
        > (start, x)
    }""")
    with pytest.raises(ModelError, match=r"length of its sequence is T; .*shapes={'x'"):
        import_onnx(model)


def test_scan__of_a_length_that_is_computed_names_the_input():
    """A size that an operator makes has a name of its own, which `shapes=` does not know."""
    model = parse("""
    main (float[3] start, float[T, 3] x) => (float[3] last)
        <int64[1] zero = {0}, int64[1] three = {3}> {
        sizes = Shape (x)
        rows = Gather (sizes, zero)
        left = Mod (rows, three)
        used = Sub (rows, left)
        part = Slice (x, zero, used, zero)
        last = Scan <num_scan_inputs = 1,
            body = step (float[3] a, float[3] b) => (float[3] c) { c = Add (a, b) }
        > (start, part)
    }""")
    with pytest.raises(ModelError, match=r"length of its sequence is .*shapes={'x': "):
        import_onnx(model)


# -- inputs that are fixed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"rates": 1}, "names 'rates', which is not an input.*'rate'"),
        ({"rate": 0.5}, "0.5, which does not fit int64"),
        ({"rate": "fast"}, "'rate' a value that cannot be int64"),
        ({"rate": [1, 2]}, r"shape \(2,\); allowed: \(\), the shape of the input"),
    ],
)
def test_inputs__wrong_values(inputs, message):
    with pytest.raises(ModelError, match=message):
        import_onnx(parse(CHOICE), inputs=inputs)


# -- constants -------------------------------------------------------------------------------------

#: how exporters write a reshape that keeps the first size: (opset, nodes that compute `shape`)
SIZES = [
    (
        13,
        """
        s = Shape (x)
        s2 = Cast <to = 1> (s)
        half = Constant <value = float {0.5}> ()
        s3 = Mul (s2, half)
        s4 = Ceil (s3)
        s5 = Cast <to = 7> (s4)
        begin = Constant <value = int64[1] {0}> ()
        end = Constant <value = int64[1] {1}> ()
        first = Slice (s5, begin, end)
        rest = Constant <value = int64[1] {-1}> ()
        shape = Concat <axis = 0> (first, rest)
        """,
    ),
    (
        11,
        """
        s = Shape (x)
        one = Constant <value = int64 {1}> ()
        n = Gather <axis = 0> (s, one)
        two = Constant <value = int64 {2}> ()
        twice = Mul (n, two)
        halves = Div (twice, two)
        back = Unsqueeze <axes = [0]> (halves)
        rest = Constant <value = int64[1] {-1}> ()
        shape = Concat <axis = 0> (rest, back)
        """,
    ),
    (
        9,
        """
        s = Shape (x)
        turned = Slice <starts = [1], ends = [2]> (s)
        rest = Constant <value = int64[1] {-1}> ()
        shape = Concat <axis = 0> (turned, rest)
        """,
    ),
]


@pytest.mark.parametrize(("opset", "nodes"), SIZES)
def test_fold__sizes_that_are_computed(opset, nodes):
    text = f"main (float[2, 3] x) => (float[A, B] y) {{ {nodes} y = Reshape (x, shape) }}"
    mod = check(parse(text, opset), {"x": X})
    assert operators_of(mod) == ["relax.reshape"]


def test_fold__quantized_and_large_constants_stay():
    model = parse("""
    main (float[2, 3] x) => (float[2, 3] y, float[100, 100] z) {
        scale = Constant <value = float {0.5}> ()
        q = Constant <value = int8[3] {1, 2, 3}> ()
        w = DequantizeLinear (q, scale)
        y = Mul (x, w)
        size = Constant <value = int64[2] {100, 100}> ()
        z = Expand (scale, size)
    }""")
    mod, _ = import_onnx(model)
    assert operators_of(mod)[:2] == ["relax.qnn.dequantize", "relax.multiply"]
    assert len(operators_of(mod)) == 3


def test_slice__of_opset_9_with_negative_bounds():
    text = """
    main (float[2, 3] x) => (float[A, B] y) {
        z = Slice <starts = [-1, 0], ends = [100, -1]> (x)
        y = Slice <axes = [1], starts = [1], ends = [2]> (z)
    }"""
    check(parse(text, 9), {"x": X})


def test_shapes__of_paddlepaddle():
    """-1 is a size that is not known."""
    model = make_onnx([helper.make_node("Relu", ["x"], ["y"])], {"x": [-1, 3]}, {"y": [-1, 3]})
    check(model, {"x": X})
    mod = check(model, {"x": X}, shapes={"x": (2, 3)})
    assert [int(size) for size in mod["main"].params[0].ty.shape.values] == [2, 3]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -2
    with pytest.raises(ModelError, match="no size is below 0"):
        import_onnx(model)
