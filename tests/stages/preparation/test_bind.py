"""Parameters become constants; the paths of modules in their names select what reads them."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op
from tvm.relax.frontend import nn

import relayquant as rq
from relayquant.ir.rewrite.bind import describe_weights
from relayquant.ir.rewrite.editor import Editor
from relayquant.ir.rewrite.function import make_main
from relayquant.ir.rewrite.moves import MOVES


class Block(nn.Module):
    def __init__(self) -> None:
        self.fc = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.out(nn.op.relu(self.fc(x)))


class Network(nn.Module):
    """Two blocks, and a layer that is used twice."""

    def __init__(self) -> None:
        self.block1 = Block()
        self.block2 = Block()
        self.tied = nn.Linear(16, 16, bias=False)

    def main(self, x):
        x = nn.op.relu(self.block2(self.block1(x)))
        return self.tied(nn.op.relu(self.tied(x)))


@pytest.fixture(scope="module")
def network():
    """(module, its parameters by path, data)."""
    mod, named = Network().export_tvm({"main": {"x": nn.spec.Tensor([4, 16], "float32")}})
    rng = np.random.default_rng(2)
    params = {
        name: (rng.standard_normal(param.shape) * 0.3).astype("float32") for name, param in named
    }
    return mod, params, [rng.standard_normal((4, 16)).astype("float32") for _ in range(8)]


def run_network(params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What `Network` says, in double precision."""
    p = {name: value.astype("float64") for name, value in params.items()}
    for block in ("block1", "block2"):
        hidden = np.maximum(x @ p[f"{block}.fc.weight"].T + p[f"{block}.fc.bias"], 0)
        x = hidden @ p[f"{block}.out.weight"].T
    return np.maximum(np.maximum(x, 0) @ p["tied.weight"].T, 0) @ p["tied.weight"].T


def test_describe_weights__module_paths_select_layers(network):
    mod, params, data = network
    mapping = rq.QConfigMapping().set_global(rq.get_backend_config("generic").default_qconfig)
    mapping = mapping.set_module_name("block1", None)
    qmod = rq.quantize(mod, params, data, backend="generic", qconfig_mapping=mapping)
    rows = [row for row in rq.ledger(qmod).to_dict()["operators"] if row["op"] == "matmul"]
    assert [(row["sources"][0], row["quantized"]) for row in rows] == [
        ("block1.fc", False),
        ("block1.out", False),
        ("block2.fc", True),
        ("block2.out", True),
        ("tied", True),
        ("tied", True),
    ]
    want = run_network(params, data[0])
    np.testing.assert_allclose(
        rq.reference.run(mod, [data[0], *params.values()])[0], want, 1e-4, 1e-4
    )
    error = np.square(rq.reference.run(qmod, [data[0]])[0] - want).sum() / np.square(want).sum()
    assert error < 1e-2


@pytest.mark.parametrize("name", MOVES)
def test_describe_weights__a_weight_is_moved_on_its_way_to_its_reader(name):
    move = {
        "relax.reshape": lambda weight: op.reshape(weight, (32,)),
        "relax.flatten": op.flatten,
        "relax.nn.batch_flatten": op.nn.batch_flatten,
        "relax.squeeze": op.squeeze,
        "relax.expand_dims": lambda weight: op.expand_dims(weight, 0),
        "relax.permute_dims": op.permute_dims,
    }[name]
    weight = relax.Var("block.fc.weight", relax.TensorType((1, 8, 4), "float32"))
    mod = make_main([weight], lambda builder: op.nn.relu(builder.emit(move(weight))))
    rows = describe_weights(Editor(mod), {weight.name: np.zeros((1, 8, 4), "float32")})
    assert [(row["node"], row["op"]) for row in rows.values()] == [("block.fc", "relax.nn.relu")]
