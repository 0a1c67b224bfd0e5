"""Mistakes people make in an optimiser."""

import math

import numpy as np

from minitransformer.checks.properties.training.optimisers import suite
from minitransformer.training import optimisers as right

LOOP = "updates_are_those_of_a_loop_over_numbers"


def _update(value, grad, mean, square, *, step, rate, betas, weight_decay=0.0, eps=1e-8):
    """The right update in its parts: the mutants below change one."""
    beta1, beta2 = betas
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    return mean, square, mean / (1 - beta1**step), square / (1 - beta2**step)


def _made(value, mean, square):
    return right.AdamWUpdate(*(np.asarray(x) for x in (value, mean, square)))


# ---- one array -----------------------------------------------------------------------------------


@suite.mutant(
    "adamw_update",
    "Adam with an L2 penalty: decay is divided by √ŝ, and large gradients decay least",
    killed_by=(
        LOOP,
        "decay_acts_on_the_weight_and_not_through_the_gradient",
        "the_size_of_the_loss_does_not_matter",
    ),
)
def decay_added_to_the_gradient(value, grad, mean, square, *, weight_decay=0.0, **given):
    return right.adamw_update(value, grad + weight_decay * value, mean, square, **given)


@suite.mutant(
    "adamw_update",
    "the weight loses λ a step and not ηλ: a schedule of the rate does not reach the decay",
    killed_by=(LOOP, "decay_acts_on_the_weight_and_not_through_the_gradient"),
)
def decay_without_the_rate(value, grad, mean, square, *, weight_decay=0.0, **given):
    new = right.adamw_update(value, grad, mean, square, **given)
    return new._replace(value=np.asarray(new.value - weight_decay * value))


@suite.mutant(
    "adamw_update",
    "moments start at 0, the squares stay small longest: the first step is three times too long",
    killed_by=(
        LOOP,
        "the_first_update_moves_every_number_by_the_rate",
        "a_gradient_that_stays_gives_steps_that_stay",
    ),
)
def no_bias_correction(value, grad, mean, square, **given):
    m, s, _, _ = _update(value, grad, mean, square, **given)
    rate, decay = given["rate"], given["weight_decay"]
    return _made(value * (1 - rate * decay) - rate * m / (np.sqrt(s) + given["eps"]), m, s)


@suite.mutant(
    "adamw_update",
    "t counted from 0: the first correction divides by 1 - β⁰ = 0",
    killed_by=(LOOP, "the_first_update_moves_every_number_by_the_rate"),
)
def steps_counted_from_zero(value, grad, mean, square, *, step, betas, **given):
    betas = tuple(np.float64(b) for b in betas)
    m, s, m_hat, s_hat = _update(value, grad, mean, square, step=step - 1, betas=betas, **given)
    rate, decay = given["rate"], given["weight_decay"]
    step_ = rate * m_hat / (np.sqrt(s_hat) + given["eps"])
    return _made(value * (1 - rate * decay) - step_, m, s)


@suite.mutant(
    "adamw_update",
    "√(ŝ + ε) is √ε at least: ten thousand times the floor that was asked for",
    killed_by=(
        LOOP,
        "the_first_update_moves_every_number_by_the_rate",
        "a_gradient_that_stays_gives_steps_that_stay",
    ),
)
def epsilon_inside_the_root(value, grad, mean, square, **given):
    m, s, m_hat, s_hat = _update(value, grad, mean, square, **given)
    rate, decay = given["rate"], given["weight_decay"]
    return _made(value * (1 - rate * decay) - rate * m_hat / np.sqrt(s_hat + given["eps"]), m, s)


@suite.mutant(
    "adamw_update",
    "√s + ε before the correction: ε̂ of the paper's shortcut, which means another size",
    killed_by=(LOOP, "the_first_update_moves_every_number_by_the_rate"),
)
def epsilon_before_the_correction(value, grad, mean, square, **given):
    m, s, m_hat, _ = _update(value, grad, mean, square, **given)
    rate, unbiased = given["rate"], math.sqrt(1 - given["betas"][1] ** given["step"])
    step = rate * m_hat / ((np.sqrt(s) + given["eps"]) / unbiased)
    return _made(value * (1 - rate * given["weight_decay"]) - step, m, s)


@suite.mutant(
    "adamw_update",
    "β1 for the squares and β2 for the mean: the first step is right, the second is not",
    killed_by=LOOP,
)
def betas_exchanged(value, grad, mean, square, *, betas, **given):
    return right.adamw_update(value, grad, mean, square, betas=betas[::-1], **given)


