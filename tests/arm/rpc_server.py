"""On the emulated side: an RPC server on 127.0.0.1; prints its port.

A session is a fork of this process. TVM's usual server starts a new interpreter for each, which an
emulated process cannot.
"""

from tvm.rpc.server import PopenRPCServerState

state = PopenRPCServerState("127.0.0.1", 19400, 19800, silent=True)
print(state.port, flush=True)
state.thread.join()
