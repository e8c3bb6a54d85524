"""Models that only run: calibrated by calling, converted in regions."""

from __future__ import annotations

import re
import sys
import warnings

import numpy as np
import pytest
import tvm

import relayquant as rq
from relayquant.errors import ConfigError, MissingDependencyError, ModelError


def test_torch_missing__extra_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'relayquant\[torch\]'"):
        rq.torch.prepare(lambda x: x, (1,))


torch = pytest.importorskip("torch", reason="pip install torch")

from run_models import (  # noqa: E402
    EarlyExit,
    Residual,
    Writer,
    draw_images,
    draw_sequences,
    seed,
    sqnr,
)
from torch import nn  # noqa: E402

from relayquant.torch.define_by_run.arguments import FlatArguments, Slot, is_equal  # noqa: E402
from relayquant.torch.define_by_run.executing import (  # noqa: E402
    DeferredTensor,
    RegionRunner,
    quantize_tensor,
)
from relayquant.torch.define_by_run.recording import KnownOperator  # noqa: E402
from relayquant.torch.define_by_run.tape import replay  # noqa: E402


def calibrate(model, inputs, **options):
    """The prepared model after calls with all inputs, each a tensor."""
    prepared = rq.torch.prepare(model, (inputs[0],), effort="fast", **options)
    for x in inputs[1:]:
        prepared(x)
    return prepared


def run_float(model, inputs):
    with torch.no_grad():
        return [model(x) for x in inputs]


def quantize_part(module, inputs):
    """A straight part by hand: a function of tensors, on compiled integers."""
    inputs = [each if isinstance(each, tuple) else (each,) for each in inputs]
    qmod = rq.torch.quantize(
        module, inputs[0], [tuple(t.numpy() for t in each) for each in inputs], effort="fast"
    )
    run = rq.Executor(rq.compile(qmod)).run
    return lambda *args: [torch.from_numpy(out) for out in run("main", [a.numpy() for a in args])]


@pytest.fixture(scope="module")
def early_exit():
    model = seed(EarlyExit)
    prepared = calibrate(model, draw_images(20))
    assert -1 in model.counts, "calibration took the one branch"
    assert max(model.counts) > 1, "and the loop behind the other"
    return model, prepared, rq.torch.convert(prepared)


@pytest.fixture(scope="module")
def writer():
    model = seed(Writer)
    return model, rq.torch.convert(calibrate(model, draw_sequences(10)))


# --- Control flow -----------------------------------------------------------------------------


def test_if_and_while__as_good_as_each_part_by_hand(early_exit):
    """Within 0.5 dB of the same parts, each quantized alone by `quantize`."""
    model, _, converted = early_exit

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

    class Start(Part):
        def forward(self, x):
            x = model.body(torch.relu(model.stem(x)))
            return x, x.mean()

    class Again(Part):
        def forward(self, x):
            x = torch.relu(model.shrink(model.refine(x)))
            return x, x.amax()

    class Head(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x.mean((2, 3)))

    def drive(start, again, early, late, x):
        x, mean = start(x)
        if mean < 0.5:
            return early(x)
        count, peak = 0, x.amax()
        while peak > 1 and count < 6:
            x, peak = again(x)
            count += 1
        return late(x)

    seen: dict[str, list] = {"start": [], "again": [], "early": [], "late": []}
    parts = {"start": Start(), "again": Again(), "early": Head(model.early)}
    parts["late"] = Head(model.late)

    def record(name):
        def run(x):
            seen[name].append(x)
            return parts[name](x)

        return run

    with torch.no_grad():
        for x in draw_images(20):
            drive(*map(record, parts), x)
    by_hand = {name: quantize_part(part, seen[name]) for name, part in parts.items()}
    heads = [lambda x, f=by_hand[name]: f(x)[0] for name in ("early", "late")]
    test = draw_images(30, 1)
    expected = run_float(model, test)
    hand = [drive(by_hand["start"], by_hand["again"], *heads, x) for x in test]
    got = [converted(x) for x in test]
    assert sqnr(expected, got) > sqnr(expected, hand) - 0.5
    assert sqnr(expected, got) > 25


