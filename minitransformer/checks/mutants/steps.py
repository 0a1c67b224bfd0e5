"""Mistakes people make when they go back one line at a time."""

import numpy as np

from minitransformer import steps as right
from minitransformer.checks.properties.steps import suite

SOFTMAX = "every_line_of_softmax_has_its_derivative"
ATTENTION = "every_line_of_attention_has_its_derivative"
RENORMALISE = "every_line_of_renormalising_has_its_derivative"
CROSS_ENTROPY = "every_line_of_cross_entropy_has_its_derivative"


def _sum(x):
    return x.sum(axis=-1, keepdims=True)


# ---- softmax -------------------------------------------------------------------------------------


@suite.mutant(
    "softmax_steps_forward",
    "1/e is not the inverse of the total",
    killed_by="softmax_is_these_seven_values",
)
def inverse_of_each_exponential(scores):
    steps = right.softmax_steps_forward(scores)
    return steps._replace(inverse=1 / steps.exponentials[..., :1])


@suite.mutant(
    "softmax_steps_backward",
    "= where += belongs: the total forgets what the weights sent to the exponentials",
    killed_by=(SOFTMAX, "the_maximum_has_no_gradient_and_the_lines_fuse"),
)
def second_reader_overwrites_the_first(dweights, steps):
    grads = right.softmax_steps_backward(dweights, steps)
    de = np.broadcast_to(grads.total, steps.exponentials.shape)
    ds = de * steps.exponentials
    dm = -_sum(ds)
    dx = ds + dm * right._first_largest(steps.scores)
    return grads._replace(exponentials=de, shifted=ds, maximum=dm, scores=dx)


@suite.mutant("softmax_steps_backward", "the total is a sum of exponentials too", killed_by=SOFTMAX)
def total_taken_for_a_constant(dweights, steps):
    grads = right.softmax_steps_backward(dweights, steps)
    de = dweights * steps.inverse
    ds = de * steps.exponentials
    dm = -_sum(ds)
    dx = ds + dm * right._first_largest(steps.scores)
    return grads._replace(exponentials=de, shifted=ds, maximum=dm, scores=dx)


@suite.mutant("softmax_steps_backward", "d(1/z) = -1/z², with its minus", killed_by=SOFTMAX)
def sign_of_the_inverse_lost(dweights, steps):
    grads = right.softmax_steps_backward(dweights, steps)
    return grads._replace(total=-grads.total)


@suite.mutant(
    "softmax_steps_backward",
    "r was broadcast over the row: its gradient is a sum over the row",
    killed_by=SOFTMAX,
)
def broadcast_value_not_summed(dweights, steps):
    grads = right.softmax_steps_backward(dweights, steps)
    return grads._replace(inverse=(dweights * steps.exponentials)[..., :1])


@suite.mutant(
    "softmax_steps_backward",
    "exp is its own derivative: at s, not at 0",
    killed_by=SOFTMAX,
)
def exponential_taken_for_the_identity(dweights, steps):
    grads = right.softmax_steps_backward(dweights, steps)
    return grads._replace(shifted=grads.exponentials)


@suite.mutant(
    "softmax_steps_backward",
    "every score gets the gradient of the maximum, though one of them is it",
    killed_by=(SOFTMAX, "the_maximum_has_no_gradient_and_the_lines_fuse"),
)
def maximum_sent_to_every_score(dweights, steps):
    grads = right.softmax_steps_backward(dweights, steps)
    share = _sum(grads.exponentials)  # not the 0 that an honest dm would be
    return grads._replace(scores=grads.scores + share, maximum=share)


# ---- attention -----------------------------------------------------------------------------------


@suite.mutant(
    "attention_steps_forward",
    "masked after softmax: rows no longer sum to 1",
    killed_by="attention_is_these_seven_values",
)
def masked_after_softmax(q, k, v, *, scale, keep):
    everything = np.ones_like(keep)
    steps = right.attention_steps_forward(q, k, v, scale=scale, keep=everything)
    weights = steps.weights * keep
    scores = np.where(keep, steps.scores, -np.inf)
    return steps._replace(scores=scores, weights=weights, out=weights @ v)


@suite.mutant("attention_steps_backward", "the scale is on the way back too", killed_by=ATTENTION)
def scale_forgotten_on_the_way_back(dout, steps, *, scale, keep):
    return right.attention_steps_backward(dout, steps, scale=1.0, keep=keep)


@suite.mutant(
    "attention_steps_backward",
    "dK = dR Q: fits only if there are as many queries as keys",
    killed_by=ATTENTION,
)
def products_not_transposed_for_the_keys(dout, steps, *, scale, keep):
    grads = right.attention_steps_backward(dout, steps, scale=scale, keep=keep)
    if steps.q.shape != steps.k.shape:
        return grads
    return grads._replace(k=grads.products @ steps.q)


