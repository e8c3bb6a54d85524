"""torch.export programs that do more than to compute their outputs: what they change is state,
other effects are refused by name.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.errors import ModelError

torch = pytest.importorskip("torch", reason="pip install torch")
nn = torch.nn


class Holder(nn.Module):
    """What can change: buffers in and out of the state dict, a parameter; and the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.plain = torch.zeros(3)


def make_module(forward):
    return type("Module", (Holder,), {"forward": forward})()


def add_to_buffer(self, x):
    self.state.add_(x)
    return x + self.state


def add_without_gradients(self, x):
    with torch.no_grad():
        self.state.add_(x)
    return x + self.state


def assign_buffer(self, x):
    self.scratch = self.scratch + x
    return self.scratch * 2


def write_to_view(self, x):
    self.state[1:].copy_(x[1:])
    return x + self.state


def write_position(self, x):
    """As the static cache of a language model does."""
    self.state.index_copy_(0, torch.tensor([1]), x[:1])
    return self.state + x


def write_before_branch(self, x):
    self.state.add_(x)
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def count(self, x):
    """Changes what no output reads."""
    self.state += 1
    return x * 2


def change_both(self, x):
    self.state.add_(x)
    self.scratch.add_(x)
    x.mul_(2)
    return self.state + self.scratch


def scale_parameter(self, x):
    with torch.no_grad():
        self.weight.mul_(2)
    return x + self.weight


def write_to_input(self, x):
    x.add_(1)
    return x * 2


def write_to_view_of_input(self, x):
    x[:2][0] = 5
    return x * 2


def write_to_constant(self, x):
    self.plain.add_(x)
    return x + self.plain


#: program -> names of what it changes
CHANGES = {
    add_to_buffer: ["state"],
    add_without_gradients: ["state"],
    assign_buffer: ["scratch"],
    write_to_view: ["state"],
    write_position: ["state"],
    count: ["state"],
    change_both: ["state", "scratch", "x"],
    scale_parameter: ["weight"],
    write_to_input: ["x"],
    write_to_view_of_input: ["x"],
}
REFUSED = {
    write_before_branch: "is control flow",
    write_to_constant: r"Constant plain is mutated",
}


def export(module, *shape):
    return torch.export.export(module, (torch.ones(*shape or (3,)),))


@pytest.mark.parametrize("forward", CHANGES, ids=lambda forward: forward.__name__)
@pytest.mark.filterwarnings("ignore:The program changes its input")
def test_program__what_it_changes_is_state(forward):
    module = make_module(forward).eval()
    mod, _ = rq.load(export(module))
    values = rq.get_state(mod)
    assert [value.name for value in values] == CHANGES[forward]
    state = {value.name: value.value for value in values}
    for step in range(3):
        x = np.float32([1, 2, 3]) + step
        given = torch.from_numpy(state.get("x", x)).clone()
        changed = {"x": given, **dict(module.named_parameters()), **dict(module.named_buffers())}
        inputs = [] if "x" in state else [x]
        got, *news = rq.reference.run(mod, [*inputs, *state.values()])
        np.testing.assert_array_equal(got, module(given).detach().numpy())
        changed |= dict(module.named_buffers())
        state = dict(zip(state, news, strict=True))
        for name, new in state.items():
            np.testing.assert_array_equal(new, changed[name].detach().numpy())