def test_if_and_while__runs_are_the_straight_parts_of_the_code(early_exit):
    _, prepared, converted = early_exit
    assert prepared.calls == 20
    starts = [run.region.sites[0] for run in converted.regions]
    assert [(site.module, site.operator) for site in starts] == [
        ("stem", "conv2d"),
        ("", "mean"),
        ("refine.conv1", "conv2d"),
        ("", "mean"),
    ]
    assert starts[1].line < starts[3].line, "the heads of the two branches are two operators"
    sizes = [len({site for run in converted.regions for site in run.region.sites})]
    assert sizes == [sum(len(run.region.sites) for run in converted.regions)], "each in one run"


def test_boundary__integers_pass_from_run_to_run_and_round_the_loop(early_exit, monkeypatch):
    """What enters the loop, from the branch before and from itself, has one grid; no copies."""
    _, _, converted = early_exit
    first, _, again, _ = converted.regions
    assert first.outputs[0] is again.inputs[0] is again.outputs[0] is not None
    given, made = [], []
    call = type(RegionRunner(first, None).module).call

    def watch(self, inputs):
        outputs = call(self, inputs)
        given.extend((t.dtype, t.data_ptr()) for t in inputs)
        made.extend((t.dtype, t.data_ptr()) for t in outputs)
        return outputs

    monkeypatch.setattr("relayquant.torch.define_by_run.executing.CompiledModule.call", watch)
    converted(draw_images(5)[4])
    passed = [each for each in given if each[0] is torch.uint8]
    assert len(passed) >= 2
    assert all(each in made for each in passed)


def test_boundary__what_is_read_in_float_is_not_rounded_for_it(early_exit, monkeypatch):
    """Values that shrink from pass to pass cross on one grid, that of the largest. Conditions and
    heads read them as exactly as without a boundary: the same decisions, each answer as good.
    """
    model, prepared, converted = early_exit
    assert [run.exact for run in converted.regions] == [(0,), (), (0,), ()]
    assert converted.regions[2].inputs[0] is converted.regions[0].outputs[0] is not None
    monkeypatch.setattr(
        "relayquant.torch.define_by_run.quantized_regions.choose_boundaries", lambda *arguments: []
    )
    apart = rq.torch.convert(prepared)
    test = draw_images(15, 1)
    for x, want in zip(test, run_float(model, test), strict=True):
        assert sqnr([want], [converted(x)]) > sqnr([want], [apart(x)]) - 0.5


