"""Errors and warnings of every stage: what is wrong, where, what is allowed and what to do.

Each has a code of its kind at the end of its message, "[RQ204]", by what is raised where (`KINDS`);
`docs/errors` has a page for every kind.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

import tvm_ffi


class RelayQuantError(Exception):
    """Base of all errors raised on purpose by relayquant.

    Its message ends with the code of its kind. Where it quotes another error it keeps the code of
    that, which is nearer to the cause.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(add_code(str(message), type(self), find_caller()))

    @property
    def code(self) -> str:
        """The code of its kind: "RQ204"; "" if other code than that of relayquant raised it."""
        return find_shown(str(self))


class ConfigError(RelayQuantError, ValueError):
    """A setting, option or configuration file is wrong."""


class ModelError(RelayQuantError, ValueError):
    """The model cannot be read, or holds something relayquant does not accept."""


class DataError(RelayQuantError, ValueError):
    """Calibration or input data is wrong: name, shape, dtype, or values."""


class QnnError(RelayQuantError, ValueError):
    """A `relax.qnn` operator was given operands or attributes it does not allow."""


class FileError(RelayQuantError, OSError):
    """A file or a folder cannot be written: there is no such folder, a right is missing, the disk
    is full.

    Attributes:
        errno: The number of the system's error, as in any OSError; None if the system had none.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number

    def __reduce__(self) -> tuple[type[FileError], tuple[object, ...]]:
        """With the number, which an OSError of one argument forgets."""
        return type(self), (*self.args, self.errno)


class WorkerError(RelayQuantError, RuntimeError):
    """Another process that was to do a part of the work died, hangs, or failed again and again."""


class MissingDependencyError(RelayQuantError, ImportError):
    """An optional package is needed; the message says which extra installs it."""


class AccuracyWarning(UserWarning):
    """The integer model does not follow the float model, or a bound on accuracy was not met."""


class DataWarning(UserWarning):
    """Calibration data looks wrong: `relayquant.lint` tells more."""


# An exception that crosses a C++ frame of TVM keeps its Python type only when it is registered.
tvm_ffi.register_error("QnnError", QnnError)


@dataclass(frozen=True)
class ErrorKind:
    """A kind of error or warning: what is raised, and in which modules of the package (those below
    them count) that is of this kind.
    """

    code: str
    raises: tuple[type[Exception], ...]
    modules: tuple[str, ...]


#: Order is priority. The hundreds: settings, models, data, accuracy, operators, files and machine.
KINDS: tuple[ErrorKind, ...] = (
    ErrorKind("RQ601", (FileError,), ("storage",)),
    ErrorKind("RQ602", (RelayQuantError,), ("storage",)),
    ErrorKind("RQ603", (MissingDependencyError,), ("",)),
    ErrorKind("RQ604", (WorkerError,), ("",)),
    ErrorKind(
        "RQ605",
        (ModelError,),
        ("analysis.engines", "analysis.onnxruntime_baseline", "analysis.openvino_baseline"),
    ),
    ErrorKind("RQ501", (QnnError,), ("dialect", "reference")),
    ErrorKind("RQ502", (RuntimeWarning,), ("reference",)),
    ErrorKind("RQ401", (AccuracyWarning,), ("refine",)),
    ErrorKind("RQ402", (AccuracyWarning,), ("quantizer",)),
    ErrorKind("RQ403", (UserWarning,), ("analysis.accumulators",)),
    ErrorKind("RQ301", (DataError,), ("datasets.images",)),
    ErrorKind("RQ302", (DataError,), ("datasets", "cli", "analysis.label_scores")),
    ErrorKind("RQ303", (DataWarning,), ("datasets",)),
    ErrorKind("RQ304", (DataWarning,), ("refine",)),
    ErrorKind("RQ305", (DataError,), ("calibration", "refine", "compression")),
    ErrorKind("RQ306", (DataError,), ("reference", "runtime")),
    ErrorKind("RQ307", (DataError,), ("analysis.sensitivity",)),
    ErrorKind("RQ308", (DataError,), ("torch",)),
    ErrorKind("RQ309", (DataError, ModelError), ("demo",)),
    ErrorKind("RQ201", (ModelError,), ("formats", "importers.files", "cli")),
    ErrorKind("RQ202", (ModelError,), ("importers.torch.program", "torch.exported")),
    ErrorKind("RQ203", (ModelError, UserWarning), ("torch.define_by_run",)),
    ErrorKind("RQ204", (ModelError,), ("importers",)),
    ErrorKind("RQ205", (ModelError,), ("relay.export",)),
    ErrorKind("RQ206", (ModelError,), ("relay",)),
    ErrorKind("RQ207", (ModelError,), ("export",)),
    ErrorKind(
        "RQ208", (ModelError, UserWarning), ("preparation", "rewrite", "dialect", "ops", "datasets")
    ),
    ErrorKind("RQ209", (ModelError,), ("ledger", "analysis", "equalization")),
    ErrorKind("RQ210", (ModelError,), ("pipeline",)),
    ErrorKind("RQ211", (ModelError,), ("reference",)),
    ErrorKind("RQ212", (ModelError,), ("compression",)),
    ErrorKind("RQ213", (ModelError, UserWarning), ("torch",)),
    ErrorKind("RQ214", (ModelError,), ("codegen",)),
    ErrorKind("RQ101", (RelayQuantError,), ("arguments", "analysis.latency")),
    ErrorKind("RQ102", (ConfigError,), ("plain_data",)),
    ErrorKind("RQ103", (ConfigError,), ("qtypes",)),
    ErrorKind(
        "RQ104", (ConfigError,), ("config.mapping", "config.qconfig", "annotation.annotator")
    ),
    ErrorKind("RQ105", (ConfigError,), ("config", "backends")),
    ErrorKind("RQ106", (ConfigError, UserWarning), ("annotation",)),
    ErrorKind("RQ107", (ConfigError,), ("conversion.interface",)),
    ErrorKind("RQ108", (ConfigError, UserWarning), ("conversion.partial",)),
    ErrorKind("RQ109", (RelayQuantError,), ("ops", "conversion", "preparation", "testing")),
    ErrorKind("RQ110", (ConfigError,), ("calibration.distribute",)),
    ErrorKind("RQ111", (ConfigError,), ("calibration.parameters",)),
    ErrorKind("RQ112", (ConfigError,), ("calibration",)),
    ErrorKind("RQ113", (ConfigError,), ("refine.prepared_edit", "plan", "prepared", "simulation")),
    ErrorKind("RQ114", (ConfigError,), ("steps", "evaluation")),
    ErrorKind("RQ115", (ConfigError,), ("analysis.sensitivity",)),
    ErrorKind("RQ116", (ConfigError,), ("settings", "quantizer", "effort", "refine")),
    ErrorKind("RQ117", (ConfigError,), ("datasets",)),
    ErrorKind("RQ118", (ConfigError,), ("kernels.isa.target", "codegen")),
    ErrorKind("RQ119", (ConfigError,), ("kernels",)),
    ErrorKind("RQ120", (ConfigError,), ("runtime",)),
    ErrorKind("RQ121", (ConfigError,), ("compression", "equalization")),
    ErrorKind("RQ122", (ConfigError,), ("relay",)),
    ErrorKind("RQ123", (ConfigError,), ("torch",)),
    ErrorKind("RQ124", (ConfigError,), ("report",)),
    ErrorKind("RQ125", (ConfigError,), ("cli",)),
)

CODE = re.compile(r"\[(RQ\d{3})\]")
#: a code within a message, with the full stop before it where another one follows
SHOWN = re.compile(r"\.? \[RQ\d{3}\](?=\.)| \[RQ\d{3}\]")


def add_code(message: str, raised: type[Exception], module: str) -> str:
    """A message with a code at its end: the first that it quotes, else that of what `module`
    raises; none where that is no module of this package.
    """
    code = find_shown(message) or find_code(raised, module)
    text = SHOWN.sub("", message)
    return f"{text} [{code}]" if code else text


def find_shown(message: str) -> str:
    """The first code in a message, "" if there is none."""
    found = CODE.search(message)
    return found[1] if found else ""


@functools.cache
def find_code(raised: type[Exception], module: str) -> str:
    """The code of what a module raises, "" if that is no module of this package."""
    package = __name__.partition(".")[0]
    for kind in KINDS:
        if issubclass(raised, kind.raises) and any(
            belongs_to(module, f"{package}.{name}".rstrip(".")) for name in kind.modules
        ):
            return kind.code
    return ""


def find_caller() -> str:
    """The module that called this one."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that names the line which called this package, however deep it is raised."""
    message = add_code(message, category, find_caller())
    package = __name__.partition(".")[0]
    frame, level = inspect.currentframe(), 0
    while frame is not None and belongs_to(frame.f_globals.get("__name__", ""), package):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def belongs_to(module: str, package: str) -> bool:
    """Whether a module is a package or in it."""
    return module == package or module.startswith(f"{package}.")


