"""Integer modules as modules of PyTorch (`as_module`), and compared with one (`compare`).

PyTorch is an extra and is imported when a function here is called.
"""

from __future__ import annotations

from typing import Any

import tvm

from relayquant.analysis.compare import CompareReport
from relayquant.base.arguments import check_arguments
from relayquant.errors import DataError
from relayquant.flow.evaluation import compare as compare_modules
from relayquant.ir.rewrite.entry import name_main
from relayquant.torch.exporting import check_module, load_module


@check_arguments
def as_module(mod: tvm.IRModule) -> Any:
    """Return a module of `quantize`, `convert` or `compress_weights` as a `torch.nn.Module`.

    It takes and returns tensors without gradients, by position: one tensor, or a tuple of several
    outputs. It is compiled for this machine at its first call. `state_dict`, `copy.deepcopy` and
    `pickle` carry the whole module as text, and none of its compiled code. It has no parameters:
    `.to`, `.half` and training change nothing.

    Raises:
        MissingDependencyError: PyTorch is not installed.
    """
    from relayquant.torch.training.entry import import_trainable

    import_trainable()
    from relayquant.torch.compiled_module import IntegerModule

    return IntegerModule(name_main(mod))


@check_arguments
def compare(module: Any, qmod: tvm.IRModule, dataset: Any) -> CompareReport:
    """Compare a PyTorch module with its integer module, value by value: `relayquant.compare`.

    Args:
        module: The float module, as passed to `quantize`. The first item of the data is its
            example, so a module with fixed shapes needs batches of one size.
        qmod: The integer module.
        dataset: As for `quantize`; a few dozen samples are enough.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ModelError: torch.export cannot export the module; or the integer module was not made from
            it.
        DataError: the data does not fit the model, or is empty.
    """
    check_module(module)
    mod, params = load_module(module, read_example(dataset), may_have_state=True)
    return compare_modules(mod, params, qmod, dataset)


def read_example(dataset: Any) -> tuple[Any, ...]:
    """Return the first item of a data set as arguments of a module.

    Raises:
        DataError: the data set is empty, or its items are no tensors by position.
    """
    import torch  # pyright: ignore[reportMissingImports]

    source = dataset() if callable(dataset) else dataset
    first = next(iter(source), None)
    values = first if isinstance(first, tuple | list) else (first,)
    try:
        return tuple(torch.as_tensor(value) for value in values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"compare: the first item of the data is a {type(first).__name__}; allowed: a tensor "
            "or array, or a tuple of them in the order of the module's arguments. For other data: "
            "relayquant.compare(*relayquant.load(exported_program), qmod, dataset).",
            code="RQ302",
        ) from error
