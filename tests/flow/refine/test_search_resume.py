"""A search that is killed goes on from its file and ends with the same patch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

#: Kills itself with the third call of the metric, then goes on, then searches without a break.
SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, {tests!r})
import numpy as np
from tvm.relax import op
import relayquant as rq
from float_models import build_model, draw_batches

BROKEN = ("a", "c")

def body(emit, x):
    for name in "abcd":
        x = emit(name, op.nn.relu(emit.dense(name + ".product", x, 8)))
    return emit.dense("out", x, 4)

def clip_two(info, samples):
    high = max(float(array.max()) for array in samples)
    low = min(float(array.min()) for array in samples)
    return rq.choose_qparams(low, high / (50 if info.name in BROKEN else 1), info.spec)

def search(path, kill_at=None):
    mod = build_model(body, (16, 8))
    data, calls = draw_batches(mod, 3), 0

    def metric(expected, got):
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return -float(np.linalg.norm(expected[0] - got[0]) / np.linalg.norm(expected[0]))

    qmod = rq.quantize(mod, None, data, metric=metric, effort="fast", max_drop=0.1,
                       observer=clip_two, search_state=path)
    found = rq.ledger(qmod).search
    return {{"mapping": found.mapping, "score": found.score, "calls": calls}}

broken, whole = sys.argv[1:]
for path, kill_at in ((broken, 6), (broken, None), (whole, None)):
    child = os.fork()  # before anything has run in TVM
    if not child:
        print(json.dumps(search(path, kill_at)), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), os.path.exists(path), flush=True)
"""


@pytest.mark.slow
def test_search__killed_and_resumed_gives_the_same_patch(tmp_path) -> None:
    broken, whole = tmp_path / "broken.json", tmp_path / "whole.json"
    script = SCRIPT.format(tests=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", script, str(broken), str(whole)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert lines[0] == f"-{signal.SIGKILL.value} True", done.stderr
    assert [lines[2], lines[4]] == ["0 True", "0 True"], done.stderr
    resumed, straight = json.loads(lines[1]), json.loads(lines[3])
    assert resumed["calls"] < straight["calls"], "what was measured is not measured again"
    assert resumed["mapping"] == straight["mapping"]
    assert resumed["mapping"]["module_name"], "there was something to put back"
    np.testing.assert_equal(resumed["score"], straight["score"])
    # Both files hold the same in the end.
    assert json.loads(broken.read_text()) == json.loads(whole.read_text())
