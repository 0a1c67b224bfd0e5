"""What key/value caches say to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.attention.kv_cache import (
    bytes_per_token,
    empty_cache,
    extend,
    memory_cache,
    next_positions,
    padded_positions,
    read_memory,
    reorder,
)

pytestmark = pytest.mark.usefixtures("own_errors")

K = np.ones((2, 1, 3, 4))
V = np.ones((2, 1, 3, 5))


def cache(window=None):
    return empty_cache((2,), 1, 4, 5, window=window)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: empty_cache((2,), 0, 4), ValueError, "groups must be at least 1, got 0"),
        (lambda: empty_cache((2,), 1, -4), ValueError, "width must be at least 0, got -4"),
        (lambda: empty_cache((2,), 1, 4, 2.0), TypeError, "value_width must be a whole number"),
        (lambda: empty_cache((-2,), 1, 4), ValueError, "leading must be at least 0, got -2"),
        (lambda: empty_cache((2,), 1, 4, window=0), ValueError, "window must be at least 1, got 0"),
        (lambda: empty_cache((2,), 1, 4, dtype=int), TypeError, "dtype must hold floating-point"),
        (lambda: next_positions(cache(), 1.5), TypeError, "tokens must be a whole number, got 1.5"),
        (lambda: padded_positions(np.ones(3)), TypeError, "real must be a boolean array"),
        (lambda: bytes_per_token(0, 1, 4), ValueError, "layers must be at least 1, got 0"),
    ],
)
def test_sizes_are_whole_numbers(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "k, v, error, message",
    [
        (K.tolist(), V, TypeError, "k must be a NumPy array, got list"),
        (K > 0, V, TypeError, "k must hold floating-point numbers"),
        (K[0, 0], V, ValueError, r"k needs at least 3 axes, got shape \(3, 4\)"),
        (K[..., :3], V, ValueError, r"k has shape \(2, 1, 3, 3\), the cache holds \(2, 1, 0, 4\)"),
        (K[:1], V, ValueError, r"k has shape \(1, 1, 3, 4\), the cache holds"),
        (K, K, ValueError, r"v has shape \(2, 1, 3, 4\), the cache holds \(2, 1, 0, 5\)"),
        (K, V[..., :2, :], ValueError, "v has 2 tokens, k has 3: the two must agree"),
    ],
)
def test_new_keys_fit_the_cache(k, v, error, message):
    with pytest.raises(error, match=message):
        extend(cache(), k, v)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    "positions, error, message",
    [
        ([3, 4, 5], TypeError, "positions must be an array of integers, got list"),
        (np.array([3.0, 4, 5]), TypeError, "positions must be an array of integers"),
        (np.array([3, 4]), ValueError, r"positions has shape \(2,\), which does not broadcast to"),
        (np.array([2, 3, 4]), ValueError, "positions must rise within each row, from what the ca"),
        (np.array([3, 5, 5]), ValueError, "positions must rise within each row"),
        (np.array([4, -1, 3]), ValueError, "positions must rise within each row"),
        (np.array([-2, 3, 4]), ValueError, r"positions must rise .* \(-1: padding\), got \[-2, 3"),
        (np.array([[3, 4, 5], [0, 1, 2]]), ValueError, "positions must rise within each row"),
    ],
)
def test_positions_go_on_upwards(window, positions, error, message):
    _, held = extend(cache(window), K, V)  # 0, 1, 2
    with pytest.raises(error, match=message):
        extend(held, K, V, positions=positions)


@pytest.mark.parametrize(
    "rows, error, message",
    [
        ([0, 1], TypeError, "rows must be an array of integers, got list"),
        (np.array([True, False]), TypeError, "rows must be an array of integers, got dtype bool"),
        (np.array([0, 2]), ValueError, r"rows must .* lie in \[0, 2\), got \[0, 2\]"),
        (np.array([-1]), ValueError, r"rows must .* lie in \[0, 2\), got \[-1\]"),
        (np.array([[0]]), ValueError, r"rows must have shape \(beams,\)"),
    ],
)
def test_beams_come_from_rows_that_exist(rows, error, message):
    with pytest.raises(error, match=message):
        reorder(cache(), rows)


def test_a_cache_without_a_batch_has_no_rows():
    with pytest.raises(ValueError, match=r"cache has no batch axis to reorder"):
        reorder(empty_cache((), 1, 4), np.array([0]))


@pytest.mark.parametrize(
    "memory, project, keep, error, message",
    [
        ([[1.0]], lambda m: (K, V), None, TypeError, "memory must be a NumPy array, got list"),
        (K[:, 0], lambda m: (K, V), np.ones((2, 3)), TypeError, "keep must be a boolean array"),
        (K[:, 0], lambda m: (K, V), np.ones((3, 2), bool), ValueError, "keep has shape"),
        (K[:, 0], lambda m: (K[0], V), None, ValueError, "project gave k of shape .*2, groups, 3"),
        (K[:, 0], lambda m: (K, V[..., :2, :]), None, ValueError, "project gave v of shape"),
        (K[:, 0], lambda m: (K, 1.0), None, TypeError, "v must be a NumPy array, got float"),
    ],
)
def test_a_memory_and_its_projection_agree(memory, project, keep, error, message):
    with pytest.raises(error, match=message):
        memory_cache(memory, project, keep=keep)


def test_as_many_tokens_read_a_memory_as_there_are():
    held = memory_cache(K[:, 0], lambda m: (K, V))
    with pytest.raises(ValueError, match="queries must be at least 0, got -1"):
        read_memory(held, -1)