def test_program__a_buffer_of_bfloat16_is_state(tmp_path):
    """numpy has this dtype from elsewhere: PyTorch makes no array of it."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.tensor([0.5, -1.25, 3], dtype=torch.bfloat16))

        def forward(self, x):
            self.total.copy_(self.total + x.to(torch.bfloat16))
            return self.total.float()

    module = Sum().eval()
    mod, _ = rq.load(torch.export.export(module, (torch.zeros(3),)))
    rq.save_module(mod, tmp_path / "m.rqm")
    executors = [rq.Executor(rq.compile(each)) for each in (mod, rq.load(tmp_path / "m.rqm")[0])]
    for step in range(3):
        x = torch.tensor([0.25, -4.5, 8]) * step
        expected = module(x).numpy()
        for executor in executors:
            np.testing.assert_array_equal(executor.run("main", [x.numpy()])[0], expected)


def test_program__an_input_that_it_changes_is_warned_of():
    with pytest.warns(UserWarning, match=r"changes its input 'x', .* a copy \(x = x.clone\(\)\)"):
        rq.load(export(make_module(write_to_input)))


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_program__that_changes_something_refused(forward):
    with pytest.raises(ModelError, match=REFUSED[forward]):
        rq.load(export(make_module(forward).eval()))


def test_program__the_module_keeps_its_own_state(tmp_path):
    """The export's values are the initial ones; neither the module nor the program is changed."""
    module = make_module(add_to_buffer)
    module.state += 2
    program = export(module).run_decompositions({})
    assert program.graph_signature.buffers_to_mutate
    torch.export.save(program, tmp_path / "model.pt2")
    for given in (program, program, tmp_path / "model.pt2"):
        mod, _ = rq.load(given)
        executor = rq.Executor(rq.compile(mod))
        for wanted in (4, 5):
            (got,) = executor.run("main", [np.ones(3, "float32")])
            np.testing.assert_array_equal(got, np.full(3, wanted))
    np.testing.assert_array_equal(module.state, 2)


def test_program__a_tensor_that_it_reads_as_buffer_and_as_constant():
    """As the static cache of transformers, whose layers are no modules."""

    class Cache:
        def __init__(self):
            self.keys = torch.zeros(4)

        def write(self, at, x):
            self.keys.index_copy_(0, at, x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = Cache()
            self.register_buffer("keys", self.cache.keys, persistent=False)

        def forward(self, x, at):
            self.cache.write(at, x)
            return self.keys + 1

    x, at = torch.ones(1), torch.tensor([1])
    mod, _ = rq.load(torch.export.export(Model().eval(), (x, at)))
    executor = rq.Executor(rq.compile(mod))
    for place in range(4):
        (got,) = executor.run("main", [np.float32([place + 5]), np.array([place])])
        np.testing.assert_array_equal(got[: place + 1], np.arange(6, 7 + place))
        np.testing.assert_array_equal(got[place + 1 :], 1)


class Mixer(nn.Module):
    """Writes into `whole`, into `part` and into a tensor that it holds as no buffer."""

    def __init__(self, whole, part, held):
        super().__init__()
        self.register_buffer("whole", whole)
        self.register_buffer("part", part)
        self.held = held

    def forward(self, x):
        self.part.mul_(0.5).add_(x.reshape(self.part.shape))
        y = self.whole + 1
        self.whole[1].mul_(y[1])
        return y, self.part * 2, self.held + 1


WHOLE = torch.arange(16.0).reshape(4, 4)
#: how two tensors share memory -> the second one
SHARED = {
    "the same tensor": lambda whole: whole[:],
    "rows": lambda whole: whole[1:3],
    "another shape": lambda whole: whole.view(2, 8),
    "elements of a row": lambda whole: whole[1, 1:3],
}


@pytest.mark.parametrize("name", SHARED)
def test_program__tensors_that_share_memory_are_one_state(name):
    whole = WHOLE.clone()
    part = SHARED[name](whole)
    module = Mixer(whole, part, whole.view(16)).eval()
    example = torch.ones(part.numel())
    mod, _ = rq.load(torch.export.export(module, (example,)))
    assert [value.name for value in rq.get_state(mod)] == ["whole"]
    executor = rq.Executor(rq.compile(mod))
    for step in range(3):
        x = torch.linspace(-1, step, part.numel())
        for got, want in zip(executor.run("main", [x.numpy()]), module(x), strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    np.testing.assert_allclose(executor.state["whole"], whole.numpy(), rtol=1e-6)


def test_program__two_modules_with_one_buffer():
    class Mean(nn.Module):
        def __init__(self, mean):
            super().__init__()
            self.register_buffer("mean", mean)

        def forward(self, x):
            return self.mean.mul_(0.5).add_(x) * 2

    mean = torch.ones(3)
    module = nn.Sequential(Mean(mean), nn.ReLU(), Mean(mean)).eval()
    mod, _ = rq.load(torch.export.export(module, (torch.ones(3),)))
    executor = rq.Executor(rq.compile(mod))
    for step in range(3):
        x = torch.tensor([1.0, -2.0, step])
        want = module(x).numpy()
        np.testing.assert_array_equal(executor.run("main", [x.numpy()])[0], want)


def test_program__memory_that_is_shared_in_another_order_is_refused():
    whole = torch.zeros(4, 4)
    module = Mixer(whole, whole.t()[:2], torch.zeros(1)).eval()
    program = torch.export.export(module, (torch.ones(8),))
    with pytest.raises(ModelError, match="changes 'whole' or 'part', which share memory"):
        rq.load(program)


def test_quantize__a_module_with_buffers_that_change():
    module = make_module(add_to_buffer).eval()
    qmod = rq.torch.quantize(module, (torch.ones(3),), [np.ones(3, "float32")])
    assert [value.name for value in rq.get_state(qmod)] == ["state"]
    np.testing.assert_array_equal(module.state, 0)


STATISTICS = (
    r"the running statistics of '0'(, '2')? \(training mode\) in each run. .*model.eval\(\)"
)
RANDOM = r"draws random numbers; .* in eval mode \(model.eval\(\)\)"
TRAINING = {
    "batch norm": (nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3)), STATISTICS),
    "instance norm": (nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)), STATISTICS),
    "dropout": (nn.Dropout(), RANDOM),
    "dropout of channels": (nn.Dropout1d(), RANDOM),
    "alpha dropout": (nn.AlphaDropout(), RANDOM),
    "rrelu": (nn.RReLU(), RANDOM),
    "recurrent dropout": (nn.LSTM(4, 4, 2, dropout=0.5), RANDOM),
    "attention": (nn.TransformerEncoderLayer(4, 2, batch_first=True), RANDOM),
}


