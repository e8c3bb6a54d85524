"""Generator: tokens against a model in numpy that reads the whole text at each step; sampling
against its definition; ends of texts; errors.
"""

from __future__ import annotations

import numpy as np
import pytest

import relayquant as rq
from relayquant.base.language import goes_back
from relayquant.base.runtime import Executor
from relayquant.errors import ConfigError, DataError, ModelError
from relayquant.flow.generation import StopReason
from relayquant.flow.generation.sampling import choose_token, find_candidates

tokenizers = pytest.importorskip("tokenizers")
LETTERS = "abcdefghijklmnopqrstuvwxyz "
WIDTH, LENGTH = 8, 24
END = len(LETTERS)
#: draws of a distribution
COUNT = 1000


def make_tokenizer():
    """A token for each letter, and one that ends a text."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)} | {"<end>": END}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    core.add_special_tokens(["<end>"])
    core.decoder = tokenizers.decoders.Fuse()
    return rq.Tokenizer(core, frozenset([END]))


class NumpyModel(Executor):
    """Attention over everything seen, in numpy, with the functions and the state of a compiled
    language model.
    """

    def __init__(self, sequences=1, seed=0):
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((len(LETTERS) + 1, WIDTH)).astype("float32")
        self.steps = rng.standard_normal((LENGTH, WIDTH)).astype("float32")
        self.cache = np.full((sequences, 1, LENGTH, WIDTH), np.nan, "float32")
        self.calls = []

    def describe_state(self):
        row = {"name": "keys.0", "shape": [*self.cache.shape], "dtype": "float32"}
        return {"values": [row], "functions": {}}

    def has_function(self, name):
        return name in ("prefill", "decode")

    def run(self, name, args):
        tokens, positions, *picked = args
        self.calls.append((name, tokens.shape[1]))
        assert all(each.dtype == np.int32 for each in args)
        assert (len(picked) == 1) == (name == "prefill")
        rows = np.empty((*tokens.shape, len(self.embedding)), "float32")
        for b, start in enumerate(positions):
            for t, token in enumerate(tokens[b]):
                if start + t < LENGTH:
                    self.cache[b, 0, start + t] = self.embedding[token]
                    rows[b, t] = self.score(self.cache[b, 0, : start + t + 1])
        return [np.take_along_axis(rows, picked[0][..., None], 1) if picked else rows]

    def score(self, seen):
        """Scores of the token behind a text, whose tokens were embedded."""
        return self.embedding @ (seen * self.steps[: len(seen)]).sum(0) / len(seen) ** 0.5

    def continue_greedily(self, prompt, count):
        """The likeliest tokens, each from the whole text. END is the last one."""
        text = [*prompt]
        while len(text) < len(prompt) + count and END not in text:
            text.append(int(self.score(self.embedding[text]).argmax()))
        return text[len(prompt) :]


class RunningModel(NumpyModel):
    """The same with a sum of all that was read, which cannot go back."""

    def __init__(self, sequences=1, seed=0):
        super().__init__(sequences, seed)
        self.read = [[] for _ in range(sequences)]

    def describe_state(self):
        row = {"name": "rows.0", "shape": [len(self.read), 3, WIDTH], "dtype": "float32"}
        return {"values": [*super().describe_state()["values"], row], "functions": {}}

    def run(self, name, args):
        tokens, positions, *picked = args
        self.calls.append((name, tokens.shape[1]))
        rows = np.zeros((*tokens.shape, len(self.embedding)), "float32")
        for b, start in enumerate(positions):
            count = (tokens[b] >= 0).sum()
            assert (tokens[b, :count] >= 0).all()
            if start == 0:
                self.read[b] = []
            assert count == 0 or start == len(self.read[b])
            for t, token in enumerate(tokens[b, :count]):
                self.read[b].append(token)
                rows[b, t] = self.score(self.embedding[self.read[b]])
        return [np.take_along_axis(rows, picked[0][..., None], 1) if picked else rows]


KINDS = [NumpyModel, RunningModel]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def draw_prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, END, length).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_generate__greedy_tokens_of_several_prompts_are_those_of_each_alone(chunk, kind, tokenizer):
    """Ragged prompts, more of them than sequences, read in chunks."""
    model = kind(3)
    prompts = [draw_prompt(length, length) for length in (4, 1, 9, 7, 2)]
    texts = rq.Generator(model, tokenizer, chunk=chunk).generate(prompts, max_tokens=8)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == tokenizer.decode(model.continue_greedily(prompt, 8))
    assert max(rows for _, rows in model.calls) == min(chunk, 9)


@pytest.mark.parametrize("name", ["keys.0", "values.11", "keys.0.scale"])
def test_goes_back__caches(name):
    assert goes_back(name)


@pytest.mark.parametrize("name", ["rows.0", "memory.3", "sum", "hidden.keys"])
def test_goes_back__no_state_of_another_name(name):
    """A state that nobody knows may be of all tokens so far."""
    assert not goes_back(name)


def read_rows(model):
    """Rows of all calls of prefill since the last time, together."""
    rows = sum(rows for name, rows in model.calls if name == "prefill")
    model.calls.clear()
    return rows


#: prompts that follow "abcab" and the five tokens written behind it, and the rows that are read, by
#: a model that goes back and one that does not
FOLLOWING = {
    "same": (lambda said: "abcab", 1, 5),
    "text": (lambda said: "abcab" + said, 1, 1),
    "next turn": (lambda said: "abcab" + said + "xyz", 4, 4),
    "part": (lambda said: "abc", 1, 3),
    "other end": (lambda said: "abcax", 1, 5),
    "other begin": (lambda said: "bbcab", 5, 5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [2, 512])
@pytest.mark.parametrize("case", FOLLOWING)
def test_reuse_prefix__the_rest_is_read_and_the_text_is_that_of_the_whole(
    case, chunk, kind, tokenizer
):
    """Of a text, the last token was never read."""
    model, (following, *rows) = kind(), FOLLOWING[case]
    generator = rq.Generator(model, tokenizer, chunk=chunk, reuse_prefix=True)
    said = generator.generate("abcab", max_tokens=5)
    assert read_rows(model) == 5
    prompt = following(said)
    text = generator.generate(prompt, max_tokens=5)
    assert text == rq.Generator(NumpyModel(), tokenizer).generate(prompt, max_tokens=5)
    assert read_rows(model) == rows[KINDS.index(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_prefix__each_sequence_keeps_its_own(kind, tokenizer):
    """Conversations of other lengths, of which one ends earlier, go on beside each other."""
    model, alone = kind(2), rq.Generator(NumpyModel(), tokenizer)
    generator = rq.Generator(model, tokenizer, reuse_prefix=True)
    prompts, added = ["another", "hello"], ["abc", "c"]
    stop = [alone.generate(prompts[0], max_tokens=2)[1]]
    texts = generator.generate(prompts, max_tokens=4, stop=stop)
    assert [*map(len, texts)] == [1, 4]
    prompts = ["".join(each) for each in zip(prompts, texts, added, strict=True)]
    read_rows(model)
    texts = generator.generate(prompts, max_tokens=4)
    assert texts == [alone.generate(each, max_tokens=4) for each in prompts]
    assert read_rows(model) == 3


@pytest.mark.parametrize("order", [(2, 2), (2, 1), (1, 2)])
def test_reuse_prefix__of_several_sequences(order, tokenizer):
    """A sequence without a prompt is overwritten, so a later prompt in its place is read whole."""
    model = NumpyModel(2)
    generator = rq.Generator(model, tokenizer, reuse_prefix=True)
    turns = [["systemab", "systemc"], ["systemabc", "systemdefg"]]
    for prompts, count in zip(turns, order, strict=True):
        read_rows(model)
        texts = generator.generate(prompts[:count], max_tokens=3)
        alone = rq.Generator(NumpyModel(), tokenizer)
        assert texts == [alone.generate(prompt, max_tokens=3) for prompt in prompts[:count]]
    assert read_rows(model) == {(2, 2): 4, (2, 1): 1, (1, 2): 10}[order]


def test_reuse_prefix__a_text_that_another_interrupts_leaves_what_was_read(tokenizer):
    model = NumpyModel()
    generator = rq.Generator(model, tokenizer, reuse_prefix=True)
    begun = generator.stream("abcd", max_tokens=9)
    next(begun), next(begun)
    assert generator.generate("abxy") == rq.Generator(NumpyModel(), tokenizer).generate("abxy")
    with pytest.raises(ConfigError, match="Another text was begun"):
        next(begun)
    assert read_rows(model) == 6


def test_reuse_prefix__a_prompt_that_was_not_read_to_its_end_leaves_nothing(tokenizer):
    class Failing(NumpyModel):
        def run(self, name, args):
            results = super().run(name, args)
            if name == "prefill" and 25 in args[0]:  # z
                raise OSError("the disk is full")
            return results

    generator = rq.Generator(Failing(), tokenizer, chunk=2, reuse_prefix=True)
    generator.generate("abcab", max_tokens=5)
    with pytest.raises(OSError, match="the disk is full"):
        generator.generate("xyxyz")
    text = generator.generate("abcab", max_tokens=5)
    assert text == rq.Generator(NumpyModel(), tokenizer).generate("abcab", max_tokens=5)


def test_generate__without_reuse_prefix_each_prompt_is_read_whole(tokenizer):
    model = NumpyModel()
    generator = rq.Generator(model, tokenizer)
    for _ in range(2):
        generator.generate("abcab", max_tokens=2)
        assert read_rows(model) == 5


def test_iterate__steps_have_a_piece_of_each_text_that_goes_on(tokenizer):
    model = NumpyModel(2)
    prompts = [draw_prompt(3, 1), draw_prompt(LENGTH - 2, 2)]
    steps = [*rq.Generator(model, tokenizer).iterate(prompts, max_tokens=6)]
    found = [[p for step in steps for p in step if p.sequence == i] for i in range(2)]
    for pieces, prompt, count in zip(found, prompts, (6, 3), strict=True):
        assert [piece.token for piece in pieces] == model.continue_greedily(prompt, count)
        assert all(piece.reason is None for piece in pieces[:-1])
    assert found[0][-1].reason is StopReason.MAX_TOKENS
    assert found[1][-1].reason is StopReason.MAX_LENGTH


def test_generate__the_longest_prompt_has_room_for_one_token(tokenizer):
    model = NumpyModel()
    prompt = draw_prompt(LENGTH)
    text = rq.Generator(model, tokenizer).generate(prompt)
    assert text == tokenizer.decode(model.continue_greedily(prompt, 1))


def test_stream__is_the_text_of_generate(tokenizer):
    generator = rq.Generator(NumpyModel(), tokenizer)
    pieces = [*generator.stream("hello", max_tokens=7)]
    assert len(pieces) == 7
    assert "".join(pieces) == generator.generate("hello", max_tokens=7)


class Script(NumpyModel):
    """A model that says a given text, whatever it is asked."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def score(self, seen):
        wanted = [*make_tokenizer().encode(self.text), END][len(seen) - 1]
        return np.eye(len(self.embedding), dtype="float32")[wanted]


