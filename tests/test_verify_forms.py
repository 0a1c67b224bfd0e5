"""Linear attention, FAVOR+, block-sparse attention and decoding under `verify`: right functions
pass, wrong ones are found, most of them by name."""

import numpy as np
import pytest

from minitransformer.checks import detection, verify
from minitransformer.checks.suite import NotApplicable

DEFINITION = "the_output_is_the_definition"


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def grouped(q, k, v):
    repeat = q.shape[1] // k.shape[1]
    return q, np.repeat(k, repeat, 1), np.repeat(v, repeat, 1)


def linear(q, k, v, *, causal=False, keep=None, epsilon=0.0):
    """All the weights at once."""
    if keep is not None:
        k, v = (np.where(keep[..., None], x, 0) for x in (k, v))
    fk = phi(k) if keep is None else phi(k) * keep[..., None]
    q, fk, v = grouped(q, fk, v)
    a = phi(q) @ np.swapaxes(fk, -1, -2)
    if causal:
        a = np.tril(a, a.shape[-1] - a.shape[-2])
    a = np.nan_to_num(a)  # a query with no key may be anything
    total = a.sum(-1, keepdims=True) + epsilon
    return a @ v / np.where(total == 0, 1, total)


def linear_with_epsilon(q, k, v, *, causal=False, keep=None):
    return linear(q, k, v, causal=causal, keep=keep, epsilon=1e-6)


def favor(q, k, v, projection, *, causal=False, keep=None, scale=None, over=(-1,), floor=0.0):
    """Feature by feature in logarithms."""
    root = np.sqrt(q.shape[-1] ** -0.5 if scale is None else scale)
    if keep is not None:
        k, v = (np.where(keep[..., None], x, 0) for x in (k, v))
    lq, lk = ((root * x) @ projection.T - ((root * x) ** 2).sum(-1, keepdims=True) / 2
              for x in (q, k))  # fmt: skip
    lk = lk if keep is None else np.where(keep[..., None], lk, -np.inf)
    lq = np.nan_to_num(lq)  # a query with no key may be anything
    lq, lk, v = grouped(lq, lk, v)
    logs = lq[..., :, None, :] + lk[..., None, :, :]
    n, m = logs.shape[-3:-1]
    if causal:
        logs = np.where(np.tri(n, m, m - n, dtype=bool)[..., None], logs, -np.inf)
    top = logs.max(axis=(-2, -1), keepdims=True, initial=-np.inf)
    w = np.exp(logs - np.where(top == -np.inf, 0, top)).sum(-1)
    total = w.sum(-1, keepdims=True) + floor
    return w @ v / np.where(total == 0, 1, total)


def favor_with_epsilon(q, k, v, projection, *, causal=False, keep=None, scale=None):
    """The authors' 1e-6, which stays when everything else was divided by the largest feature."""
    return favor(q, k, v, projection, causal=causal, keep=keep, scale=scale, floor=1e-6)


