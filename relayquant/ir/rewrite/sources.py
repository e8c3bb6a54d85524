"""Where values come from: what the reader of a file recorded of the node that made each."""

from __future__ import annotations

import json
from typing import Any

from tvm import relax

#: Attribute of main: JSON text, value name -> {"node": name, "op": operator, "constants": names of
#: its weights and biases}; "constants" is absent where it has none.
SOURCES_ATTR = "relayquant.sources"


def read_sources(func: relax.Function) -> dict[str, dict[str, Any]]:
    """Value name -> its row of `SOURCES_ATTR`; empty where nothing was recorded."""
    attrs = func.attrs
    if attrs is None or SOURCES_ATTR not in attrs:
        return {}
    return json.loads(str(attrs[SOURCES_ATTR]))