@pytest.mark.parametrize(
    ("stop", "pieces", "reason"),
    [
        ([], ["a", "b", "a", "b", "c", "d", ""], StopReason.STOP_TOKEN),
        (["abc"], ["", "", "ab", "", ""], StopReason.STOP_TEXT),
        (["dx", "cd"], ["a", "b", "a", "b", "", ""], StopReason.STOP_TEXT),
        (["ddd"], ["a", "b", "a", "b", "c", "", "d"], StopReason.STOP_TOKEN),
    ],
)
def test_stop__text_that_may_begin_a_stop_text_waits(stop, pieces, reason, tokenizer):
    """It is left out if it does, and is given if it does not."""
    generator = rq.Generator(Script("ababcd"), tokenizer)
    found = [piece for (piece,) in generator.iterate(["x"], stop=stop)]
    assert [piece.text for piece in found] == pieces
    assert found[-1].reason is reason


def test_sampling__is_the_definition():
    """Temperature, then the k likeliest, then the fewest whose probabilities add up to p."""
    rng = np.random.default_rng(0)
    for trial in range(200):
        count = int(rng.integers(2, 700))
        scores = rng.normal(0, 3, count).astype("float32")
        temperature, top_p = float(rng.uniform(0.1, 3)), float(rng.uniform(0.05, 1))
        top_k = int(rng.integers(0, count + 3)) if trial % 2 else 0
        order = np.argsort(-scores, kind="stable")[: top_k or count]
        chances = np.exp(scores[order].astype("float64") / temperature)
        chances /= chances.sum()
        kept = np.cumsum(chances) - chances < top_p
        sampling = rq.TokenSampling(temperature, top_k, top_p)
        tokens, weights = find_candidates(scores, sampling)
        assert sorted(tokens) == sorted(order[kept])
        expected = dict(zip(order[kept], chances[kept] / chances[kept].sum(), strict=True))
        found = dict(zip(tokens, weights / weights.sum(), strict=True))
        np.testing.assert_allclose([found[t] for t in expected], [*expected.values()], rtol=1e-9)