class Chained(nn.Module):
    """Blocks between conditions that read something else."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x, steps):
        for block in self.blocks:
            if steps.sum() > 0:
                x = block(x)
        return x


def test_boundary__what_is_read_as_integers_alone_is_given_so():
    model = seed(Chained)
    images = [torch.randn(1, 4, 6, 6) for _ in range(4)]
    prepared = rq.torch.prepare(model, (images[0], torch.ones(2)), effort="fast")
    for image in images[1:]:
        prepared(image, torch.ones(2))
    converted = rq.torch.convert(prepared)
    first, second, last = converted.regions
    assert first.outputs[0] is second.inputs[0] is not None
    assert second.outputs[0] is last.inputs[0] is not None
    assert [run.exact for run in converted.regions] == [(), (), ()]
    assert last.outputs == (None,)
    with torch.no_grad():
        want = model(images[0], torch.ones(2))
    assert sqnr([want], [converted(images[0], torch.ones(2))]) > 30


def test_deferred_values__made_again_only_where_nobody_holds_them(writer):
    model, converted = writer
    tokens = torch.ones(6, dtype=torch.int64)
    first = converted(tokens)
    kept = model.last
    state = kept.clone()
    again = converted(torch.full((6,), 2))
    assert model.last is not kept
    assert torch.equal(kept, state), "a value that the user holds stays what it was"
    assert not torch.equal(first, again)
    kept.note = "mine"
    converted(tokens)
    del kept
    converted(tokens)
    assert not hasattr(model.last, "note")


def test_state_in_python__code_runs_as_it_is(early_exit):
    model, _, converted = early_exit
    before = len(model.counts)
    converted(draw_images(1)[0])
    assert len(model.counts) == before + 1


def test_ledger__covers_modules_and_pytorch(early_exit):
    _, _, converted = early_exit
    rows = converted.ledger.rows
    assert {"relu", "relu_2", "late"} <= {row.name for row in rows if row.quantized}
    (reason,) = {row.reason for row in rows if row.op == "__bool__"}
    assert reason == "its result is no tensor"
    sources = [row.sources for row in rows if row.op == "__bool__"]
    assert all("run_models.py:" in place and "forward" in place for (place,) in sources)
    assert len(converted.modules) == 4
    assert all(rq.ledger(mod).rows for mod in converted.modules)


def test_gru_loop__as_good_as_the_cell_by_hand(writer):
    model, converted = writer

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, token, state):
            state = model.cell(model.embed(token)[None], state)
            return state, model.out(state)

    def drive(cell, sequence):
        state, scores = torch.zeros(1, 32), []
        for token in sequence:
            state, score = cell(token, state)
            scores.append(score)
            if token.item() == 0:
                break
        return torch.cat(scores)

    seen, cell = [], Cell()

    def record(token, state):
        seen.append((token, state))
        return cell(token, state)

    with torch.no_grad():
        for sequence in draw_sequences(10):
            drive(record, sequence)
    by_hand = quantize_part(cell, seen)
    test = draw_sequences(12, 1)
    expected = run_float(model, test)
    lengths = {len(each) for each in expected}
    assert len(lengths) > 2, "the loop ends at different places"
    got = [converted(x) for x in test]
    assert [len(each) for each in got] == [len(each) for each in expected]
    assert sqnr(expected, got) > sqnr(expected, [drive(by_hand, x) for x in test]) - 0.5


def test_gru_loop__one_run_whatever_the_length(writer):
    model, converted = writer
    (run,) = converted.regions
    assert [site.operator for site in run.region.sites][-2:] == ["gru_cell", "linear"]
    long = torch.ones(40, dtype=torch.int64)
    (expected,) = run_float(model, [long])
    assert converted(long).shape == expected.shape
    assert type(model.last) is DeferredTensor, "state is read when the user reads it"
    assert model.last.numpy().shape == (1, 32)
    torch.testing.assert_close(
        converted.model.out(model.last)[0], converted(long)[-1], atol=0.1, rtol=0.1
    )


# --- Models that export as a whole ------------------------------------------------------------


def test_straight_model__the_module_of_the_graph_flow():
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model = seed(lambda: nn.Sequential(*layers))
    inputs = draw_images(6)
    converted = rq.torch.convert(calibrate(model, inputs))
    (qmod,) = converted.modules
    expected = rq.torch.quantize(model, (inputs[0],), inputs, effort="fast")
    assert rq.ledger(qmod).to_dict() == rq.ledger(expected).to_dict() == converted.ledger.to_dict()
    (test,) = draw_images(1, 1)
    (want,) = rq.reference.run(expected, [test.numpy()])
    (reference,) = rq.reference.run(qmod, [test.numpy()])
    np.testing.assert_array_equal(reference, want)
    np.testing.assert_allclose(converted(test).numpy(), want, rtol=1e-6)


# --- Operators that calibration never came to -------------------------------------------------


class Branch(nn.Module):
    """`x` or `-x` go through the one layer or through the other, and then through a third one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.first(x) if x.sum() > 0 else self.second(x)
        return self.third(torch.relu(x))


UP, DOWN = torch.full((2, 8), 0.5), torch.full((2, 8), -0.5)


def test_unseen__error_names_module_line_and_remedy():
    converted = rq.torch.convert(calibrate(seed(Branch), [UP, 2 * UP]))
    converted(UP)
    with pytest.raises(ModelError) as error:
        converted(DOWN)
    text = str(error.value)
    for part in ("linear", "module 'second'", "test_define_by_run.py:", "Call the prepared model"):
        assert part in text
    with pytest.raises(ModelError, match=r"is called with float32 \(5, 8\)"):
        converted(torch.ones(5, 8))


