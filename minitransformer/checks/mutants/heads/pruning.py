"""Mistakes people make when they take heads out."""

import numpy as np

from minitransformer.checks.properties.heads.pruning import suite
from minitransformer.heads import pruning as right

SCALES = "a_gate_scales_the_rows_of_its_head"
DERIVATIVE = "gate_backward_is_the_derivative"
WORTH = "the_gradient_of_the_weights_says_what_a_head_is_worth"
REMOVED = "removed_is_silenced"
LEARNS = "what_is_left_learns_as_before"
READER = "a_key_head_goes_with_its_last_reader"
FIRST = "heads_keep_their_first_numbers"
EVEN = "even_groups_are_said_to_be_even"
MADE_OF = "magnitude_is_what_a_head_is_made_of"
LAW = "chance_is_the_law"
LOWEST = "the_lowest_go_first"
AGAIN = "scores_are_measured_again_each_round"
RHYTHM = "heads_go_in_a_cubic_rhythm"
NARROW = "narrow_weights_stay_as_they_are"
ALONE = "arguments_are_left_alone"


# ---- silenced ------------------------------------------------------------------------------------


@suite.mutant("gate_output_forward", "row r is of head r % H", killed_by=(SCALES, REMOVED))
def heads_interleaved_in_the_rows(output, gates):
    _, cache = right.gate_output_forward(output, gates)
    return output * np.resize(gates, len(output))[:, None], cache


@suite.mutant("gate_output_forward", "those that stay speak louder", killed_by=(SCALES, REMOVED))
def rescaled_like_dropout(output, gates):
    out, cache = right.gate_output_forward(output, gates)
    total = gates.sum()
    return out * (len(gates) / total if total != 0 else 1), cache


@suite.mutant("gate_output_forward", "W_O silenced where it is stored", killed_by=ALONE)
def weights_gated_in_place(output, gates):
    out, cache = right.gate_output_forward(output.copy(), gates)
    output[...] = out
    return out, cache


@suite.mutant("gate_output_backward", "as if the gate were always 1", killed_by=DERIVATIVE)
def gate_missing_in_the_gradient(dout, cache):
    return right.gate_output_backward(dout, cache)._replace(output=dout.copy())


@suite.mutant(
    "gate_output_backward",
    "the gradient, without what it multiplies",
    killed_by=(DERIVATIVE, WORTH),
)
def gate_gradient_without_the_weights(dout, cache):
    grads = right.gate_output_backward(dout, cache)
    return grads._replace(gates=dout.reshape(len(cache.gates), -1).sum(axis=-1))


@suite.mutant(
    "gate_output_backward", "|·| belongs outside, once per example", killed_by=(DERIVATIVE, WORTH)
)
def gate_gradient_of_absolute_terms(dout, cache):
    grads = right.gate_output_backward(dout, cache)
    felt = np.abs(dout * cache.output).reshape(len(cache.gates), -1).sum(axis=-1)
    return grads._replace(gates=felt)


@suite.mutant("gate_output_backward", "bfloat16 ones stop at 256", killed_by=NARROW)
def products_summed_in_the_storage_type(dout, cache):
    grads = right.gate_output_backward(dout, cache)
    products = (dout * cache.output).reshape(len(cache.gates), -1)
    total = np.zeros(len(products), dout.dtype)
    for column in products.T:
        total = (total + column).astype(dout.dtype)
    return grads._replace(gates=total)


# ---- out for good --------------------------------------------------------------------------------


@suite.mutant("prune_heads", "True is pruned", killed_by=(REMOVED, READER), crashes=True)
def flags_the_other_way_round(layer, keep):
    return right.prune_heads(layer, ~keep)


@suite.mutant("prune_heads", "nothing is saved in keys and values", killed_by=READER)
def unread_key_heads_stay(layer, keep):
    few = right.prune_heads(layer, keep)
    names = ("key", "value", "key_bias", "value_bias")
    whole = {name: getattr(layer.projections, name) for name in names}
    return few._replace(projections=few.projections._replace(**whole), groups=layer.groups)


