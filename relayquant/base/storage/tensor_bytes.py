"""Tensors as bytes, in the form of TVM's JSON: a head, the sizes, the number of bytes, and the
data. Bytes from a file are checked before memory is allocated, since their sizes decide how much.

Elements of fewer than 8 bits share bytes in memory. TVM's JSON has a byte for each of them: its
writer reads past the end of the tensor, and its reader writes past the end. It forgets lanes, too.
So TVM gets neither.
"""

from __future__ import annotations

import base64
import ctypes
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray

from relayquant.errors import format_count

#: Data that TVM writes before the sizes of a tensor: a magic number and a reserved field of 8 bytes
#: each, the device, the rank, and the dtype. After the sizes comes the number of bytes.
HEAD = struct.Struct("<QQiiiBBH")
MAGIC = 0xDD5E40F096B4A13F
CPU = (int(tvm_ffi.DLDeviceType.kDLCPU), 0)
MAX_RANK = 32


@dataclass(frozen=True)
class TensorHead:
    """What the bytes of a tensor say about it.

    Attributes:
        dtype: DLPack's code, bits and lanes of an element.
        start: Index of the first byte of the data.
    """

    shape: tuple[int, ...]
    dtype: tuple[int, int, int]
    start: int


def is_plain(tensor: tvm.runtime.Tensor) -> bool:
    """Whether a tensor lies in CPU memory, without gaps. `pack_tensor` takes no other."""
    device = tensor.device
    return (device.dlpack_device_type(), device.index) == CPU and tensor.is_contiguous()


def is_written_by_tvm(bits: int, lanes: int) -> bool:
    """Whether TVM's JSON has a valid form for elements of so many bits and lanes."""
    return bits % 8 == 0 and lanes == 1


def count_bytes(tensor: tvm.runtime.Tensor) -> int:
    """Return the size of a tensor in memory (tvm/ffi/container/tensor.h, GetDataSize)."""
    return -(-math.prod(tensor.shape) * tensor.dtype.bits * tensor.dtype.lanes // 8)


def pack_tensor(tensor: tvm.runtime.Tensor) -> NDArray[np.uint8]:
    """Copy a plain tensor to bytes, (B,). They are those that TVM's JSON has as base64, if
    no elements share a byte.
    """
    dtype, size = tensor.dtype, count_bytes(tensor)
    head = HEAD.pack(MAGIC, 0, *CPU, tensor.ndim, dtype.type_code, dtype.bits, dtype.lanes)
    head += struct.pack(f"<{tensor.ndim + 1}q", *tensor.shape, size)
    data = np.empty(len(head) + size, "uint8")
    data[: len(head)] = np.frombuffer(head, "uint8")
    ctypes.memmove(data.ctypes.data + len(head), tensor.data_ptr(), size)
    return data


def unpack_tensor(data: NDArray[np.uint8]) -> tvm.runtime.Tensor:
    """Copy bytes, contiguous, (B,), to a tensor. ValueError if they are damaged."""
    head = read_head(data)
    dtype = tvm_ffi.dtype.from_dlpack_data_type(head.dtype)
    tensor = tvm.runtime.empty(head.shape, str(dtype))
    ctypes.memmove(tensor.data_ptr(), data.ctypes.data + head.start, count_bytes(tensor))
    return tensor


def encode_tensor(tensor: tvm.runtime.Tensor) -> str:
    """Return the text of a plain tensor in TVM's JSON."""
    return base64.b64encode(pack_tensor(tensor)).decode()


def check_tensor(text: Any) -> None:
    """Raise ValueError unless a text is a tensor with as many bytes as its sizes say, in a form
    that TVM reads.
    """
    if not isinstance(text, str):
        raise ValueError("it is not a text")
    _, bits, lanes = read_head(base64.b64decode(text, validate=True)).dtype
    if not is_written_by_tvm(bits, lanes):
        raise ValueError(
            f"its elements have {format_count(bits, 'bit')} x {lanes}, for which TVM's JSON has no "
            "valid form; allowed: in constants of an .rqm file, which relayquant.save_module writes"
        )


def read_head(data: bytes | NDArray[np.uint8]) -> TensorHead:
    """Read what a tensor's bytes say. ValueError unless there are as many as its sizes need."""
    if len(data) < HEAD.size:
        raise ValueError(f"it has {format_count(len(data), 'byte')}")
    magic, _, _, _, rank, code, bits, lanes = HEAD.unpack_from(data)
    if magic != MAGIC or not 0 <= rank <= MAX_RANK:
        raise ValueError("it does not begin as tensors do")
    start = HEAD.size + 8 * (rank + 1)
    *sizes, claimed = struct.unpack_from(f"<{rank + 1}q", data, HEAD.size)
    count = math.prod(max(size, 0) for size in sizes) * lanes
    # Elements of fewer than 8 bits share bytes, or have a byte each if TVM wrote them.
    fitting = {count * -(-bits // 8), -(-count * bits // 8)}
    if min(sizes, default=0) < 0 or claimed not in fitting or len(data) != start + claimed:
        raise ValueError(
            f"shape {tuple(sizes)} of {bits} bits needs {format_count(max(fitting), 'byte')}, it "
            f"has {len(data) - start}"
        )
    return TensorHead(tuple(sizes), (code, bits, lanes), start)