def test_unseen__stays_float():
    model = seed(Branch)
    converted = rq.torch.convert(calibrate(model, [UP, 2 * UP], unseen="float"))
    (expected,) = run_float(model, [DOWN])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(converted(DOWN), expected), "what follows was calibrated elsewhere"
        (wide,) = run_float(model, [torch.ones(5, 8)])
        assert torch.equal(converted(torch.ones(5, 8)), wide)


def test_unseen__choices_are_named():
    with pytest.raises(ConfigError, match="Did you mean 'float'"):
        rq.torch.prepare(Branch(), (UP,), unseen="floats")


def test_new_way_between_known_operators__float_and_a_warning():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
            self.skips, self.only = False, False

        def forward(self, x):
            if not self.only:
                x = self.a(x)
                if not self.skips:
                    x = self.b(x)
            return self.c(x) if x.sum() < 1e9 else x

    model = seed(Skipping)
    converted = rq.torch.convert(calibrate(model, [UP, DOWN, 2 * UP]))
    model.skips = True
    (expected,) = run_float(model, [UP])
    with pytest.warns(UserWarning, match="a path that calibration never took"):
        got = converted(UP)
    assert sqnr([expected], [got]) > 25
    model.skips = False
    assert sqnr(run_float(model, [UP]), [converted(UP)]) > 25, "the known way is integer again"


def test_strict_order__is_the_rule_of_the_source():
    prepared = calibrate(seed(Branch), [UP, 2 * UP], strict_order=True)
    with pytest.raises(ModelError, match=r"strict_order: operator 3 .*'second'.*'first'"):
        prepared(DOWN)
    converted = rq.torch.convert(prepared)
    converted(UP)
    with pytest.raises(ModelError, match=r"Calibration never reached|strict_order"):
        converted(DOWN)


# --- What is recorded -------------------------------------------------------------------------


def scale_all(values, layer, depth=2):
    """A helper that calls itself."""
    values = layer(values)
    return scale_all(values, layer, depth - 1) if depth else values


LAYER = nn.Linear(8, 8)


def test_call_site__place_in_the_code_not_the_number_of_calls():
    """A loop has its operators once, at any length; two lines that call one helper have their own;
    a function that calls itself has the same at any depth.
    """

    def run(x, times):
        for _ in range(times):
            x = torch.tanh(LAYER(x))
        x = scale_all(x, LAYER, times)
        y = scale_all(x, LAYER, 0)
        return x + y

    prepared = rq.torch.prepare(run, (UP, 1), effort="fast")
    first = len(prepared.sites)
    for times in (2, 5, 9):
        prepared(UP, times)
    assert [site.module for site in prepared.sites if site.operator == "linear"].count("LAYER") == 4
    assert len(prepared.sites) == first
    steps = prepared._tapes[-1].steps
    assert len({step.call for step in steps}) == len({step.site for step in steps}), "kept once"


