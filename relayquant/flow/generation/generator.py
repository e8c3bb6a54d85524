"""A compiled language model and its tokenizer -> text, for one prompt or several at once.

This module loads no compiler: a `relayquant_runtime.Library` generates with TVM's runtime alone.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relayquant.base.arguments import check_arguments, describe_value
from relayquant.base.language import DECODE, LANGUAGE_FUNCTIONS, PADDING, PREFILL, goes_back
from relayquant.errors import ConfigError, DataError, ModelError, format_count
from relayquant.flow.generation.sampling import TokenSampling, choose_token
from relayquant.formats.tokenizers import Tokenizer
from relayquant_runtime import Library

#: Tokens of a prompt that the model takes at once: more take more memory, fewer more time.
CHUNK = 512
MAX_TOKENS = 128


class StopReason(enum.Enum):
    """Why a text ended."""

    STOP_TOKEN = "stop token"
    STOP_TEXT = "stop text"
    MAX_TOKENS = "max tokens"
    MAX_LENGTH = "max length"


@dataclass(frozen=True)
class Piece:
    """What one step gave one sequence.

    Attributes:
        sequence: Index of the prompt.
        token: The token.
        text: The text that became certain with it. "" within a character or a stop text.
        reason: Why this is the sequence's last piece. None if it is not.
    """

    sequence: int
    token: int
    text: str
    reason: StopReason | None


class Generator:
    """Generates text with a compiled language model.

    The model has functions `prefill` and `decode` and holds keys and values of all tokens as its
    state, as `relayquant.load` makes it of a GGUF file. It runs as many sequences at once as it was
    loaded for. Texts of one generator are generated one after another.

    Args:
        executable: A `relayquant_runtime.Library`, which takes the least memory, or
            what `relayquant.compile` returned, or an `Executor` of it.
        tokenizer: What `load_tokenizer` returns. It is needed.
        chunk: Tokens of a prompt that the model takes at once.
        reuse_prefix: Keep the tokens that a prompt shares with the prompt and text before it, as
            the turns of a conversation do, and read only the rest. A model with layers whose state
            cannot go back, as LFM2 has, keeps all tokens or none. Nothing else may run the
            executable meanwhile, nor set its state. A text was read token by token, which may
            round otherwise than reading a prompt does. So scores can differ by a rounding from
            scores without `reuse_prefix`.

    Attributes:
        sequences: Prompts that run at once.
        max_length: Most tokens of a prompt and its text together.
        vocabulary: Number of the model's tokens.

    Raises:
        ConfigError: there is no tokenizer.
        ModelError: the model lacks a function or its state.
    """

    @check_arguments
    def __init__(
        self,
        executable: Any,
        tokenizer: Any = None,
        *,
        chunk: int = CHUNK,
        reuse_prefix: bool = False,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise ConfigError(
                f"Generator: tokenizer is {describe_value(tokenizer)}; allowed: what "
                "relayquant.load_tokenizer returns for the model's .gguf file, its tokenizer.json, "
                "or a folder that save_pretrained of its tokenizer wrote.",
                code="RQ101",
            )
        if chunk < 1:
            raise ConfigError(f"Generator: chunk is {chunk}; allowed: 1 or more.", code="RQ101")
        self.executor = executable if isinstance(executable, Library) else execute(executable)
        self.tokenizer, self.chunk = tokenizer, chunk
        state = self.executor.describe_state()["values"]
        missing = [name for name in LANGUAGE_FUNCTIONS if not self.executor.has_function(name)]
        # Keys and values are (sequences, groups, length, width).
        if missing or not state or len(state[0]["shape"]) != 4:
            lacks = " and no ".join(missing) or "keys and values as state"
            raise ModelError(
                f"The model has no {lacks}. A generator runs language models: relayquant.load of a "
                "GGUF file or of a folder with config.json, relayquant.torch.load_causal_lm.",
                code="RQ204",
            )
        self.sequences, _, self.max_length, _ = state[0]["shape"]
        self._goes_back = all(goes_back(each["name"]) for each in state)
        self._turn, self._reuse_prefix = 0, reuse_prefix
        #: of each sequence the tokens whose keys and values the state has, from the first one on
        self._read: list[list[int]] = []
        empty = np.zeros((self.sequences, 1), "int32")
        self.vocabulary = self._run(DECODE, empty, empty[:, 0]).shape[-1]

    @check_arguments
    def generate(
        self,
        prompts: Any,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: TokenSampling = TokenSampling(),  # noqa: B008 (frozen)
    ) -> Any:
        """Return the text that follows a prompt, or a list of the texts of a list of prompts.

        Args:
            prompts: A text or its tokens; or a list of them, of any lengths. As many as the model
                has sequences run at once.
            max_tokens: Most tokens of each text.
            stop: Texts that end a text. They are left out.
            sampling: How tokens are chosen.

        Raises:
            ConfigError: an argument is wrong.
            DataError: a prompt is empty, too long, or has a token that the model does not have.
            ModelError: the model's scores are NaN or infinite.
        """
        listed, is_one = list_prompts(prompts)
        texts = [""] * len(listed)
        for first in range(0, len(listed), self.sequences):
            part = listed[first : first + self.sequences]
            steps = self.iterate(part, max_tokens=max_tokens, stop=stop, sampling=sampling)
            for piece in (piece for step in steps for piece in step):
                texts[first + piece.sequence] += piece.text
        return texts[0] if is_one else texts

    @check_arguments
    def stream(
        self,
        prompt: Any,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: TokenSampling = TokenSampling(),  # noqa: B008 (frozen)
    ) -> Iterator[str]:
        """Yield the text that follows a prompt as soon as it is certain. See `generate`."""
        steps = self.iterate([prompt], max_tokens=max_tokens, stop=stop, sampling=sampling)
        return (piece.text for (piece,) in steps if piece.text)

    @check_arguments
    def iterate(
        self,
        prompts: Any,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: TokenSampling = TokenSampling(),  # noqa: B008 (frozen)
    ) -> Iterator[list[Piece]]:
        """Yield the next piece of every text that has not ended, step by step.

        The first step follows the whole prompt. See `generate`, which takes more prompts than the
        model has sequences.
        """
        if not all(stop):
            raise ConfigError(
                f"stop is {stop!r}; allowed: a list of texts, none empty.", code="RQ101"
            )
        if max_tokens < 1:
            raise ConfigError(f"max_tokens is {max_tokens}; allowed: 1 or more.", code="RQ101")
        listed, _ = list_prompts(prompts)
        if len(listed) > self.sequences:
            raise DataError(
                f"There are {format_count(len(listed), 'prompt')} at once; the model runs "
                f"{self.sequences}. Call generate, or load the model with "
                f"CausalLMOptions(sequences={len(listed)}).",
                code="RQ302",
            )
        tokens = [self._read_prompt(i, prompt) for i, prompt in enumerate(listed)]
        return self._iterate(tokens, max_tokens, stop, sampling)

    def _iterate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        stop: Sequence[str],
        sampling: TokenSampling,
    ) -> Iterator[list[Piece]]:
        self._turn = turn = self._turn + 1
        texts = []
        for prompt in prompts:
            # The last token of a text is never read.
            room = self.max_length - len(prompt) + 1
            reason = StopReason.MAX_TOKENS if max_tokens <= room else StopReason.MAX_LENGTH
            limit = min(max_tokens, room)
            texts.append(GrowingText(self.tokenizer, prompt, limit, reason, stop))
        # A text does not depend on the others that run beside it.
        draws = [np.random.default_rng((sampling.seed, i)) for i in range(len(prompts))]
        running = dict(enumerate(self.prefill(prompts))) if prompts else {}
        tokens = np.full((self.sequences, 1), PADDING, "int32")
        positions = np.zeros(self.sequences, "int32")
        while running:
            step = []
            for i, row in running.items():
                check_scores(row, i, len(prompts[i]) + texts[i].count)
                tokens[i] = token = choose_token(row, sampling, draws[i])
                positions[i] = len(prompts[i]) + texts[i].count
                step.append(Piece(i, token, *texts[i].add(token)))
            yield step
            left = [piece.sequence for piece in step if piece.reason is None]
            if not left:
                return
            if turn != self._turn:
                raise ConfigError(
                    "Another text was begun before this one ended. Finish a text first, or make "
                    "a generator for each from its own Executor.",
                    code="RQ105",
                )
            ended = [piece.sequence for piece in step if piece.reason is not None]
            tokens[ended] = PADDING
            read, self._read = self._read, []  # a run that fails leaves nothing to keep
            scores = self._run(DECODE, tokens, positions)[:, 0]
            for i in left:
                read[i].append(int(tokens[i, 0]))
            self._read = read
            running = {i: scores[i] for i in left}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Read prompts in chunks, from the first position on, or behind what `reuse_prefix` keeps.

        Returns the scores of the token that follows each, float32 (vocabulary,).
        """
        kept = np.zeros(self.sequences, int)
        if self._reuse_prefix:
            kept[: len(prompts)] = self._count_kept(prompts)
        self._read = []  # a run that fails leaves nothing to keep
        rests = [prompt[start:] for prompt, start in zip(prompts, kept, strict=False)]
        lengths = np.zeros(self.sequences, int)
        lengths[: len(prompts)] = [len(rest) for rest in rests]
        tokens = np.full((self.sequences, lengths.max()), PADDING, "int32")
        for row, rest in zip(tokens, rests, strict=False):
            row[: len(rest)] = rest
        found = [np.empty(0, "float32")] * len(prompts)
        for start in range(0, tokens.shape[1], self.chunk):
            rows = tokens[:, start : start + self.chunk]
            ends = start + rows.shape[1]
            # Rows behind the end of a short prompt are overwritten before they are seen.
            positions = (kept + start).astype("int32")
            picked = np.clip(lengths - 1 - start, 0, rows.shape[1] - 1).astype("int32")
            scores = self._run(PREFILL, rows, positions, picked[:, None])
            for i in range(len(prompts)):
                if start < lengths[i] <= ends:
                    found[i] = scores[i, 0]
        self._read = [[*map(int, prompt)] for prompt in prompts]
        return found

    def _count_kept(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Count the first tokens of each prompt that the state has. Of each prompt one token at
        least is left to read, because its scores are wanted.
        """
        counts = [0] * len(prompts)
        for i, (prompt, read) in enumerate(zip(prompts, self._read, strict=False)):
            counts[i] = min(count_equal(prompt, read), len(prompt) - 1)
            if not self._goes_back and counts[i] < len(read):
                counts[i] = 0
        return counts

    def _run(self, name: str, *args: np.ndarray) -> np.ndarray:
        """Call a function, which keeps the state. Returns its scores."""
        return self.executor.run(name, args)[0]

    def _read_prompt(self, index: int, prompt: Any) -> list[int]:
        """Return the tokens of a prompt. DataError if there are none, too many or unknown ones."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list_items(prompt)
        if tokens is None or not all(map(is_token, tokens)):
            raise DataError(
                f"Prompt {index} is {describe_value(prompt)}; allowed: a text, or a list of its "
                "tokens, which are integers.",
                code="RQ302",
            )
        check_prompt(index, tokens, self.max_length, self.vocabulary)
        return [*map(int, tokens)]


def count_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two sequences have in common, from the first one on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def check_prompt(index: int, tokens: Sequence[int], max_length: int, vocabulary: int) -> None:
    """Check that a model of this length and vocabulary takes a prompt.

    Raises:
        DataError: it has no tokens, too many or unknown ones.
    """
    if not tokens:
        raise DataError(
            f"Prompt {index} has no tokens. Give it at least one character that the tokenizer "
            "knows, or a list with one token.",
            code="RQ302",
        )
    if len(tokens) > max_length:
        raise DataError(
            f"Prompt {index} has {format_count(len(tokens), 'token')}; allowed: at most "
            f"{max_length}. Shorten it. If the model was made for more tokens "
            "(max_position_embeddings of its config.json, context_length of a GGUF file), load it "
            "with CausalLMOptions(max_length=...).",
            code="RQ302",
        )
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        raise DataError(
            f"Prompt {index} has the token {wrong[0]}; the model has 0 to {vocabulary - 1}. Is "
            "the tokenizer that of the model?",
            code="RQ302",
        )


def list_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Return the prompts of an argument, and whether it is one prompt: a text, or its tokens.

    Raises:
        DataError: it is neither, nor a list of prompts.
    """
    items = list_items(prompts)
    if isinstance(prompts, str) or (items and is_token(items[0])):
        return [prompts], True
    if items is None:
        raise DataError(
            f"prompts is {describe_value(prompts)}; allowed: a text, a list of its tokens, or a "
            "list of several such prompts.",
            code="RQ302",
        )
    return items, False


def list_items(values: Any) -> list[Any] | None:
    """Return the items of a list, tuple or array. None if a value is none of them."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        return None
    return [*np.atleast_1d(values)] if isinstance(values, np.ndarray) else [*values]


def is_token(value: Any) -> bool:
    """Whether a value may be the number of a token."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def execute(executable: Any) -> Any:
    """Return an `Executor` of an executable, or the given one."""
    from relayquant.base.runtime import Executor  # loads the compiler

    return executable if isinstance(executable, Executor) else Executor(executable)


class GrowingText:
    """One text while it grows: what is certain of it, and whether it ends.

    Args:
        tokenizer: Converts the tokens.
        prompt: Tokens before the text.
        limit: Most tokens.
        reason: Why there may not be more.
        stop: Texts that end it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        limit: int,
        reason: StopReason,
        stop: Sequence[str],
    ) -> None:
        self._stop_tokens, self._stop = tokenizer.stop_tokens, stop
        self._limit, self._reason = limit, reason
        self._stream = tokenizer.open_stream(prompt[-8:])
        self._held = ""  #: certain text that may be the beginning of a stop text
        self.count = 0  #: tokens so far

    def add(self, token: int) -> tuple[str, StopReason | None]:
        """Return the text that became certain with a token, and why it is the last, if it is."""
        self.count += 1
        if token in self._stop_tokens:
            return self._find(self._stream.finish(), StopReason.STOP_TOKEN)
        text = self._stream.add(token)
        if self.count == self._limit:
            return self._find(text + self._stream.finish(), self._reason)
        return self._find(text, None)

    def _find(self, text: str, reason: StopReason | None) -> tuple[str, StopReason | None]:
        """Look for stop texts. Without one, what may begin one is held until the text ends."""
        text, self._held = self._held + text, ""
        ends = [at for at in map(text.find, self._stop) if at >= 0]
        if ends:
            return text[: min(ends)], StopReason.STOP_TEXT
        if reason is None:
            at = len(text) - max((count_begun(text, each) for each in self._stop), default=0)
            text, self._held = text[:at], text[at:]
        return text, reason


def check_scores(scores: np.ndarray, sequence: int, position: int) -> None:
    """Raise ModelError if the scores of a token, float32 (vocabulary,), name no likeliest one."""
    if not np.isfinite(scores.max()):
        raise ModelError(
            f"The model's scores of token {position} of sequence {sequence} (prompt included) are "
            "NaN or infinite; allowed: finite numbers. The file may be damaged: load it again from "
            "its source, and compare checksums.",
            code="RQ204",
        )


def count_begun(text: str, stop: str) -> int:
    """Count the last characters of a text that are the first ones of a stop text."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
