"""Every node case of the onnx package is computed as onnx has it, or refused as the list says.

A case that begins to work or stops working fails here: write the list anew with
`python tests/formats/readers/onnx_node_cases.py` and look at what changed.
"""

from __future__ import annotations

import re

import onnx
import pytest
from onnx_node_cases import Outcome, Result, list_cases, read_refused, run_case, shorten

#: The cases are spread over so many tests, which run side by side.
PARTS = 128

#: What a refusal says: which node or operator, what is supported, and what to do.
SAYS = (
    r"Node '.+' \(operator \w+, opset \d+\) cannot be converted: .*(supported|allowed|expected): .*"
    r"\. (Write|What|Fix|Convert|Sort|Loops) ",
    r"Not supported, \d+ operators? of the model: \w+ \(nodes '.+'\)\. Replace ",
    r"The model uses opset \d+; supported: 7 and later\. Convert ",
)

#: Differs at 2 of 192 values by two steps of float16: onnx rounds after each step of its softmax,
#: this once. The transform expects 2e-7 where the exact result, and ours, is 0, within 1e-7.
FAULTS = {
    "test_attention_4d_causal_fp16",
    "test_attention_4d_causal_fp16_expanded",
    "test_dft_inverse_opset19",
}


def is_terse(result: Result) -> bool:
    """Whether it is a refusal that leaves something unsaid."""
    return result.outcome is Outcome.REFUSED and not any(re.match(p, result.reason) for p in SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_node_cases__right_or_refused(part):
    version, refused = read_refused()
    cases = list_cases()[part::PARTS]
    results = {case.name: run_case(case) for case in cases}
    faults = {
        name: f"{result.outcome.value}: {result.reason[:300]}"
        for name, result in results.items()
        if result.outcome in (Outcome.BARE, Outcome.WRONG)
    }
    assert not {name: fault for name, fault in faults.items() if name not in FAULTS}
    if version != onnx.__version__:
        return  # the cases and the words of onnx are others; that none is wrong was seen above
    found = {
        name: shorten(result.reason)
        for name, result in results.items()
        if result.outcome is Outcome.REFUSED
    }
    assert not [result.reason for result in results.values() if is_terse(result)]
    expected = {case.name: refused[case.name] for case in cases if case.name in refused}
    assert found == expected


@pytest.mark.slow
def test_node_cases__list_names_cases_alone():
    version, refused = read_refused()
    if version != onnx.__version__:
        pytest.skip(f"the list is of onnx {version}, this is {onnx.__version__}")
    assert set(refused) <= {case.name for case in list_cases()}
    assert len(list_cases()) > 1500
