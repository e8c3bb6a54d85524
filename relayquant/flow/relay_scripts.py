"""Relay scripts: calls of `relay.quantize` -> calls of `quantize`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tvm

from relayquant.data.item import to_array
from relayquant.errors import DataError
from relayquant.flow.quantizer import quantize as run_quantizer
from relayquant.flow.steps import calibrate, convert_to_reference, prepare
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
            dataset: Samples, as for `rq.quantize`; None with a global scale. A generator is read
                once and its samples are kept in memory, as in Relay.

        Returns:
            The integer module. With `do_simulation=True` it is the reference form, which rounds in
            float.

        Raises:
            DataError: samples are needed and there are none.
            ModelError: the module or the parameters do not belong to a model.
        """
        config = current_qconfig()
        if dataset is None and config.needs_data:
            raise DataError(
                f"relay.quantize: calibrate_mode={config.calibrate_mode!r} measures ranges on "
                "data, and dataset is None. Pass dataset=, or use calibrate_mode='global_scale', "
                "which needs none.",
                code="RQ303",
            )
        settings = replace(config, do_simulation=False).settings
        if isinstance(dataset, Iterator):
            dataset = [copy_sample(sample, index) for index, sample in enumerate(dataset)]
        if config.do_simulation:
            return convert_to_reference(calibrate(prepare(mod, params, **settings), dataset))
        return run_quantizer(mod, params, dataset, **settings)

    quantize = __call__
    qconfig = staticmethod(qconfig)
    current_qconfig = staticmethod(current_qconfig)

    def __getattr__(self, name: str) -> Any:
        successor = SUCCESSORS.get(name)
        advice = f"Use {successor}." if successor else "It has quantize, qconfig, current_qconfig."
        raise AttributeError(f"relay.quantize of relayquant has no {name!r}. {advice}")


def copy_sample(sample: Any, index: int) -> Any:
    """Copy the arrays of a sample {input: array}. A generator may fill the same arrays again."""
    if not isinstance(sample, Mapping):
        return sample
    where = f"Sample {index}"
    return {name: np.array(to_array(value, str(name), where)) for name, value in sample.items()}


quantize = RelayQuantize()