class Writing(nn.Module):
    """Writes into tensors in every way: its own, through views, into state, and at random."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("memory", torch.zeros(4, 8))
        self.calls = 0

    def forward(self, x):
        self.memory[self.calls % 4] = x[0]
        self.calls += 1
        y = self.linear(x)
        half = y[:, :4]
        half.mul_(2)
        y += self.memory.mean(0)
        y.relu_()
        z = self.linear(y + torch.rand_like(y) * 0.01)
        return torch.nn.functional.relu(z, inplace=True), self.memory.clone()


def test_views__of_a_tensor_that_is_gone_are_not_those_of_the_next_at_its_address():
    """Else what is flattened stays in PyTorch, or not, as memory happens to be given out."""

    def step(x):
        flat = [(x + i).flatten(1) for i in range(20)]  # whose bases nothing else holds
        x = flat[0] * 2
        del flat
        kept = [(x * 0.5).relu_() for _ in range(40)]  # some at addresses that were given back
        x = x + kept[-1]
        return x if x.sum() > 1e6 else x + 1

    prepared = rq.torch.prepare(step, (UP.reshape(2, 2, 4),), effort="fast")
    sites = [site for tape in prepared._tapes for site in tape.eager]
    assert [site.reason for site in sites] == []


def test_tape__runs_again_to_the_same_values():
    """The tapes alone give what the calls gave, whatever was written where."""
    model = seed(Writing)
    memory = model.memory.clone()
    torch.manual_seed(0)
    prepared = rq.torch.prepare(model, (UP,), effort="fast")
    results = [prepared(x) for x in (DOWN, 3 * UP)]
    expected = model.memory.clone()
    for tape, (z, kept) in zip(prepared._tapes[1:], results, strict=True):
        values = {}

        def observe(i, step, tensors, tape=tape, values=values):
            values[i] = [tensor.clone() for tensor in tensors]

        replay(tape, prepared._constants, prepared._file, observe)
        relu = max(i for i, step in enumerate(tape.steps) if step.site.operator == "relu")
        copy = max(i for i, step in enumerate(tape.steps) if step.site.operator == "clone")
        assert torch.equal(values[relu][0].relu(), z)
        assert torch.equal(values[copy][0], kept)
    assert torch.equal(model.memory, expected), "running tapes again changes no state"
    assert not torch.equal(model.memory, memory)


class Alternating(nn.Module):
    """One place in the code that is called with other arguments, results and tensors each time."""

    def __init__(self):
        super().__init__()
        self.linear, self.writer = nn.Linear(8, 8), Writing()

    def forward(self, x):
        steps = [1, 1, 1.0, True, 0.0, -0.0, 0.0, 2, 2, 2]
        for i, factor in enumerate(steps):
            x = x * factor if factor else torch.atan2(x + 1, x * factor)
            x = torch.flatten(x, i % 2).reshape(2, 8)
            y = x.topk(2)[0] if i < 5 else x
            parts = torch.cat([x, y], 1).split(8, 1) if i % 2 else (x, None)
            x = torch.nn.functional.dropout(parts[0], 0.5, training=i > 7) + self.linear(x)
        return self.writer(x), x.max().item() > 0 and x


def test_repetitions__are_recorded_as_if_each_were_the_first(monkeypatch):
    """The same steps with the same numbers, hence the same statistics, whatever of a call is like
    the one before at its place.
    """

    def record(model, inputs):
        torch.manual_seed(7)
        prepared = rq.torch.prepare(model, (inputs[0],), effort="fast")
        for x in inputs[1:]:
            prepared(x)
        rows: list[object] = []
        for tape in prepared._tapes:
            for s in tape.steps:
                rows.append((str(s.site), s.call.function, s.call.arguments))
                rows.append((s.pure and s.pure.arguments, s.operands, s.results, s.form))
                rows.append((s.target, s.is_drawn, s.written))
            rows.append((tape.forms, tape.stored, sorted(tape.alive), tape.has_state))
        return rows, prepared

    cases = [(Alternating, [UP, DOWN]), (Writer, draw_sequences(3)), (EarlyExit, draw_images(5))]
    for kind, inputs in cases:
        model = seed(kind)
        twin = seed(kind)
        got, prepared = record(model, inputs)
        assert any(known.repeated for known in prepared._known.values())
        with monkeypatch.context() as patch:
            patch.setattr(
                KnownOperator, "of", lambda name, step, _: KnownOperator(step, None, None)
            )
            expected, slow = record(twin, inputs)

        def name_constants(rows, prepared):
            return re.sub(
                r"ModelConstant\(number=(\d+)\)",
                lambda found: prepared._constants.names[int(found[1])],
                repr(rows),
            )

        assert name_constants(got, prepared) == name_constants(expected, slow)
        if kind is not Alternating:
            for fast, each in zip(
                rq.torch.convert(prepared).modules, rq.torch.convert(slow).modules, strict=True
            ):
                tvm.ir.assert_structural_equal(fast, each)


def test_call_site__builtins_are_the_same_when_code_is_warm():
    """Python calls them another way once the code has run some times."""

    def run(x):
        y = abs(LAYER(x))
        rows = list(map(LAYER, y))
        return torch.stack(rows) if y.sum() < 1e6 else round(y)

    prepared = rq.torch.prepare(run, (UP,), effort="fast")
    prepared(DOWN)
    first = len(prepared.sites)
    converted = rq.torch.convert(prepared)
    for i in range(40):
        with torch.no_grad():
            assert sqnr([run(UP)], [converted(UP)]) > 20, i
    prepared(UP)
    assert len(prepared.sites) == first


def test_aliases__without_a_view_follow_what_is_written():
    def detach(x):
        y = LAYER(x) if x.sum() < 1e6 else x
        z = y.detach()
        y += 1
        return LAYER(z), z

    def detach_twice(x):
        y = LAYER(x) if x.sum() < 1e6 else x
        z = y.detach().detach()
        z.mul_(3)
        return LAYER(y), y

    def share(x):
        y = LAYER(x) if x.sum() < 1e6 else x
        z = torch.zeros_like(y)
        z.data = y.data
        y += 1
        return LAYER(z), z

    def split(x):
        y = LAYER(x) if x.sum() < 1e6 else x
        first, _ = y.chunk(2, 1)
        first.mul_(3)
        return LAYER(y), y

    for run in (detach, detach_twice, share, split):
        converted = rq.torch.convert(calibrate(run, [UP, DOWN, 2 * UP]))
        for x in (UP, DOWN):
            with torch.no_grad():
                want, got = run(x), converted(x)
            assert sqnr(want, got) > 20, run.__name__


RETURNING = {
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(-1).reshape(8, 8),
    "to": lambda y: y.to(torch.float32),
    "dropout": lambda y: nn.functional.dropout(y, 0.5, False),
    "detach": lambda y: y.contiguous().detach(),
    "clone": lambda y: y.clone(),
}


@pytest.mark.parametrize("copies", [(), (0,)])
@pytest.mark.parametrize("name", RETURNING)
def test_aliases__of_functions_that_copy_at_times(name, copies):
    """What they return shows the memory of what they are given, is that itself, or is another
    tensor, by its strides: it follows what is written, or does not, as in PyTorch. Copies are
    copies also where compiled code computes nothing for them.
    """
    layer = nn.Linear(8, 8)

    def run(x):
        y, rows = layer(x), []
        for i in range(3):
            source = y.t() if i in copies else y
            z = RETURNING[name](source)
            source += 1
            rows += [layer(z), z.clone()]
        return rows if x.sum() < 1e6 else x

    square, other = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(1, 0, 64).reshape(8, 8)
    converted = rq.torch.convert(calibrate(run, [square, other]))
    for x in (square, other):
        with torch.no_grad():
            for want, got in zip(run(x), converted(x), strict=True):
                assert sqnr([want], [got]) > 20


def test_aliases__of_a_tensor_that_is_returned_as_it_is_stay_in_the_run():
    """Nothing is written into another part's tensor: such a function costs no run."""

    def run(x):
        y = LAYER(x).contiguous()
        z = torch.relu_(nn.functional.dropout(y, 0.5, False))
        return (LAYER(z), y) if x.sum() < 1e6 else x

    converted = rq.torch.convert(calibrate(run, [UP, DOWN]))
    first = converted.regions[0]
    assert [site.operator for site in first.region.sites][:4] == [
        "linear", "contiguous", "dropout", "relu_",
    ]  # fmt: skip
    with torch.no_grad():
        want, got = run(UP), converted(UP)
    assert sqnr(want, got) > 20
    assert got[1].min() >= 0, "the same tensor"
    dropout = nn.Dropout()  # a module that is taken at once does so, too
    dropout.eval()

    def call(x):
        y = LAYER(x)
        z = dropout(y)
        y += 1
        return LAYER(z) if x.sum() < 1e6 else x

    converted = rq.torch.convert(calibrate(call, [UP, DOWN]))
    for _ in range(3):
        with torch.no_grad():
            assert sqnr([call(UP)], [converted(UP)]) > 20


