"""Lowered module -> the same with a pool of threads of its own, which its parallel loops run on.

TVM deals the parts of a loop out to its threads and waits for each of them. A thread that is asleep
costs the time to wake it at every kernel; one that is kept awake costs, beside another busy
process, whole slices of the scheduler: launches of 0.02 ms take 4 ms and more. The pool's caller
does what no worker has begun, so neither is needed (`pool.ll`).

Beside a module's kernels stand the functions below, whose bodies are calls of those in `pool.ll`:
what is imported into TIR may be inlined, but has no address of its own.
"""

from __future__ import annotations

import importlib.resources

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import PrimType, StringImm, make_node
from tvm.target import Target

from relayquant.codegen.kernels.isa.target import read_triple

#: threads of a pool at most
MOST_THREADS = 256
#: turns that a worker waits for the next kernel before it sleeps: some 50 microseconds, as small
#: kernels between two large ones take
WORKER_TURNS = 5000
#: turns that a caller waits for parts under way before it sleeps
CALLER_TURNS = 2000
#: nanoseconds that workers may spin in advance of what they save: at most and at first, and after
#: a back-off
MAX_SPIN_CREDIT, INITIAL_SPIN_CREDIT = 10_000_000, 2_500_000
#: nanoseconds that a part by a worker counts as saved at most: a caller that lost its processor
#: took long for its own
MOST_SAVED = 1_000_000
#: nanoseconds that it costs to lose the processor, and launches between two looks at how often
SWITCH, INTERVAL = 4_000_000, 32
#: nanoseconds of a back-off, in which no workers run, once the credit is spent: least and most
MIN_BACKOFF, MAX_BACKOFF = 2_000_000, 500_000_000
#: a back-off this many nanoseconds plus four times the last one after it, or sooner, is doubled
BACKOFF_WINDOW = 100_000_000

#: what a run says of which a part failed
FAILED = (
    "A part of a kernel's loop failed on its thread: most likely there was no memory for what it "
    "computes with, or an assertion in the kernel did not hold. Outputs of this run are incomplete."
)

#: architecture -> name and arguments of the intrinsic by which a thread that waits for another one
#: leaves the core alone for a while
PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", ""),
    "amd64": ("llvm.x86.sse2.pause", ""),
    "aarch64": ("llvm.aarch64.isb", "i32 15"),
    "arm64": ("llvm.aarch64.isb", "i32 15"),
}


def make_launch(source: str) -> tirx.PrimFunc:
    """What kernels call for a parallel loop, as they would TVMBackendParallelLaunch; it brings the
    `source` of all.
    """
    function, data = tirx.Var("function", "handle"), tirx.Var("data", "handle")
    wanted, state = tirx.Var("wanted", "int32"), tirx.Var("state", "int32")
    start = tirx.IfThenElse(tirx.EQ(state, 2), call_pool("start"), None)
    body = tirx.SeqStmt(
        [
            tirx.Bind(state, tirx.call_extern("int32", "pool_take", wanted)),
            tirx.IfThenElse(
                tirx.EQ(state, 0),
                check_parts("run_alone", function, data, wanted),
                tirx.SeqStmt([start, check_parts("run", function, data)]),
            ),
        ]
    )
    imported = tirx.AttrStmt(0, "pragma_import_llvm", StringImm(source), body)
    return make_function("relayquant_launch", [function, data, wanted], imported)


def check_parts(name: str, *args: tirx.Var) -> tirx.Stmt:
    """A call that runs the parts of a loop, which fails if one of them does.

    What a part says of it stays with the thread that ran it.
    """
    result = tirx.Var("result", "int32")
    call = tirx.call_extern("int32", f"pool_{name}", *args)
    check = tirx.AssertStmt(tirx.EQ(result, 0), StringImm("RuntimeError"), [StringImm(FAILED)])
    return tirx.SeqStmt([tirx.Bind(result, call), check])


def make_work() -> tirx.PrimFunc:
    """What the thread of a worker runs."""
    worker = tirx.Var("worker", "int64")
    return make_function("relayquant_work", [worker], call_pool("work", worker))


def make_stop() -> tirx.PrimFunc:
    """Called when the library is unloaded."""
    return make_function("relayquant_stop", [], call_pool("stop"))


def call_pool(name: str, *args: tirx.Var) -> tirx.Stmt:
    """A call of a function of `pool.ll`."""
    return tirx.Evaluate(tirx.call_extern("int32", f"pool_{name}", *args))


def make_function(name: str, params: list[tirx.Var], body: tirx.Stmt) -> tirx.PrimFunc:
    """A function that is called from outside with these parameters, which TVM does not pack."""
    returned = tirx.SeqStmt([body, tirx.Return(tirx.IntImm("int32", 0))])
    # 1: packed already. Without `noalias` here TVM would take it from all functions of the module.
    attrs = {"global_symbol": name, "calling_conv": 1, "tirx.noalias": True}
    return tirx.PrimFunc(params, returned, PrimType("int32"), make_node("ir.DictAttrs", **attrs))


def add_pool(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """The module with a pool, which starts with its first parallel loop and has TVM_NUM_THREADS
    threads, or as many as there are cores.

    As it is, if it has no parallel loops, is not for 64-bit x86 or Arm with Linux, or is to be
    linked statically, where a second module's pool would have the same names.
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
    """Whether a function is a kernel with such a loop."""
    found: list[tirx.For] = []

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.PARALLEL:
            found.append(loop)

    if isinstance(func, tirx.PrimFunc):
        tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    return bool(found)


def attach_pool(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """body -> pool_attach(); body, inside of the root block, where there is one."""
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
    """`pool.ll` with its numbers, for the architecture whose intrinsic `pause` is."""
    text = importlib.resources.files(__package__).joinpath("pool.ll").read_text("utf-8")
    return text.format(
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
