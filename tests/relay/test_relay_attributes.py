"""Every attribute that an operator written in Relay may have is in the text, or it is refused."""

from __future__ import annotations

import numpy as np
import pytest
from attribute_calls import VARIED, build_models, pick_result

import relayquant as rq
from relayquant.flow.testing.draw import draw_inputs
from relayquant.relay import from_text, to_text

#: attributes that Relay, or its writer, has no form for
REFUSED = {
    "out_layout",
    "roi extrapolation_value",
    "mode=nan",
    "pad_mode=replicate",
    "pad_mode=circular",
}
#: operators that are not written at all; a resize keeps its dtype
UNWRITTEN = ("relax.gather_elements", "relax.gather_nd", "relax.tile")
REFUSED_OF = {
    "relax.image.resize2d": {"out_dtype=float16", "out_dtype=float64", "rounding_method=round"},
    # Relay has none: it is written as a formula, that of the default values.
    "relax.nn.softplus": {"beta=-0.7", "threshold=-19.7"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", VARIED)
def test_attributes__are_written_or_refused(name):
    builder, values, mod, _ = build_models(name)
    inputs = draw_inputs(builder, 1)[0]
    expected = rq.reference.run(mod, inputs)
    refused = set()
    for index, what in enumerate(values):
        try:
            read = from_text(*to_text(pick_result(mod, index)))
        except rq.RelayQuantError:
            refused.add(what)
            continue
        fed = {param.name: inputs[param.name] for param in read["main"].params}
        (have,) = rq.reference.run(read, fed)
        np.testing.assert_allclose(have, expected[index], 1e-4, 1e-4, err_msg=what)
    wanted = values.keys() if name in UNWRITTEN else REFUSED & values.keys()
    assert refused == wanted | REFUSED_OF.get(name, set())