@suite.mutant(
    "adamw_update",
    "m̂ / ŝ: the size of the loss matters again, upside down",
    killed_by=(
        "the_size_of_the_loss_does_not_matter",
        "the_first_update_moves_every_number_by_the_rate",
        LOOP,
    ),
)
def root_forgotten(value, grad, mean, square, **given):
    m, s, m_hat, s_hat = _update(value, grad, mean, square, **given)
    rate, decay = given["rate"], given["weight_decay"]
    return _made(value * (1 - rate * decay) - rate * m_hat / (s_hat + given["eps"]), m, s)


@suite.mutant(
    "adamw_update",
    "s = m²: the sign of the mean, whose noise is never seen",
    killed_by=LOOP,
)
def square_of_the_mean(value, grad, mean, square, **given):
    m, s, m_hat, _ = _update(value, grad, mean, square, **given)
    rate, decay = given["rate"], given["weight_decay"]
    step = rate * m_hat / (np.abs(m_hat) + given["eps"])
    return _made(value * (1 - rate * decay) - step, m, s)


@suite.mutant(
    "adamw_update",
    "plus: every step goes uphill",
    killed_by=("the_first_update_moves_every_number_by_the_rate", LOOP),
)
def uphill(value, grad, mean, square, **given):
    return right.adamw_update(value, -grad, mean, square, **given)


@suite.mutant(
    "adamw_update",
    "saves two arrays a step, and changes the caller's",
    killed_by="an_update_changes_nothing_in_place",
)
def moments_changed_in_place(value, grad, mean, square, **given):
    new = right.adamw_update(value, grad, mean, square, **given)
    mean[...], square[...] = new.mean, new.square
    return new._replace(mean=mean, square=square)


@suite.mutant(
    "adamw_update",
    "one float64 number that is no Python float makes every moment float64",
    killed_by="narrow_weights_have_narrow_moments",
)
def moments_widened(value, grad, mean, square, *, betas, **given):
    betas = tuple(np.float64(b) for b in betas)
    return right.adamw_update(value, grad, mean, square, betas=betas, **given)


# ---- a model -------------------------------------------------------------------------------------


@suite.mutant(
    "AdamW",
    "t counts parameters and not updates: only the first has the right correction",
    killed_by="every_parameter_is_updated_with_the_same_count",
)
class one_count_for_each_parameter(right.AdamW):
    def step(self, rate):
        everything = self.parameters
        for name, p in everything.items():
            self.parameters = {name: p}
            super().step(rate)
        self.parameters = everything


@suite.mutant(
    "AdamW",
    "biases and norms are pulled to 0 with the rest",
    killed_by="every_parameter_is_updated_with_the_same_count",
)
class everything_decays(right.AdamW):
    def step(self, rate):
        asked = {name: p.decay for name, p in self.parameters.items()}
        for p in self.parameters.values():
            p.decay = True
        super().step(rate)
        for name, p in self.parameters.items():
            p.decay = asked[name]


NARROW = "small_updates_of_narrow_weights_add_up"


@suite.mutant("AdamW", "an update below half a unit is lost, every time", killed_by=NARROW)
class narrow_weights_learn_themselves(right.AdamW):
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.master = {}


@suite.mutant("AdamW", "masters begin again from the rounded weights", killed_by=NARROW)
class masters_left_out_of_the_state(right.AdamW):
    def load_state(self, state):
        rounded = {
            f"master.{name}": self.parameters[name].value.astype(np.float32)
            if not self.updates
            else x
            for name, x in self.master.items()
        }
        super().load_state({**state, **rounded})


@suite.mutant("AdamW", "moments as narrow as the weights", killed_by=NARROW)
class moments_stored_narrow(right.AdamW):
    def step(self, rate):
        super().step(rate)
        for name, p in self.parameters.items():
            for moments in (self.mean, self.square):
                moments[name] = moments[name].astype(p.value.dtype).astype(moments[name].dtype)


@suite.mutant(
    "AdamW",
    "a new array for each value: a tied layer keeps the old one and does not learn",
    killed_by="every_parameter_is_updated_with_the_same_count",
)
class values_replaced(right.AdamW):
    def step(self, rate):
        for p in self.parameters.values():
            p.value = p.value.copy()
        super().step(rate)


@suite.mutant(
    "AdamW",
    "the count starts anew after a resume: m̂ and ŝ are blown up a second time",
    killed_by="an_optimiser_read_back_goes_on_as_if_never_stopped",
)
class count_not_restored(right.AdamW):
    def load_state(self, state):
        super().load_state(state)
        self.updates = 0


