"""Every command from end to end on the built-in example, as a user types it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from onnx_models import make_onnx
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relayquant as rq
from relayquant import cli
from relayquant.demo import load_digits
from relayquant.ir.ledger import find_ledger
from relayquant.ir.rewrite import Graph
from relayquant.ir.rewrite.graph import constant_value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's model, its calibration digits, and the quantized module."""
    folder = tmp_path_factory.mktemp("digits")
    demo = load_digits()
    (folder / "digits.onnx").write_bytes(demo.model_path.read_bytes())
    np.savez(folder / "calibration.npz", image=np.concatenate(demo.calibration))
    np.savez(folder / "held_out.npz", image=demo.images, labels=demo.labels)
    arguments = [str(folder / "digits.onnx"), "--data", str(folder / "calibration.npz")]
    assert cli.main(["quantize", *arguments, "-o", str(folder / "digits.int8.json")]) == 0
    return folder


def test_quantize__writes_a_quantized_module(folder: Path) -> None:
    mod = tvm.ir.load_json((folder / "digits.int8.json").read_text())
    assert "qnn.conv2d" in mod.script()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG files of twice the size, and their classes."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("pictures")
    demo = load_digits()
    classes = []
    for i, (array, label) in enumerate(zip(demo.images[:24], demo.labels, strict=False)):
        pixels = (array[0] * 255).round().astype("uint8")
        image.fromarray(pixels).resize((16, 16), 0).save(folder / f"{i:02d}.png")
        classes.append(f"{i:02d}.png {label}")
    (folder / "classes.txt").write_text("\n".join(classes))
    return folder


@pytest.mark.slow
def test_quantize__pictures_a_metric_a_library_and_a_report(
    folder: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("jinja2", "grandalf", "matplotlib"):
        pytest.importorskip(package)
    given = [str(folder / "digits.onnx"), "--data", str(pictures), "--preprocess", "unit"]
    labels = ["--labels", str(pictures / "classes.txt")]
    library, page = tmp_path / "digits.so", tmp_path / "report.html"
    outputs = ["-o", str(library), "--report", str(page)]
    metric = ["--metric", "top1", *labels, "--max-drop", "0.05", "--effort", "fast"]
    assert cli.main(["quantize", *given, *outputs, *metric]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^\d+ of \d+ operators quantized", text)
    assert "search: score" in text
    assert text.endswith(f"wrote {library}\nwrote {page}\n")
    assert "top1" in page.read_text()
    demo = load_digits()
    main = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())["main"]
    logits = main(tvm.runtime.tensor(demo.images)).numpy()
    assert (logits.argmax(1) == demo.labels).mean() >= 0.95


@pytest.mark.slow
def test_quantize__options_reach_the_quantizer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / "digits.onnx"), "--data", str(folder / "calibration.npz")]
    output = tmp_path / "q.json"
    more = ["--observer", "mse", "--weights", "int4", "--input-dtype", "uint8", "--guard", "off"]
    fast = ["--effort", "fast", "--backend", "generic", "--quiet"]
    assert cli.main(["quantize", *given, "-o", str(output), *more, *fast]) == 0
    assert capsys.readouterr().out == ""
    mod = tvm.ir.load_json(output.read_text())
    found = rq.ledger(mod)
    assert found.inputs[0].dtype == "uint8"
    assert {row.observer for row in found.quantized if row.observer} == {"MSE"}
    graph = Graph(mod)
    weights = [constant_value(arg) for v in graph.values.values() for arg in getattr(v, "args", ())]
    integers = [w for w in weights if w is not None and w.dtype == "int8" and w.ndim > 1]
    assert integers
    assert min(int(w.min()) for w in integers) == -8  # all 16 codes
    assert max(int(w.max()) for w in integers) == 7


@pytest.mark.slow
def test_quantize__model_type(folder: Path, tmp_path: Path) -> None:
    given = [str(folder / "digits.onnx"), "--data", str(folder / "calibration.npz")]
    output = tmp_path / "q.json"
    more = ["--model-type", "transformer", "--effort", "fast", "--quiet"]
    assert cli.main(["quantize", *given, "-o", str(output), *more]) == 0
    found = {row.op for row in rq.ledger(tvm.ir.load_json(output.read_text())).quantized}
    assert found == {"matmul", "nn.conv2d"}


