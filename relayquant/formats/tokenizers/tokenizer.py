"""Text <-> tokens. What a tokenizer file becomes."""

from __future__ import annotations

import datetime
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relayquant.base.arguments import check_arguments, describe_value
from relayquant.base.optional import needed
from relayquant.errors import ConfigError

#: Character that stands for bytes that are no UTF-8, or not yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Tokens after which bytes that are no UTF-8 are taken for good. A character has four at most.
LONGEST = 64


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back.

    Attributes:
        core: The `tokenizers.Tokenizer` that does the work.
        stop_tokens: Tokens that end a text.
        chat_template: Jinja template for conversations, "" if there is none.
        special_texts: Name -> text of the special tokens that the template names ("bos_token").

    Raises:
        ConfigError: `core` is of another class.
    """

    core: Any
    stop_tokens: frozenset[int] = frozenset()
    chat_template: str = ""
    special_texts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not hasattr(self.core, "get_vocab_size"):
            raise ConfigError(
                f"Tokenizer: core is {describe_value(self.core)}; allowed: a tokenizers.Tokenizer. "
                "relayquant.load_tokenizer reads a file.",
                code="RQ101",
            )

    @property
    def size(self) -> int:
        """Number of tokens, special ones included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    @check_arguments
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Convert text to tokens.

        Args:
            text: The text. The text of a special token, such as ``<|im_end|>``, becomes that token.
            add_special: Put the tokens that the model expects around a text, such as a first one
                that begins it.

        Raises:
            ConfigError: the text has half of a surrogate pair, which stands for no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"encode: text is no Unicode: {error}. Decode bytes with errors='replace'.",
                code="RQ101",
            ) from None
        return self.core.encode(text, add_special_tokens=add_special).ids

    def decode(self, tokens: Sequence[int], *, keep_special: bool = False) -> str:
        """Convert tokens to text. Bytes that are no UTF-8 become U+FFFD.

        Args:
            tokens: The tokens.
            keep_special: Write the names of special tokens, which are left out otherwise.

        Raises:
            ConfigError: they are no integers from 0 on.
        """
        try:
            numbers = [operator.index(token) for token in tokens]
            return self.core.decode(numbers, skip_special_tokens=not keep_special)
        except (TypeError, OverflowError):
            raise ConfigError(
                f"decode: tokens is {describe_value(tokens)}; allowed: a list of integers, from 0 "
                f"to {self.size - 1}.",
                code="RQ101",
            ) from None

    def open_stream(self, before: Sequence[int] = ()) -> TextStream:
        """Return a converter for tokens that come one after another, after the tokens `before`."""
        return TextStream(self, before)

    @check_arguments
    def apply_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Write a conversation as the model expects it, up to where its answer begins.

        Encode the result with `add_special=False`: it has its special tokens.

        Args:
            messages: Dicts with a "role" ("system", "user" or "assistant") and a "content".

        Raises:
            ConfigError: the tokenizer has no chat template, a message has no role, or the template
                refuses the messages.
            MissingDependencyError: the package jinja2 is not installed.
        """
        if not all("role" in message for message in messages):  # a template would write ""
            raise ConfigError(
                f"apply_chat: messages is {describe_value(messages)}; allowed: a list of dicts "
                'with a "role" and a "content" each.',
                code="RQ101",
            )
        if not self.chat_template:
            raise ConfigError(
                "The tokenizer has no chat template. Write the prompt as the model's page says, "
                "and pass the text.",
                code="RQ102",
            )
        with needed("A chat template needs the package jinja2", "relayquant[language]"):
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        # As in transformers. Templates come with models, so they may reach nothing else.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **how: json.dumps(
            value, ensure_ascii=False, **how
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template).render(
                messages=[*messages], add_generation_prompt=True, **self.special_texts
            )
        except Exception as error:  # whatever the template of a model raises
            raise ConfigError(
                f"The model's chat template refuses the messages: {str(error).rstrip('.')}. Each "
                "is a dict with a "
                'role ("system", "user" or "assistant") and a content.',
                code="RQ102",
            ) from error


class TextStream:
    """Tokens that come one after another -> text, as soon as it is certain.

    The text of a token may depend on the token before it, and a character may be spread over
    several tokens. So new tokens are decoded together with those of the last piece of text, whose
    text is then removed, and a character that is incomplete waits for its other tokens.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._waiting: list[int] = []
        self._sent = 0  #: characters of the text of `_waiting` that were returned
        self._last: list[int] = []  #: tokens of the last piece
        for token in before:
            self.add(token)
        self.finish()

    def add(self, token: int) -> str:
        """Return the text that became certain with this token, "" if none."""
        self._waiting.append(token)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._waiting) < LONGEST:
            certain = text.rstrip(REPLACEMENT)
            new, self._sent = certain[self._sent :], len(certain)
            return new
        return self._take(text)

    def finish(self) -> str:
        """Return the text of what is waiting, incomplete characters as U+FFFD."""
        return self._take(self._decode())

    def _decode(self) -> str:
        before = self.tokenizer.decode(self._last)
        return self.tokenizer.decode([*self._last, *self._waiting])[len(before) :]

    def _take(self, text: str) -> str:
        new, self._sent = text[self._sent :], 0
        # Without a text, as special tokens are, they do not say what comes before the next one.
        self._last = self._waiting if text else [*self._last, *self._waiting][-LONGEST:]
        self._waiting = []
        return new
