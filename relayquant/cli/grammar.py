"""The commands and their arguments -> their parsers. TVM is not imported here, as in `parsers`."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayquant.cli.arguments import (
    add_backend,
    add_choice,
    add_csv,
    add_data,
    add_effort,
    add_inputs,
    add_labels,
    add_model,
    add_output,
    add_plot,
    add_precision,
    add_qmodel,
    add_samples,
    add_target,
    add_tune,
    add_work,
    parse_size,
)
from relayquant.cli.command import Command

# Enums of stages that cannot be imported here. A test compares them.
GUARDS = ("revert", "warn", "off")
MODEL_TYPES = ("general", "transformer")
OBSERVERS = ("minmax", "average-max", "moving-average", "percentile", "mse", "kl")
SCHEMES = ("symmetric", "affine")
METRICS = ("top1", "agreement")
ENGINES = ("onnxruntime", "openvino")
CACHE_DTYPES = ("float16", "int8", "float32")
#: endings of compiled libraries
LIBRARIES = (".so", ".dylib", ".dll")


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Show what a model file is and what can be done with it, or what a backend can run.

    relayquant inspect model.onnx        a float model: inputs, operators
    relayquant inspect model.int8.rqm    a quantized model: what is in float
    relayquant inspect x86               a backend: operators and dtypes
    relayquant inspect x86 -o mine.json  write the backend, to change it
    """
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model file, or a backend: x86, x86-7bit, arm, generic, accelerator, or its "
        "FILE.json (default: this machine's backend)",
    )
    group = parser.add_argument_group("of a model")
    add_inputs(group)
    group = parser.add_argument_group("of a backend")
    group.add_argument("--operator", metavar="OP", help="show only this operator, e.g. nn.conv2d")
    add_output(group, "FILE.json", "write its table to this file")


