"""PyTorch's classes and functions as operator types of a QConfigMapping, by their names alone.

PyTorch itself is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relayquant.config.relay_names import RelaxOperator
from relayquant.errors import ConfigError, suggest_name

#: Operator of torch.ops -> Relax operators, as `relayquant.load` reads programs. Operators that
#: become several Relax operators (silu, hardswish) are not listed. A product with a constant is
#: `linear`, also if the code says `matmul`.
TORCH_NAMES: Mapping[str, tuple[RelaxOperator, ...]] = {
    f"aten.{name}": tuple(found)
    for name, *found in (
        ("linear", RelaxOperator("relax.matmul", ("dense", ""))),
        ("bmm", RelaxOperator("relax.matmul", ("batch_matmul",))),
        ("matmul", RelaxOperator("relax.matmul", ("batch_matmul",))),
        ("conv1d", RelaxOperator("relax.nn.conv1d")),
        ("conv2d", RelaxOperator("relax.nn.conv2d")),
        ("conv_transpose1d", RelaxOperator("relax.nn.conv1d_transpose")),
        ("conv_transpose2d", RelaxOperator("relax.nn.conv2d_transpose")),
        ("relu", RelaxOperator("relax.nn.relu")),
        ("relu6", RelaxOperator("relax.clip")),
        ("hardtanh", RelaxOperator("relax.clip")),
        ("clamp", RelaxOperator("relax.clip")),
        ("leaky_relu", RelaxOperator("relax.nn.leakyrelu")),
        ("prelu", RelaxOperator("relax.nn.leakyrelu"), RelaxOperator("relax.nn.prelu")),
        ("gelu", RelaxOperator("relax.nn.gelu"), RelaxOperator("relax.nn.gelu_tanh")),
        ("sigmoid", RelaxOperator("relax.sigmoid")),
        ("tanh", RelaxOperator("relax.tanh")),
        ("exp", RelaxOperator("relax.exp")),
        ("softmax", RelaxOperator("relax.nn.softmax")),
        ("log_softmax", RelaxOperator("relax.nn.log_softmax")),
        ("layer_norm", RelaxOperator("relax.nn.layer_norm")),
        ("group_norm", RelaxOperator("relax.nn.group_norm")),
        ("max_pool2d", RelaxOperator("relax.nn.max_pool2d")),
        ("avg_pool2d", RelaxOperator("relax.nn.avg_pool2d")),
        ("mean", RelaxOperator("relax.mean")),
        ("sum", RelaxOperator("relax.sum")),
        ("amax", RelaxOperator("relax.max")),
        ("add", RelaxOperator("relax.add")),
        ("sub", RelaxOperator("relax.subtract")),
        ("mul", RelaxOperator("relax.multiply")),
        ("div", RelaxOperator("relax.divide")),
        ("maximum", RelaxOperator("relax.maximum")),
        ("minimum", RelaxOperator("relax.minimum")),
        ("cat", RelaxOperator("relax.concat")),
        ("reshape", RelaxOperator("relax.reshape")),
        ("flatten", RelaxOperator("relax.reshape")),
        ("permute", RelaxOperator("relax.permute_dims")),
        ("transpose", RelaxOperator("relax.permute_dims")),
        ("pad", RelaxOperator("relax.nn.pad")),
    )
}
#: other names of the same functions: of `operator`, of torch, and of their forms in place
SYNONYMS = {
    "truediv": "div",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
}


def name_class(kind: type) -> str:
    """Return the full name of a class: "torch.nn.modules.linear.Linear"."""
    return f"{kind.__module__}.{kind.__qualname__}"


def name_function(function: Any) -> str:
    """Return the operator type of a function of PyTorch: "aten.linear" for
    `torch.nn.functional.linear`.

    Raises:
        ConfigError: the function has no operator type.
    """
    name = getattr(function, "__name__", type(function).__name__)
    home = getattr(function, "__module__", None) or ""
    is_known = home.partition(".")[0] in ("torch", "_operator") or "TensorBase" in repr(function)
    found = find_name(name) if is_known else ""
    if found:
        return found
    raise ConfigError(
        f"QConfigMapping.set_object_type: {home}{'.' if home else ''}{name} is not one operator "
        f"type. {suggest_name(name, [key.removeprefix('aten.') for key in TORCH_NAMES])} Select "
        "the class of the modules that call it, or names with set_module_name.",
        code="RQ101",
    )


def find_name(name: str) -> str:
    """Find the operator type of a function by its name, also in place ("relu_") or with an
    overload ("add.Tensor"). "" if there is none.
    """
    base = name.partition(".")[0].rstrip("_")
    key = f"aten.{SYNONYMS.get(base, base)}"
    return key if key in TORCH_NAMES else ""
