"""Define-by-run, entry point: `prepare(model, example_inputs)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relayquant.base.arguments import check_arguments
from relayquant.base.optional import needed
from relayquant.config import BackendConfig, Effort, Unseen
from relayquant.errors import ConfigError, suggest_name
from relayquant.flow.settings import QuantizeSettings
from relayquant.stages.backends import resolve_backend
from relayquant.torch.custom_config import PrepareCustomConfig
from relayquant.torch.user_mapping import read_mapping


def resolve_unseen(unseen: Unseen | str) -> Unseen:
    """Return a member of `Unseen`, from the member or its value.

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
    qconfig_mapping: Any = None,
    backend: BackendConfig | str | None = None,
    effort: Effort | str = Effort.BALANCED,
    observer: Any = None,
    unseen: Unseen | str = Unseen.ERROR,
    strict_order: bool = False,
    prepare_custom_config: PrepareCustomConfig | None = None,
) -> Any:
    """Prepare a model that is calibrated by calling it, for `relayquant.torch.convert`.

    For PyTorch code that `torch.export` refuses: data-dependent `if` and `while`, loops of any
    length, state in Python. The model runs as it is, in float and without gradients, and its
    operators are recorded. An operator is identified by the path of its module and its place in the
    user's code. So in a loop it is the same operator each time, and each branch has its own
    operators. The code and the parameters of the model are not changed. The model may change its
    own state.

    Args:
        model: A `torch.nn.Module`, which runs in evaluation mode, or any callable.
        example_inputs: Arguments of a first call, which counts as calibration.
        qconfig_mapping: As for `relayquant.torch.quantize`. Names are paths of modules; for a
            callable, after the name under which it refers to the module. In a line for the n-th
            operator of a type, n counts inside a region.
        backend, effort, observer: As for `relayquant.quantize`.
        unseen: Behaviour of the converted model at an operator that calibration never reached: an
            `Unseen` or its value.
        strict_order: Every call must run the operators of the first call in the same order. Any
            other order is an error, in calibration and afterwards.
        prepare_custom_config: By path or class: modules that stay in float; standalone modules,
            each a separate integer module calibrated on its calls; custom modules, called in their
            observed form, and after `convert` in their quantized form. Also integer inputs and
            outputs of the converted model: numbers count the tensors among its arguments and among
            its results. The converted model's ledger states their parameters. The prepared model
            takes and returns floats.

    Returns:
        A `relayquant.torch.define_by_run.program.PreparedProgram`. Call it like the model, with
        representative inputs.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        ConfigError: an argument is wrong.
    """
    with needed("Calibrating PyTorch code needs PyTorch", "relayquant[torch]"):
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    from relayquant.torch.define_by_run.call_sites import join_modules
    from relayquant.torch.define_by_run.program import PreparedProgram

    backend = resolve_backend(backend)
    model = getattr(model, "_orig_mod", model)  # torch.compile: the code runs as it is written
    config = prepare_custom_config
    settings = QuantizeSettings(
        effort=effort,
        backend=backend,
        qconfig_mapping=read_mapping(qconfig_mapping, join_modules(model), backend),
        observer=observer,
        **({} if config is None else config.name_dtypes(backend)),
    )
    prepared = PreparedProgram(model, settings, resolve_unseen(unseen), strict_order, config)
    prepared(*example_inputs)
    return prepared
