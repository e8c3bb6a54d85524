"""Weights alone in few bits, of modules as PyTorch exports them: a table that is the classifier
too, one product for queries, keys and values, sequences of any length.
"""

from __future__ import annotations

import numpy as np
import pytest
from tvm.ir import Call

import relayquant as rq
from relayquant.errors import ModelError
from relayquant.ir.dialect.legality import iterate_bindings
from relayquant.ir.rewrite.graph import call_name

torch = pytest.importorskip("torch", reason="pip install torch")

VOCABULARY, WIDTH, HEADS = 50, 64, 4
IDS = torch.arange(7)[None]


class Block(torch.nn.Module):
    """Attention over rows of a table, and scores by the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = (torch.nn.Linear(WIDTH, n * WIDTH) for n in (3, 1))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        batch, length, _ = x.shape

        def split(part):
            return part.reshape(batch, length, HEADS, -1).transpose(1, 2)

        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH)))


@pytest.fixture(scope="module")
def modules():
    """(float model, {whether the length is symbolic: module of 4 bits})."""
    torch.manual_seed(0)
    model = Block().eval()
    length = {"ids": {1: torch.export.Dim("n", min=2, max=64)}}
    found = {}
    for is_symbolic in (False, True):
        shapes = length if is_symbolic else None
        program = torch.export.export(model, (IDS,), dynamic_shapes=shapes)
        found[is_symbolic] = rq.compress_weights(*rq.load(program), bits=4, embedding_bits=8)
    return model, found


def run(mod, ids) -> np.ndarray:
    return rq.reference.run(mod, [ids.numpy()])[0]


def test_torch__symbolic_and_static_lengths_agree(modules):
    model, found = modules
    np.testing.assert_array_equal(run(found[True], IDS), run(found[False], IDS))
    for length in (2, 7, 64):
        ids = torch.arange(length)[None] % VOCABULARY
        exact = model(ids).detach().numpy()
        assert np.abs(run(found[True], ids) - exact).max() < 0.1 * np.abs(exact).max()


def test_torch__a_table_that_is_the_classifier_is_held_once(modules):
    _, found = modules
    for mod in found.values():
        calls = [
            binding.value
            for binding in iterate_bindings(mod["main"])
            if isinstance(binding.value, Call)
            and call_name(binding.value).startswith("relax.qnn.grouped")
        ]
        (taken,) = [call for call in calls if call_name(call).endswith("take")]
        products = [call for call in calls if call_name(call).endswith("dense")]
        assert [int(call.attrs.bits) for call in products] == [4, 4, 8]
        assert int(products[0].args[2].ty.shape[0]) == 3 * WIDTH  # queries, keys and values
        for one, other in zip(taken.args[1:], products[-1].args[2:], strict=True):
            assert one.value.same_as(other.value)


def test_torch__relay_has_no_weights_in_groups(modules):
    _, found = modules
    with pytest.raises(ModelError, match="7 values cannot be written in the Relay") as raised:
        rq.relay.to_text(found[False])
    assert str(raised.value).count("has no counterpart") == 7
    assert "grouped_take" in str(raised.value)
