"""An integer module as a `torch.nn.Module`, which can be called, copied and pickled."""

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch import nn

from relayquant.errors import DataError, ModelError, format_count
from relayquant.stages.compilation import compile
from relayquant.torch.define_by_run.executing import CompiledModule
from relayquant_runtime.vm_errors import read_argument_error


class IntegerModule(nn.Module):
    """A compiled integer module, from `relayquant.torch.as_module`.

    Attributes:
        mod: The integer module.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__()
        self.mod = mod
        self._compiled: CompiledModule | None = None

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Return the outputs for inputs of the module's shapes: one tensor, or a tuple.

        Raises:
            DataError: an input is missing or unknown, is no tensor, or has another shape or dtype.
            ModelError: PyTorch traces the call, to export it.
        """
        is_tracing = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        if torch.compiler.is_exporting() or is_tracing:
            raise ModelError(
                "The module runs compiled code, which PyTorch cannot trace. To deploy its "
                "attribute mod, call relayquant.compile(module.mod).export_library(path), or "
                "relayquant.export_onnx(module.mod, path).",
                code="RQ207",
            )
        main = self.mod["main"]
        params = main.params[: int(main.attrs.get("num_input", len(main.params)))]
        names = [param.name for param in params]
        given = dict(zip(names, inputs, strict=False))
        is_right = len(inputs) <= len(names) and not {*given} & {*named}
        given |= named
        is_right = is_right and {*given} == {*names}
        if not is_right or not all(isinstance(one, torch.Tensor) for one in given.values()):
            kinds = [type(one).__name__ for one in inputs]
            kinds += [f"{name}={type(one).__name__}" for name, one in named.items()]
            raise DataError(
                f"The module takes {format_count(len(names), 'tensor')} ({', '.join(names)}), by "
                f"position or by name, got {', '.join(kinds) or 'none'}.",
                code="RQ302",
            )
        if self._compiled is None:
            self._compiled = CompiledModule(compile(self.mod))
        tensors = [given[name] for name in names]
        try:
            results = self._compiled.call(tensors)
        except (RuntimeError, TypeError, ValueError) as error:
            fault = read_argument_error(error)
            if fault is None:
                raise
            tensor = tensors[fault.index]
            raise DataError(
                f"Input {fault.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; allowed: "
                f"({fault.type}). Convert it with tensor.to(torch.{fault.dtype}); for other sizes "
                "give dynamic_shapes= to relayquant.torch.quantize.",
                code="RQ302",
            ) from error
        return results[0] if len(results) == 1 else tuple(results)

    def get_extra_state(self) -> str:
        """Return what `state_dict` holds: the integer module as JSON."""
        return str(tvm.ir.save_json(self.mod))  # a plain str, for torch.load(weights_only=True)

    def set_extra_state(self, state: Any) -> None:
        """Take over the module of a `state_dict`.

        Raises:
            ModelError: the state holds no module.
        """
        mod = tvm.ir.load_json(state) if isinstance(state, str) else state
        if not isinstance(mod, tvm.IRModule):
            raise ModelError(
                f"The state of an IntegerModule is a {type(mod).__name__}; allowed: the text that "
                "state_dict() of another one holds.",
                code="RQ201",
            )
        self.mod, self._compiled = mod, None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `pickle` and `copy.deepcopy`, without compiled code."""
        return {**self.__dict__, "mod": self.get_extra_state(), "_compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "mod": tvm.ir.load_json(state["mod"])})
