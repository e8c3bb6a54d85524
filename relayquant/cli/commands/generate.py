"""`relayquant generate`: text of a language model, as it comes, and how fast it came.

TVM's compiler is loaded only for a model that is not compiled yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import relayquant as rq
from relayquant.base.cores import count_threads
from relayquant.base.events import StageEvent
from relayquant.base.language import DECODE
from relayquant.base.storage.files import ARCHIVE_SUFFIX, check_file, reading
from relayquant.cli.grammar import LIBRARIES
from relayquant.cli.options import check_options
from relayquant.cli.output import CommandOutput, ExitCode, printing
from relayquant.cli.threads import use_threads
from relayquant.errors import ConfigError, ModelError, format_count
from relayquant.flow.generation import Piece
from relayquant.flow.generation.generator import check_prompt
from relayquant.plots.progress import ProgressReport
from relayquant_runtime import Library

#: Files with a language model.
SOURCES = (".gguf", ARCHIVE_SUFFIX)


def run(options: argparse.Namespace, output: CommandOutput) -> ExitCode:
    threads = count_threads() if options.threads is None else options.threads
    counts = {"--threads": threads, "--max-tokens": options.max_tokens}
    counts["--max-length"] = options.max_length
    check_options(options, counts=counts, outputs=(options.save,))
    is_library = options.model.suffix in LIBRARIES
    if is_library:
        check_library(options)
    else:
        check_source(options)
    if options.save is not None and options.save.suffix not in LIBRARIES:
        raise ConfigError(
            f"--save {options.save}: a compiled model is written as {', '.join(LIBRARIES)}.",
            code="RQ102",
        )
    sampling = rq.TokenSampling(
        options.temperature, options.top_k, options.top_p, seed=options.seed
    )
    tokenizer = rq.load_tokenizer(options.tokenizer or options.model)
    prompt = read_input() if options.prompt == "-" else options.prompt
    if options.chat:
        text = tokenizer.apply_chat([{"role": "user", "content": prompt}])
        prompt = tokenizer.encode(text, add_special=False)
    else:
        prompt = tokenizer.encode(prompt)
    check_prompt(0, prompt, options.max_length or sys.maxsize, sys.maxsize)
    with use_threads(threads):
        with output.open_progress() as progress:
            start = time.perf_counter()
            executor = (
                open_library(options.model) if is_library else build(options, prompt, progress)
            )
            with show_stage(progress, "prepare"):
                generator = rq.Generator(executor, tokenizer)
            seconds = time.perf_counter() - start
        steps = generator.iterate(
            [prompt], max_tokens=options.max_tokens, stop=options.stop, sampling=sampling
        )
        report(output, len(prompt), seconds, [*print_pieces(steps, output)])
    if options.save is not None:
        output.files.append(options.save)
    return ExitCode.OK


def read_input() -> str:
    """Read a prompt from standard input, without the end of its last line."""
    with reading("Standard input", "UTF-8 text"):
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")


def check_library(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not apply to a compiled model."""
    for name in ("max_length", "cache", "bits", "save"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} does not apply to {options.model}, which is compiled. "
                "Leave it out, or give the .gguf file.",
                code="RQ102",
            )
    if options.tokenizer is None:
        raise ConfigError(
            f"{options.model} has no tokenizer. Add --tokenizer with the model's .gguf file or "
            "tokenizer.json.",
            code="RQ102",
        )


def check_source(options: argparse.Namespace) -> None:
    """Raise ModelError for a file that is no language model by its name, and ConfigError for a
    module without a tokenizer.
    """
    path = options.model
    if path.exists() and path.suffix.lower() not in SOURCES and not path.is_dir():
        raise ModelError(
            f"{path} is no language model. Name a .gguf file, a folder with config.json and "
            f"*.safetensors, a {ARCHIVE_SUFFIX} of `relayquant compress`, or the library that "
            "--save wrote.",
            code="RQ202",
        )
    if path.suffix == ARCHIVE_SUFFIX and options.tokenizer is None:
        raise ConfigError(
            f"{path} has no tokenizer. Add --tokenizer with the model's .gguf file or "
            "tokenizer.json.",
            code="RQ102",
        )


def open_library(path: Path) -> Library:
    """Load a compiled model."""
    check_file(path, sys.maxsize)
    with reading(path, "compiled model", ModelError):
        return Library(path)


def build(options: argparse.Namespace, prompt: list[int], progress: ProgressReport) -> rq.Executor:
    """Load and compile a model, and save it if that was asked for. Raises DataError for a prompt
    that the model does not take, before it compiles.
    """
    given = {"max_length": options.max_length, "cache": options.cache}
    settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    with show_stage(progress, "load"):
        causal_lm = rq.CausalLMOptions(**settings) if settings else None
        mod, params = rq.load(options.model, causal_lm=causal_lm)
    from relayquant.ir.rewrite.entry import is_language_model  # loads the compiler
    from relayquant.ir.rewrite.graph import static_size

    if not is_language_model(mod):
        raise ModelError(
            f"{options.model} is no language model: it has no functions prefill and decode.",
            code="RQ202",
        )
    state, vocabulary = rq.get_state(mod), static_size(mod[DECODE].ret_ty.fields[0].shape[-1])
    if state and len(state[0].shape) == 4 and vocabulary is not None:  # keys, as of our readers
        check_prompt(0, prompt, state[0].shape[2], vocabulary)
    if options.bits is not None:
        mod = rq.compress_weights(mod, params, bits=options.bits, callbacks=(progress,))
        params = None
    with show_stage(progress, "compile"):
        executable = rq.compile((mod, params))
        if options.save is not None:
            executable.export_library(str(options.save))
    return rq.Executor(executable)


@contextmanager
def show_stage(progress: ProgressReport, name: str) -> Iterator[None]:
    """Show that a stage is running."""
    progress.on_stage_start(StageEvent(name))
    yield
    progress.on_stage_end(StageEvent(name))


def print_pieces(
    steps: Iterator[list[Piece]], output: CommandOutput
) -> Iterator[tuple[Piece, float]]:
    """Yield (piece, seconds since the start), and print the text of each piece at once."""
    start = time.perf_counter()
    for (piece,) in steps:
        yield piece, time.perf_counter() - start
        if not output.is_json:
            with printing():
                sys.stdout.write(piece.text)
    if not output.is_json:
        with printing():
            sys.stdout.write("\n")


def report(
    output: CommandOutput, prompt: int, seconds: float, pieces: list[tuple[Piece, float]]
) -> None:
    """Report the text for machines, and for both how fast prompt and text were read and made."""
    first, last = pieces[0][1], pieces[-1][1]
    reason = pieces[-1][0].reason
    rates = {"prompt": prompt / first, "text": 0.0}
    if len(pieces) > 1:
        rates["text"] = (len(pieces) - 1) / (last - first)
    output.add_values(
        text="".join(piece.text for piece, _ in pieces),
        tokens=[piece.token for piece, _ in pieces],
        prompt_tokens=prompt,
        reason="" if reason is None else reason.value,
        prompt_tokens_per_second=rates["prompt"],
        text_tokens_per_second=rates["text"],
        seconds_to_start=seconds,
    )
    if output.is_quiet or output.is_json:
        return
    for line in (
        f"ready after {seconds:.1f} s",
        f"prompt: {format_count(prompt, 'token')}, {rates['prompt']:.1f} per second",
        f"text: {format_count(len(pieces), 'token')}, {rates['text']:.1f} per second, ended by "
        f"{'' if reason is None else reason.value}",
    ):
        print(f"relayquant: {line}", file=sys.stderr)