def add_lint(parser: argparse.ArgumentParser) -> None:
    """Find mistakes in calibration data before it is used.

    The first layer's results are compared with the statistics in its batch norm. With --labels,
    the accuracy of the float model is measured for each preset of preprocessing.

    The exit code is 1 if something looks wrong.

        relayquant lint model.onnx --data photos/ --preprocess imagenet
    """
    add_model(parser)
    group = parser.add_argument_group("data")
    add_data(group)
    add_labels(group, "also measure the accuracy of the float model")
    add_inputs(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--growth",
        action="store_true",
        help="also show after how many samples the range of an input stops growing",
    )


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Quantize a float model, with calibration data.

    The ending of -o selects the format: .rqm (the module), .json (the same as text), .so (compiled
    for --target), .onnx (QDQ), .relay (Relay text, with .params next to it).

    With --metric, operators are put back to float until the metric drops by at most --max-drop. The
    exit code is 1 if that is not possible. --save-config writes the configuration that was found.

    Ctrl-C leaves a checkpoint. The same command resumes from it.

        relayquant quantize model.onnx --data inputs.npz -o model.int8.rqm
    """
    add_model(parser)
    group = parser.add_argument_group("data")
    add_data(group)
    add_inputs(group)
    group = parser.add_argument_group("output")
    add_output(group, "FILE", "default: MODEL with .int8.rqm")
    group.add_argument("--report", type=Path, metavar="FILE.html", help="also write a report")
    add_target(group, "CPU that will run the model")
    for side in ("input", "output"):
        group.add_argument(
            f"--{side}-dtype",
            action="append",
            default=[],
            metavar="[NAME=]DTYPE",
            help=f"make the module's {side}s integers, e.g. uint8; may be repeated",
        )
    group = parser.add_argument_group("quantization")
    add_effort(group)
    add_backend(group)
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE.json",
        help="a QConfigMapping: how each operator is quantized (--save-config and `sensitivity "
        "--keep` write one)",
    )
    add_choice(
        group,
        "--model-type",
        MODEL_TYPES,
        "transformer: quantize only matrix products, and smooth their inputs; general: quantize "
        "all operators (default: recognized)",
    )
    add_choice(group, "--observer", OBSERVERS, "how ranges are chosen (default: by --effort)")
    group.add_argument(
        "--weights", choices=["int8", "int4"], help="dtype of weights (default: int8)"
    )
    group.add_argument(
        "--strict", action="store_true", help="an operator left in float is an error"
    )
    group.add_argument(
        "--guard",
        choices=GUARDS,
        help="when the outputs deviate from the float model: put operators back to float, warn, "
        "or skip the check (default: revert; warn with --effort fast)",
    )
    group.add_argument(
        "--only-if-faster",
        action="store_true",
        help="quantize only operators that are faster in integers on this machine, as measured",
    )
    group = parser.add_argument_group("accuracy control")
    group.add_argument(
        "--metric",
        choices=METRICS,
        help="top1: top-1 accuracy (needs --labels); agreement: share of answers that are equal "
        "to the float model's",
    )
    add_labels(group, "for --metric top1")
    group.add_argument("--max-drop", type=float, metavar="X", help="default: 0.01")
    group.add_argument("--time-limit", type=float, metavar="SECONDS", help="limit of the search")
    group.add_argument(
        "--save-config",
        type=Path,
        metavar="FILE.json",
        help="write the configuration that was found, for `quantize --config`",
    )
    add_work(parser.add_argument_group("work"))


def add_compress(parser: argparse.ArgumentParser) -> None:
    """Store the weights of matrix products and embeddings in few bits. Everything else stays float.

    This is usual for language models. No data is needed. With data, weights are rounded so that the
    results change least. The ending of -o selects the format, as for quantize. Ctrl-C leaves a
    checkpoint. The same command resumes from it.

        relayquant compress model.onnx --bits 4 -o model.int4.rqm
    """
    add_model(parser)
    group = parser.add_argument_group("data")
    add_data(group, required=False)
    add_inputs(group)
    group = parser.add_argument_group("output")
    add_output(group, "FILE", "default: MODEL with .int4.rqm, for --bits 4")
    add_target(group, "target of a library (.so)")
    group = parser.add_argument_group("compression")
    group.add_argument(
        "--bits", type=int, choices=[2, 3, 4, 8], default=4, help="bits of a weight (default: 4)"
    )
    group.add_argument(
        "--group-size",
        type=int,
        default=32,
        metavar="N",
        help="number of weights with one scale, 16 to 256 (default: 32)",
    )
    group.add_argument(
        "--scheme",
        choices=SCHEMES,
        default="symmetric",
        help="affine: with a zero point for each scale (default: symmetric)",
    )
    group.add_argument(
        "--embedding-bits",
        type=int,
        choices=[2, 3, 4, 8],
        default=8,
        help="bits of an embedding weight (default: 8)",
    )
    add_effort(group)
    group.add_argument(
        "--max-size",
        type=parse_size,
        metavar="SIZE",
        help="limit for all compressed weights, such as 1.5GB; the weights with the largest "
        "error keep 8 bits while they fit",
    )
    add_work(parser.add_argument_group("work"))


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Compare the outputs of a float model and its quantized module.

    With --values, also the values inside the model, in order.

        relayquant compare model.onnx model.int8.rqm --data inputs.npz --values
    """
    add_model(parser, "float model")
    add_qmodel(parser)
    group = parser.add_argument_group("data")
    add_data(group)
    add_samples(group, "compare on", None, "all")
    add_inputs(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--values", action="store_true", help="also compare the values inside the model"
    )
    add_csv(group)
    add_plot(group, "SQNR along the depth of the model")