@pytest.mark.parametrize(
    ("options", "dtype", "scheme", "groups", "weights"),
    [
        ([], "int4", "symmetric", 32, "without data"),
        (
            ["--bits", "3", "--scheme", "affine", "--group-size", "16"],
            *("int3", "affine", 16, "without data"),
        ),
        (  # there is room for 8 bits
            ["--data", "calibration.npz", "--effort", "fast", "--max-size", "1kB"],
            *("int8", "symmetric", 32, "weighted by data"),
        ),
    ],
)
def test_compress__options_reach_the_compression(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    dtype: str,
    scheme: str,
    groups: int,
    weights: str,
) -> None:
    monkeypatch.chdir(folder)
    name = "digits.int3.rqm" if "3" in options else "digits.int4.rqm"
    assert cli.main(["compress", "digits.onnx", *options, "--quiet"]) == 0
    ledger = rq.ledger(rq.load(name))
    (row,) = ledger.rows
    assert (row.op, row.dtype, row.scheme) == ("matmul", dtype, scheme)
    assert row.rule.startswith(f"groups of {groups}, ")
    assert ledger.choices["weights"].endswith(weights)


@pytest.mark.slow
def test_export_and_verify(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, written = str(folder / "digits.int8.json"), tmp_path / "digits.onnx"
    assert cli.main(["export", module, "-o", str(written)]) == 0
    onnx.checker.check_model(onnx.load(written))
    capsys.readouterr()
    data = ["--data", str(folder / "calibration.npz")]
    assert cli.main(["verify", module, *data]) == 0
    assert capsys.readouterr().out.startswith("bit for bit as the reference: ")
    assert cli.main(["verify", module, *data, "--samples", "3"]) == 0
    assert capsys.readouterr().out.endswith(", 3 samples\n")


def test_main__a_file_alone_is_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(folder / "digits.onnx")]) == 0
    text = capsys.readouterr().out
    assert "digits.onnx: float model (ONNX), " in text
    assert "output  logits" in text
    assert "of 7 fused operators can be quantized, for backend" in text
    assert "input   image" in text
    assert "relayquant quantize" in text
    assert cli.main([str(folder / "digits.int8.json")]) == 0
    text = capsys.readouterr().out
    assert "quantized model" in text
    assert "relayquant export" in text


@I.ir_module
class ManyOutputs:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), s: R.Tensor((), "int64")):
        n = T.int64()
        with R.dataflow():
            y = R.nn.relu(x)
            z = R.split(y, 2, axis=1)
            size = R.shape([n, 4])
            R.output(y, z, size)
        return (y, (z, size), x)


def test_inspect__outputs_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.json"
    path.write_text(tvm.ir.save_json(ManyOutputs))
    assert cli.main([str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  output")]
    assert [line.split()[1] for line in lines] == ["y", "z", "size", "x"]
    assert lines[0] == "  output  y (n, 4) float32"
    assert "Tuple" in lines[1]
    assert "Shape" in lines[2]


def test_inspect__ledger_of_the_quantized_module(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(folder / "digits.int8.json"), "--all"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^block1/depthwise\S*\s+nn\.conv2d\s+yes", text, re.MULTILINE)
    assert re.search(r"^\d+ of \d+ operators quantized", text, re.MULTILINE)
    guard = r"^guard: [\d.]+ dB SQNR, \d+ of \d+ answers equal \(.*%\), on \d+ of \d+ samples "
    guard += r"\(.*held back.*; worst sample number \d+: [\d.]+ dB SQNR"
    assert re.search(guard, text, re.MULTILINE)


def test_inspect__operators_of_the_float_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(folder / "digits.onnx"), "--all"]) == 0
    assert re.search(r"^nn\.conv2d\s+4\s*$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_export__library_runs(folder: Path) -> None:
    library = folder / "digits.so"
    module = str(folder / "digits.int8.json")
    assert cli.main(["export", module, "-o", str(library)]) == 0
    demo = load_digits()
    main = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())["main"]
    logits = main(tvm.runtime.tensor(demo.images)).numpy()
    assert (logits.argmax(1) == demo.labels).mean() >= 0.97


@pytest.mark.slow
def test_compare__outputs_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(folder / name) for name in ("digits.onnx", "digits.int8.json")]
    data = str(folder / "held_out.npz")
    assert cli.main(["compare", *arguments, "--data", data, "--samples", "200"]) == 0
    text = capsys.readouterr().out
    found = re.search(r"([\d.]+) dB SQNR, (\d+) of 200 answers equal .*, on 200 samples", text)
    assert found is not None, text
    assert "output logits" in text  # the name in the ONNX file
    assert float(found[1]) > 15.0
    assert int(found[2]) >= 194
    before = rq.ledger(tvm.ir.load_json((folder / "digits.int8.json").read_text())).guard
    assert f"quantize measured {before.agreement}" in text


