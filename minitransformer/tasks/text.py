"""Characters of a text, one after another: what the language model learns from and is judged by.

The default text is CPython's own documentation (`pydoc_data.topics`, 460 000 characters of English,
no download); any UTF-8 file will do. It is cut once, by position: the first part trains, the last
part validates. Loss is in nats per character; a person reads it in bits:

    bits per character = loss / log 2

The baselines look back at most n - 1 characters. With ML the ratio of counts on the training part,

    p_n(c | h) = λ_n ML(c | h) + (1 - λ_n) p_{n-1}(c | h'),   p_0 = 1 / V

where h' is h without its oldest character and λ_n = 0 after a context never seen. Each λ_n is
fitted on the last tenth of the *training* part (counts from the rest), then the counts are taken
anew from all of it: the validation part is only ever scored. Jelinek & Mercer (1980).
"""

import hashlib
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from minitransformer.arrays import Array
from minitransformer.philox import Draw, Stream, random_bits

# The probe sees the same windows at every look, so its loss moves only when the model does.
PROBE_WINDOWS = 16


def bits_per_character(loss: float) -> float:
    """Nats to bits."""
    return loss / math.log(2)


# ---- the text ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """The characters of a text, sorted; a token is a character's place among them."""

    characters: str

    @classmethod
    def of(cls, text: str) -> "Vocabulary":
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    @cached_property
    def _codes(self) -> Array:
        return np.array([ord(c) for c in self.characters], dtype=np.uint32)

    def encode(self, text: str) -> Array:
        """Tokens of `text`.

        Raises
        ------
        ValueError
            If a character is not in the vocabulary.
        """
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        places = np.searchsorted(self._codes, codes)
        known = self._codes[np.minimum(places, len(self) - 1)] == codes
        if not known.all():
            at = int(np.argmin(known))
            raise ValueError(
                f"character {text[at]!r} (position {at}) is not among the {len(self)} characters "
                "of the text that the model was trained on"
            )
        return places.astype(np.int64)

    def decode(self, tokens: Array) -> str:
        """The text of `tokens`."""
        return "".join(self.characters[t] for t in tokens)


@dataclass(frozen=True)
class Corpus:
    """A text cut by position into a training and a validation part, as tokens."""

    source: str
    sha256: str  # of the UTF-8 bytes: two runs with equal hashes saw the same text
    vocabulary: Vocabulary
    train: Array
    validation: Array


def read_text(path: str) -> str:
    """The text of a UTF-8 file.

    Raises
    ------
    ValueError
        If the file is missing, unreadable, empty, or not text; the message names it.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text {path!r}: {error.strerror or error}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text {path!r} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
        ) from error
    if not text.strip():
        raise ValueError(f"the text {path!r} is empty")
    if "\0" in text:
        raise ValueError(f"the text {path!r} is binary: character {text.index(chr(0))} is NUL")
    return text


def python_topics() -> str:
    """The language reference inside every Python, its topics in alphabetical order. It differs
    between Python versions, so a result quotes the hash."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def load_corpus(path: str = "", *, validation: float = 0.1, context: int = 1) -> Corpus:
    """Read and split a text; an empty `path` means Python's own documentation.

    Raises
    ------
    ValueError
        If the file cannot serve (see `read_text`), or a part is shorter than one window of
        `context` characters and the one that follows it.
    """
    source = path or f"pydoc_data.topics of Python {platform.python_version()}"
    text = read_text(path) if path else python_topics()
    vocabulary = Vocabulary.of(text)
    cut = len(text) - round(len(text) * validation)
    if min(cut, len(text) - cut) < context + 1:
        raise ValueError(
            f"the text {source!r} is too short: its {len(text)} characters split into {cut} to "
            f"train and {len(text) - cut} to validate, and each needs at least {context + 1} "
            f"(one window of {context} and the next character)"
        )
    tokens = vocabulary.encode(text)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return Corpus(source, digest, vocabulary, tokens[:cut], tokens[cut:])


# ---- the task ------------------------------------------------------------------------------------


def _windows(tokens: Array, starts: Array, context: int) -> tuple[Array, Array]:
    span = tokens[starts[:, None] + np.arange(context + 1)]  # (B, N + 1)
    return span[:, :-1], span[:, 1:]


