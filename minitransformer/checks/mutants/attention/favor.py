"""Mistakes people make with FAVOR+; the stabiliser over all keys is in the authors' own code."""

import numpy as np

from minitransformer.arrays import narrowed
from minitransformer.attention import favor as right
from minitransformer.checks.properties.attention.favor import suite

LAW = "independent_rows_are_the_law"
BLOCK = "rows_of_a_block_are_orthogonal"
DIRECTIONS = "rows_are_as_likely_in_every_direction"
ANEW = "it_is_drawn_anew_when_asked"
FEWER = "more_features_keep_those_of_fewer"
LOGS = "log_features_are_the_definition"
UNBIASED = "the_kernel_is_unbiased"
SLOPE = "log_features_backward_is_the_derivative"
DEFINITION = "the_output_is_the_definition"
CHUNKS = "the_length_of_a_chunk_does_not_matter"
GROUPS = "query_head_h_reads_key_head_h_over_the_group_size"
ANY_SIZE = "numbers_of_any_size_give_a_mean"
CLOSE = "many_features_come_close_to_softmax"
PARTS = "a_text_read_in_parts_is_the_text"
MERGE = "states_of_two_texts_merge"
FUTURE = "no_word_comes_from_the_future"
LEFT_OUT = "a_key_left_out_might_as_well_not_exist"
DEAD = "a_row_with_no_key_is_zero"
DERIVATIVE = "favor_attention_backward_is_the_derivative"
NARROW = "narrow_numbers_are_rounded_once"
ALONE = "arguments_are_left_alone"


# ---- the projection ------------------------------------------------------------------------------


@suite.mutant("random_projection", "what NumPy draws: nobody else can", killed_by=(LAW, BLOCK))
def drawn_from_a_sequence(draw, features, width, *, layer=0, every=None, **kind):
    rows = features // 2 if kind.get("hyperbolic") else features
    step = draw.step // every if every else 0
    rng = np.random.default_rng([draw.seed, step, layer, draw.sample])
    w = rng.standard_normal((rows, width))
    return np.concatenate([w, -w]) if kind.get("hyperbolic") else w