@suite.mutant(
    "prune_heads",
    "the key head goes with the first of its readers",
    killed_by=(REMOVED, READER),
    crashes=True,
)
def key_head_removed_too_early(layer, keep):
    _, groups = layer.sizes
    gone = [g for g in layer.groups if not keep.reshape(groups, -1)[g].all()]
    few = right.prune_heads(layer, keep)
    stay = [i for i, g in enumerate(few.groups) if g not in gone]
    names = ("key", "value", "key_bias", "value_bias")

    def some(x):
        split = x.reshape(*x.shape[:-1], len(few.groups), -1)
        return split[..., stay, :].reshape(*x.shape[:-1], -1)

    left = {n: some(x) for n in names if (x := getattr(few.projections, n)) is not None}
    return few._replace(
        projections=few.projections._replace(**left), groups=tuple(few.groups[i] for i in stay)
    )


@suite.mutant("prune_heads", "key head h % G, where it is h // (H/G)", killed_by=(REMOVED, READER))
def columns_of_the_wrong_group(layer, keep):
    few = right.prune_heads(layer, keep)
    _, groups = layer.sizes
    if len(few.groups) == groups or layer.sizes[0] != len(layer.heads):
        return few
    wrong = sorted({h % groups for h in few.heads})
    wrong = (wrong + [g for g in range(groups) if g not in wrong])[: len(few.groups)]
    p = layer.projections

    def some(x):
        split = x.reshape(*x.shape[:-1], groups, -1)
        return split[..., wrong, :].reshape(*x.shape[:-1], -1)

    return few._replace(projections=few.projections._replace(key=some(p.key), value=some(p.value)))


@suite.mutant(
    "prune_heads",
    "flags counted among the heads that are left:"
    " https://github.com/huggingface/transformers/pull/4904",
    killed_by=FIRST,
)
def heads_numbered_anew(layer, keep):
    if len(layer.heads) == layer.sizes[0]:
        return right.prune_heads(layer, keep)
    among = np.zeros_like(keep)
    left = [h for h, wanted in zip(layer.heads, keep, strict=False) if wanted]
    among[left or [layer.heads[0]]] = True
    return right.prune_heads(layer, among)


@suite.mutant("prune_heads", "biases were forgotten", killed_by=(REMOVED, READER))
def biases_of_the_first_heads(layer, keep):
    few = right.prune_heads(layer, keep)
    bias = layer.projections.query_bias
    if bias is None:
        return few
    first = bias[: len(few.projections.query_bias)].copy()
    return few._replace(projections=few.projections._replace(query_bias=first))


@suite.mutant("prune_heads", "as after dropout: H / H' times as loud", killed_by=(REMOVED, READER))
def output_made_louder(layer, keep):
    few = right.prune_heads(layer, keep)
    louder = few.projections.output * (len(layer.heads) / len(few.heads))
    return few._replace(projections=few.projections._replace(output=louder))


class _Even(right.HeadsLeft):
    @property
    def is_even(self):
        return len(self.heads) % len(self.groups) == 0


@suite.mutant("prune_heads", "even because the numbers divide", killed_by=(EVEN, REMOVED, LEARNS))
def evenness_by_division(layer, keep):
    return _Even(*right.prune_heads(layer, keep))


@suite.mutant("prune_heads", "the same arrays if nothing goes", killed_by=ALONE)
def views_handed_out(layer, keep):
    return layer if keep.all() else right.prune_heads(layer, keep)


# ---- scores --------------------------------------------------------------------------------------


@suite.mutant("head_magnitude", "each reader owns the whole key head", killed_by=MADE_OF)
def shared_weights_counted_for_each(layer):
    heads, _ = layer.sizes
    p = layer.projections

    def squares(x, number):
        return (x * x).reshape(len(x), number, -1).sum(axis=(0, 2))

    shared = squares(p.key, len(layer.groups)) + squares(p.value, len(layer.groups))
    own = squares(p.query, len(layer.heads)) + squares(p.output.T, len(layer.heads))
    found = np.zeros(heads, own.dtype)
    found[list(layer.heads)] = np.sqrt(own + shared[list(layer.reads)])
    return found


@suite.mutant("head_magnitude", "squares without the root", killed_by=MADE_OF)
def magnitude_squared(layer):
    return right.head_magnitude(layer) ** 2


@suite.mutant("head_magnitude", "as many numbers as heads left", killed_by=MADE_OF)
def magnitudes_of_those_left_alone(layer):
    return right.head_magnitude(layer)[list(layer.heads)]


@suite.mutant("head_magnitude", "squares of narrow numbers summed narrow", killed_by=NARROW)
def magnitude_in_the_storage_type(layer):
    found = right.head_magnitude(layer)
    return found.astype(layer.projections.query.dtype).astype(found.dtype)


