"""Define-by-run, the way in: `prepare(model, example_inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relayquant.base.arguments import check_arguments
from relayquant.config import BackendConfig, Effort, QConfigMapping, Unseen
from relayquant.errors import ConfigError, MissingDependencyError, suggest_name
from relayquant.flow.settings import QuantizeSettings
from relayquant.stages.backends import resolve_backend
from relayquant.torch.custom_config import PrepareCustomConfig


def resolve_unseen(unseen: Unseen | str) -> Unseen:
    """A member of `Unseen`, or its value.

    Raises:
        ConfigError: there is no such member.
    """
    if isinstance(unseen, Unseen):
        return unseen
    names = [member.value for member in Unseen]
    if unseen not in names:
        raise ConfigError(
            f"prepare: there is no unseen={unseen!r}. {suggest_name(unseen, names)}", code="RQ101"
        )
    return Unseen(unseen)


@check_arguments
def prepare(
    model: Callable[..., Any],
    example_inputs: tuple[Any, ...],
    *,
    qconfig_mapping: QConfigMapping | None = None,
    backend: BackendConfig | str | None = None,
    effort: Effort | str = Effort.BALANCED,
    calibration: Any = None,
    unseen: Unseen | str = Unseen.ERROR,
    strict_order: bool = False,
    prepare_custom_config: PrepareCustomConfig | None = None,
) -> Any:
    """A model that is calibrated by calling it, for `relayquant.torch.convert`.

    For PyTorch code that `torch.export` refuses: `if` and `while` on what is computed, loops of
    any length, state that is kept in Python. The model runs as it is, in float and without
    gradients; what it calls is recorded. An operator is known by the path of its module and its
    place in the user's code: in a loop it is the same one each time, each branch has its own. The
    code and the parameters of the model are not changed; what it does to its own state, it does.

    Args:
        model: A `torch.nn.Module`, which runs in evaluation mode, or any callable.
        example_inputs: Arguments of a first call, which counts as calibration.
        qconfig_mapping: As for `relayquant.quantize`; names are paths of modules, of a callable
            with the name in front under which it finds them. A number of a line for the n-th
            operator of a type counts within a region.
        backend, effort, calibration: As for `relayquant.quantize`.
        unseen: What the converted model does at an operator that calibration never passed; a value
            of `Unseen` will do.
        strict_order: Every call must pass the operators of the first, in its order; another is an
            error, at calibration and afterwards.
        prepare_custom_config: By path or class, modules that stay in float; standalone modules,
            each an integer module of its own, calibrated on its calls; and custom ones, whose
            observed form is called, and after `convert` the quantized one. And inputs and outputs
            of the converted model that are integers: numbers count the tensors among its
            arguments, and among what it returns. Its ledger states their grids; this one takes and
            gives floats.

    Returns:
        A `relayquant.torch.define_by_run.program.PreparedProgram`: call it like the model, with
        representative inputs.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ConfigError: an argument is wrong.
    """
    try:
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingDependencyError(
            "Calibrating PyTorch code needs PyTorch. Run: pip install 'relayquant[torch]'",
            code="RQ503",
        ) from None
    from relayquant.torch.define_by_run.program import PreparedProgram

    backend = resolve_backend(backend)
    config = prepare_custom_config
    settings = QuantizeSettings(
        effort=effort,
        backend=backend,
        qconfig_mapping=qconfig_mapping,
        calibration=calibration,
        **({} if config is None else config.name_dtypes(backend)),
    )
    prepared = PreparedProgram(model, settings, resolve_unseen(unseen), strict_order, config)
    prepared(*example_inputs)
    return prepared
