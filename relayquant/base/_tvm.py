"""The only module that knows names and versions that drift between TVM releases."""

from __future__ import annotations

import functools
import json
import re
import threading
from importlib import metadata
from typing import Any

#: package -> (first version that works, first version that does not, why)
SUPPORTED = {
    "apache-tvm": ("0.27.0", "0.28", "the Relax API changes between minor releases"),
    "apache-tvm-ffi": (
        "0.1.14.post0",
        "0.1.15",
        "0.1.15 crashes the process in tvm.ir.save_json and Schedule.tensorize",
    ),
}

#: What is used of TVM's insides, which may change without notice: owner -> its names. The names of
#: frontends are those that readers call or override. `tests/test_versions.py` fails with the names
#: that the installed TVM lacks.
INTERNALS = {
    "tvm.relax.vm_build": "_vmcodegen _vmlink",
    "tvm.relax.BlockBuilder": "_begin_dataflow_block _end_block",
    "tvm.runtime.vm.VirtualMachine": "_get_function_arity",
    "tvm_ffi.core": "_lookup_or_register_type_info_from_type_key",
    "tvm.relax.frontend.onnx.onnx_frontend": (
        "ONNXGraphImporter _get_convert_map onnx_input BatchNormalization._impl_v15"
    ),
    "tvm.relax.frontend.onnx.onnx_frontend.ONNXGraphImporter": (
        "_check_for_unsupported_ops _construct_nodes _convert_operator _nodes _parse_attr "
        "_parse_graph_initializers bb from_onnx opset"
    ),
    "tvm.relax.frontend.tflite.tflite_frontend": (
        "ExprTable OperatorConverter from_tflite get_tensor_name"
    ),
    "tvm.relax.frontend.tflite.tflite_frontend.OperatorConverter": (
        "_SUPPORTED_QUANTIZED_OPS _convert_reduce _convert_reduce_bool _convert_stablehlo_gather "
        "_get_relax_tensor_dtype _get_relax_tensor_shape _get_segment_scatter_base "
        "_get_tensor_param _get_tensor_shape_tuple _get_var_handle_resource_key "
        "activation_fn_type bb check_unsupported_ops conversion_state convert_fill "
        "convert_fully_connected convert_fused_activation_function convert_map "
        "convert_mirror_pad convert_nms_v4 convert_nms_v5 convert_op_to_relax convert_reshape "
        "convert_resize_nearest_neighbor convert_softmax dequantize "
        "exp_tab get_expr get_input_tensors get_op_code_str get_output_tensors "
        "get_prefetched_node get_tensor_expr get_tensor_shape get_tensor_type_as_numpy "
        "get_tensor_type_str get_tensor_value get_tensors has_expr has_same_qnn_params "
        "is_prefetched model quantize resource_handles subgraph"
    ),
    "tvm.relax.frontend.torch.exported_program_translator": "ExportedProgramImporter",
    "tvm.relax.frontend.torch.exported_program_translator.ExportedProgramImporter": (
        "_arange _check_unsupported_func_type _clamp _convert_data_type "
        "_convert_pytorch_tensor_to_tvm _convolution _emit_torch_reshape _gather _slice_scatter "
        "block_builder convert_map env from_exported_program retrieve_args shape_of"
    ),
}
#: Functions of TVM's registry that no Python module offers.
GLOBAL_FUNCTIONS = ("ffi.ArrayGetItem", "tvm.codegen.llvm.GetHostCPUFeatures")


#: Held while a TVM frontend runs. A frontend records the functions that it builds in one list per
#: process, so two frontends at once would fail.
FRONTEND_LOCK = threading.Lock()


def parse_version(text: str) -> tuple[int, ...]:
    """Return a comparable form of a release: "0.1.14.post1" -> (0, 1, 14, 2), "0.1.14" -> (0, 1,
    14, 0).

    A post-release counts from 1, so it sorts after the release that it follows, as in PEP 440.
    """
    release, _, post = text.split("+")[0].partition(".post")
    numbers = [int(part) for part in re.findall(r"\d+", release)][:3]
    numbers += [0] * (3 - len(numbers))
    return (*numbers, int(post) + 1 if post else 0)


def check_versions() -> None:
    """Raise ImportError unless the installed TVM packages have supported versions.

    Reads package metadata only and runs before TVM is loaded. A wrong version would not fail here,
    but crash the process later.
    """
    for package, (first, end, reason) in SUPPORTED.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise ImportError(
                f"relayquant needs {package}>={first},<{end}, which is not installed. "
                f"Run: pip install '{package}>={first},<{end}'"
            ) from None
        if not parse_version(first) <= parse_version(found) < parse_version(end):
            raise ImportError(
                f"relayquant needs {package}>={first},<{end} but found {found} ({reason}). "
                f"Run: pip install '{package}>={first},<{end}'"
            )


def load_onnx_frontend() -> Any:
    """Return parts of TVM's ONNX frontend: ONNXGraphImporter, _get_convert_map, onnx_input."""
    from tvm.relax.frontend.onnx import onnx_frontend

    return onnx_frontend


def load_tflite_frontend() -> Any:
    """Return parts of TVM's TFLite frontend: OperatorConverter, from_tflite, get_tensor_name."""
    from tvm.relax.frontend.tflite import tflite_frontend

    return tflite_frontend


def load_torch_frontend() -> Any:
    """Return TVM's torch.export frontend: ExportedProgramImporter. Needs torch."""
    from tvm.relax.frontend.torch import exported_program_translator

    return exported_program_translator


def build_bytecode(lowered: Any, target: Any, kernels: Any) -> Any:
    """Build the executable of a lowered module whose TIR functions are already compiled into
    libraries, the list `kernels`.
    """
    from tvm import relax
    from tvm.relax import vm_build

    builder = relax.ExecBuilder()
    vm_build._vmcodegen(builder, lowered)
    return vm_build._vmlink(builder, target, ext_libs=kernels)


def read_host_features() -> dict[str, bool]:
    """Return LLVM's feature names -> whether this machine has the feature.

    On x86 the map is complete and says what the operating system allows. On Arm it has the few
    features that the kernel lists. It is empty where LLVM cannot ask the system.
    """
    import tvm

    features = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return {str(name): bool(has) for name, has in features.items()}


@functools.cache
def find_fields(type_key: str) -> dict[str, str]:
    """Return field name -> type name for an object type and its base types, from TVM's reflection.

    The types "int", "float", "bool", "DataType" and "Device" are values. Any other type is an
    object.

    Raises:
        ValueError: there is no such type.
    """
    fields: dict[str, str] = {}
    info = _find_type(type_key)
    while info is not None:
        for field in info.fields or ():
            schema = field.metadata["type_schema"]  # cached by an earlier call
            schema = json.loads(schema) if isinstance(schema, str) else schema
            fields[field.name] = schema["type"]
        info = info.parent_type_info
    return fields


def _find_type(type_key: str) -> Any:
    from tvm_ffi import core

    return core._lookup_or_register_type_info_from_type_key(type_key)