@suite.mutant("random_scores", "what NumPy draws: nobody else can", killed_by=LAW)
def chance_from_a_sequence(draw, layers, heads):
    return np.random.default_rng([draw.seed, draw.step]).random((layers, heads))


@suite.mutant("random_scores", "one long row: it depends on the others", killed_by=LAW)
def heads_numbered_through(draw, layers, heads):
    return right.random_scores(draw, 1, layers * heads).reshape(layers, heads)


# ---- who goes, and when --------------------------------------------------------------------------


@suite.mutant("choose_heads", "the best go first", killed_by=LOWEST)
def highest_go_first(scores, keep, remove, *, minimum=1):
    return right.choose_heads(-scores, keep, remove, minimum=minimum)


@suite.mutant("choose_heads", "a signed score loses its sign", killed_by=LOWEST)
def absolute_scores(scores, keep, remove, *, minimum=1):
    return right.choose_heads(np.abs(scores), keep, remove, minimum=minimum)


@suite.mutant("choose_heads", "a layer may lose all its heads", killed_by=LOWEST)
def minimum_ignored(scores, keep, remove, *, minimum=1):
    return right.choose_heads(scores, keep, remove, minimum=0)


@suite.mutant("choose_heads", "of equals the last goes", killed_by=LOWEST)
def ties_from_the_end(scores, keep, remove, *, minimum=1):
    flipped = right.choose_heads(scores[::-1, ::-1], keep[::-1, ::-1], remove, minimum=minimum)
    return flipped[::-1, ::-1]


@suite.mutant("choose_heads", "layer by layer, not over all", killed_by=LOWEST)
def every_layer_loses_its_share(scores, keep, remove, *, minimum=1):
    left, layer = keep.copy(), 0
    while remove:
        if left[layer].sum() > minimum:
            one = np.where(left[layer], scores[layer], np.inf).argmin()
            left[layer, one] = False
            remove -= 1
        layer = (layer + 1) % len(keep)
    return left


@suite.mutant("choose_heads", "the caller's flags are the result", killed_by=ALONE)
def flags_changed_in_place(scores, keep, remove, *, minimum=1):
    keep[...] = right.choose_heads(scores, keep, remove, minimum=minimum)
    return keep


@suite.mutant("prune_iteratively", "the scores of the whole model, for ever", killed_by=AGAIN)
def measured_once(measure, keep, left, *, each=1, minimum=1):
    scores = measure(keep.copy())
    return right.prune_iteratively(lambda _: scores, keep, left, each=each, minimum=minimum)


@suite.mutant("prune_iteratively", "measured with every head back in place", killed_by=AGAIN)
def measured_on_the_whole_model(measure, keep, left, *, each=1, minimum=1):
    return right.prune_iteratively(
        lambda _: measure(keep.copy()), keep, left, each=each, minimum=minimum
    )


@suite.mutant("prune_iteratively", "all in one go", killed_by=AGAIN)
def one_shot(measure, keep, left, *, each=1, minimum=1):
    return right.prune_iteratively(measure, keep, left, each=keep.size, minimum=minimum)


@suite.mutant("prune_iteratively", "the last round is as large as the others", killed_by=AGAIN)
def last_round_removes_too_many(measure, keep, left, *, each=1, minimum=1):
    while keep.sum() > left:
        scores = measure(keep.copy())
        spare = int(np.maximum(keep.sum(axis=1) - minimum, 0).sum())
        keep = right.choose_heads(scores, keep, min(each, spare), minimum=minimum)
        yield keep.copy()


@suite.mutant("removed_by", "the same number every step", killed_by=RHYTHM)
def linear_rhythm(step, *, total, start, end):
    return int(total * min(max((step - start) / (end - start), 0), 1))


@suite.mutant("removed_by", "τ³: most of them late", killed_by=RHYTHM)
def late_rhythm(step, *, total, start, end):
    return total - right.removed_by(max(start + end - step, 0), total=total, start=start, end=end)


@suite.mutant("removed_by", "τ goes on beyond 1, and before 0", killed_by=RHYTHM)
def rhythm_without_an_end(step, *, total, start, end):
    span = end - start
    return total * (span**3 - (end - step) ** 3) // span**3


@suite.mutant("removed_by", "counted from step 0", killed_by=RHYTHM)
def start_forgotten(step, *, total, start, end):
    return right.removed_by(step, total=total, start=0, end=end)
