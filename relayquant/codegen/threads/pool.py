"""Lowered module -> the same module with a thread pool that runs its parallel loops.

TVM gives chunks of a loop to its threads and waits for each thread. Waking a sleeping thread costs
time at every kernel. A thread that is kept awake next to another busy process costs whole time
slices of the scheduler: launches of 0.02 ms take 4 ms and more. Here the calling thread takes over
chunks that no worker has started, so neither is needed (`pool.ll`).

The functions below are added to the kernels of a module. They only call functions of `pool.ll`:
code imported into TIR may be inlined, but has no address.
"""

from __future__ import annotations

import importlib.resources

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import PrimType, StringImm, make_node
from tvm.target import Target

from relayquant.codegen.kernels.isa.matrix_unit import COUNT_THREADS
from relayquant.codegen.kernels.isa.target import read_triple

#: largest number of threads of a pool
MOST_THREADS = 256
#: Turns that a worker waits for the next kernel before it sleeps: some 50 microseconds, the time of
#: small kernels between two large ones.
WORKER_TURNS = 5000
#: turns that a caller waits for running chunks before it sleeps
CALLER_TURNS = 2000
#: Nanoseconds that workers may spin before they have saved as much: the maximum, and the value at
#: the start and after a back-off.
MAX_SPIN_CREDIT, INITIAL_SPIN_CREDIT = 10_000_000, 2_500_000
#: Most nanoseconds that count as saved by a chunk on a worker. A caller that lost its processor
#: took long for its chunk.
MOST_SAVED = 1_000_000
#: nanoseconds of a lost time slice, and launches between two checks for lost time slices
SWITCH, INTERVAL = 4_000_000, 32
#: Shortest and longest back-off in nanoseconds. It begins when the credit is spent, and no workers
#: run during it.
MIN_BACKOFF, MAX_BACKOFF = 2_000_000, 500_000_000
#: If a back-off begins within this many nanoseconds plus four times the last back-off after its
#: end, it is twice as long.
BACKOFF_WINDOW = 100_000_000

#: Message of a run in which a chunk failed.
FAILED = (
    "A part of a kernel's loop failed on its thread. Most likely memory ran out, or an "
    "assertion in the kernel failed. The outputs of this run are incomplete: do not use them."
)

#: Architecture -> name and arguments of the intrinsic for spin loops, which frees the core for a
#: while.
PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", ""),
    "amd64": ("llvm.x86.sse2.pause", ""),
    "aarch64": ("llvm.aarch64.isb", "i32 15"),
    "arm64": ("llvm.aarch64.isb", "i32 15"),
}


def make_launch(source: str) -> tirx.PrimFunc:
    """Make the function that kernels call for a parallel loop, like TVMBackendParallelLaunch.

    It imports `source`, the code of all pool functions.
    """
    function, data = tirx.Var("function", "handle"), tirx.Var("data", "handle")
    wanted, state = tirx.Var("wanted", "int32"), tirx.Var("state", "int32")
    start = tirx.IfThenElse(tirx.EQ(state, 2), call_pool("start"), None)
    body = tirx.SeqStmt(
        [
            tirx.Bind(state, tirx.call_extern("int32", "pool_take", wanted)),
            tirx.IfThenElse(
                tirx.EQ(state, 0),
                check_chunks("run_alone", function, data, wanted),
                tirx.SeqStmt([start, check_chunks("run", function, data)]),
            ),
        ]
    )
    imported = tirx.AttrStmt(0, "pragma_import_llvm", StringImm(source), body)
    return make_function("relayquant_launch", [function, data, wanted], imported)


def check_chunks(name: str, *args: tirx.Var) -> tirx.Stmt:
    """Make a call that runs the chunks of a loop, and fails if one of them fails.

    The error message of a chunk stays with the thread that ran it.
    """
    result = tirx.Var("result", "int32")
    call = tirx.call_extern("int32", f"pool_{name}", *args)
    check = tirx.AssertStmt(tirx.EQ(result, 0), StringImm("RuntimeError"), [StringImm(FAILED)])
    return tirx.SeqStmt([tirx.Bind(result, call), check])