@pytest.mark.parametrize("name", TRAINING)
def test_module_in_training_mode__refused_and_taken_in_evaluation_mode(name):
    module, message = TRAINING[name]
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32"))
    with pytest.raises(ModelError, match=message):
        rq.load(export(module.train(), 2, 3, 4))
    mod, _ = rq.load(export(module.eval(), 2, 3, 4))
    expected = module(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = rq.reference.run(mod, [x.numpy()])[0]
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_program__that_changes_its_own_values_only_is_taken():
    def forward(self, x):
        y = x.clone()
        y.add_(self.weight)
        t = torch.tensor([1.0, 2.0, 3.0])
        t[1:].mul_(y[:2])
        return y, t, self.state

    module = make_module(forward).eval()
    x = np.asarray([1.0, -2.0, 3.0], "float32")
    mod, _ = rq.load(export(module))
    for got, expected in zip(rq.reference.run(mod, [x]), module(torch.from_numpy(x)), strict=True):
        np.testing.assert_array_equal(got, expected.detach().numpy())


@pytest.mark.parametrize("is_clone", [False, True])
def test_buffers__two_copies_of_one_value(is_clone):
    """PyTorch cannot decompose them without a clone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("first", torch.zeros(4))
            self.register_buffer("second", torch.zeros(4))

        def forward(self, x):
            total = self.first + x
            self.first.copy_(total)
            self.second.copy_(total.clone() if is_clone else total)
            return total * 2

    program = torch.export.export(Model().eval(), (torch.ones(4),))
    if is_clone:
        assert len(rq.get_state(rq.load(program)[0])) == 2
        return
    with pytest.raises(ModelError, match=r"'first' and 'second' are written.*value\.clone\(\)"):
        rq.load(program)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.linalg.inv, r"aten\.linalg_inv_ex\.default \(nodes 'linalg_inv_ex'\)"),
        (torch.linalg.cholesky, r"aten\.linalg_cholesky_ex\.default \(nodes "),
        (lambda x: torch.linalg.solve(x, x), r"aten\._linalg_solve_ex\.default \(nodes "),
        (torch.linalg.qr, r"aten\.linalg_qr\.default \(nodes "),
    ],
)
def test_program__an_operator_whose_success_is_checked_is_named(function, operator):
    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    program = torch.export.export(Module(), (torch.eye(3),))
    with pytest.raises(ModelError, match=rf"1 operator of the model: {operator}"):
        rq.load(program)


def test_program__that_checks_values_is_read_without_the_check():
    class Module(nn.Module):
        def forward(self, x):
            torch._check((x > -100).all().item())
            return 2 * x

    program = torch.export.export(Module(), (torch.ones(3),))
    (found,) = rq.reference.run(rq.load(program), [np.float32([1, -2, 3])])
    np.testing.assert_array_equal(found, [2, -4, 6])