def test_sampling__a_tiny_temperature_takes_the_likeliest():
    scores, rng = np.array([0, 3, 1], "float32"), np.random.default_rng(0)
    assert choose_token(scores, rq.TokenSampling(1e-320), rng) == 1


def test_sampling__draws_as_often_as_is_likely():
    from scipy.stats import chisquare

    scores = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15])).astype("float32")
    for sampling, chances in (
        (rq.TokenSampling(1.0), [0.1, 0.4, 0.05, 0.3, 0.15]),
        (rq.TokenSampling(0.5), np.square([0.1, 0.4, 0.05, 0.3, 0.15]) / 0.285),
        (rq.TokenSampling(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (rq.TokenSampling(1.0, top_p=0.75), [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
    ):
        rng = np.random.default_rng(1)
        counts = np.bincount(
            [choose_token(scores, sampling, rng) for _ in range(COUNT)], minlength=5
        )
        seen = np.array(chances) > 0
        assert not counts[~seen].any()
        assert chisquare(counts[seen], COUNT * np.array(chances)[seen]).pvalue > 0.001


def test_sampling__a_seed_gives_the_same_text(tokenizer):
    """Also beside another prompt."""
    single, double = (rq.Generator(NumpyModel(n), tokenizer) for n in (1, 2))
    sampling = rq.TokenSampling(1.0, seed=3)
    text = single.generate("abc", sampling=sampling)
    assert single.generate("abc", sampling=sampling) == text
    assert double.generate(["abc", "hello"], sampling=sampling)[0] == text
    assert single.generate("abc", sampling=rq.TokenSampling(1.0, seed=4)) != text
    assert double.generate(["abc", "abc"], sampling=sampling)[1] != text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; allowed: 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; allowed: above 0, at most 1"),
        ({"seed": "x"}, "seed"),
        ({"top_k": 5}, "temperature is 0, .* top_k=5 and top_p=1.0 change nothing"),
        ({"top_p": 0.5}, "Set a temperature above 0"),
    ],
)
def test_sampling__refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        rq.TokenSampling(**wrong)


def test_refused__prompts(tokenizer):
    generator = rq.Generator(NumpyModel(), tokenizer)
    with pytest.raises(DataError, match=r"Prompt 0 has no tokens\. Give it"):
        generator.generate("")
    with pytest.raises(
        DataError,
        match=f"has 25 tokens; allowed: at most {LENGTH}. Shorten it. If the model was made for",
    ):
        generator.generate([0] * 25)
    with pytest.raises(DataError, match="has the token 28; the model has 0 to 27"):
        generator.generate([0, 28])
    with pytest.raises(DataError, match="2 prompts at once; the model runs 1"):
        generator.iterate(["a", "b"])
    assert generator.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts is None; allowed: a text, a list of its tokens"),
        (3, "prompts is 3"),
        ({"a": 1}, "prompts is {'a': 1}"),
        (b"a", "prompts is b'a'"),
        ([1.5], "Prompt 0 is 1.5; allowed: a text, or a list of its tokens"),
        (["a", [True]], r"Prompt 1 is \[True\]"),
        ([1, "a"], r"Prompt 0 is \[1, 'a'\]"),
        (np.array([[0.5]]), "Prompt 0 is array"),
        ([1 << 70], "has the token 1180591620717411303424"),
    ],
)
def test_refused__prompts_of_other_types(prompts, message, tokenizer):
    generator = rq.Generator(NumpyModel(2), tokenizer)
    with pytest.raises(DataError, match=message):
        generator.generate(prompts)


