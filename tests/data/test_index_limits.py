"""Data with an index beyond what the model selects from is refused, as PyTorch refuses it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import make_onnx

import relayquant as rq
from relayquant.data.item import describe_inputs
from relayquant.stages.preparation import prepare_module

#: what reaches the table, and whether any number is allowed
INDICES = {
    "as given": (("Gather", "i"), 10),
    "reshaped": (("Reshape", "i", "flat"), 10),
    "cast": (("Cast", "i"), 10),
    "changed before": (("Abs", "i"), None),
}


def load_embedding(kind):
    operator, *operands = INDICES[kind][0]
    table = np.random.default_rng(0).standard_normal((10, 16)).astype("float32")
    weight = np.random.default_rng(1).standard_normal((16, 16)).astype("float32")
    nodes, index = [], "i"
    if operator != "Gather":
        attributes = {"to": TensorProto.INT32} if operator == "Cast" else {}
        nodes.append(helper.make_node(operator, operands, ["j"], **attributes))
        index = "j"
    nodes.append(helper.make_node("Gather", ["table", index], ["rows"]))
    nodes.append(helper.make_node("MatMul", ["rows", "weight"], ["y"]))
    constants = {"table": table, "weight": weight, "flat": np.int64([4])}
    return rq.load(make_onnx(nodes, {"i": ("int64", [1, 4])}, {"y": None}, constants))


@pytest.mark.parametrize("kind", INDICES)
def test_places__are_found_before_and_after_preparation(kind):
    mod, params = load_embedding(kind)
    prepared = prepare_module(mod, params)
    for each in (prepared, prepare_module(prepared)):
        (info,) = describe_inputs(each)
        assert info.places == INDICES[kind][1]


@pytest.mark.parametrize("wrong", [10, -11])
def test_data__with_an_index_beyond_the_table_is_refused(wrong):
    mod, params = load_embedding("as given")
    data = [np.int64([[0, 1, 2, 9]])] * 3 + [np.int64([[0, 1, 2, wrong]])]
    message = rf"Sample 3: input 'i' holds the index {wrong}; the model selects from 10 places"
    for use in (
        lambda: rq.quantize(mod, params, data, effort="fast"),
        lambda: rq.calibrate(rq.prepare(mod, params, effort="fast"), data),
        lambda: rq.compress_weights(mod, params, bits=8, group_size=16, dataset=data),
    ):
        with pytest.raises(rq.errors.DataError, match=message):
            use()
    findings = rq.lint(mod, params, data)
    assert message[:30] in findings[0].what


def test_data__indices_from_the_end_are_taken():
    mod, params = load_embedding("as given")
    rq.quantize(mod, params, [np.int64([[-10, -1, 0, 9]])] * 4, effort="fast", guard="off")


def test_training__refuses_an_index_beyond_the_table():
    """PyTorch's own module raises an error, too."""
    torch = pytest.importorskip("torch", reason="pip install torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = torch.nn.Embedding(10, 16), torch.nn.Linear(16, 4)

        def forward(self, index):
            return self.layer(self.table(index))

    index, model = torch.tensor([[0, 1, 2, 9]]), Model().eval()
    trained = rq.torch.prepare_qat(model, (index,), calibration_dataset=[index.numpy()] * 4)
    trained(index)
    with pytest.raises(IndexError):
        model(index + 1)
    with pytest.raises(rq.errors.DataError, match=r"holds indices from 1 to 10; .* 10 places"):
        trained(index + 1)