@suite.mutant("random_projection", "uniform numbers of variance 1", killed_by=(LAW, DIRECTIONS))
def uniform_rows(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    ranks = np.argsort(np.argsort(w, axis=0), axis=0) + 0.5
    return np.sqrt(12) * (ranks / max(len(w), 1) - 0.5)


@suite.mutant(
    "random_projection",
    "u where 1 - u or √ belongs: -2 ln u without its root",
    killed_by=(LAW, DIRECTIONS, UNBIASED),
)
def box_muller_without_the_root(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    return w * np.abs(w)


@suite.mutant("random_projection", "blocks are an option nobody reads", killed_by=BLOCK)
def orthogonality_forgotten(draw, features, width, **kind):
    return right.random_projection(draw, features, width, **{**kind, "orthogonal": False})


@suite.mutant(
    "random_projection",
    "LAPACK's signs are no coin tosses: the rotations are not all equally likely",
    killed_by=(BLOCK, FEWER),
)
def signs_left_to_lapack(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    if not kind.get("orthogonal", True):
        return w
    signed = w.copy()
    last = (features - 1) // width * width
    signed[last:] = -w[last:]
    return signed


@suite.mutant(
    "random_projection",
    "rows of an orthogonal matrix have length 1",
    killed_by=(BLOCK, DIRECTIONS, UNBIASED, CLOSE),
)
def rows_of_unit_length(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    orthogonal = kind.get("orthogonal", True)
    return w / np.linalg.norm(w, axis=1, keepdims=True) if orthogonal else w


@suite.mutant(
    "random_projection",
    "√D for every row: right on average, and the exponential is not linear",
    killed_by=(BLOCK, DIRECTIONS),
)
def rows_of_equal_length(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    lengths = np.linalg.norm(w, axis=1, keepdims=True)
    return w * np.sqrt(width) / lengths if kind.get("orthogonal", True) else w


@suite.mutant(
    "random_projection", "the block's own norms, no longer independent of it", killed_by=BLOCK
)
def lengths_of_the_same_normals(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    if not kind.get("orthogonal", True) or kind.get("hyperbolic"):
        return w
    own = right.random_projection(draw, features, width, **{**kind, "orthogonal": False})
    return w * np.linalg.norm(own, axis=1, keepdims=True) / np.linalg.norm(w, axis=1, keepdims=True)


@suite.mutant("random_projection", "every step of training its own", killed_by=ANEW)
def drawn_anew_every_step(draw, features, width, **kind):
    return right.random_projection(draw, features, width, **{**kind, "every": 1})


@suite.mutant("random_projection", "one projection for ever", killed_by=(ANEW, UNBIASED))
def never_drawn_anew(draw, features, width, **kind):
    return right.random_projection(draw, features, width, **{**kind, "every": None})


@suite.mutant("random_projection", "other features than it was trained with", killed_by=ANEW)
def evaluation_draws_its_own(draw, features, width, **kind):
    draw = draw if draw.training else draw._replace(seed=draw.seed ^ 1)
    return right.random_projection(draw, features, width, **kind)


@suite.mutant("random_projection", "all layers err alike", killed_by=(ANEW, LAW))
def layers_share_a_projection(draw, features, width, *, layer=0, **kind):
    return right.random_projection(draw, features, width, layer=0, **kind)


@suite.mutant("random_projection", "W and -W alternate", killed_by=FEWER)
def hyperbolic_rows_interleaved(draw, features, width, **kind):
    w = right.random_projection(draw, features, width, **kind)
    if not kind.get("hyperbolic"):
        return w
    return w.reshape(2, features // 2, width).swapaxes(0, 1).reshape(features, width)


# ---- features ------------------------------------------------------------------------------------


@suite.mutant(
    "log_features_forward",
    "exp(w · x) alone estimates exp(‖q + k‖²/2)",
    killed_by=(LOGS, UNBIASED, SLOPE),
)
def half_the_square_forgotten(x, projection, *, scale=None):
    out, cache = right.log_features_forward(x, projection, scale=scale)
    square = (cache.scaled * cache.scaled).sum(axis=-1, keepdims=True) / 2
    return narrowed(out + square, x), cache


@suite.mutant("log_features_forward", "‖x̂‖² for ‖x̂‖²/2", killed_by=(LOGS, UNBIASED, SLOPE))
def the_whole_square(x, projection, *, scale=None):
    out, cache = right.log_features_forward(x, projection, scale=scale)
    square = (cache.scaled * cache.scaled).sum(axis=-1, keepdims=True) / 2
    return narrowed(out - square, x), cache


@suite.mutant(
    "log_features_forward", "s on each side is s² for the product", killed_by=(LOGS, UNBIASED)
)
def scaled_on_both_sides(x, projection, *, scale=None):
    scale = 1 / np.sqrt(x.shape[-1]) if scale is None else scale
    return right.log_features_forward(x, projection, scale=float(scale) ** 2)


@suite.mutant("log_features_forward", "the norm of x, not of x̂", killed_by=(LOGS, UNBIASED))
def square_of_what_is_not_scaled(x, projection, *, scale=None):
    out, cache = right.log_features_forward(x, projection, scale=scale)
    scaled = (cache.scaled * cache.scaled).sum(axis=-1, keepdims=True) / 2
    return narrowed(out + scaled - (x * x).sum(axis=-1, keepdims=True) / 2, x), cache


@suite.mutant("log_features_forward", "float32 for float16", killed_by=NARROW)
def features_left_wide(x, projection, *, scale=None):
    wide = x.astype(np.float32) if x.dtype.itemsize == 2 else x
    return right.log_features_forward(wide, projection, scale=scale)


@suite.mutant("log_features_backward", "dl W alone", killed_by=SLOPE)
def square_has_no_gradient(dout, cache):
    return right.log_features_backward(dout, cache._replace(scaled=0 * cache.scaled))


@suite.mutant("log_features_backward", "dx̂ handed out as dx", killed_by=SLOPE)
def root_of_the_scale_forgotten(dout, cache):
    return right.log_features_backward(dout, cache._replace(root=1.0))


@suite.mutant("log_features_backward", "√s twice", killed_by=SLOPE)
def root_of_the_scale_applied_twice(dout, cache):
    return right.log_features_backward(dout, cache._replace(root=cache.root**2))


# ---- the forward ---------------------------------------------------------------------------------


def _stabilised(q, k, v, projection, *, stabiliser, epsilon, **options):
    """The usual code: exp(l(k) - a shift) + ε, and prefix sums of that. What it lacks, the text
    before, it takes from the right one."""
    out, cache = right.favor_attention_forward(q, k, v, projection, **options)
    lq, lk = cache.logs
    if options.get("state") is not None or not lk.size or not lq.size:
        return out, cache
    top = np.where(np.isfinite(lk.real), lk.real, -1e300).max(axis=stabiliser, keepdims=True)
    fq = np.exp(lq - lq.real.max(axis=-1, keepdims=True)) + epsilon
    fk = np.where(np.isfinite(lk), np.exp(lk - top) + epsilon, 0)
    weights = fq @ fk.mT
    if options.get("causal"):
        n, m = q.shape[-2], k.shape[-2]
        weights = weights * np.tri(n, m, 0 if options.get("align") == "upper_left" else m - n)
    both = weights @ cache.values
    with np.errstate(invalid="ignore", divide="ignore"):
        wrong = both[..., :-1] / both[..., -1:]
    wrong = np.where(cache.alive[..., None], wrong, 0)
    return wrong.reshape(out.shape).astype(out.dtype), cache


@suite.mutant(
    "favor_attention_forward",
    "the largest l of all keys, the future's too, and ε = 1e-6: it does not cancel",
    killed_by=(FUTURE, DEFINITION, PARTS),
)
def stabiliser_over_all_keys_and_an_epsilon(q, k, v, projection, **options):
    return _stabilised(q, k, v, projection, stabiliser=(-2, -1), epsilon=1e-6, **options)


@suite.mutant(
    "favor_attention_forward",
    "without the ε it cancels, until the rows before a large key underflow to 0/0",
    killed_by=ANY_SIZE,
)
def stabiliser_over_all_keys(q, k, v, projection, **options):
    return _stabilised(q, k, v, projection, stabiliser=(-2, -1), epsilon=0, **options)


@suite.mutant(
    "favor_attention_forward",
    "a shift for each key alone changes its weight:"
    " https://github.com/lucidrains/performer-pytorch/issues/36",
    killed_by=(DEFINITION, PARTS),
)
def stabiliser_of_each_key(q, k, v, projection, **options):
    return _stabilised(q, k, v, projection, stabiliser=-1, epsilon=0, **options)


@suite.mutant(
    "favor_attention_forward",
    "the peak moves up, the state stays as it was",
    killed_by=(DEFINITION, PARTS),
)
def state_not_scaled_along(q, k, v, projection, *, state=None, **options):
    out, cache = right.favor_attention_forward(q, k, v, projection, state=state, **options)
    if state is None:
        return out, cache
    raised = np.maximum(cache.state.peak, state.peak)
    return right.favor_attention_forward(
        q, k, v, projection, state=state._replace(peak=raised), **options
    )


@suite.mutant(
    "favor_attention_forward",
    "S is scaled along, z is not",
    killed_by=(DEFINITION, PARTS, MERGE),
)
def normaliser_not_scaled_along(q, k, v, projection, *, state=None, **options):
    out, cache = right.favor_attention_forward(q, k, v, projection, state=state, **options)
    if state is None:
        return out, cache
    peak = np.where(np.isfinite(state.peak), state.peak, 0)
    state = state._replace(z=state.z * np.exp(np.minimum(np.abs(peak), 9)))
    return right.favor_attention_forward(q, k, v, projection, state=state, **options)


@suite.mutant("favor_attention_forward", "every call the first", killed_by=(DEFINITION, PARTS))
def state_ignored(q, k, v, projection, *, state=None, **options):
    return right.favor_attention_forward(q, k, v, projection, **options)


@suite.mutant(
    "favor_attention_forward",
    "chunks go on from the state before the call",
    killed_by=PARTS,
)
def chunks_forget_each_other(q, k, v, projection, **options):
    out, cache = right.favor_attention_forward(q, k, v, projection, **options)
    chunk, n = options.get("chunk", 16), q.shape[-2]
    if not options.get("causal") or n != k.shape[-2] or not n or chunk >= n:
        return out, cache
    keep, rows = options.get("keep"), []
    for i in range(0, n, chunk):
        c = slice(i, i + chunk)
        own = {**options, "keep": None if keep is None else keep[..., c]}
        part = q[..., c, :], k[..., c, :], v[..., c, :]
        rows.append(right.favor_attention_forward(*part, projection, **own)[0])
    return np.concatenate(rows, axis=-2), cache


@suite.mutant(
    "favor_attention_forward",
    "k = 0 has the feature exp(0) = 1",
    killed_by=(DEFINITION, LEFT_OUT),
)
def padding_zeroes_the_key(q, k, v, projection, *, keep=None, **options):
    if keep is not None:
        k, v = (np.where(keep[..., 0, :, None], x, 0) for x in (k, v))
    return right.favor_attention_forward(q, k, v, projection, **options)


@suite.mutant(
    "favor_attention_forward", "causal read, and forgotten", killed_by=(DEFINITION, CLOSE)
)
def reads_the_future(q, k, v, projection, **options):
    return right.favor_attention_forward(q, k, v, projection, **{**options, "causal": False})


@suite.mutant(
    "favor_attention_forward", "a scale from the caller is forgotten", killed_by=DEFINITION
)
def scale_argument_ignored(q, k, v, projection, *, scale=None, **options):
    return right.favor_attention_forward(q, k, v, projection, **options)


@suite.mutant("favor_attention_forward", "0/0 where nothing is read", killed_by=(DEFINITION, DEAD))
def dead_rows_divided_by_zero(q, k, v, projection, **options):
    out, cache = right.favor_attention_forward(q, k, v, projection, **options)
    dead = np.broadcast_to(~cache.alive[..., None], cache.out.shape).reshape(out.shape)
    return np.where(dead, np.nan, out), cache


@suite.mutant("favor_attention_forward", "head h reads h % G", killed_by=(DEFINITION, GROUPS))
def key_heads_tiled_instead_of_repeated(q, k, v, projection, **options):
    _, cache = right.favor_attention_forward(q, k, v, projection, **options)
    heads, groups = q.shape[-3], k.shape[-3]
    order = np.arange(heads).reshape(-1, groups).T.ravel()  # the heads that read group 0, 1, …
    tiled, _ = right.favor_attention_forward(q[..., order, :, :], k, v, projection, **options)
    return tiled[..., np.argsort(order), :, :], cache


@suite.mutant(
    "favor_attention_forward",
    "the projection is float64, so the output becomes it",
    killed_by=NARROW,
)
def computed_in_the_dtype_of_the_projection(q, k, v, projection, **options):
    q, k, v = (x.astype(np.result_type(x.dtype.type(0), np.float64)) for x in (q, k, v))
    return right.favor_attention_forward(q, k, v, projection, **options)


@suite.mutant("favor_attention_forward", "S and z scaled in the caller's arrays", killed_by=ALONE)
def state_scaled_in_place(q, k, v, projection, *, state=None, **options):
    out, cache = right.favor_attention_forward(q, k, v, projection, state=state, **options)
    if state is not None:
        state.z[...] *= 0.5
    return out, cache


@suite.mutant("merged", "S and z added on different scales", killed_by=MERGE)
def states_added_as_they_are(first, second):
    peak = np.maximum(first.peak, second.peak)
    return right.FavorState(peak, first.s + second.s, first.z + second.z)


@suite.mutant("merged", "the later state wins", killed_by=MERGE)
def second_state_alone(first, second):
    return second


# ---- the backward --------------------------------------------------------------------------------


@suite.mutant(
    "favor_attention_backward", "the denominator taken for a constant", killed_by=DERIVATIVE
)
def normaliser_has_no_gradient(dout, cache):
    return right.favor_attention_backward(dout, cache._replace(out=0 * cache.out))


@suite.mutant("favor_attention_backward", "h = +(do · o) / den", killed_by=DERIVATIVE)
def normaliser_gradient_with_the_wrong_sign(dout, cache):
    return right.favor_attention_backward(dout, cache._replace(out=-cache.out))


@suite.mutant(
    "favor_attention_backward",
    "keys learn from the queries of their own chunk only: U is not carried back",
    killed_by=(CHUNKS, DERIVATIVE),
)
def gradient_stops_at_the_chunk(dout, cache):
    grads = right.favor_attention_backward(dout, cache)
    causal, _align, chunk = cache.options
    n, m = cache.shape[-2:]
    if not causal or n != m or chunk >= n or not dout.size:
        return grads
    own = []
    for i in range(0, n, chunk):
        masked = np.zeros_like(dout)
        masked[..., i : i + chunk, :] = dout[..., i : i + chunk, :]
        part = right.favor_attention_backward(masked, cache)
        own.append((part.k[..., i : i + chunk, :], part.v[..., i : i + chunk, :]))
    dk, dv = (np.concatenate(x, axis=-2) for x in zip(*own, strict=True))
    return grads._replace(k=dk, v=dv)


@suite.mutant("favor_attention_backward", "the text before does not matter", killed_by=DERIVATIVE)
def state_before_forgotten(dout, cache):
    peak, s = cache.start
    return right.favor_attention_backward(dout, cache._replace(start=(peak, 0 * s)))


@suite.mutant("favor_attention_backward", "dl W, without x̂ Σ dl, in k", killed_by=DERIVATIVE)
def square_of_the_keys_has_no_gradient(dout, cache):
    q, k = cache.maps
    bare = k._replace(scaled=0 * k.scaled)
    return right.favor_attention_backward(dout, cache._replace(maps=(q, bare)))


@suite.mutant(
    "favor_attention_backward", "the query heads of a group averaged", killed_by=DERIVATIVE
)
def group_gradients_averaged(dout, cache):
    grads = right.favor_attention_backward(dout, cache)
    repeat = cache.logs[0].shape[-3]
    return grads._replace(k=grads.k / repeat, v=grads.v / repeat)


@suite.mutant("favor_attention_backward", "0 · NaN into every value", killed_by=DEAD)
def cotangent_of_a_dead_row_let_in(dout, cache):
    grads = right.favor_attention_backward(dout, cache)
    return grads._replace(v=grads.v + 0 * dout.sum())


@suite.mutant("favor_attention_backward", "dO /= den, in place", killed_by=ALONE)
def cotangent_divided_in_place(dout, cache):
    grads = right.favor_attention_backward(dout, cache)
    dout /= 2
    return grads
