"""What `load` gives, a pair (mod, params), is taken by every public function of a module."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import relayquant as rq
from relayquant.ir.rewrite.bind import Model


@I.ir_module
class Dense:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 16), "float32")) -> R.Tensor(
        (4, 16), "float32"
    ):
        with R.dataflow():
            h = R.matmul(x, w)
            y = R.nn.relu(h)
            R.output(y)
        return y


RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(8, 16)).astype("float32")}
BATCH = RNG.normal(size=(4, 8)).astype("float32")
DATA = [BATCH] * 4
PAIR = (Dense, PARAMS)
BOUND = tvm.relax.transform.BindParams("main", PARAMS)(Dense)
QMOD = rq.quantize(Dense, PARAMS, DATA, effort="fast", guard="off")
REFERENCE = rq.convert_to_reference(rq.calibrate(rq.prepare(Dense, PARAMS, effort="fast"), DATA))


def write(save: Callable[..., Any], mod: Any, path: Path) -> bytes:
    return Path(save(mod, path)).read_bytes()


def show(value: Any) -> str:
    """What of a result is to be equal: a module as text, all else as it is printed."""
    if isinstance(value, tvm.IRModule):
        return value.script(show_meta=True)
    return repr(value)


def run(executable: Any) -> list[str]:
    return [repr(np.asarray(out)) for out in rq.Executor(executable).run("main", [BATCH])]


#: name -> what is called with a model in two forms: params apart or bound, and in a pair
MODULE_AND_PARAMS: dict[str, Callable[[Any, Any], Any]] = {
    "rq.quantize": lambda mod, params: rq.quantize(mod, params, DATA, effort="fast", guard="off"),
    "rq.prepare": lambda mod, params: rq.prepare(mod, params, DATA).mod,
    "rq.compare": lambda mod, params: rq.compare(mod, params, QMOD, DATA),
    "rq.report": lambda mod, params: rq.report(mod, params, QMOD, DATA, rank=False).data.samples,
    "rq.lint": lambda mod, params: rq.lint(mod, params, DATA),
    "rq.analysis.measure_growth": lambda mod, params: rq.analysis.measure_growth(mod, params, DATA),
    "rq.equalize_layers": lambda mod, params: rq.equalize_layers(mod, params)[0],
    "rq.smooth_activations": lambda mod, params: rq.smooth_activations(mod, params, DATA)[0],
    "rq.compress_weights": lambda mod, params: rq.compress_weights(mod, params, group_size=None),
    "rq.torch.finetune": lambda mod, params: rq.torch.finetune(mod, params, DATA, steps=1),
    "rq.torch.from_relax": lambda mod, params: rq.torch.from_relax(mod, params),
}
#: the same of functions that take a module alone: the model bound, and in a pair
MODULE: dict[str, Callable[[Any, Path], Any]] = {
    "rq.compile": lambda mod, _: run(rq.compile(mod)),
    "rq.verify": lambda mod, _: rq.verify(mod, [BATCH]),
    "rq.export_onnx": lambda mod, path: write(rq.export_onnx, mod, path / "m.onnx"),
    "rq.export_bundle": lambda mod, path: Path(
        rq.export_bundle(mod, path / "deploy"), "bundle.json"
    ).read_text(),
    "rq.reference.run": lambda mod, _: rq.reference.run(mod, [BATCH]),
    "rq.reference.run_values": lambda mod, _: rq.reference.run_values(mod, [BATCH]),
    "rq.relay.to_text": lambda mod, _: rq.relay.to_text(mod),
}
#: the same of functions that take what was quantized, which `load` gives without parameters
QUANTIZED: dict[str, tuple[tvm.IRModule, Callable[[Any], Any]]] = {
    "rq.compare": (QMOD, lambda mod: rq.compare(Dense, PARAMS, mod, DATA)),
    "rq.ledger": (QMOD, rq.ledger),
    "rq.analysis.accumulator_report": (
        QMOD,
        lambda mod: rq.analysis.accumulator_report(mod, DATA),
    ),
    "rq.lower": (REFERENCE, rq.lower),
}
#: they make or edit modules, and are for authors of rules; a file that holds a module alone; the
#: description of a module's state; what takes an integer module to PyTorch
ALONE = {
    *("rq.extend.Emitter", "rq.PreparedModel", "rq.save_module", "rq.get_state", "rq.with_state"),
    *("rq.torch.as_module", "rq.torch.compare"),
}


def list_functions(
    name: str = "rq", module: types.ModuleType = rq
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, function) of everything public that can be called."""
    for each in getattr(module, "__all__", ()):
        value = getattr(module, each)
        if isinstance(value, types.ModuleType):
            yield from list_functions(f"{name}.{each}", value)
        elif callable(value):
            yield f"{name}.{each}", value


def takes_module(function: Callable[..., Any]) -> bool:
    called = function.__init__ if isinstance(function, type) else function
    try:
        hints = typing.get_type_hints(called)
    except (NameError, TypeError):
        return False
    names = inspect.signature(called).parameters
    return any("IRModule" in str(hint) for name, hint in hints.items() if name in names)


def test_table__has_every_public_function() -> None:
    pytest.importorskip("torch")
    found = {name for name, function in list_functions() if takes_module(function)}
    assert found == {*MODULE_AND_PARAMS, *MODULE, *QUANTIZED, *ALONE}


@pytest.mark.parametrize("name", MODULE_AND_PARAMS)
def test_pair__in_place_of_module_and_params(name: str) -> None:
    if "torch" in name:
        pytest.importorskip("torch")
    call = MODULE_AND_PARAMS[name]
    assert show(call(PAIR, None)) == show(call(Dense, PARAMS))
    with pytest.raises(rq.ConfigError, match=r"mod is a pair \(mod, params\), and params is given"):
        call(PAIR, PARAMS)


@pytest.mark.parametrize("name", MODULE)
def test_pair__is_bound_where_a_module_is_taken_alone(name: str, tmp_path: Path) -> None:
    call = MODULE[name]
    assert show(call(PAIR, tmp_path)) == show(call(BOUND, tmp_path))
    with pytest.raises(rq.ModelError, match=r"params has 'v', which main does not"):
        call((Dense, {"v": PARAMS["w"]}), tmp_path)


@pytest.mark.parametrize("name", QUANTIZED)
def test_pair__of_a_quantized_module(name: str) -> None:
    mod, call = QUANTIZED[name]
    assert show(call((mod, {}))) == show(call(mod)) == show(call((mod, None)))


@pytest.mark.parametrize("mod", [(Dense,), (Dense, [1]), (PARAMS, Dense)])
def test_pair__another_tuple(mod: Any) -> None:
    with pytest.raises(
        rq.ModelError, match=r"quantize: mod is .*; allowed: a tvm.IRModule, or a t"
    ):
        rq.quantize(mod, None, DATA)


def test_pair__is_what_load_gives(tmp_path: Path) -> None:
    path = rq.export_onnx(BOUND, tmp_path / "m.onnx")
    loaded: Model = rq.load(path)
    expected = rq.reference.run(BOUND, [BATCH])
    np.testing.assert_allclose(rq.reference.run(loaded, [BATCH])[0], expected[0], rtol=1e-6)
