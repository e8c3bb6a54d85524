"""Tokenizers of GGUF files and tokenizer.json, against what the package tokenizers trains and
encodes by itself; texts that are hard to split; streams; chat templates; damaged files.
"""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from damage import damage

import relayquant as rq
from relayquant.errors import ConfigError, ModelError
from relayquant.formats.tokenizers import Tokenizer
from relayquant.formats.tokenizers.gguf import WORD_PATTERNS, TokenType

tokenizers = pytest.importorskip("tokenizers")
gguf = pytest.importorskip("gguf")

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, we'll see!",
    "def f(x):\n    return x + 1\n\n\tfor i in range(10):\n        print(i, end='')",
    "Ünïcödé, κόσμε, привет мир, 你好世界, こんにちは 한국어 ไทย 🎉🦙👩‍👩‍👧",
    "the the of and to in is that it was for on are with as his they be at one have this",
]
HARD = [
    *CORPUS,
    "", " ", "   ", "\n", "\t\t \n\n  x", " lead", "trail  ", "a  b   c    d",
    "0 00 000 0000 3.14159 1,000,000 ½ ²", "I'LL I'll you'VE 'tis '", "e\u0301 é ﬁ Ⅷ ﷺ",
    "🦙🦙 👩🏽‍🚀 \u200d \ufe0f \U0001f1e9\U0001f1ea", "�\x00\x7f\u2028\u00a0.",
    "<|im_start|>user\nhi<|im_end|>", "<|im_end", "x" * 100,
]  # fmt: skip
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_bytes():
    """A byte-level BPE as GPT-2's, whose special tokens come first."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


def train_pieces():
    """A BPE of pieces as Llama's, with a token for each byte."""
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS[::3], trainer)
    # Bytes are no special tokens, which a text does not show.
    data = json.loads(core.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def write_vocabulary(path, core, kind, **more):
    """A GGUF file with a vocabulary. more: key behind "tokenizer.ggml." -> number or text."""
    vocabulary = core.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    model = json.loads(core.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    types = [
        TokenType.CONTROL
        if token in SPECIAL
        else TokenType.UNKNOWN
        if token == "<unk>"
        else TokenType.BYTE
        if token.startswith("<0x")
        else TokenType.NORMAL
        for token in tokens
    ]
    writer.add_token_types([*map(int, types)])
    if kind == "llama":
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    else:
        writer.add_token_merges(merges)
        writer.add_tokenizer_pre(more.pop("pre", "gpt-2"))
    writer.add_bos_token_id(vocabulary["<|im_start|>"])
    writer.add_eos_token_id(vocabulary["<|end|>"])
    writer.add_chat_template(TEMPLATE)
    for key, value in more.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def trained():
    """Name of the kind -> what the package trained."""
    return {"gpt2": train_bytes(), "llama": train_pieces()}


@pytest.fixture(scope="module")
def paths(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    return {k: write_vocabulary(folder / f"{k}.gguf", core, k) for k, core in trained.items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf__tokens_and_texts_are_those_of_the_package(kind, trained, paths):
    """Merges of pieces are found again from their scores."""
    tokenizer = rq.load_tokenizer(paths[kind])
    assert tokenizer.size == trained[kind].get_vocab_size()
    for text in HARD:
        expected = trained[kind].encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == expected, text
        assert tokenizer.decode(expected) == trained[kind].decode(expected)
        # Pieces have a space after a special token too, as in llama.cpp.
        if kind == "gpt2" or "<|im_start|>" not in text:
            assert tokenizer.decode(expected, keep_special=True) == text


def test_gguf__a_special_token_is_parsed_and_left_out(paths):
    tokenizer = rq.load_tokenizer(paths["gpt2"])
    tokens = tokenizer.encode("<|im_start|>a<|im_end|>", add_special=False)
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert len(tokens) == 3
    assert tokenizer.decode(tokens) == "a"


@pytest.mark.parametrize(
    ("kind", "more", "begins"),
    [
        ("llama", {}, True),
        ("llama", {"add_bos_token": False}, False),
        ("gpt2", {}, False),
        ("gpt2", {"add_bos_token": True}, True),
        ("gpt2", {"pre": "llama-bpe"}, True),
    ],
)
def test_gguf__begins_a_text_as_the_file_says(kind, more, begins, trained, tmp_path):
    path = write_vocabulary(tmp_path / "m.gguf", trained[kind], kind, **more)
    tokenizer = rq.load_tokenizer(path)
    first = trained[kind].token_to_id("<|im_start|>")
    assert tokenizer.encode("the") == [first] * begins + tokenizer.encode("the", add_special=False)


def test_gguf__stops_at_the_named_token_and_at_those_that_end_a_turn(trained, paths, tmp_path):
    """<|end|> is named by the file, <|im_end|> is known by its text."""
    vocabulary = trained["gpt2"].get_vocab()
    ends = {vocabulary["<|end|>"], vocabulary["<|im_end|>"]}
    assert rq.load_tokenizer(paths["gpt2"]).stop_tokens == ends
    more = write_vocabulary(tmp_path / "m.gguf", trained["gpt2"], "gpt2", eot_token_id=300)
    assert rq.load_tokenizer(more).stop_tokens == {*ends, 300}


#: What llama.cpp's own tests and the tokenizers of these models split a text into.
WORDS = {
    "gpt-2": ["I", "'", "LL", " pay", " 12345", "€", "  ", " x", "\n\n"],
    "smollm": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " x", "\n\n"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "45", "€", "  ", " x", "\n\n"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " x", "\n\n"],
    "tekken": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "€", "  ", " x", "\n\n"],
    "gpt-4o": ["I'LL", " pay", " ", "123", "45", "€", "  ", " x", "\n\n"],
    "falcon": ["I", "'", "LL", " pay", " ", "123", "45", "€", "  ", " x", "\n\n"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_gguf__words(pre):
    text = "I'LL pay 12345€   x\n\n"
    words = [text]
    for pattern in WORD_PATTERNS[pre]:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        words = [part for word in words for part, _ in split.pre_tokenize_str(word)]
    assert words == WORDS[pre]


@pytest.mark.parametrize("pre", WORD_PATTERNS)
def test_gguf__every_text_can_be_split(pre, trained, tmp_path):
    path = write_vocabulary(tmp_path / "m.gguf", trained["gpt2"], "gpt2", pre=pre)
    tokenizer = rq.load_tokenizer(path)
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text), keep_special=True).endswith(text)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_stream__pieces_are_the_text_and_never_part_of_a_character(kind, paths):
    tokenizer = rq.load_tokenizer(paths[kind])
    for text in HARD:
        tokens = tokenizer.encode(text, add_special=False)
        stream = tokenizer.open_stream()
        pieces = [*map(stream.add, tokens), stream.finish()]
        assert "".join(pieces) == tokenizer.decode(tokens)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_stream__goes_on_behind_a_prompt(paths):
    """The space before a word is not lost, as it is at the beginning of a text."""
    tokenizer = rq.load_tokenizer(paths["llama"])
    before, tokens = (tokenizer.encode(t, add_special=False) for t in ("the", "quick"))
    assert "".join(map(tokenizer.open_stream().add, tokens)) == "quick"
    assert "".join(map(tokenizer.open_stream(before).add, tokens)) == " quick"


def test_stream__bytes_that_are_no_text(paths):
    """Random tokens, also incomplete at the end."""
    tokenizer = rq.load_tokenizer(paths["gpt2"])
    rng = np.random.default_rng(0)
    for count in range(1, 40):
        tokens = rng.integers(3, 259, count).tolist()
        stream = tokenizer.open_stream()
        assert "".join([*map(stream.add, tokens), stream.finish()]) == tokenizer.decode(tokens)


def test_json__a_file_and_a_folder_with_its_configuration(trained, tmp_path):
    trained["gpt2"].save(str(tmp_path / "tokenizer.json"))
    alone = rq.load_tokenizer(tmp_path / "tokenizer.json")
    assert alone.encode("The quick") == trained["gpt2"].encode("The quick").ids
    assert alone.stop_tokens == set()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE})
    )
    found = rq.load_tokenizer(tmp_path)
    assert found.stop_tokens == {0, 2}
    assert found.chat_template == TEMPLATE