def test_generate__forms_of_one_prompt(tokenizer):
    """A text, or its tokens as a list, a tuple or an array; alone or in a list."""
    generator = rq.Generator(NumpyModel(2), tokenizer)
    text = generator.generate("abc")
    for tokens in ([0, 1, 2], (0, 1, 2), np.array([0, 1, 2])):
        assert generator.generate(tokens) == text
        assert generator.generate([tokens]) == [text]
        assert "".join(generator.stream(tokens)) == text
        assert "".join(piece.text for (piece,) in generator.iterate(tokens)) == text
    assert generator.generate(np.array([[0, 1, 2], [0, 1, 2]])) == [text] * 2


def test_refused__arguments(tokenizer):
    generator = rq.Generator(NumpyModel(), tokenizer)
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        generator.generate("a", max_tokens=0)
    for stop in ("x", [3], None):
        with pytest.raises(ConfigError, match=r"stop is .*; allowed: a list or tuple of text"):
            generator.stream("a", stop=stop)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"stop is .*, none empty"):
        generator.generate("a", stop=[""])
    with pytest.raises(ConfigError, match=r"max_tokens is 2\.5; allowed: an integer"):
        generator.generate("a", max_tokens=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"sampling is .*; allowed: a TokenSampling"):
        generator.generate("a", sampling={"seed": 1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"'max_new_tokens'\. Did you mean 'max_tokens'"):
        generator.generate("a", max_new_tokens=1)  # pyright: ignore[reportCallIssue]
    for wrong in ([], [None], ["tokenizer.json"], [tokenizer.core]):
        with pytest.raises(ConfigError, match=r"tokenizer is .*; allowed: .*load_tokenizer"):
            rq.Generator(NumpyModel(), *wrong)
    for wrong in (None, "model.so", (1, 2)):
        with pytest.raises(ConfigError, match=r"executable is a .*relayquant\.compile"):
            rq.Generator(wrong, tokenizer)
    with pytest.raises(ConfigError, match="Generator: chunk is '3'; allowed: an integer"):
        rq.Generator(NumpyModel(), tokenizer, chunk="3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="chunk is 0"):
        rq.Generator(NumpyModel(), tokenizer, chunk=0)


def test_refused__two_texts_at_a_time(tokenizer):
    """They would write over each other's keys and values."""
    generator = rq.Generator(NumpyModel(), tokenizer)
    first = generator.stream("abc")
    next(first)
    generator.generate("hello")
    with pytest.raises(ConfigError, match="Another text was begun"):
        next(first)


def test_refused__a_model_that_generates_nothing(tokenizer, monkeypatch):
    model = NumpyModel()
    for rows in ([], [{"name": "count", "shape": [], "dtype": "int32"}]):
        described = {"values": rows, "functions": {}}
        monkeypatch.setattr(model, "describe_state", lambda found=described: found)
        with pytest.raises(ModelError, match="The model has no keys and values"):
            rq.Generator(model, tokenizer)
    monkeypatch.setattr(model, "has_function", lambda name: False)
    with pytest.raises(ModelError, match=r"no prefill and no decode.*load of a GGUF file"):
        rq.Generator(model, tokenizer)


@pytest.mark.parametrize("sampling", [rq.TokenSampling(), rq.TokenSampling(1.0, 5, 0.9)])
def test_refused__scores_that_are_nan(sampling, tokenizer):
    """Of a damaged model. Greedy and drawn tokens would be any."""
    model = NumpyModel()
    generator = rq.Generator(model, tokenizer)
    model.steps[4, 3] = np.nan
    steps = generator.iterate(["abc"], sampling=sampling)
    next(steps)  # reads three tokens, the next step four
    next(steps)
    with pytest.raises(ModelError, match=r"token 5 of sequence 0.*NaN.*RQ204"):
        next(steps)