def test_autocast__around_the_converted_model_is_left():
    """PyTorch's part of it has the dtypes of calibration."""

    def run(x):
        y = LAYER(x) if x.sum() < 1e6 else x
        return LAYER(y @ y.t() @ y)

    mapping = rq.QConfigMapping().set_object_type("matmul", None)
    prepared = rq.torch.prepare(run, (UP,), effort="fast", qconfig_mapping=mapping)
    prepared(DOWN)
    converted = rq.torch.convert(prepared)
    want = converted(UP)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = converted(UP)
        assert torch.is_autocast_enabled("cpu")
    assert got.dtype is torch.float32
    assert torch.equal(got, want)


def test_autocast__stays_in_pytorch_and_says_so():
    def run(x):
        y = LAYER(x) if x.sum() < 1e6 else x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = LAYER(y)
        return LAYER(z.float()), z

    prepared = calibrate(run, [UP, DOWN])
    tape = prepared._tapes[0]
    (value,) = next(step for step in tape.steps if step.is_drawn).results
    assert prepared._file.read(tape.stored[value]).dtype is torch.bfloat16, "what really came"
    converted = rq.torch.convert(prepared)
    with torch.no_grad():
        want, got = run(UP), converted(UP)
    assert [t.dtype for t in got] == [t.dtype for t in want] == [torch.float32, torch.bfloat16]
    assert sqnr(want, got) > 20
    (row,) = [row for row in converted.ledger.rows if "autocast" in row.reason]
    assert row.op == "linear"


