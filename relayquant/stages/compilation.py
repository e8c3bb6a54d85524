"""Compilation: quantized or float module + target -> TVM executable. The flow compiles with it
on this machine, and users deploy with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tvm
from tvm.ir import Call
from tvm.target import Target

from relayquant.base.arguments import check_arguments
from relayquant.base.runtime import stop_spinning
from relayquant.codegen import make_pipeline, open_tuner
from relayquant.codegen.checks.element_types import check_element_types
from relayquant.codegen.checks.failure import explain_failure
from relayquant.codegen.kernels.isa.target import host_config, read_triple, resolve_target
from relayquant.codegen.library.expanded_weights import (
    EXPAND_WEIGHTS,
    add_expanders,
    expand_weights,
)
from relayquant.codegen.library.host_functions import name_kernel_pipeline
from relayquant.codegen.library.mmap_constants import MappedExecutable, can_map
from relayquant.codegen.library.state_functions import add_state_functions
from relayquant.config import Precision
from relayquant.errors import RelayQuantError, warn_user
from relayquant.ir.dialect.legality import is_integer_operator
from relayquant.ir.float_precision import find_float_precision
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite.bind import Model, bind_model
from relayquant.ir.rewrite.entry import MAIN, find_entry, name_main, rename_function
from relayquant.ir.rewrite.function import list_functions
from relayquant.ir.rewrite.graph import call_name
from relayquant.ir.state import find_places, get_state
from relayquant.stages.backends import ARM, X86, X86_7BIT, get_backend_config
from relayquant.stages.preparation import prepare_module


@check_arguments
def get_pipeline(target: Any = None, *, precision: Precision | None = None) -> tvm.transform.Pass:
    """Return the Relax pipeline for a target: `tvm.compile(mod, target, relax_pipeline=...)`.

    `precision` None: the one that the module asks for.

    A float model is first brought into canonical form, with batch norms folded. A quantized model
    is in this form already. Function names stay: `forward` is `forward` in the executable.

    Raises:
        ConfigError: TVM does not know the target, or the target has no instructions for the
            precision.
    """
    resolved = resolve_target(target)
    lowering = adapt_pipeline(make_pipeline(resolved, precision=precision), resolved)
    return tvm.transform.Sequential([lowering, EXPAND_WEIGHTS])


def adapt_pipeline(lowering: tvm.transform.Pass, target: Target) -> tvm.transform.Pass:
    """Adapt a target's pipeline as `get_pipeline` does: with calls that expand weights, and the
    functions of state.
    """

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        entry, values = find_entry(mod), get_state(mod)
        places = find_places(mod, values)
        if entry is None:
            lowered = lowering(mod)
        else:
            named = name_main(mod)
            lowered = lowering(prepare_unbound(named) if is_float_model(named) else named)
            lowered = lowered if entry == MAIN else rename_function(lowered, MAIN, entry)
        return add_state_functions(lowered, values, places, target)

    return tvm.transform.module_pass(run, opt_level=0, name="relayquant.compile")  # pyright: ignore[reportReturnType]


@check_arguments
def compile(
    mod: Model,
    target: Any = None,
    *,
    tune: bool | str | os.PathLike[str] = False,
    precision: Precision | None = None,
) -> Any:
    """Compile a quantized or float module into a TVM executable.

    Args:
        mod: The module; it is not changed.
        target: None for this machine, a `tvm.target.Target`, a dict, or a string such as "llvm
            -mcpu=cascadelake".
        tune: Time candidates on this machine instead of taking the estimated fastest: the best
            register tiles of every int8 or float32 convolution and dense layer, and 3x3 int8
            convolutions with and without Winograd's transforms. This takes some seconds per model.
            The results are the same, bit for bit. The times are stored in a file, by default in the
            system's cache folder. Pass a path to use another file.
        precision: Operands of the products that are computed in float32: convolutions and matrix
            products. "bf16" rounds them to bfloat16, and sums in float32. All other operators stay
            float32, and quantized operators stay as they are. "bfloat16" in
            docs/concepts/numbers.md says what this costs. None: the `float_precision` that the
            module was quantized with, else float32; and the rows of a language model's prefill,
            which 4-bit products round to 8 bits, are rounded to bfloat16 instead on CPUs with tiles
            for it, which is faster and more accurate. "float32" keeps the 8 bits.

    A module that was quantized for another kind of CPU than the target warns: it computes the same
    bits, but slower.

    Raises:
        ConfigError: TVM does not know the target, or the target has no instructions for the
            precision; with `tune`, this machine cannot run code for it, or the file of times is
            damaged.
        FileError: the file of times cannot be written.
        ModelError: TVM has no code for an operator with these dtypes or shapes. The message names
            the operator and its value.
    """
    mod, resolved = bind_model(mod), resolve_target(target)
    warn_other_backend(mod, resolved)
    return compile_silently(mod, resolved, tune, precision)


def compile_silently(
    mod: tvm.IRModule,
    target: Any = None,
    tune: bool | str | os.PathLike[str] = False,
    precision: Precision | None = None,
) -> MappedExecutable:
    """Compile a bound module like `compile`, without a warning."""
    check_element_types(mod)
    stop_spinning()
    resolved, keeps_rows = resolve_target(target), precision is Precision.FLOAT32
    precision = precision or find_float_precision(mod)
    if tune is False:
        lowering = make_pipeline(resolved, precision=precision, keeps_rows=keeps_rows)
        return build(mod, resolved, adapt_pipeline(lowering, resolved))
    with open_tuner(resolved, None if tune is True else Path(tune)) as tuner:
        lowering = make_pipeline(resolved, tuner.choose, precision, keeps_rows, tuner.choose_float)
        return build(mod, resolved, adapt_pipeline(lowering, resolved))


def warn_other_backend(mod: tvm.IRModule, target: Target) -> None:
    """Warn if a module was quantized for x86 and the target is Arm, or the other way round."""
    ledger, served = find_ledger(mod), get_backend_config(target=target).name
    used = "" if ledger is None else ledger.backend
    of_x86 = (X86.name, X86_7BIT.name)
    if (used in of_x86 and served == ARM.name) or (used == ARM.name and served in of_x86):
        warn_user(
            f"The module was quantized for the backend {used!r}, and kernels for "
            f"{read_triple(target)} are made for {served!r}: it computes the same bits, but "
            f"slower. Quantize for the target: backend={served!r}.",
            code="RQ102",
        )


def build(mod: tvm.IRModule, target: Target, lowering: tvm.transform.Pass) -> MappedExecutable:
    """Run `tvm.compile` on a module and return the executable and the lowered module.

    The module from `codegen.lowering` has calls that expand weights.
    """
    lowered = []

    def keep(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        lowered.append(lowering(mod))
        can_expand = can_map(lowered[0], target)
        return expand_weights(add_expanders(lowered[0]) if can_expand else lowered[0])

    keeping: Any = tvm.transform.module_pass(keep, opt_level=0, name="relayquant.keep")
    try:
        kernels = name_kernel_pipeline()
        executable = tvm.compile(mod, target, relax_pipeline=keeping, tir_pipeline=kernels)
    except RelayQuantError:
        raise
    except Exception as error:  # an error of TVM's C++ code whose class does not say what it means
        explained = explain_failure(
            mod, lambda alone: tvm.compile(alone, target, relax_pipeline=lowering)
        )
        raise error if explained is None else explained from error
    return MappedExecutable(executable, lowered[0], target)


def compile_draft(mod: tvm.IRModule) -> Any:
    """Compile an executable for this machine that runs a few hundred times and is thrown away.

    LLVM runs at level 1. For MobileNet's calibration graph this saves a third of the compile time.
    The kernels are as fast, because their registers and vectors are laid out before LLVM sees them.
    """
    return compile_silently(mod, {**host_config(), "opt-level": 1})


def prepare_unbound(mod: tvm.IRModule) -> tvm.IRModule:
    """Run `prepare_module`, with weights that a frontend left as parameters without values
    treated as inputs.
    """
    main = mod[MAIN]
    if "num_input" in (main.attrs or {}) and "params" not in main.attrs:
        bare = main.without_attr("num_input")
        mod = tvm.IRModule({**mod.functions, mod.get_global_var(MAIN): bare}, attrs=mod.attrs)
    return prepare_module(mod)


def is_float_model(mod: tvm.IRModule) -> bool:
    """Whether `prepare_module` accepts the module: main is in dataflow form and has no integer
    operators.
    """
    if [gvar.name_hint for gvar in list_functions(mod)] != ["main"]:
        return False
    blocks = mod["main"].body.blocks
    if not all(isinstance(block, tvm.relax.DataflowBlock) for block in blocks):
        return False
    calls = [b.value for block in blocks for b in block.bindings if isinstance(b.value, Call)]
    return not any(is_integer_operator(call_name(call)) for call in calls)
