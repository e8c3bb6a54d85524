"""Messages name the options of the command line, not the arguments of Python."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.helper as oh
import pytest
from onnx_models import make_onnx

from relayquant import cli
from relayquant.cli.output import ExitCode
from relayquant.cli.parsers import build_whole_parser, list_actions
from relayquant.cli.wording import OPTIONS, name_options
from relayquant.errors import suggest_sizes


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Fix it: shapes={'x:0': (1, 'N', 3)}.", "Fix it: --shape x:0=1,N,3."),
        ("Fix it: shapes={'x': (...)}, or", "Fix it: --shape x=..., or"),
        ("inputs={'a': value, 'b': [1, 2]} fixes", "--input a=value --input b=[1, 2] fixes"),
        ("shapes= names 'y'.", "--shape names 'y'."),
        ("checkpoint='a b': there is no folder", "--checkpoint a b: there is no folder"),
        ("Use group_size=32; or budget=1.5.", "Use --group-size 32; or --time-limit 1.5."),
        ("load it with CausalLMOptions(max_length=...).", "load it with --max-length."),
        ("QSpec('int4', group_size=32)", "QSpec('int4', group_size=32)"),
        ("QSpec(group_size=4) is for weights", "QSpec(group_size=4) is for weights"),
        ("Or --shape x=1,shapes=2", "Or --shape x=1,--shape 2"),
        ("max_sizes=1", "max_sizes=1"),
    ],
)
def test_name_options__of_arguments(message: str, expected: str) -> None:
    assert name_options(message) == expected


def test_name_options__of_a_call() -> None:
    told = name_options(suggest_sizes("x", (1, 8), (1, 9)))
    assert "ONNX and TFLite with --shape x=1,n1, PyTorch exported with dynamic_shapes={'x'" in told


def test_name_options__every_option_exists() -> None:
    known = {o for action in list_actions(build_whole_parser()) for o in action.option_strings}
    assert set(OPTIONS.values()) <= known


def test_error__of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the file to the line on standard error, and to the JSON document."""
    model = tmp_path / "m.onnx"
    node = oh.make_node("Relu", ["x"], ["y"])
    onnx.save(make_onnx([node], {"x": ["N", 4]}, {"y": ["N", 4]}), model)
    words = ["inspect", str(model), "--shape", "z=1,4"]
    assert cli.main(words) == ExitCode.USER_ERROR
    assert "--shape names 'z', which is not an input" in capsys.readouterr().err
    assert cli.main([*words, "--json"]) == ExitCode.USER_ERROR
    assert "shapes=" not in capsys.readouterr().out