def test_script_module__runs_as_it_is():
    script = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.script, self.linear = script, nn.Linear(8, 8)

        def forward(self, x):
            x = self.script(self.linear(x))
            return self.linear(x) if x.sum() < 1e6 else x

    model = seed(Holding)
    converted = rq.torch.convert(calibrate(model, [UP, DOWN]))
    assert sqnr(run_float(model, [UP]), [converted(UP)]) > 20


def test_writes__converted_model_follows():
    model = seed(Writing)
    converted = rq.torch.convert(calibrate(model, [UP, DOWN, 3 * UP, 2 * DOWN]))
    model.memory.zero_()
    model.calls = 0
    twin = seed(Writing)
    twin.load_state_dict(model.state_dict())
    for x in (UP, 2 * UP, DOWN):
        torch.manual_seed(1)
        (want,) = run_float(twin, [x])
        torch.manual_seed(1)
        got = converted(x)
        assert torch.equal(got[1], want[1]), "state is exact: nothing quantized came into it"
        assert sqnr([want[0]], [got[0]]) > 20
    reasons = {row.op: row.reason for row in converted.ledger.rows if not row.quantized}
    assert "random" in reasons["rand_like"]
    assert "writes" in reasons["mul_"]


def test_sizes__that_differ_in_calibration_are_free():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            y = torch.relu(self.linear(x))
            return self.out(y) if y.sum() > 0 else y

    model = seed(Growing)
    inputs = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (2, 3, 6)]
    converted = rq.torch.convert(calibrate(model, inputs))
    (test,) = draw_images(1, 3)
    test = test.reshape(-1, 8)
    assert len(test) not in (2, 3, 6)
    assert sqnr(run_float(model, [test]), [converted(test)]) > 25


def test_mapping__names_are_module_paths():
    model = seed(Branch)
    mapping = (
        rq.QConfigMapping()
        .set_global(rq.get_backend_config("x86").default_qconfig)
        .set_module_name("second", None)
    )
    prepared = calibrate(model, [UP, DOWN], qconfig_mapping=mapping, backend="x86")
    rows = {row.name: row for row in rq.torch.convert(prepared).ledger.rows}
    assert rows["first"].quantized
    assert rows["third"].quantized
    assert not rows["second.linear"].quantized
    assert "module_name 'second'" in rows["second.linear"].reason

    mapping = mapping.set_module_name("fourth", None)
    prepared = calibrate(model, [UP, DOWN], qconfig_mapping=mapping, backend="x86")
    with pytest.raises(ConfigError, match=r"'fourth'.* matches no operator.*first"):
        rq.torch.convert(prepared)