def make_work() -> tirx.PrimFunc:
    """Make the thread function of a worker."""
    worker = tirx.Var("worker", "int64")
    return make_function("relayquant_work", [worker], call_pool("work", worker))


def make_stop() -> tirx.PrimFunc:
    """Make the function that is called when the library is unloaded."""
    return make_function("relayquant_stop", [], call_pool("stop"))


def call_pool(name: str, *args: tirx.Var) -> tirx.Stmt:
    """Call a function of `pool.ll`."""
    return tirx.Evaluate(tirx.call_extern("int32", f"pool_{name}", *args))


def make_function(name: str, params: list[tirx.Var], body: tirx.Stmt) -> tirx.PrimFunc:
    """Make a function with these parameters that C code can call directly.

    TVM does not pack the parameters.
    """
    returned = tirx.SeqStmt([body, tirx.Return(tirx.IntImm("int32", 0))])
    # 1: packed already. Without `noalias` here TVM would remove it from all functions of the
    # module.
    attrs = {"global_symbol": name, "calling_conv": 1, "tirx.noalias": True}
    return tirx.PrimFunc(params, returned, PrimType("int32"), make_node("ir.DictAttrs", **attrs))


def add_pool(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Add a thread pool to a module. It starts with the first parallel loop.

    The pool has TVM_NUM_THREADS threads, or one for each core. A module is returned unchanged if
    - it has no parallel loops
    - it is not for 64-bit x86 or Arm with Linux
    - it is to be linked statically, where the pool of a second module would have the same names.
    """
    if target.kind.name != "llvm" or "system_lib_prefix" in (mod.attrs or {}):
        return mod
    architecture, *system = read_triple(target).split("-")
    kernels = {gv: func for gv, func in mod.functions_items() if has_parallel_loop(func)}
    if architecture not in PAUSES or "linux" not in system or not kernels:
        return mod
    launch = make_launch(format_source(*PAUSES[architecture]))
    functions = (launch, make_work(), make_stop())
    pool = {tvm.ir.GlobalVar(str(func.attrs["global_symbol"])): func for func in functions}
    attached = {gv: attach_pool(func) for gv, func in kernels.items()}
    return tvm.IRModule({**dict(mod.functions_items()), **attached, **pool}, attrs=mod.attrs)


def has_parallel_loop(func: tvm.ir.BaseFunc) -> bool:
    """Whether a function is a kernel with a parallel loop."""
    found: list[tirx.For] = []

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            found.append(loop)

    if isinstance(func, tirx.PrimFunc):
        tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    return bool(found)


def attach_pool(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite body -> pool_attach(); body, inside the root block if there is one."""
    attach = call_pool("attach")
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func.with_body(tirx.SeqStmt([attach, func.body]))
    root = func.body.block
    body = tirx.SeqStmt([attach, root.body])
    block = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        body,
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    return func.with_body(s_tir.SBlockRealize([], func.body.predicate, block))


def format_source(pause: str, arguments: str) -> str:
    """Fill in the constants of `pool.ll`, for an architecture with the intrinsic `pause`."""
    text = importlib.resources.files(__package__).joinpath("pool.ll").read_text("utf-8")
    return COUNT_THREADS.code + text.format(
        most=MOST_THREADS,
        worker_turns=WORKER_TURNS,
        caller_turns=CALLER_TURNS,
        most_saved=MOST_SAVED,
        switch=SWITCH,
        interval=INTERVAL,
        max_spin_credit=MAX_SPIN_CREDIT,
        initial_spin_credit=INITIAL_SPIN_CREDIT,
        min_backoff=MIN_BACKOFF,
        backoff_window=BACKOFF_WINDOW,
        max_backoff=MAX_BACKOFF,
        pause=f"call void @{pause}({arguments})",
        declare_pause=f"declare void @{pause}({arguments.split(' ')[0]})",
    )
