"""Language models from GGUF files and folders: scores as numpy computes them; what is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from causal_lm_runs import run_chunks, run_function
from llama_files import (
    CHOSEN,
    EXPERTS,
    INNER,
    LENGTH,
    VOCABULARY,
    WIDTH,
    compute_scores,
    draw_experts,
    draw_weights,
    write_folder,
    write_gguf,
)
from module_constants import list_constants

import relayquant as rq
from relayquant.base.qtypes import Granularity, QSpec, Scheme
from relayquant.errors import ConfigError, ModelError
from relayquant.ir.state import get_state

TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (1, 18))
CHUNKS = (7, 8, 1, 1, 1)
FLOAT = rq.CausalLMOptions(cache="float32")


def check_scores(found, want, share):
    assert found.shape == want.shape
    assert np.sqrt(((found - want) ** 2).mean()) < share * np.sqrt((want**2).mean())


def check_most_rows(found, want, share):
    """Half of the rows: after rounding, some choose other experts."""
    errors = np.sqrt(((found - want) ** 2).mean(-1)) / np.sqrt((want**2).mean(-1))
    assert np.median(errors) < share


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama"), draw_weights())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    pytest.importorskip("gguf")
    return write_gguf(tmp_path_factory.mktemp("llama") / "m.gguf").path


def test_folder__scores_are_those_of_numpy(folder):
    mod, params = rq.load(folder, causal_lm=FLOAT)
    found = run_chunks(mod, params, TOKENS, CHUNKS)
    check_scores(found[0], compute_scores(draw_weights(), TOKENS[0]), 1e-5)


def test_gguf__scores_are_those_of_numpy(path):
    mod, params = rq.load(path, causal_lm=FLOAT)
    found = run_chunks(mod, params, TOKENS, CHUNKS)
    check_scores(found[0], compute_scores(draw_weights(), TOKENS[0]), 1e-5)


@pytest.mark.parametrize(("cache", "share"), [("float16", 3e-3), ("int8", 3e-2)])
def test_cache__narrow_dtypes(folder, cache, share):
    mod, params = rq.load(folder, causal_lm=rq.CausalLMOptions(cache=cache))
    found = run_chunks(mod, params, TOKENS, CHUNKS)
    check_scores(found[0], compute_scores(draw_weights(), TOKENS[0]), share)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_folder__dtypes(tmp_path, dtype):
    weights = draw_weights()
    if dtype == "bfloat16":  # the upper halves of float32
        stored = {name: (w.view("uint32") >> 16).astype("uint16") for name, w in weights.items()}
        weights = {name: (w.view("uint32") & 0xFFFF0000).view("f4") for name, w in weights.items()}
    else:
        stored = {name: w.astype(dtype) for name, w in weights.items()}
        weights = {name: w.astype("float32") for name, w in stored.items()}
    mod, params = rq.load(write_folder(tmp_path, stored), causal_lm=FLOAT)
    assert all(value.dtype == np.float32 for value in params.values())
    found = run_chunks(mod, params, TOKENS[:, :5], (5,))
    check_scores(found[0], compute_scores(weights, TOKENS[0, :5]), 1e-5)


def test_folder__several_files(tmp_path, folder):
    one, many = rq.load(folder), rq.load(write_folder(tmp_path, draw_weights(), files=3))
    assert one[0].script(show_meta=True) == many[0].script(show_meta=True)
    assert list(one[1]) == list(many[1])
    for name, value in one[1].items():
        np.testing.assert_array_equal(many[1][name], value)


def test_folder__names_without_the_model_s_and_tied(tmp_path):
    weights = draw_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    stored = {
        name.removeprefix("model."): w for name, w in weights.items() if "lm_head" not in name
    }
    mod, params = rq.load(write_folder(tmp_path, stored, tie_word_embeddings=True), causal_lm=FLOAT)
    assert "classifier.weight" not in params
    found = run_chunks(mod, params, TOKENS[:, :5], (5,))
    check_scores(found[0], compute_scores(weights, TOKENS[0, :5]), 1e-5)


@pytest.mark.slow
def test_gguf__blocks_stay_and_both_functions_share_them(tmp_path):
    pytest.importorskip("gguf")
    kinds = dict.fromkeys(("attn_q.", "attn_k.", "attn_output", "ffn_gate", "ffn_up"), "Q4_0")
    kinds |= dict.fromkeys(("attn_v", "ffn_down", "token_embd", "output."), "Q8_0")
    file = write_gguf(tmp_path / "m.gguf", kinds)
    mod, params = rq.load(file.path, causal_lm=FLOAT)
    assert dict(params) == {}
    places = [
        {constant.value.data_ptr() for constant in list_constants(mod[name], least=2)}
        for name in ("prefill", "decode")
    ]
    assert places[0] == places[1]
    found = run_chunks(mod, params, TOKENS, CHUNKS)
    check_scores(found[0], compute_scores(file.weights, TOKENS[0]), 2e-2)  # rows are rounded
    rows = {row.name: row for row in rq.ledger(mod).rows}
    assert {row.dtype for row in rows.values()} == {"int4", "int8"}
    # q and k are one product, v has other blocks.
    assert rows["decode.layers.0.qk"].dtype == "int4"
    assert rows["decode.layers.0.v"].dtype == "int8"


@pytest.mark.slow
def test_gguf__floats_of_four_bits(tmp_path):
    """MXFP4, the kind of GPT-OSS, keeps 4 bits, also compiled."""
    pytest.importorskip("gguf")
    names = ("attn_q.", "attn_k.", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    file = write_gguf(tmp_path / "m.gguf", dict.fromkeys((*names, "token_embd"), "MXFP4"))
    mod, params = rq.load(file.path, causal_lm=FLOAT)
    row = next(row for row in rq.ledger(mod).rows if row.name == "decode.layers.0.qkv")
    assert (row.dtype, row.rule) == ("int4", "blocks of the file, as groups of 32 with 16 levels")
    found = run_chunks(mod, params, TOKENS, (17, 1))
    check_scores(found[0], compute_scores(file.weights, TOKENS[0]), 3e-2)  # rows are rounded
    tokens, positions = TOKENS.astype("int32"), np.zeros(1, "int32")
    picked = np.arange(17, dtype="int32")[None]
    # Without a precision, `prefill` on AMX rounds rows to bfloat16, and not to 8 bits as numpy.
    for precision, wanted, share in (
        ("float32", found, 1e-3),
        (None, compute_scores(file.weights, TOKENS[0])[None], 3e-2),
    ):
        executor = rq.Executor(rq.compile((mod, params), precision=precision))
        first = executor.run("prefill", [tokens[:, :17], positions, picked])[0]
        second = executor.run("decode", [tokens[:, 17:], positions + 17])[0]
        check_scores(np.concatenate([first, second], 1), wanted, share)


MIXTRAL = {
    "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "intermediate_size": INNER,
}  # fmt: skip


def rename_as_mixtral(weights):
    """Names that files of Mixtral have."""
    renamed = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    found = {}
    for name, value in weights.items():
        for before, after in renamed.items():
            name = name.replace(before, after)
        found[name] = value
    return found


def test_experts__of_a_folder_and_a_gguf_file_are_those_of_numpy(tmp_path):
    pytest.importorskip("gguf")
    weights = draw_experts()
    expected = compute_scores(weights, TOKENS[0])
    write_folder(tmp_path, rename_as_mixtral(weights), **MIXTRAL)
    path = write_gguf(tmp_path / "m.gguf", has_experts=True).path
    for source in (tmp_path, path):
        mod, params = rq.load(source, causal_lm=FLOAT)
        assert params["layers.1.experts_down.weight"].shape == (EXPERTS * WIDTH, INNER)
        found = run_chunks(mod, params, TOKENS, CHUNKS)
        check_scores(found[0], expected, 1e-5)


@pytest.mark.slow
def test_experts__blocks_stay_and_compute_as_the_reference(tmp_path):
    pytest.importorskip("gguf")
    kinds = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "Q4_1", "ffn_down_exps": "Q8_0"}
    path = write_gguf(tmp_path / "m.gguf", kinds, has_experts=True).path
    pair = rq.load(path, causal_lm=FLOAT)
    assert not any("experts" in name for name in pair[1])
    rows = {row.name: row.dtype for row in rq.ledger(pair[0]).rows}
    assert rows["decode.layers.0.experts_gate"] == "int4"
    assert rows["decode.layers.0.experts_down"] == "int8"
    small = rq.compress_weights(pair, bits=4)  # what is float in the file: not the router
    kept = [row.name for row in rq.ledger(small).rows if not row.quantized]
    assert {name.split(".")[1] for name in kept} == {"layers_0_router", "layers_1_router"}
    want = run_chunks(*pair, TOKENS, (17, 1))
    check_most_rows(want[0], compute_scores(draw_experts(), TOKENS[0]), 0.2)
    executor = rq.Executor(rq.compile(pair))
    tokens, positions = TOKENS.astype("int32"), np.zeros(1, "int32")
    picked = np.arange(17, dtype="int32")[None]
    first = executor.run("prefill", [tokens[:, :17], positions, picked])[0]
    second = executor.run("decode", [tokens[:, 17:], positions + 17])[0]
    check_scores(np.concatenate([first, second], 1), want, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_affine", [False, True])
def test_experts__compressed_and_the_router_stays(tmp_path, is_affine):
    """The router chooses. Rows of an affine scheme are shifted by the sums of the chosen weight."""
    write_folder(tmp_path, rename_as_mixtral(draw_experts()), **MIXTRAL)
    pair = rq.load(tmp_path, causal_lm=FLOAT)
    activation = QSpec("int8", Scheme.AFFINE, Granularity.PER_ROW, is_dynamic=True)
    small = rq.compress_weights(pair, bits=8, **({"activation": activation} if is_affine else {}))
    kept = [row for row in rq.ledger(small).rows if not row.quantized]
    assert {row.name.split(".")[1] for row in kept} == {"layers_0_router", "layers_1_router"}
    assert "its results choose experts" in kept[0].reason
    found = run_chunks(small, {}, TOKENS, CHUNKS)
    check_most_rows(found[0], compute_scores(draw_experts(), TOKENS[0]), 0.1)


def test_experts__compressed_with_data(tmp_path):
    """Other weights are fitted to rows behind experts that are compressed already."""
    write_folder(tmp_path, rename_as_mixtral(draw_experts()), **MIXTRAL)
    mod, params = rq.load(tmp_path, causal_lm=FLOAT)
    state = {each.name: each.value for each in get_state(mod)}
    at, last = np.zeros(1, "int32"), np.array([[17]], "int32")
    rng = np.random.default_rng(5)
    data = [
        {"tokens": rng.integers(0, VOCABULARY, (1, 18), "int32"), "positions": at, "picked": last}
        | state
        for _ in range(4)
    ]
    small = rq.compress_weights(mod, params, data, function="prefill", bits=8)
    found = run_chunks(small, {}, TOKENS, CHUNKS)
    check_most_rows(found[0], compute_scores(draw_experts(), TOKENS[0]), 0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("experts.2.w3.weight", "no tensor 'model.layers.1.mlp.experts.2.up_proj.weight'"),
        ("gate.weight", "no tensor 'model.layers.1.mlp.gate.weight'"),
    ],
)
def test_experts__tensors_that_are_missing(tmp_path, name, message):
    weights = rename_as_mixtral(draw_experts())
    del weights[f"model.layers.1.block_sparse_moe.{name}"]
    write_folder(tmp_path, weights, **MIXTRAL)
    with pytest.raises(ModelError, match=message):
        rq.load(tmp_path)


def test_experts__shapes_that_are_wrong(tmp_path):
    write_folder(tmp_path, rename_as_mixtral(draw_experts()), **MIXTRAL | {"intermediate_size": 63})
    with pytest.raises(ModelError, match=r"experts.0.gate_proj.*\(64, 64\); the model's metadata"):
        rq.load(tmp_path)
    write_folder(tmp_path, rename_as_mixtral(draw_experts()), **MIXTRAL | {"num_local_experts": 2})
    with pytest.raises(ModelError, match=r"mlp.gate.weight' has shape \(3, 64\)"):
        rq.load(tmp_path)


def test_sequences__of_different_lengths(folder):
    """A short sequence is padded. What is written behind its end is never seen."""
    options = rq.CausalLMOptions(cache="float32", sequences=2, max_length=16)
    mod, params = rq.load(folder, causal_lm=options)
    state = [value.value for value in get_state(mod)]
    assert state[0].shape == (2, 2, 16, 16)
    long, short = TOKENS[0, :9], TOKENS[0, 9:14]
    rows = np.stack([long[:8], np.pad(short[:4], (0, 4))]).astype("int32")
    picked = np.array([[7], [3]], "int32")
    first, *state = run_function(
        mod, params, "prefill", [rows, np.zeros(2, "int32"), picked, *state]
    )
    assert first.shape == (2, 1, VOCABULARY)
    last = np.array([[long[8]], [short[4]]], "int32")
    second, *_ = run_function(mod, params, "decode", [last, np.array([8, 4], "int32"), *state])
    for i, sequence in enumerate((long, short)):
        want = compute_scores(draw_weights(), sequence)
        check_scores(first[i, 0], want[-2], 1e-5)
        check_scores(second[i, 0], want[-1], 1e-5)


@pytest.mark.slow
def test_compile__both_functions_compute_as_the_reference(folder):
    pair = rq.load(folder)
    executor = rq.Executor(rq.compile(pair))
    tokens = TOKENS.astype("int32")
    positions, picked = np.zeros(1, "int32"), np.arange(17, dtype="int32")[None]
    first = executor.run("prefill", [tokens[:, :17], positions, picked])[0]
    second = executor.run("decode", [tokens[:, 17:], positions + 17])[0]
    want = run_chunks(*pair, TOKENS, (17, 1))
    found = np.concatenate([np.asarray(first), np.asarray(second)], 1)
    check_scores(found, want, 1e-3)  # float16 keys and values


def test_compress__float_weights_of_both_functions(folder):
    pair = rq.load(folder, causal_lm=FLOAT)
    small = rq.compress_weights(pair, bits=8)
    assert {param.name for param in small["decode"].params} == {
        param.name for param in pair[0]["decode"].params[: -len(pair[1])]
    }
    found = run_chunks(small, {}, TOKENS, CHUNKS)
    check_scores(found[0], compute_scores(draw_weights(), TOKENS[0]), 3e-2)


# --- Errors -------------------------------------------------------------------------------------


def test_options__out_of_range(folder):
    with pytest.raises(ConfigError, match="max_length=41; the model allows at most 40"):
        rq.load(folder, causal_lm=rq.CausalLMOptions(max_length=LENGTH + 1))
    for wrong in ({"max_length": 0}, {"sequences": 0}, {"cache": "int4"}):
        with pytest.raises(ConfigError, match="allowed"):
            rq.CausalLMOptions(**wrong)
    with pytest.raises(ModelError, match="causal_lm= does not apply"):
        rq.load("m.onnx", causal_lm=FLOAT)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "rwkv"}, "architecture is 'rwkv'; supported: llama"),
        ({"hidden_act": "mish"}, "activation is 'mish'; supported: silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic'; supported: default"),
        ({"hidden_size": "many"}, "'hidden_size' of the model is many; needed: an integer"),
        ({"vocab_size": None}, "'vocab_size' of the model is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2.self_attn.q_proj.weight'.*more"),
        ({"num_hidden_layers": 1}, "does not use: 'model.layers.1"),
        ({"intermediate_size": 95}, "has shape .*96, 64.*; the model's metadata says"),
        ({"max_position_embeddings": 1 << 40}, "max_length"),
        ({"num_key_value_heads": 3}, "3 heads of keys and values"),
        ({"head_dim": 15}, "turns 15 elements"),
        ({"rms_norm_eps": float("nan")}, "finite"),
        ({"model_type": "x" * 5000}, f"architecture is '{'x' * 60}'; supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*call compress_weights"),
    ],
)
def test_folder__metadata_that_is_wrong(tmp_path, config, message):
    write_folder(tmp_path, draw_weights(), **config)
    with pytest.raises(ModelError, match=message) as caught:
        rq.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [{"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}],
    ids=lambda metadata: next(iter(metadata)),
)
def test_gguf__positions_are_scaled_without_a_type(tmp_path, metadata):
    """As by llama.cpp, whose scores were compared."""
    pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "m.gguf", **metadata).path
    scaling = {"rope_type": "linear", "factor": 4.0}
    folder = write_folder(tmp_path, draw_weights(), rope_scaling=scaling)
    found, expected = (
        run_chunks(*rq.load(each, causal_lm=FLOAT), TOKENS, CHUNKS) for each in (path, folder)
    )
    check_scores(found[0], expected[0], 1e-5)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": 3}, "no tensor 'blk.2.attn_q.weight'"),
        ({"feed_forward_length": 95}, "metadata says"),
        ({"rope.dimension_count": 2**31 - 2}, "elements"),
        ({"expert_count": 8}, "'llama.expert_used_count' of the model is missing"),
        ({"expert_count": 2, "expert_used_count": 3}, "chooses 3 of 2 experts; allowed: 1 to all"),
        (
            {"expert_count": 2, "expert_used_count": 1, "expert_gating_func": 2},
            "expert_gating_func' of the model is 2; needed: 0 or 1. Other routers",
        ),
        ({"context_length": 0}, "max_length is 0"),
        ({"attention.causal": False}, "causal' of the model is False; needed: true"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "has 'llama.rope.scaling.yarn_ext_factor'"),
        ({"split.count": 3}, "part 1 of 3 files.*llama-gguf-split --merge"),
    ],
)
def test_gguf__metadata_that_is_wrong(tmp_path, metadata, message):
    pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "m.gguf", **metadata).path
    with pytest.raises(ModelError, match=message) as caught:
        rq.load(path)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("kind", ["IQ2_S", "IQ3_XXS", "TQ1_0", "Q8_K"])
def test_gguf__blocks_that_are_not_read(kind, tmp_path):
    """The first tensor with them is named, and what could be read instead."""
    gguf = pytest.importorskip("gguf")
    form = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[form]
    path = tmp_path / "m.gguf"
    blocks = np.zeros((64, 256 // values * size), "uint8")
    write_gguf(path, extra={"blk.0.ffn_norm.weight": (blocks, form)})
    with pytest.raises(ModelError, match=rf"ffn_norm.*of kind {kind} .*supported: .*Q6_K.*RQ202"):
        rq.load(path)


@pytest.mark.parametrize("dtype", ["F4", "F8_E4M3", "F8_E5M2", "I8", "BOOL"])
def test_folder__dtypes_that_are_not_read(dtype, tmp_path):
    """They are refused when the model is loaded. Beside the tensors that are used they may be."""
    weights = draw_weights()
    name, buffer = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.rotary_emb.inv_freq"
    write_folder(
        tmp_path, weights | {name: weights[name].view("int8")[:, :64]}, dtypes={name: dtype}
    )
    with pytest.raises(ModelError, match=rf"'{name}' is {dtype}; supported: F64.*bfloat16.*RQ202"):
        rq.load(tmp_path)
    write_folder(tmp_path, weights | {buffer: np.zeros(8, "int8")}, dtypes={buffer: dtype})
    rq.load(tmp_path)


def test_folder__files_that_were_not_downloaded(tmp_path):
    write_folder(tmp_path, draw_weights(), files=3)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
    (tmp_path / "model-1.safetensors").write_bytes(pointer)
    with pytest.raises(ModelError, match=r"model-1\.safetensors' is .*Git LFS.*git lfs pull"):
        rq.load(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no file .*model-1.*names 3 files, and 2 are there"):
        rq.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"has 2 files .*pickle.*save_pretrained"):
        rq.load(tmp_path)
    for part in ("model-0.safetensors", "pytorch_model.bin", "config.json"):
        with pytest.raises(ModelError, match=r"is no model\..*name the folder.*has a config"):
            rq.load(tmp_path / part)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"is no model\..*has no config\.json"):
        rq.load(tmp_path)


def test_quantize__of_a_language_model_says_what_is_for_it(folder):
    mod, params = rq.load(folder)
    with pytest.raises(ModelError, match=r"is a language model.*compress_weights"):
        rq.quantize(mod, params, [])


def test_gguf__damaged(path, tmp_path):
    """Every cut is an error. A changed byte is an error, or another model."""
    raw, bad = path.read_bytes(), tmp_path / "bad.gguf"
    rng = np.random.default_rng(0)
    for stop in rng.integers(0, len(raw), 20):
        bad.write_bytes(raw[:stop])
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            rq.load(bad)
    end = raw.index(b"output.weight") + 60
    for place in rng.integers(0, end, 60):
        bad.write_bytes(raw[:place] + rng.bytes(1) + raw[place + 1 :])
        with suppress(ModelError):
            rq.load(bad, causal_lm=rq.CausalLMOptions(max_length=4))


def test_folder__damaged_config(folder, tmp_path):
    text = json.dumps(json.loads((folder / "config.json").read_text())).encode()
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(text), 40):
        changed = text[:place] + bytes([rng.integers(32, 127)]) + text[place + 1 :]
        (tmp_path / "config.json").write_bytes(changed)
        with suppress(ModelError, ConfigError):
            rq.load(tmp_path, causal_lm=rq.CausalLMOptions(max_length=4))
    (tmp_path / "config.json").write_text("[" * 100000)
    with pytest.raises(ModelError, match="nested too deeply"):
        rq.load(tmp_path)
