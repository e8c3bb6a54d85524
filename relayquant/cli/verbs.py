"""Words that other tools use for a command -> what to type here."""

from __future__ import annotations

from collections.abc import Mapping

QUANTIZE = "relayquant quantize MODEL --data DATA"
EXPORT = "relayquant export MODEL -o FILE.so"
BENCH = "relayquant bench MODEL"
SEARCH = f"{QUANTIZE} --metric agreement"
COMPARE = "relayquant compare MODEL QMODEL --data DATA"
COMPRESS = "relayquant compress MODEL"
GENERATE = 'relayquant generate MODEL.gguf -p "TEXT"'
INSPECT = "relayquant inspect MODEL"
PLOTS = (
    "relayquant compare | sensitivity | bench ... --plot FILE.png, or relayquant report ... "
    "--pictures FOLDER"
)
TRAIN = "relayquant.torch.prepare_qat or relayquant.torch.finetune, in Python"
#: Another name of a command -> the command.
ALIASES = {"compile": "export"}
#: A word that other tools use for a command -> the command here.
OTHER_VERBS: Mapping[str, str] = {
    **dict.fromkeys(("calibrate", "ptq", "optimize", "quantise", "int8"), QUANTIZE),
    **dict.fromkeys(("build", "convert", "deploy", "save", "lower"), EXPORT),
    **dict.fromkeys(("benchmark", "run", "profile", "latency", "time", "perf"), BENCH),
    **dict.fromkeys(("search", "accuracy", "autoquant"), SEARCH),
    **dict.fromkeys(("diff", "evaluate", "eval", "debug"), COMPARE),
    **dict.fromkeys(("check", "test", "validate"), "relayquant verify QMODEL --data DATA"),
    **dict.fromkeys(("chat", "complete", "infer", "llm", "text"), GENERATE),
    **dict.fromkeys(("int4", "gptq", "awq", "weights"), COMPRESS),
    **dict.fromkeys(("describe", "info", "show", "ledger", "load", "summary"), INSPECT),
    **dict.fromkeys(("plot", "draw"), PLOTS),
    **dict.fromkeys(("qat", "train", "finetune"), TRAIN),
    "backend": "relayquant inspect x86",
    "completion": "relayquant --completion bash",
    "help": "relayquant --help",
    "tune": f"{SEARCH} (for accuracy), or {EXPORT} --tune (for speed)",
    "version": "relayquant --version",
}