def test_lint__finds_what_is_wrong_with_the_data(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(folder / "digits.onnx")
    assert cli.main(["lint", model, "--data", str(folder / "calibration.npz"), "--growth"]) == 0
    text = capsys.readouterr().out
    assert "nothing looks wrong" in text
    assert re.search(r"^range of image: .*100% after \d+$", text, re.MULTILINE)
    with np.load(folder / "calibration.npz") as data:
        np.savez(tmp_path / "pixels.npz", image=data["image"] * 255)
    assert cli.main(["lint", model, "--data", str(tmp_path / "pixels.npz")]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^warning\s+scale\s+image\s.*too large", text, re.MULTILINE)
    assert "\n1 warning\n" in text


@pytest.mark.slow
def test_lint__pictures_and_their_classes(
    folder: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / "digits.onnx"), "--data", str(pictures), "--preprocess"]
    labels = ["--labels", str(pictures / "classes.txt")]
    assert cli.main(["lint", *given, "unit", *labels]) == 0
    text = capsys.readouterr().out
    assert re.search(r"the float model is\s+right on", text)
    assert re.search(r"the first 24 samples: .*'tflite' [\d.]+%", text)
    assert cli.main(["lint", *given[:-1]]) == 0
    warned = capsys.readouterr().err
    assert re.search(r"guessed: --preprocess (unit|cifar), because .* its batch norm", warned)
    assert cli.main(["lint", *given, "tflite"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^warning\s+normalization\s+image", text, re.MULTILINE)
    assert "was not checked" not in text
    assert cli.main(["lint", *given, "unit", "--labels", str(tmp_path / "no.txt")]) != 0
    assert "There is no file of labels" in capsys.readouterr().err


@pytest.mark.slow
def test_sensitivity__its_configuration_is_what_quantize_takes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder / "digits.onnx"), "--data", str(folder / "calibration.npz")]
    patch, table = tmp_path / "patch.json", tmp_path / "rank.csv"
    rank = ["sensitivity", *given, "--effort", "fast", "--samples", "32"]
    assert cli.main([*rank, "--csv", str(table), "--keep", "1", "-o", str(patch)]) == 0
    text = capsys.readouterr().out
    header, worst, *_ = table.read_text().splitlines()
    assert header == "name,op,score"
    name, op, score = worst.split(",")
    line = rf"^{re.escape(name)}\s+{op.removeprefix('nn.')}\s+{float(score):.4g}\s*$"
    assert re.search(line, text, re.MULTILINE)
    output = tmp_path / "patched.json"
    assert cli.main(["quantize", *given, "--config", str(patch), "-o", str(output)]) == 0
    floating = rq.ledger(tvm.ir.load_json(output.read_text())).floating
    assert [row.name for row in floating] == [name]


def test_sensitivity__keep_needs_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(folder / "digits.onnx"), "--data", str(folder / "calibration.npz")]
    assert cli.main(["sensitivity", *given, "--keep", "1"]) == 2
    assert "--keep N and -o FILE.json need each other" in capsys.readouterr().err