def test_chat__is_written_by_the_template(paths):
    tokenizer = rq.load_tokenizer(paths["gpt2"])
    text = tokenizer.apply_chat([{"role": "user", "content": "Hello"}])
    assert text == "<|im_start|>user\nHello<|im_end|><|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="chat template refuses the messages"):
        tokenizer.apply_chat([{"role": "user"}])


def test_chat__a_template_reaches_nothing(trained):
    """It comes with a model, so it is not trusted."""
    core = trained["gpt2"]
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.clear() }}"):
        with pytest.raises(ConfigError, match="refuses"):
            Tokenizer(core, chat_template=template).apply_chat([{"role": "user", "content": ""}])
    with pytest.raises(ConfigError, match="has no chat template"):
        Tokenizer(core).apply_chat([])


def write_metadata(path, **values):
    """A GGUF file with text values under "tokenizer.ggml."."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in values.items():
        writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"m\.gguf: The file has no tokenizer. Name the tokenizer.json"),
        ({"model": "bert"}, "kind 'bert'; supported: 'gpt2'"),
        ({"model": "gpt2"}, r"m\.gguf is no tokenizer, or is damaged: 'tokens' is missing"),
    ],
)
def test_refused__a_file_without_one_that_is_supported(values, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        rq.load_tokenizer(write_metadata(tmp_path / "m.gguf", **values))


def test_refused__unknown_words_and_files(trained, tmp_path):
    path = write_vocabulary(tmp_path / "m.gguf", trained["gpt2"], "gpt2", pre="poro-chat")
    with pytest.raises(ModelError, match=r"splits texts by 'poro-chat'.*Supported: chatglm-bpe, "):
        rq.load_tokenizer(path)
    with pytest.raises(ModelError, match=r"There is no model file .*tokenizer\.model"):
        rq.load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"a tokenizer is read from a \.gguf file"):
        rq.load_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json.*save_pretrained"):
        rq.load_tokenizer(tmp_path)


def test_refused__arguments(paths):
    tokenizer = rq.load_tokenizer(paths["gpt2"])
    with pytest.raises(ConfigError, match=r"text is no Unicode.*position 1"):
        tokenizer.encode("a\ud800")  # as a shell's bytes that are no UTF-8
    for tokens in ([-1], [1.5], "ab", None, 3, [1 << 70]):
        with pytest.raises(ConfigError, match=r"tokens is .*; allowed: a list of integers, from 0"):
            tokenizer.decode(tokens)
    assert tokenizer.decode(np.array([5, 6])) == tokenizer.decode([5, 6])
    for messages in ("hi", ["hi"], {"role": "user", "content": "hi"}, [{"rol": "user"}], None):
        with pytest.raises(ConfigError, match=r"messages is .*; allowed: a list .*dict"):
            tokenizer.apply_chat(messages)
    for core in (None, "tokenizer.json"):
        with pytest.raises(ConfigError, match=r"core is .*; allowed: a tokenizers\.Tokenizer"):
            Tokenizer(core)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "json"])
def test_damaged__ends_in_an_error_or_a_tokenizer(kind, trained, paths, tmp_path):
    if kind == "json":
        raw, bad = trained["gpt2"].to_str().encode(), tmp_path / "tokenizer.json"
    else:
        raw, bad = paths[kind].read_bytes(), tmp_path / "m.gguf"
    for seed in range(60):
        bad.write_bytes(damage(raw, seed))
        with suppress(ModelError):
            rq.load_tokenizer(bad)
