"""On the emulated side: an RPC server on 127.0.0.1; prints its port, ends when its input does.

A session is a fork of this process. TVM's usual server starts a new interpreter for each, which an
emulated process cannot.
"""

import os
import threading

from tvm.rpc.server import PopenRPCServerState


def end_with_input() -> None:
    """Whatever ended the process that started this one."""
    os.read(0, 1)
    os._exit(0)


state = PopenRPCServerState("127.0.0.1", 19400, 19800, silent=True)
print(state.port, flush=True)
threading.Thread(target=end_with_input, daemon=True).start()
state.thread.join()