#: Nouns whose plural follows no rule of `form_plural`.
IRREGULAR_PLURALS = {"axis": "axes", "index": "indices"}


def format_count(number: int, noun: str) -> str:
    """ "1 operator", "2 operators", "2 batches", "3 spatial axes", "0 entries"."""
    return f"{number} {noun if number == 1 else form_plural(noun)}"


def form_plural(noun: str) -> str:
    """The plural of a noun; of several words, such as "zero point", that of the last."""
    rest, space, last = noun.rpartition(" ")
    if last in IRREGULAR_PLURALS:
        plural = IRREGULAR_PLURALS[last]
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        plural = f"{last[:-1]}ies"
    elif last.endswith(("s", "x", "z", "ch", "sh")):
        plural = f"{last}es"
    else:
        plural = f"{last}s"
    return f"{rest}{space}{plural}"


def suggest_sizes(name: str, wanted: Sequence[object], given: Sequence[int]) -> str:
    """A sentence with what makes a model take an input of these sizes, "" where none is wrong or
    the number of axes is.

    Args:
        wanted: Sizes of the model; what is no int is free already.
    """
    if len(wanted) != len(given):
        return ""
    free = {
        at: size if isinstance(size, str) and size.isidentifier() else f"n{at}"
        for at, (size, got) in enumerate(zip(wanted, given, strict=True))
        if size != got
    }
    if not any(isinstance(wanted[at], int) for at in free):
        return ""
    shape = tuple(free.get(at, size) for at, size in enumerate(wanted))
    axes = ", ".join(f"{at}: torch.export.Dim({size!r})" for at, size in free.items())
    return (
        f" For other sizes load the model with free ones: ONNX with relayquant.load(path, "
        f"shapes={{{name!r}: {shape}}}), PyTorch exported with dynamic_shapes={{{name!r}: "
        f"{{{axes}}}}}."
    )


def suggest_name(wrong: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest of `known` to `wrong`, or lists what is known."""
    known = sorted(set(known))
    near = difflib.get_close_matches(wrong, known, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known: {', '.join(map(repr, known))}." if known else "None is known."
