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
from tvm import tirx
from tvm.ir import PrimType, StringImm, make_node
from tvm.target import Target

from relayquant.codegen.kernels.emit import LEAST_EXTENT
from relayquant.codegen.kernels.isa.matrix_unit import COUNT_THREADS
from relayquant.codegen.kernels.isa.target import may_use_system, read_triple
from relayquant.ir.rewrite.function import add_functions

#: largest number of threads of a pool
MOST_THREADS = 256
#: processors that a cpu_set_t of the C library holds, and words of 64 bits of it
MOST_CPUS = 1024
CPU_WORDS = MOST_CPUS // 64
#: Threads, with the caller, that are kept apart when they wake. It takes a microsecond for each.
MOST_SPREAD = 16
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


def make_launch_alone() -> tirx.PrimFunc:
    """Make the function that kernels call for a parallel loop that is not worth other threads."""
    function, data = tirx.Var("function", "handle"), tirx.Var("data", "handle")
    wanted = tirx.Var("wanted", "int32")
    body = check_chunks("run_alone", function, data, wanted)
    return make_function("relayquant_launch_alone", [function, data, wanted], body)


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


def call_pool(name: str, *args: tirx.Expr) -> tirx.Stmt:
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

    The pool has TVM_NUM_THREADS threads, or one for each core. A module gets none if
    - it has no parallel loops
    - it is not for 64-bit x86 or Arm with Linux
    - it is to be linked statically, where the pool of a second module would have the same names.

    There, loops with `LEAST_EXTENT` become serial: TVM's own threads would always share them.
    """
    kernels = {gv: func for gv, func in mod.functions_items() if list_parallel_loops(func)}
    pause = find_pause(target, mod)
    pool: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    if pause is None:
        marked = {gv: make_serial(func) for gv, func in kernels.items() if has_least_extent(func)}
    else:
        marked = {gv: attach_pool(func) for gv, func in kernels.items()}
        launches = (make_launch(format_source(*pause)), make_launch_alone())
        functions = (*launches, make_work(), make_stop()) if kernels else ()
        pool = {tvm.ir.GlobalVar(str(func.attrs["global_symbol"])): func for func in functions}
    if not marked:
        return mod
    return add_functions(mod, {**marked, **pool})


def find_pause(target: Target, mod: tvm.IRModule) -> tuple[str, str] | None:
    """Find the row of PAUSES for a module that may have a pool, None for others."""
    architecture = read_triple(target).split("-")[0]
    return PAUSES.get(architecture) if may_use_system(target, mod) else None


def list_parallel_loops(func: tvm.ir.BaseFunc) -> list[tirx.For]:
    """List the parallel loops of a kernel. A Relax function has none."""
    found: list[tirx.For] = []

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            found.append(loop)

    if isinstance(func, tirx.PrimFunc):
        tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    return found


def has_least_extent(func: tirx.PrimFunc) -> bool:
    """Whether a parallel loop of a kernel is shared only from some extent on."""
    return any(LEAST_EXTENT in loop.annotations for loop in list_parallel_loops(func))


def make_serial(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the loops with `LEAST_EXTENT` serial."""

    def change(loop: tirx.For) -> tirx.For:
        return with_kind(loop, tirx.ForKind.SERIAL) if LEAST_EXTENT in loop.annotations else loop

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, change)))


def attach_pool(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite each parallel loop -> pool_attach(whether to share it); loop."""

    def attach(loop: tirx.For) -> tirx.Stmt:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        worth = tirx.IntImm("int32", 1)
        if LEAST_EXTENT in loop.annotations:
            least = tirx.const(int(loop.annotations[LEAST_EXTENT]), str(loop.extent.ty.dtype))
            worth = tirx.Cast("int32", loop.extent >= least)
        return tirx.SeqStmt([call_pool("attach", worth), with_kind(loop, loop.kind)])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, attach)))


def with_kind(loop: tirx.For, kind: tirx.ForKind) -> tirx.For:
    """Make a loop of another kind, without `LEAST_EXTENT`."""
    rest = {key: value for key, value in loop.annotations.items() if key != LEAST_EXTENT}
    return tirx.For(
        loop.loop_var, loop.min, loop.extent, kind, loop.body, loop.thread_binding, rest, loop.step
    )


def format_source(pause: str, arguments: str) -> str:
    """Fill in the constants of `pool.ll`, for an architecture with the intrinsic `pause`."""
    text = importlib.resources.files(__package__).joinpath("pool.ll").read_text("utf-8")
    return COUNT_THREADS.code + text.format(
        most=MOST_THREADS,
        most_spread=MOST_SPREAD,
        most_cpus=MOST_CPUS,
        cpu_words=CPU_WORDS,
        cpu_bytes=CPU_WORDS * 8,
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
