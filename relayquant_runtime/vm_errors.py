"""Messages of TVM's virtual machine about arguments, which both packages answer with their own."""

from __future__ import annotations

import re

#: An argument that does not fit its parameter. `type` is what R.Tensor has in its brackets.
ARGUMENT_ERROR = re.compile(
    r"ErrorContext\(fn=(?P<function>[^,]*), loc=param\[(?P<index>\d+)\], param=(?P<name>.*?), "
    r"annotation=R\.Tensor\((?P<type>.*)\)\)"
)
#: A wrong number of arguments, and the names of the parameters.
COUNT_ERROR = re.compile(
    r"Invoking function .+? expects (?P<count>\d+) arguments \((?P<names>.*)\), but"
)