def test_demo__accuracy_size_speed_and_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--repeat", "3"]) == 0
    text = capsys.readouterr().out
    accuracies = [float(value) for value in re.findall(r"accuracy\s+([\d.]+)%", text)]
    sizes = [float(value) for value in re.findall(r"constants\s+([\d.]+) kB", text)]
    assert accuracies[0] == pytest.approx(98.6, abs=0.21)
    assert accuracies[1] >= accuracies[0] - 1.0
    assert sizes[1] < 0.4 * sizes[0]
    assert "operators quantized" in text
    assert "times the speed of float" in text


@pytest.mark.parametrize(
    ("target", "backend"),
    [
        (None, rq.get_backend_config().name),
        ("llvm -mtriple=aarch64-linux-gnu", "arm"),
        ("llvm -mtriple=x86_64-linux-gnu", "x86"),
    ],
)
def test_export__a_model_of_another_tool_runs_on_integers_as_the_target_takes_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, backend: str
) -> None:
    """A module of ours has its integers already, and a float model has none."""
    qmod = tvm.ir.load_json((folder / "digits.int8.json").read_text())
    other = rq.export_onnx(qmod, tmp_path / "other.onnx")
    compiled: list[tvm.IRModule] = []

    class Library:
        def export_library(self, path: str) -> None:
            Path(path).write_text("library")

    def take(mod: tvm.IRModule, target: object = None, **_options: object) -> Library:
        compiled.append(mod)
        return Library()

    monkeypatch.setattr(rq, "compile", take)
    options = ["-o", str(tmp_path / "x.so"), *(["--target", target] if target else [])]
    for model in (other, folder / "digits.int8.json", folder / "digits.onnx"):
        assert cli.main(["export", str(model), *options]) == 0
    ours, same, plain = compiled
    assert rq.ledger(ours).backend == backend
    assert rq.ledger(ours).quantized
    assert rq.ledger(same).backend == rq.get_backend_config().name
    assert find_ledger(plain) is None


STEP, ZERO = relax.const(0.05, "float32"), relax.const(3, "int8")
WEIGHT = relax.const(np.eye(8, dtype="int8") * np.int8(40), "int8")
WEIGHT_STEP, WEIGHT_ZERO = relax.const(0.01, "float32"), relax.const(0, "int8")


@I.ir_module
class QdqOfRelax:
    """As importers give it that know nothing of the dialect."""

    @R.function
    def main(x: R.Tensor((4, 8), "float32")) -> R.Tensor((4, 8), "float32"):
        with R.dataflow():
            q = R.quantize(x, STEP, ZERO, axis=0, out_dtype="int8")
            d = R.dequantize(q, STEP, ZERO, axis=0, out_dtype="float32")
            w = R.dequantize(WEIGHT, WEIGHT_STEP, WEIGHT_ZERO, axis=0, out_dtype="float32")
            y = R.matmul(d, w)
            p = R.quantize(y, STEP, ZERO, axis=0, out_dtype="int8")
            z = R.dequantize(p, STEP, ZERO, axis=0, out_dtype="float32")
            R.output(z)
        return z