def sparse(q, k, v, *, layout, block, keep=None, scale=None):
    """A dense mask out of the tiles."""
    n, m = q.shape[2], k.shape[2]
    allowed = np.repeat(np.repeat(layout, block, 2), block, 3)[:, :, :n, :m]
    allowed = allowed if keep is None else allowed & keep
    q, k, v = grouped(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if keep is not None:  # what nobody reads may be anything
        q, k, v = (np.nan_to_num(x, posinf=0, neginf=0) for x in (q, k, v))
    s = np.where(allowed, scale * (q @ np.swapaxes(k, -1, -2)), -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(top == -np.inf, 0, top))
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return e @ v / np.where(total == 0, 1, total), lse


def sparse_of_full_tiles(q, k, v, *, layout, block, scale=None):
    q, k, v = (np.nan_to_num(x, posinf=0, neginf=0) for x in (q, k, v))
    return sparse(q, k, v, layout=layout, block=block, scale=scale)


def sparse_transposed(q, k, v, *, layout, block, keep=None, scale=None):
    """Rows for columns in the list of tiles."""
    if layout.shape[2] == layout.shape[3]:
        layout = np.swapaxes(layout, 2, 3)
    return sparse(q, k, v, layout=layout, block=block, keep=keep, scale=scale)


def attend(q, k, v, keep, scale=None):
    q, k, v = grouped(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = np.where(keep, scale * (q @ np.swapaxes(k, -1, -2)), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True, initial=-1e300))
    return e @ v / e.sum(-1, keepdims=True)


def step(q, k, v, cache, *, window=None, scale=None, first=None):
    """Append, then read by distance."""
    if cache is not None:
        k, v = (np.concatenate(pair, axis=2) for pair in zip(cache, (k, v), strict=True))
    n, m = q.shape[2], k.shape[2]
    distance = np.arange(m - n if first is None else first, m)[:n, None] - np.arange(m)
    keep = (distance >= 0) & (distance < (m if window is None else window))
    return attend(q, k, v, keep, scale), (k.copy(), v.copy())


def step_from_the_corner(q, k, v, cache, *, window=None, scale=None):
    """A causal mask at the upper left of a chunk."""
    return step(q, k, v, cache, window=window, scale=scale, first=0)


def step_in_place(q, k, v, cache, *, scale=None):
    """A static cache: two lists that grow."""
    cache = ([], []) if cache is None else cache
    for held, x in zip(cache, (k, v), strict=True):
        held.append(x.copy())
    k, v = (np.concatenate(held, axis=2) for held in cache)
    n, m = q.shape[2], k.shape[2]
    return attend(q, k, v, np.tri(n, m, m - n, dtype=bool), scale), cache


def verdicts(function, operation, only=None, **options):
    judged = verify.target(function, operation, **options)
    chosen = [s for s in verify.statements(operation) if only is None or s.name in only]
    with np.errstate(all="ignore"):
        return {s.name: verify.verdict(s, judged, profile="quick") for s in chosen}


def failed(found):
    return {name: v.message for name, v in found.items() if v.status == "fail"}


RIGHT = [
    (linear, "linear_attention", {}),
    (favor, "favor", {}),
    (sparse, "block_sparse_attention", {"returns": ("out", "lse")}),
    (sparse_of_full_tiles, "block_sparse_attention", {"returns": ("out", "lse")}),
    (step, "kv_cache", {}),
    (step_in_place, "kv_cache", {"declared": ["cache=in_place"]}),
]


@pytest.mark.parametrize(
    "function, operation, options", RIGHT, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_right_function_passes_whatever_it_can_be_asked(function, operation, options):
    found = verdicts(function, operation, **options)
    assert failed(found) == {}
    assert sum(v.status == "pass" for v in found.values()) >= 2


@pytest.mark.parametrize(
    "function, operation, statement, name",
    [
        (linear_with_epsilon, "linear_attention", DEFINITION, "epsilon in the denominator"),
        (favor_with_epsilon, "favor", DEFINITION, ""),
        (sparse_transposed, "block_sparse_attention", "the_output_is_that_of_dense_attention", ""),
        (step_from_the_corner, "kv_cache", "steps_give_what_one_pass_gives",
            "step with causal mask at the upper left"),
        (step_in_place, "kv_cache", "a_step_leaves_the_older_cache_and_its_arguments_alone", ""),
    ],
)  # fmt: skip
def test_a_wrong_function_is_found(function, operation, statement, name):
    found = verdicts(function, operation, [statement])[statement]
    assert found.status == "fail"
    assert not name or name in found.same_as


def detected(function, operation):
    def make(answers):
        return verify.target(
            function, operation, declared=[f"{key}={answer}" for key, answer in answers.items()]
        )

    return detection.detect(make, operation, (), "float64")


def test_conventions_of_the_other_forms_are_detected():
    def theirs(q, k, v, *, causal=False, key_mask=None):
        q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
        keep = None if key_mask is None else ~key_mask
        return np.swapaxes(linear(q, k, v, causal=causal, keep=keep), 1, 2)

    assert detected(theirs, "linear_attention") == {
        "layout": "bnhd", "mask": "ignore", "groups": "repeat", "causal": "lower_right",
        "dead_row": "zero",
    }  # fmt: skip
    assert detected(step_in_place, "kv_cache")["cache"] == "in_place"
    assert detected(step, "kv_cache")["cache"] == "value"
    assert detected(sparse, "block_sparse_attention")["groups"] == "repeat"


def test_who_cannot_says_so():
    def causal_alone(q, k, v, *, causal=True):
        if not causal:
            raise NotImplementedError("causal only")
        return linear(q, k, v, causal=True)

    judged = verify.target(causal_alone, "linear_attention")
    x = np.ones((1, 2, 3, 4))
    assert judged.linear_attention_forward(x, x, x, causal=True)[0].shape == x.shape
    with pytest.raises(NotApplicable, match="the target cannot: causal only"):
        judged.linear_attention_forward(x, x, x)


def test_padding_of_keys_goes_by_batch_row_where_that_is_what_a_function_takes():
    def padded(q, k, v, *, causal=False, key_padding_mask=None):
        keep = None if key_padding_mask is None else key_padding_mask[:, None]
        return linear(q, k, v, causal=causal, keep=keep)

    assert verdicts(padded, "linear_attention", [DEFINITION])[DEFINITION].status == "pass"


def test_a_state_is_judged_where_it_is_returned():
    def stateful(q, k, v, *, causal=False, keep=None, initial_state=None, z=None):
        out = linear(q, k, v, causal=causal, keep=keep)
        fk = phi(k) if keep is None else phi(k) * keep[..., None]
        v = v if keep is None else np.where(keep[..., None], v, 0)
        if initial_state is not None:
            raise NotImplementedError("no state before")
        return out, np.swapaxes(fk, -1, -2) @ v, fk.sum(-2)

    name = "the_state_is_the_sum_over_keys"
    asked = {"returns": ("out", "s", "z")}
    assert verdicts(stateful, "linear_attention", [name], **asked)[name].status == "pass"
    assert verdicts(linear, "linear_attention", [name])[name].status == "not applicable"


def test_peer_pytorch_linear_attention_has_gradients_of_its_state_too():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make verify-peers")

    def ours(q, k, v, *, causal=False, keep=None, s=None, z=None, wrong=False):
        fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        if keep is not None:
            fk, v = fk * keep[..., None], torch.where(keep[..., None], v, 0)
        n, m, repeat = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        rk, rv = (x.repeat_interleave(repeat, 1) for x in (fk, v))
        a = fq @ rk.transpose(-1, -2)
        a = a.tril(m - n) if causal else a
        top, below = a @ rv, a.sum(-1)
        end_s, end_z = fk.transpose(-1, -2) @ v, fk.sum(-2)
        if s is not None:
            top = top + fq @ s.repeat_interleave(repeat, 1)
            held = z.detach() if wrong else z
            below = below + (fq @ held.repeat_interleave(repeat, 1)[..., None])[..., 0]
            end_s, end_z = end_s + s, end_z + z
        out = top / torch.where(below == 0, 1, below)[..., None]
        return out, end_s, end_z

    def cut(q, k, v, *, causal=False, keep=None, s=None, z=None):
        return ours(q, k, v, causal=causal, keep=keep, s=s, z=z, wrong=True)

    asked = {"framework": "torch", "returns": ("out", "s", "z")}
    through = "gradients_pass_through_the_state"
    chosen = [through, DEFINITION, "the_state_is_the_sum_over_keys", "the_three_forms_agree"]
    found = verdicts(ours, "linear_attention", chosen, **asked)
    assert {v.status for v in found.values()} == {"pass"}
    assert verdicts(cut, "linear_attention", [through], **asked)[through].status == "fail"
