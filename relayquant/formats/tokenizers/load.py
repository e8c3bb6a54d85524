"""Tokenizer file -> `Tokenizer`: chooses the reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayquant.base.arguments import check_arguments
from relayquant.base.optional import needed
from relayquant.base.storage.files import (
    DEFAULT_MAX_BYTES,
    PathLike,
    check_file,
    decode_json,
    read_text,
    reading,
)
from relayquant.errors import ModelError
from relayquant.formats.readers.gguf.header import read_header
from relayquant.formats.tokenizers.gguf import make_tokenizer
from relayquant.formats.tokenizers.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"
#: bytes; the largest known tokenizer.json has 35 million
MAX_JSON_BYTES = 1 << 28
#: Files beside tokenizer.json that name special tokens, the one that counts most last.
BESIDE = ("config.json", "generation_config.json", "tokenizer_config.json")
#: Names of special tokens that chat templates use.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@check_arguments
def load_tokenizer(path: PathLike, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Tokenizer:
    """Read the tokenizer of a language model.

    Args:
        path: A GGUF file, a tokenizer.json, or a folder with a tokenizer.json.
        max_bytes: Refuse larger GGUF files.

    Raises:
        ModelError: there is no such file, it is damaged, or has a tokenizer of a kind that is not
            supported.
        MissingDependencyError: the package tokenizers is not installed.
    """
    with needed("A tokenizer needs the package tokenizers", "relayquant[language]"):
        import tokenizers
    path = Path(path)
    if path.suffix.lower() == ".gguf":
        header = read_header(path, max_bytes=max_bytes)
        with reading(path, "tokenizer", ModelError):
            return make_tokenizer(tokenizers, header.metadata)
    file = path / TOKENIZER if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ModelError(
            f"The folder {path} has no {TOKENIZER}. Of a tokenizer.model or vocab.json, "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of the package "
            f"transformers writes one. Or name a {TOKENIZER} or a .gguf file.",
            code="RQ201",
        )
    if file.exists() and file.suffix.lower() != ".json":
        raise ModelError(
            f"{path}: a tokenizer is read from a .gguf file, a tokenizer.json, or a folder with "
            "one.",
            code="RQ201",
        )
    check_file(file, MAX_JSON_BYTES)
    with reading(file, "tokenizer", ModelError):
        core = tokenizers.Tokenizer.from_str(read_text(file, MAX_JSON_BYTES))
        core.no_padding()
        core.no_truncation()
        return describe_tokens(core, read_beside(file.parent))


def read_beside(folder: Path) -> dict[str, Any]:
    """Return the merged values of the files in `BESIDE` that exist."""
    found: dict[str, Any] = {}
    for name in BESIDE:
        file = folder / name
        if file.is_file():
            with reading(file, "configuration", ModelError):
                values = decode_json(read_text(file, MAX_JSON_BYTES), allow_nan=True)
                found.update((key, value) for key, value in values.items() if value is not None)
    return found


def describe_tokens(core: Any, config: Mapping[str, Any]) -> Tokenizer:
    """Make a tokenizer whose stop tokens and chat template the configuration names."""
    texts = {name: read_token(config.get(name)) for name in SPECIAL_NAMES}
    ids = config.get("eos_token_id", [])
    ids = [ids] if isinstance(ids, int) else [*ids]
    stops = [*ids, core.token_to_id(texts["eos_token"])]
    template = config.get("chat_template", "")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return Tokenizer(
        core,
        frozenset(int(token) for token in stops if token is not None),
        str(template),
        {name: text for name, text in texts.items() if text},
    )


def read_token(value: Any) -> str:
    """Return the text of a special token, which is a text or a dict with one."""
    return str(value.get("content", "") if isinstance(value, Mapping) else value or "")
