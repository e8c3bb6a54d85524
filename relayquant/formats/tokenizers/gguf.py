"""Metadata of a GGUF file -> `Tokenizer`.

A file holds the vocabulary and names the rest: `tokenizer.ggml.model` the algorithm,
`tokenizer.ggml.pre` how a text is split into words before. What these names mean stands in
llama.cpp's `llama-vocab.cpp`, which fills in what a file leaves out, too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from relayquant.errors import ModelError, format_count
from relayquant.formats.tokenizers.tokenizer import Tokenizer

# Regular expressions of words. A list is applied in turn: each splits what the one before left.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
)
QWEN2 = rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
QWEN35 = (
    rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{ENDS}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
MARKS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"
TEKKEN = rf"{WORDS[0]}|{WORDS[1]}|\p{{N}}|{MARKS}"
GPT4O = rf"{WORDS[0]}{SUFFIX}?|{WORDS[1]}{SUFFIX}?|\p{{N}}{{1,3}}|{MARKS}"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDS}"
)
DIGIT, IDEOGRAPHS = r"\p{N}", r"[一-龥぀-ゟ゠-ヿ]+"

#: `tokenizer.ggml.pre` -> regular expressions of words
WORD_PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "exaone4"), (GPT2,)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (DIGIT, GPT2),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "dbrx", "smaug-bpe",
         "glm4", "chatglm-bpe"),
        (LLAMA3,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"), (QWEN2,)
    ),
    "qwen35": (QWEN35,),
    **dict.fromkeys(("tekken", "pixtral"), (TEKKEN,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", IDEOGRAPHS, DEEPSEEK3)),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT,
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
#: Those whose files begin texts with the first token, unless they say otherwise.
BEGINS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"}
#: Those that take a word that is a token without merging its parts.
TAKES_WHOLE_WORDS = {*BEGINS, "glm4"}

#: Texts of tokens that end a text or the turn of a speaker, whatever a file says.
STOP_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
#: Keys of tokens that end a text.
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: What SentencePiece has for a space.
SPACE = "▁"


class TokenType(enum.IntEnum):
    """Kind of a token, as numbered in a file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def make_tokenizer(tokenizers: Any, metadata: Mapping[str, Any]) -> Tokenizer:
    """Make the tokenizer that the metadata of a GGUF file describes.

    Args:
        tokenizers: The package.
        metadata: See `GgufHeader`.

    Raises:
        ModelError: the file has no tokenizer, or one of a kind that is not supported.
        ValueError: it is damaged.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = values.get("model")
    if kind is None:
        raise ModelError(
            "The file has no tokenizer. Name the tokenizer.json of the model instead: "
            'load_tokenizer("tokenizer.json"), or relayquant generate --tokenizer tokenizer.json.',
            code="RQ202",
        )
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"The file has a tokenizer of kind {kind!r}; supported: 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE). Pass the tokenizer.json of the model.",
            code="RQ202",
        )
    tokens: list[str] = values["tokens"]
    types = values.get("token_type", [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"it has {format_count(len(tokens), 'token')} and {format_count(len(types), 'type')}"
        )
    make = make_bytes_core if kind == "gpt2" else make_pieces_core
    core = make(tokenizers, values, {text: i for i, text in enumerate(tokens)})
    for is_special in (True, False):
        found = {TokenType.UNKNOWN, TokenType.CONTROL} if is_special else {TokenType.USER_DEFINED}
        core.add_tokens(
            [
                tokenizers.AddedToken(text, special=is_special, normalized=False)
                for text, type_ in zip(tokens, types, strict=True)
                if type_ in found and text
            ]
        )
    bos = values.get("bos_token_id")
    is_begun = values.get("add_bos_token", kind == "llama" or values.get("pre") in BEGINS)
    if is_begun and bos is not None:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    stops = {values[key] for key in STOP_KEYS if key in values}
    stops |= {i for i in map(core.token_to_id, STOP_TEXTS) if i is not None}
    names = ("bos_token", "eos_token", "unknown_token")
    texts = {name: tokens[values[f"{name}_id"]] for name in names if f"{name}_id" in values}
    template = metadata.get("tokenizer.chat_template", "")
    return Tokenizer(core, frozenset(stops), template, texts)


def make_bytes_core(tokenizers: Any, values: Mapping[str, Any], ids: Mapping[str, int]) -> Any:
    """Make a BPE over bytes, as in GPT-2. Bytes stand for characters of Unicode."""
    name = values.get("pre", "default")
    if name not in WORD_PATTERNS:
        raise ModelError(
            f"The file splits texts by {name!r}, which is not supported. Pass the tokenizer.json "
            f"of the model. Supported: {', '.join(sorted(WORD_PATTERNS))}.",
            code="RQ202",
        )
    patterns = map(tokenizers.Regex, WORD_PATTERNS[name])
    merges = [tuple(merge.split(" ", 1)) for merge in values["merges"]]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(dict(ids), merges, ignore_merges=name in TAKES_WHOLE_WORDS)
    )
    steps = tokenizers.pre_tokenizers
    core.pre_tokenizer = steps.Sequence(
        [
            *(steps.Split(pattern, "isolated") for pattern in patterns),
            steps.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def make_pieces_core(tokenizers: Any, values: Mapping[str, Any], ids: Mapping[str, int]) -> Any:
    """Make a BPE of SentencePiece: of two pieces that make a token, those with the best score are
    merged first. Characters without a token become their bytes.
    """
    scores = values["scores"]
    if len(scores) != len(ids):
        found = format_count(len(ids), "different token")
        raise ValueError(f"it has {found} and {format_count(len(scores), 'score')}")
    merges = [
        (-scores[i], ids[text[:at]], ids[text[at:]], text[:at], text[at:])
        for text, i in ids.items()
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    has_prefix = values.get("add_space_prefix", True)
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            dict(ids), [merge[3:] for merge in sorted(merges)], byte_fallback=True, fuse_unk=True
        )
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    core.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    return core