def add_sensitivity(parser: argparse.ArgumentParser) -> None:
    """Rank operators by the accuracy that each costs when only it is quantized.

    With --keep, write a configuration that leaves the most sensitive ones in float, for quantize
    --config.

        relayquant sensitivity model.onnx --data inputs.npz --keep 2 -o kept.json
        relayquant quantize model.onnx --data inputs.npz --config kept.json
    """
    add_model(parser)
    group = parser.add_argument_group("data")
    add_data(group)
    add_samples(group, "measure on", 64)
    add_inputs(group)
    group = parser.add_argument_group("quantization")
    add_effort(group)
    add_backend(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--keep",
        type=int,
        metavar="N",
        help="write a configuration with the N most sensitive operators in float",
    )
    add_output(group, "FILE.json", "file for --keep")
    add_csv(group)
    add_plot(group, "the accuracy that each operator costs")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Check that a compiled module computes the same as the numpy reference, bit for bit.

    The exit code is 1 if it does not.

        relayquant verify model.int8.rqm --data inputs.npz
    """
    add_qmodel(parser)
    group = parser.add_argument_group("data")
    add_data(group)
    add_samples(group, "run", 1, "the first batch")
    add_target(
        parser.add_argument_group("target"),
        "a target that this machine can run (default: this machine)",
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    """Write a page on what quantization did to a model, for a browser.

    Without QMODEL the model is quantized first, as `relayquant quantize` does it.

        relayquant report model.onnx model.int8.rqm --data inputs.npz --latency
    """
    add_model(parser, "float model")
    add_qmodel(parser, required=False, text=" (default: quantize MODEL)")
    group = parser.add_argument_group("data")
    add_data(group)
    add_labels(group, "also measure top-1 accuracy")
    add_samples(group, "measure on", 32)
    add_inputs(group)
    group = parser.add_argument_group("quantization")
    add_effort(group)
    add_backend(group)
    group.add_argument(
        "--other", type=Path, metavar="QMODEL", help="another quantized module to compare with"
    )
    group = parser.add_argument_group("output")
    add_output(group, "FILE.html", "default: MODEL with .html")
    group.add_argument(
        "--latency", action="store_true", help="compile both models, time them and each kernel"
    )
    group.add_argument(
        "--pictures",
        type=Path,
        metavar="FOLDER",
        help="also write plots to this folder: chosen ranges, error by depth, sensitivity, and "
        "with --latency the times",
    )


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Measure the float and int8 latency of a model, and the time of each kernel.

    If MODEL is quantized, it is timed alone.

    Latency is the time of one run on one batch, without copies in and out. The candidates take
    turns on the same inputs. A ratio above 1 means slower than the first line.

    --against times other engines too: the float model, the int8 model of their own quantizer (ONNX
    Runtime's; NNCF's for OpenVINO, if installed), and our int8 model as QDQ. Each candidate then
    runs in its own process. All engines get --threads. Threads of a compiled module spin for about
    20 microseconds after a kernel, ONNX Runtime's spin during a run, OpenVINO's have the latency
    hint. Float models run in float32, also in OpenVINO; with --precision bf16 ours and OpenVINO's
    run in bfloat16, ONNX Runtime's stays float32.

        relayquant bench model.onnx model.int8.rqm --threads 1
    """
    add_model(parser, "float model, or a quantized module")
    add_qmodel(parser, required=False, text=" of a float MODEL (default: quantize MODEL)")
    group = parser.add_argument_group("data")
    add_data(group, required=False, text=" (default: random numbers)")
    add_samples(group, "calibrate on", None, "four batches")
    group.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="samples in a run, if the model leaves it open (default: 1)",
    )
    add_inputs(group)
    group = parser.add_argument_group("what is timed")
    group.add_argument(
        "--against",
        action="append",
        choices=ENGINES,
        default=[],
        help="also time this engine, float and int8 (MODEL must be .onnx); may be repeated",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="default: TVM_NUM_THREADS, or all cores"
    )
    group.add_argument(
        "--repeat", type=int, default=20, metavar="N", help="turns of each model (default: 20)"
    )
    add_backend(group)
    add_tune(group)
    add_precision(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--operators",
        type=int,
        default=15,
        metavar="N",
        help="number of slowest kernels to list; 0: none (default: 15)",
    )
    add_plot(group, "the times")


def add_export(parser: argparse.ArgumentParser) -> None:
    """Write a float or quantized model in another format. The ending of -o selects it:

    no ending           a folder with all that runs the model without a
                        compiler: the library, TVM's runtime, a C++ program,
                        a description
    .so, .dylib, .dll   a library, compiled for --target
    .onnx               ONNX with QuantizeLinear and DequantizeLinear
    .rqm, .json         the module; .json as text
    .relay              Relay text, with its parameters in .params

        relayquant export model.int8.rqm -o model.so
    """
    add_model(parser, "float model, or a quantized module's .rqm or .json")
    group = parser.add_argument_group("output")
    add_output(group, "FILE", "file or folder to write", required=True)
    add_inputs(group)
    group = parser.add_argument_group("of a library or folder")
    add_target(group, "target (default: this machine)")
    add_tune(group)
    add_precision(group)
    group.add_argument(
        "--runtime",
        type=Path,
        metavar="FOLDER",
        help="for a folder: wheels of apache-tvm and apache-tvm-ffi for another kind of CPU",
    )
    group.add_argument(
        "--preprocess",
        metavar="SPEC",
        help="for a folder: preprocessing of pictures, as for quantize, to write into it",
    )


