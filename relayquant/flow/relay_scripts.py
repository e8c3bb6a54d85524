"""Relay scripts: calls of `relay.quantize` -> calls of `quantize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm

from relayquant.flow.quantizer import quantize as run_quantizer
from relayquant.relay.qconfig import current_qconfig, qconfig

#: names of `tvm.relay.quantize` that are not supported -> what to use instead
SUCCESSORS: Mapping[str, str] = {
    "QConfig": "relayquant.relay.RelayQConfig",
    "annotate": "relayquant.prepare",
    "calibrate": "relayquant.calibrate",
    "partition": "relayquant.prepare",
    "prerequisite_optimize": "relayquant.prepare",
    "realize": "relayquant.lower",
}


class RelayQuantize:
    """`relay.quantize`, which is callable. In Relay it is a module with a function of the same
    name.

        with relay.quantize.qconfig(skip_conv_layers=[0]):
            qmod = relay.quantize.quantize(mod, params, dataset)
    """

    def __call__(
        self, mod: tvm.IRModule, params: Mapping[str, Any] | None = None, dataset: Any = None
    ) -> tvm.IRModule:
        """Quantize as `relay.quantize.quantize` would, by the options of the innermost `with
        qconfig(...)`.

        Args:
            mod: A Relax module, for example from `rq.load("model.relay")`.
            params: {name: array} for parameters of main, or None if they are bound.
            dataset: Samples, as for `rq.quantize`; None with a global scale.

        Raises:
            DataError: samples are needed and there are none.
            ModelError: the module or the parameters do not belong to a model.
        """
        return run_quantizer(mod, params, dataset, **current_qconfig().settings)

    quantize = __call__
    qconfig = staticmethod(qconfig)
    current_qconfig = staticmethod(current_qconfig)

    def __getattr__(self, name: str) -> Any:
        successor = SUCCESSORS.get(name)
        advice = f"Use {successor}." if successor else "It has quantize, qconfig, current_qconfig."
        raise AttributeError(f"relay.quantize of relayquant has no {name!r}. {advice}")


quantize = RelayQuantize()
