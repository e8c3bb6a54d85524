"""Arguments that TVM's virtual machine cannot take: reads its messages, and refuses complex
numbers, for which it has none. relayquant and relayquant_runtime make their errors of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

#: An argument that does not fit its parameter. `type` is what R.Tensor has in its brackets.
ARGUMENT_ERROR = re.compile(
    r"ErrorContext\(fn=(?P<function>[^,]*), loc=param\[(?P<index>\d+)\], param=(?P<name>.*?), "
    r"annotation=R\.Tensor\((?P<type>.*)\)\)"
)
TENSOR_TYPE = re.compile(r"(?:\((?P<shape>[^)]*)\), )?dtype=\"(?P<dtype>\w+)\"")
#: A wrong number of arguments, and the names of the parameters.
COUNT_ERROR = re.compile(
    r"Invoking function .+? expects (?P<count>\d+) arguments \((?P<names>.*)\), but"
)


@dataclass(frozen=True)
class ArgumentError:
    """An argument that does not fit a parameter of a compiled function.

    Attributes:
        type: The allowed type, as TVMScript writes it in the brackets of R.Tensor.
        shape: Allowed sizes. A symbolic size is given by name. None allows any shape.
    """

    function: str
    index: int
    name: str
    type: str
    shape: tuple[int | str, ...] | None
    dtype: str


def check_real(tensor: Any) -> None:
    """Raise ValueError if a tensor of TVM has complex numbers. Calls with it would end the process,
    because TVM has no name for their dtype.
    """
    try:
        _ = tensor.dtype
    except ValueError:
        raise ValueError("one has complex numbers; allowed: real numbers") from None


def advise_rank(fault: ArgumentError, rank: int) -> str:
    """What to do where an argument has another number of dimensions. "" if it has the right one."""
    if fault.shape is None or len(fault.shape) == rank:
        return ""
    advice = f"It takes {len(fault.shape)} dimensions, and got {rank}."
    if len(fault.shape) == rank + 1 and (isinstance(fault.shape[0], str) or fault.shape[0] == 1):
        return f"{advice} One sample becomes a batch by array[None]."
    return f"{advice} Reshape the array."


def read_argument_error(error: Exception) -> ArgumentError | None:
    """Parse an error of the virtual machine that names an argument. None for any other error."""
    found = ARGUMENT_ERROR.search(str(error))
    kind = None if found is None else TENSOR_TYPE.match(found["type"])
    if found is None or kind is None:
        return None
    shape = kind["shape"]
    sizes = None if shape is None else [part.strip() for part in shape.split(",") if part.strip()]
    return ArgumentError(
        found["function"],
        int(found["index"]),
        found["name"],
        found["type"],
        None if sizes is None else tuple(int(s) if s.isdigit() else s for s in sizes),
        kind["dtype"],
    )


def read_count_error(error: Exception) -> tuple[int, str] | None:
    """Parse an error of the virtual machine about the number of arguments into (allowed number,
    names of the parameters). None for any other error.
    """
    found = COUNT_ERROR.search(str(error))
    return None if found is None else (int(found["count"]), found["names"])