def test_refused_operator__stays_in_pytorch_and_cuts_the_run():
    def run(x):
        x = torch.relu(LAYER(x))
        x = torch.special.bessel_j0(x)
        return LAYER(x), x.sum().item()

    prepared = rq.torch.prepare(run, (UP,), effort="fast")
    prepared(DOWN)
    converted = rq.torch.convert(prepared)
    assert len(converted.regions) == 2
    (row,) = [row for row in converted.ledger.rows if "bessel" in row.op]
    assert "Not supported" in row.reason
    assert row.advice
    with torch.no_grad():
        expected = run(UP)
    got = converted(UP)
    assert sqnr([expected[0]], [got[0]]) > 25
    assert got[1] == pytest.approx(expected[1], rel=0.05)


@pytest.mark.parametrize(
    ("first", "other"), [(2, 2.0), (1, True), (0.0, -0.0), ((0, 1), [0, 1]), (None, 0)]
)
def test_arguments__are_equal_to_the_type(first, other):
    """What Python takes for equal may be another operator: `x * 2.0` of integers gives floats."""

    def template(value):
        return ((Slot(0), value), {"key": [value]})

    x = torch.ones(2)
    assert is_equal(template(first), template(first))
    assert not is_equal(template(first), template(other))
    flat = FlatArguments.of(((Slot(0), first), {"key": 3}))
    if flat is not None:
        for _ in range(2):  # the second time at once
            assert flat.match((x, first), {"key": 3})[0] is x
        assert flat.match((x, other), {"key": 3}) is None
        assert flat.match((x, first), {"key": 3.0}) is None


def test_arguments__number_of_another_type_is_named():
    def run(x, counts, factor):
        counts = counts * factor
        return LAYER(x * counts) if x.sum() < 1e6 else x

    counts = torch.full((8,), 3)
    prepared = rq.torch.prepare(run, (UP, counts, 2), effort="fast")
    prepared(DOWN, counts, 2)
    converted = rq.torch.convert(prepared)
    with torch.no_grad():
        assert sqnr(run(UP, counts, 2), converted(UP, counts, 2)) > 20
    with pytest.raises(ModelError, match=r"mul .*or constants, that calibration never saw"):
        converted(UP, counts, 2.0)


# --- Small parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantize_tensor__bits_of_the_operator(dtype):
    """At a boundary, in PyTorch, what `qnn.quantize` computes; also ties and beyond the range."""
    from relayquant.base.qtypes import QParams
    from relayquant.ir.reference.qnn import quantize

    scale, zero = np.float32(0.1), np.int32(7)
    x = np.concatenate([np.arange(-40, 40, 0.05), [1e9, -1e9, 0.0, np.nan, np.inf]]).astype(
        "float32"
    )
    got = quantize_tensor(torch.from_numpy(x), QParams(scale, zero, dtype)).numpy()
    np.testing.assert_array_equal(got, quantize(x, scale, zero, out_dtype=dtype))


def test_convert__says_what_it_takes():
    with pytest.raises(ConfigError, match=r"takes the result of prepare, .*, got Residual"):
        rq.torch.convert(Residual(4))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda layer, x: torch.vmap(layer)(x),
        lambda layer, x: torch.func.grad(lambda y: layer(y).sum())(x),
        lambda layer, x: torch.autograd.grad(layer(x.requires_grad_()).sum(), x)[0],
    ],
    ids=["vmap", "func.grad", "autograd.grad"],
)
def test_prepare__names_the_operator_of_a_gradient(differentiate):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            with torch.enable_grad():
                return differentiate(self.layer, x.clone())

    with pytest.raises(ModelError, match=r"test_define_by_run.py:\d+, .* computes a gradient, or"):
        rq.torch.prepare(Model(), (torch.ones(2, 4),))
