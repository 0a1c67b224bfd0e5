"""The text task: what is read, how it is cut, and what the baselines say."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.checks.suite import GATE
from minitransformer.tasks.text import (
    Corpus,
    TextTask,
    Vocabulary,
    bits_per_character,
    load_corpus,
    ngram_bits,
)


def corpus_of(text, tmp_path, **options):
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    return load_corpus(str(path), **options)


# ---- reading and splitting -----------------------------------------------------------------------


def test_the_default_text_needs_no_file():
    corpus = load_corpus(context=128)
    assert len(corpus.train) + len(corpus.validation) > 400_000  # it differs between versions
    assert "pydoc_data" in corpus.source
    assert len(corpus.sha256) == 64


def test_the_default_text_is_the_same_every_time():
    assert load_corpus().sha256 == load_corpus().sha256


def test_the_validation_part_is_the_end_of_the_text(tmp_path):
    text = "the first nine tenths train, the rest does not. " * 10
    corpus = corpus_of(text, tmp_path, validation=0.1)
    decode = corpus.vocabulary.decode
    assert decode(corpus.train) + decode(corpus.validation) == text
    assert len(corpus.validation) == len(text) // 10


def test_the_hash_is_of_the_text(tmp_path):
    a, b = corpus_of("some text, twice" * 9, tmp_path), corpus_of("some text, twicE" * 9, tmp_path)
    assert a.sha256 != b.sha256


@settings(GATE)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_decoding_undoes_encoding(text):
    vocabulary = Vocabulary.of(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match=r"'z' \(position 2\)"):
        Vocabulary.of("abc").encode("abz")


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "cannot read the text .*No such file"),
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not UTF-8: byte 0 is 0x89"),
        (b"text\0with a zero", "is binary: character 4 is NUL"),
        (b"a few words", r"is too short: its 11 characters"),
    ],
    ids=["missing", "empty", "blank", "not_utf8", "binary", "too_short"],
)
def test_a_file_that_cannot_serve_is_named(tmp_path, content, complaint):
    path = tmp_path / "the_text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_corpus(str(path), context=16)
    assert "the_text.txt" in str(caught.value)


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(ValueError, match="cannot read the text"):
        load_corpus(str(tmp_path))


# ---- batches -------------------------------------------------------------------------------------


def numbered(train=1000, validation=100):
    """A corpus whose tokens are their own positions."""
    return Corpus(
        "numbers", "", Vocabulary(""), np.arange(train), np.arange(train, train + validation)
    )


def test_targets_are_the_next_characters():
    task = TextTask(numbered(), context=8, batch_size=4, seed=0)
    for inputs, targets in [
        task.batch(3),
        task.probe(),
        task.quick_validation(),
        *task.validation(),
    ]:
        assert np.array_equal(targets, inputs + 1)
        assert inputs.shape == targets.shape


def test_a_batch_is_a_function_of_seed_and_step():
    starts = [
        TextTask(numbered(), 8, 4, seed).batch(step)[0][:, 0].tolist()
        for seed, step in [(0, 0), (0, 0), (0, 1), (1, 0)]
    ]
    assert starts[0] == starts[1]
    assert len({tuple(s) for s in starts}) == 3


def test_a_larger_batch_begins_with_the_smaller_one():
    small, large = (TextTask(numbered(), 8, n, 0).batch(5)[0] for n in (3, 7))
    assert np.array_equal(large[:3], small)


def test_batches_reach_the_first_and_the_last_place():
    task = TextTask(numbered(train=12), context=8, batch_size=64, seed=0)
    starts = set(task.batch(0)[0][:, 0].tolist())
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize("length", [9, 16, 17, 18, 100])
def test_validation_predicts_every_character_but_the_first_once(length):
    task = TextTask(numbered(1000, length), context=8, batch_size=4, seed=0)
    targets = np.concatenate([t.ravel() for _, t in task.validation()])
    assert np.array_equal(np.sort(targets), np.arange(1001, 1000 + length))


def test_training_never_sees_the_validation_part():
    task = TextTask(numbered(), context=8, batch_size=64, seed=0)
    assert max(task.batch(step)[1].max() for step in range(50)) < 1000
    assert task.probe()[1].max() < 1000


# ---- baselines -----------------------------------------------------------------------------------


def test_uniform_letters_cost_their_logarithm():
    """Nothing predicts independent uniform letters: every order pays log2 V, plus a little for what
    it believes it saw."""
    tokens = np.random.default_rng(0).integers(0, 8, 40_000)
    corpus = Corpus("noise", "", Vocabulary("abcdefgh"), tokens[:36_000], tokens[36_000:])
    bits = ngram_bits(corpus)
    assert all(3 - 0.01 < b < 3 + 0.02 for b in bits)


def test_a_second_order_text_needs_a_trigram():
    """x_t = x_{t-1} + x_{t-2} mod 5 costs a trigram next to nothing, a bigram two bits."""
    tokens = [0, 1]
    for _ in range(4000):
        tokens.append((tokens[-1] + tokens[-2] + (len(tokens) % 97 == 0)) % 5)
    tokens = np.array(tokens)
    corpus = Corpus("sums", "", Vocabulary("abcde"), tokens[:3600], tokens[3600:])
    unigram, bigram, trigram = ngram_bits(corpus)
    assert min(unigram, bigram) > 1.9
    assert trigram < 0.2


def test_probabilities_sum_to_one():
    """Scored one by one, the next characters of a context, seen or not, share one unit."""
    train = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1, 0] * 4)
    for context in ([0, 1], [3, 3], [2, 0]):
        total = 0.0
        for c in range(5):  # 4 is in the vocabulary and never seen
            corpus = Corpus(
                "", "", Vocabulary("abcde"), np.array([*train, *context]), np.array([c])
            )
            total += 2 ** -ngram_bits(corpus)[-1]
        assert math.isclose(total, 1, rel_tol=1e-9)


def test_longer_contexts_help_on_real_text():
    unigram, bigram, trigram = ngram_bits(load_corpus())
    assert 2.2 < trigram < bigram - 0.5 < unigram - 1.5 < 3.5


def test_a_bit_is_the_logarithm_of_two():
    assert bits_per_character(math.log(2)) == 1