@suite.mutant(
    "AdamW",
    "moments start anew after a resume, with the correction of a late step",
    killed_by="an_optimiser_read_back_goes_on_as_if_never_stopped",
)
class moments_not_restored(right.AdamW):
    def load_state(self, state):
        self.updates = int(state["step"])


@suite.mutant(
    "AdamW",
    "moments read into the arrays that `state` gave away: a snapshot changes with a later read",
    killed_by="an_optimiser_read_back_goes_on_as_if_never_stopped",
)
class read_into_what_was_given_away(right.AdamW):
    def load_state(self, state):
        self.updates = int(state["step"])
        for name in self.parameters:
            self.mean[name][...] = state[f"mean.{name}"]
            self.square[name][...] = state[f"square.{name}"]


# ---- clipping ------------------------------------------------------------------------------------


@suite.mutant(
    "gradient_norm",
    "the root of a sum is not the sum of roots",
    killed_by="the_norm_is_over_all_arrays_together",
)
def norms_added(parameters):
    return sum(float(np.linalg.norm(p.grad.ravel())) for p in parameters.values())


@suite.mutant(
    "gradient_norm",
    "the square of 1e30 is no float32: the step is skipped though nothing overflowed",
    killed_by="the_norm_is_over_all_arrays_together",
)
def squares_in_the_dtype_of_the_gradient(parameters):
    return math.sqrt(sum(float((p.grad * p.grad).sum()) for p in parameters.values()))


def _clip_by(parameters, limit, factor):
    norm = right.gradient_norm(parameters)
    if limit and math.isfinite(norm):
        for p in parameters.values():
            p.grad *= factor(norm, p)
    return norm


@suite.mutant(
    "clip",
    "each array to the limit by itself: the direction turns, and the whole is √n times too long",
    killed_by=(
        "all_gradients_shrink_by_the_one_factor",
        "clipping_never_lengthens_and_twice_is_once",
    ),
)
def every_array_clipped_by_itself(parameters, limit):
    def factor(norm, p):
        return min(1.0, limit / (np.linalg.norm(p.grad.ravel()) + 1e-6))

    return _clip_by(parameters, limit, factor)


@suite.mutant(
    "clip",
    "every entry to [-limit, limit]: that is clipping by value",
    killed_by=(
        "all_gradients_shrink_by_the_one_factor",
        "clipping_never_lengthens_and_twice_is_once",
    ),
)
def entries_clipped(parameters, limit):
    norm = right.gradient_norm(parameters)
    for p in parameters.values():
        if limit and math.isfinite(norm):
            np.clip(p.grad, -limit, limit, out=p.grad)
    return norm


@suite.mutant(
    "clip",
    "always as long as the limit: at the end of training, noise is blown up",
    killed_by=(
        "clipping_never_lengthens_and_twice_is_once",
        "a_gradient_within_the_limit_keeps_its_bits",
        "all_gradients_shrink_by_the_one_factor",
    ),
)
def short_gradients_stretched(parameters, limit):
    return _clip_by(parameters, limit, lambda norm, p: limit / (norm + 1e-6))


@suite.mutant(
    "clip",
    "the norm after is never above the limit: nobody sees a run explode",
    killed_by="all_gradients_shrink_by_the_one_factor",
)
def norm_after_clipping_returned(parameters, limit):
    norm = right.clip(parameters, limit)
    return right.gradient_norm(parameters) if math.isfinite(norm) else norm


@suite.mutant(
    "clip",
    "limit / NaN is NaN: one bad entry is now in every gradient",
    killed_by="a_norm_that_is_not_finite_is_reported_and_nothing_is_touched",
)
def clipped_by_a_norm_that_is_no_number(parameters, limit):
    norm = right.gradient_norm(parameters)
    if limit and not norm <= limit:
        for p in parameters.values():
            p.grad *= limit / (norm + 1e-6)
    return norm


@suite.mutant(
    "clip",
    "bad entries set to 0 and the step taken: the failure is neither skipped nor counted",
    killed_by="a_norm_that_is_not_finite_is_reported_and_nothing_is_touched",
)
def bad_entries_set_to_zero(parameters, limit):
    for p in parameters.values():
        p.grad[~np.isfinite(p.grad)] = 0
    return right.clip(parameters, limit)


@suite.mutant(
    "clip",
    "0 means no limit here: a limit of 0 would stop all learning",
    killed_by="a_gradient_within_the_limit_keeps_its_bits",
)
def no_limit_taken_for_a_limit(parameters, limit):
    norm = right.gradient_norm(parameters)
    if math.isfinite(norm) and norm > limit:
        for p in parameters.values():
            p.grad *= limit / (norm + 1e-6)
    return norm