def add_generate(parser: argparse.ArgumentParser) -> None:
    """Generate text with a language model.

    The text is printed as it comes; how fast, on standard error. Compiling takes a while, so
    --save keeps the compiled model, with which a next call begins at once:

        relayquant generate model.gguf -p "Once upon a time" --save model.so
        relayquant generate model.so --tokenizer model.gguf -p "The end"
    """
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a .gguf file, a folder with config.json and .safetensors files, or the .so that "
        "--save wrote",
    )
    group = parser.add_argument_group("text")
    group.add_argument(
        "-p",
        "--prompt",
        required=True,
        metavar="TEXT",
        help="what comes before; -: it is read from standard input",
    )
    group.add_argument(
        "--chat", action="store_true", help="the prompt is a message, which the model answers"
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a .gguf file, a tokenizer.json or its folder (default: MODEL)",
    )
    group.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="length limit (default: 128)"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends the output, and is left out; may be repeated",
    )
    group = parser.add_argument_group("how a token is chosen")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="0: the likeliest token (default); 1: as likely as the model says",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="among the N likeliest (default: 0, all)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="among the likeliest ones whose probabilities add up to X (default: 1, all)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the same seed draws the same text, at a temperature above 0 (default: 0)",
    )
    group = parser.add_argument_group("how the model runs")
    group.add_argument(
        "--threads", type=int, metavar="N", help="default: TVM_NUM_THREADS, or all cores"
    )
    group.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of prompt and text that the cache has room for (default: what the model "
        "allows, at most 2048)",
    )
    group.add_argument(
        "--cache", choices=CACHE_DTYPES, help="dtype of keys and values (default: float16)"
    )
    group.add_argument(
        "--bits", type=int, choices=[4, 8], help="for float weights: compress them first"
    )
    group.add_argument(
        "--save", type=Path, metavar="FILE.so", help="write the compiled model to this file"
    )


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Quantize the built-in digits model and measure accuracy and speed.

    The package has the model and its data.

        relayquant demo
    """
    group = parser.add_argument_group("what is timed")
    add_backend(group)
    group.add_argument(
        "--batch", type=int, default=64, help="digits in one timed run (default: 64)"
    )
    group.add_argument("--repeat", type=int, default=50, help="turns of each model (default: 50)")


COMMANDS = (
    Command(
        "inspect", "show a model file or a backend (also: relayquant MODEL)", "MODEL", add_inspect
    ),
    Command("lint", "look for mistakes in calibration data", "MODEL --data DATA", add_lint),
    Command(
        "quantize",
        "turn a float model and data into an integer model",
        "MODEL --data DATA [-o FILE]",
        add_quantize,
    ),
    Command(
        "compress",
        "store weights in 8 to 2 bits, for language models",
        "MODEL [--data DATA] [-o FILE]",
        add_compress,
    ),
    Command(
        "compare",
        "compare the outputs of float and integer model",
        "MODEL QMODEL --data DATA",
        add_compare,
    ),
    Command(
        "sensitivity",
        "rank operators by the accuracy that they cost",
        "MODEL --data DATA",
        add_sensitivity,
    ),
    Command(
        "verify",
        "compare compiled code with the reference, bit for bit",
        "QMODEL --data DATA",
        add_verify,
    ),
    Command(
        "report",
        "write a page with a verdict, accuracy, network and times",
        "MODEL [QMODEL] --data DATA [-o FILE.html]",
        add_report,
    ),
    Command(
        "bench",
        "measure latency, and the time of each kernel",
        "MODEL [QMODEL] [--data DATA]",
        add_bench,
    ),
    Command(
        "export",
        "write a folder to deploy, .so, .onnx, .rqm, .json or .relay",
        "MODEL -o FILE",
        add_export,
    ),
    Command("generate", "generate text with a language model", "MODEL -p TEXT", add_generate),
    Command("demo", "quantize and measure the built-in example", "", add_demo),
)