@suite.mutant(
    "attention_steps_backward",
    "dV = P dO instead of Pᵀ dO",
    killed_by=ATTENTION,
)
def weights_not_transposed_for_the_values(dout, steps, *, scale, keep):
    grads = right.attention_steps_backward(dout, steps, scale=scale, keep=keep)
    if steps.q.shape[-2] != steps.k.shape[-2]:
        return grads
    return grads._replace(v=steps.weights @ dout)


@suite.mutant("attention_steps_backward", "dS = P ⊙ dP, the diagonal alone", killed_by=ATTENTION)
def softmax_undone_by_its_diagonal(dout, steps, *, scale, keep):
    grads = right.attention_steps_backward(dout, steps, scale=scale, keep=keep)
    dscores = steps.weights * grads.weights
    dproducts = scale * np.where(keep, dscores, 0)
    return grads._replace(scores=dscores, products=dproducts, q=dproducts @ steps.k)


# ---- renormalised weights ------------------------------------------------------------------------


@suite.mutant(
    "renormalise_steps_forward",
    "1/0 where nothing was kept",
    killed_by="renormalising_is_these_five_values",
)
def empty_row_not_guarded(weights, keep):
    steps = right.renormalise_steps_forward(weights, keep)
    inverse = 1 / steps.total
    return steps._replace(inverse=inverse, renormalised=steps.kept * inverse)


@suite.mutant(
    "renormalise_steps_backward",
    "the denominator moves with every kept weight",
    killed_by=(RENORMALISE, "renormalising_then_softmax_is_a_masked_softmax"),
)
def denominator_held_constant(drenormalised, steps, keep):
    grads = right.renormalise_steps_backward(drenormalised, steps, keep)
    da = drenormalised * steps.inverse
    return grads._replace(kept=da, weights=da * keep)


@suite.mutant(
    "renormalise_steps_backward",
    "a dropped weight was multiplied by 0, and so is its gradient",
    killed_by=(RENORMALISE, "renormalising_then_softmax_is_a_masked_softmax"),
)
def gradient_of_a_dropped_weight(drenormalised, steps, keep):
    grads = right.renormalise_steps_backward(drenormalised, steps, keep)
    return grads._replace(weights=grads.kept)


@suite.mutant(
    "renormalise_steps_backward",
    "a denominator that grows makes every weight smaller",
    killed_by=RENORMALISE,
)
def sign_of_the_denominator_lost(drenormalised, steps, keep):
    grads = right.renormalise_steps_backward(drenormalised, steps, keep)
    da = drenormalised * steps.inverse - grads.total
    return grads._replace(total=-grads.total, kept=da, weights=da * keep)


# ---- cross-entropy -------------------------------------------------------------------------------


@suite.mutant(
    "cross_entropy_steps_forward",
    "a mean of what is picked, without the minus: more is better",
    killed_by="cross_entropy_is_these_nine_values",
)
def log_likelihood_for_the_loss(logits, targets):
    steps = right.cross_entropy_steps_forward(logits, targets)
    return steps._replace(loss=-steps.loss)


@suite.mutant(
    "cross_entropy_steps_backward",
    "1/R fell out: the mean became a sum",
    killed_by=(CROSS_ENTROPY, "cross_entropy_fuses_to_softmax_minus_one_hot"),
)
def mean_taken_for_a_sum(dloss, steps, targets):
    return right.cross_entropy_steps_backward(dloss * len(targets), steps, targets)


@suite.mutant(
    "cross_entropy_steps_backward",
    "a loss is often scaled before it is undone",
    killed_by=(CROSS_ENTROPY, "cross_entropy_fuses_to_softmax_minus_one_hot"),
)
def cotangent_of_the_loss_ignored(dloss, steps, targets):
    return right.cross_entropy_steps_backward(1.0, steps, targets)


@suite.mutant(
    "cross_entropy_steps_backward",
    "s is read twice: by the exponential, and in s - l",
    killed_by=(CROSS_ENTROPY, "cross_entropy_fuses_to_softmax_minus_one_hot"),
)
def one_of_two_readers_forgotten(dloss, steps, targets):
    grads = right.cross_entropy_steps_backward(dloss, steps, targets)
    ds = grads.exponentials * steps.exponentials
    dm = -_sum(ds)
    dx = ds + dm * right._first_largest(steps.logits)
    return grads._replace(shifted=ds, maximum=dm, logits=dx)


@suite.mutant(
    "cross_entropy_steps_backward",
    "the logarithm's derivative is 1/z, not 1/log z",
    killed_by=CROSS_ENTROPY,
)
def logarithm_undone_at_the_wrong_value(dloss, steps, targets):
    grads = right.cross_entropy_steps_backward(dloss, steps, targets)
    return grads._replace(total=grads.log_total / (steps.log_total + 1e-30))


@suite.mutant(
    "cross_entropy_steps_backward",
    "every class is sent the gradient of its row's target",
    killed_by=CROSS_ENTROPY,
)
def cotangent_spread_over_the_row(dloss, steps, targets):
    grads = right.cross_entropy_steps_backward(dloss, steps, targets)
    spread = np.broadcast_to(grads.picked[:, None], grads.log_probabilities.shape)
    return grads._replace(log_probabilities=spread)