def test_export__quantize_and_dequantize_of_relax_run_on_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "qdq.json"
    path.write_text(tvm.ir.save_json(QdqOfRelax))
    assert cli.main([str(path)]) == 0
    assert "qdq.json: quantized model (Relax)" in capsys.readouterr().out
    real, compiled = rq.compile, []
    monkeypatch.setattr(
        rq, "compile", lambda mod, *a, **k: compiled.append(mod) or real(mod, *a, **k)
    )
    assert cli.main(["export", str(path), "-o", str(tmp_path / "x.so")]) == 0
    (mod,) = compiled
    assert [row.op for row in rq.ledger(mod).quantized] == ["matmul"]
    run = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "x.so")), tvm.cpu())
    x = np.linspace(-4, 4, 32, dtype="float32").reshape(4, 8)
    q = np.clip(np.round(x / np.float32(0.05)) + 3, -128, 127)
    y = np.clip(np.round((q - 3) * 0.4) + 3, -128, 127)
    got = run["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(got, (y - 3) * 0.05, atol=1e-6)


@pytest.fixture(scope="module")
def rated(folder: Path) -> Path:
    """A model of a signal of any length, with a gain that depends on a sampling rate."""
    make = onnx.helper.make_node
    branches = {
        f"{way}_branch": onnx.helper.make_graph(
            [make("Mul", ["x", gain], [way])], way, [], [onnx.ValueInfoProto(name=way)]
        )
        for way, gain in (("then", "low"), ("else", "high"))
    }
    nodes = [
        make("Equal", ["rate", "slow"], ["is_slow"]),
        make("If", ["is_slow"], ["y"], **branches),
    ]
    inputs = {"x": ["n", "length"], "rate": ("int64", [])}
    constants = {"slow": np.int64(8000), "low": np.float32(2), "high": np.float32(3)}
    path = folder / "rated.onnx"
    onnx.save(make_onnx(nodes, inputs, {"y": None}, constants), path)
    return path


@pytest.mark.parametrize(
    ("options", "tune"), [([], False), (["--tune"], True), (["--tune", "x"], Path("x"))]
)
def test_export__tunes_if_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], tune: object
) -> None:
    asked: list[object] = []

    def refuse(_mod: tvm.IRModule, target: object, *, tune: object, precision: object) -> None:
        asked.append(tune)
        raise rq.errors.ConfigError("far enough")

    monkeypatch.setattr(rq, "compile", refuse)
    output = str(tmp_path / "x.so")
    assert cli.main(["export", str(folder / "digits.onnx"), "-o", output, *options]) == 2
    assert asked == [tune]


def test_export__precision_of_a_library(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(_mod: tvm.IRModule, target: object, *, tune: object, precision: object) -> None:
        asked.append(precision)
        raise rq.errors.ConfigError("far enough")

    model, library = str(folder / "digits.onnx"), str(folder / "bf16.so")
    target = ["--target", "llvm -mtriple=x86_64-linux-gnu -mcpu=haswell"]
    options = ["export", model, "--precision", "bf16", "-o"]
    assert cli.main([*options, library, *target]) == 2
    assert "Sapphire Rapids" in capsys.readouterr().err
    assert cli.main([*options, str(folder / "bf16.json")]) == 2
    assert "--precision: only a library is compiled" in capsys.readouterr().err
    monkeypatch.setattr(rq, "compile", refuse)
    assert cli.main([*options, library]) == 2
    assert asked == [rq.config.Precision.BF16]


@pytest.mark.parametrize(("rate", "gain"), [("8000", 2), ("16000", 3)])
def test_export__shape_and_input_of_the_model(rated: Path, rate: str, gain: int) -> None:
    library = rated.with_suffix(f".{rate}.so")
    options = ["--shape", "x=2,480", "--input", f"rate={rate}", "-o", str(library)]
    assert cli.main(["export", str(rated), *options]) == 0
    run = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())["main"]
    x = np.linspace(-1, 1, 960, dtype="float32").reshape(2, 480)
    np.testing.assert_array_equal(run(tvm.runtime.tensor(x)).numpy(), x * np.float32(gain))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "x"], "'x' is not of the form NAME="),
        (["--shape", "x=2,0"], "no valid shape for 'x'"),
        (["--input", "rate=fast"], "no valid value for 'rate'"),
        (["--input", "rate=1", "--input", "rate=2"], "--input is given twice"),
        (["--input", "speed=1"], "names 'speed', which is not an input"),
        (["--input", "rate=1.5"], "does not fit int64"),
        (["--shape", "z=2,480", "--input", "rate=1"], "'z'"),
    ],
)
def test_export__shape_or_input_that_is_wrong(
    rated: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = rated.with_name("wrong.so")
    assert cli.main(["export", str(rated), *options, "-o", str(output)])
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_export__a_module_takes_no_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = str(folder / "digits.int8.json")
    assert cli.main(["export", module, "-o", "x.so", "--shape", "image=1,8,8"])
    assert "is a Relax module. Its inputs cannot be changed" in capsys.readouterr().err