@dataclass(frozen=True)
class TextTask:
    """Predict the next character. Every batch is a function of (seed, step) alone: a run that was
    interrupted needs no generator's state to go on."""

    corpus: Corpus
    context: int
    batch_size: int
    seed: int

    def batch(self, step: int) -> tuple[Array, Array]:
        """Inputs and targets (B, N) of one training step: windows at uniformly random places."""
        places = len(self.corpus.train) - self.context
        rows = np.arange(self.batch_size)
        zero = np.zeros(1, dtype=np.int64)
        bits = random_bits(Draw(self.seed, step), Stream.BATCH, 0, zero, rows, zero)
        starts = (bits.astype(np.uint64) * np.uint64(places) >> np.uint64(32)).astype(np.int64)
        return _windows(self.corpus.train, starts, self.context)

    def probe(self) -> tuple[Array, Array]:
        """The fixed probe batch: windows spread evenly over the training part."""
        return _windows(self.corpus.train, self._even_starts(self.corpus.train), self.context)

    def quick_validation(self) -> tuple[Array, Array]:
        """As many fixed windows of the validation part: cheap enough to look at often."""
        validation = self.corpus.validation
        return _windows(validation, self._even_starts(validation), self.context)

    def validation(self) -> Iterator[tuple[Array, Array]]:
        """The whole validation part in windows that do not overlap, each character but the first
        predicted once. A window knows nothing of the one before it."""
        tokens, last = self.corpus.validation, len(self.corpus.validation) - 1
        starts = np.arange(0, last - self.context + 1, self.context)
        for first in range(0, len(starts), self.batch_size):
            yield _windows(tokens, starts[first : first + self.batch_size], self.context)
        if rest := last % self.context:
            yield _windows(tokens, np.array([last - rest]), rest)

    def _even_starts(self, tokens: Array) -> Array:
        places = len(tokens) - self.context
        return np.unique(np.arange(PROBE_WINDOWS) * places // PROBE_WINDOWS)


# ---- the baselines -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counts:
    """How often each n-gram, and each context of n - 1 characters, occurs in the counted tokens."""

    grams: Array  # sorted keys: the n-gram read as a number in base V
    gram_counts: Array
    contexts: Array
    context_counts: Array

    @classmethod
    def of(cls, tokens: Array, n: int, base: int) -> "_Counts":
        keys = _keys(tokens, n, base)
        return cls(
            *np.unique(keys, return_counts=True), *np.unique(keys // base, return_counts=True)
        )


def _keys(tokens: Array, n: int, base: int) -> Array:
    """The n-gram that ends at each token from the n-th on, as a number in base `base`."""
    keys = np.zeros(len(tokens) - n + 1, dtype=np.int64)
    for i in range(n):
        keys = keys * base + tokens[i : i + len(keys)]
    return keys


def _look_up(keys: Array, sorted_keys: Array, counts: Array) -> Array:
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[places] == keys, counts[places], 0)


def _mix(counts: _Counts, keys: Array, base: int, weight: float, lower: Array) -> Array:
    """p_n at each key, given p_{n-1} there."""
    seen = _look_up(keys // base, counts.contexts, counts.context_counts)
    ratio = _look_up(keys, counts.grams, counts.gram_counts) / np.maximum(seen, 1)
    return np.where(seen > 0, weight * ratio + (1 - weight) * lower, lower)


def _fit_weight(counts: _Counts, keys: Array, base: int, lower: Array) -> float:
    """λ_n that makes the held-out tokens most probable: expectation maximisation of a mixture of
    two, which has one maximum."""
    seen = _look_up(keys // base, counts.contexts, counts.context_counts)
    ratio = _look_up(keys, counts.grams, counts.gram_counts) / np.maximum(seen, 1)
    ratio, lower, weight = ratio[seen > 0], lower[seen > 0], 0.5
    for _ in range(100):
        if not len(ratio):
            break
        weight = float(np.mean(weight * ratio / (weight * ratio + (1 - weight) * lower)))
    return weight


def ngram_bits(corpus: Corpus, orders: int = 3) -> list[float]:
    """Bits per character of the interpolated n-gram models of order 1, 2, ..., `orders` on the
    validation part."""
    base, train = len(corpus.vocabulary), corpus.train
    held_out = len(train) - max(len(train) // 10, 1)
    # p_0 on the held-out and on the validation tokens
    fitted = np.full(len(train) - held_out, 1 / base)
    scored = np.full(len(corpus.validation), 1 / base)
    bits = []
    for n in range(1, orders + 1):
        # a context may reach back across a cut, the scored characters do not
        keys = _keys(np.concatenate([train, corpus.validation]), n, base)
        to_fit, to_score = keys[held_out - n + 1 :][: len(fitted)], keys[len(train) - n + 1 :]
        part, whole = (_Counts.of(counted, n, base) for counted in (train[:held_out], train))
        weight = _fit_weight(part, to_fit, base, fitted)
        fitted = _mix(part, to_fit, base, weight, fitted)
        scored = _mix(whole, to_score, base, weight, scored)
        bits.append(float(-np.log2(scored).mean()))
    return bits
