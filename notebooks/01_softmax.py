# %% [markdown]
# # 01 · Softmax
#
# **The question.** A query has given every key a score. Any number will do: 3.1, -7, 0. How do the
# scores become shares, so that no share is negative and all of them sum to one?
#
# Whatever we choose has to learn, so we need its derivative as well. And it has to survive scores
# of 1000, scores of minus infinity, and numbers that have eleven bits.
#
# You need: sums, exponentials, the chain rule, a little NumPy. Formulas carry tags, `Eq. 1.1`. The
# same tags stand in the library and in its tests: `grep -rn "Eq. 1.1" minitransformer` finds them.

# %%
import numpy as np

from minitransformer import pages, steps
from minitransformer.attention import softmax
from minitransformer.checks.gradients import cotangent, gradient_errors
from minitransformer.plots.canvas import BASELINE, DENSE, STOCHASTIC, figure, tidy

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## What goes wrong without it
#
# **Divide by the sum?** Scores may be negative. Then shares are negative, and the sum may be zero.

# %%
scores = np.array([2.0, 1.0, -3.0])
with np.errstate(divide="ignore"):
    print("sum of the scores:", scores.sum(), "   shares:", scores / scores.sum())

# %% [markdown]
# **Exponentials, then.** `exp` makes everything positive and keeps the order. Divide by the sum, and
# the shares are fine. This is the formula that most books print. Below, it comes from the library's
# collection of *mutants*: mistakes with a name, kept so that the tests can prove they would notice.
#
# We raise the scores until it breaks.

# %%
book = pages.wrong("attention.softmax", "maximum not subtracted")
for dtype in ("float64", "float32", "float16"):
    for score in range(1, 800):
        with np.errstate(over="ignore", invalid="ignore"):
            weights, _ = book.softmax_forward(np.array([score, 0], dtype=dtype))
        if not np.isfinite(weights).all():
            break
    print(f"{dtype}: at score {score} the shares are {weights}")

# %% [markdown]
# `inf / inf` is NaN. In float16 a score of 12 is enough, and attention scores of 12 are ordinary.

# %% [markdown]
# ## Forward
#
# **Step 1.** Multiply numerator and denominator by the same number, $e^{-m}$. Nothing changes:
#
# $$\frac{e^{x_j}}{\sum_k e^{x_k}} = \frac{e^{x_j}\,e^{-m}}{\sum_k e^{x_k}\,e^{-m}}
#   = \frac{e^{x_j-m}}{\sum_k e^{x_k-m}}$$
#
# So softmax ignores a common shift of its scores, and we may choose $m$.
#
# **Step 2.** Choose the row's maximum. Then every exponent is at most 0, so `exp` cannot overflow.
# One exponent is exactly 0, so the sum is at least 1 and the division is safe (Eq. 1.1):
#
# $$m = \max_j x_j,\qquad Z = \sum_j e^{x_j - m},\qquad y_j = \frac{e^{x_j-m}}{Z},
#   \qquad \mathrm{lse} = m + \log Z$$
#
# **Step 3.** A score of $-\infty$ means "masked": $e^{-\infty} = 0$, no share. But if the *whole* row
# is masked, its maximum is $-\infty$ too, and $-\infty - (-\infty)$ is NaN. Such a row is called
# dead. The library decides: its shares are 0, all of them. Look for the two guards.

# %%
pages.source(softmax._exponentials, softmax.softmax_forward)

# %%
rows = np.array([[1000.0, 999.0, 0.0], [2.0, 1.0, -np.inf], [-np.inf, -np.inf, -np.inf]])
weights, _ = softmax.softmax_forward(rows)
print(weights)
print("row sums:", weights.sum(axis=-1))

# %% [markdown]
# And the shift? Rounding aside, it changes nothing:

# %%
for shift in (1.0, 700.0, -700.0):
    moved, _ = softmax.softmax_forward(rows[:2] + shift)
    print(
        f"shift {shift:6}: largest change below 1e-12: {np.abs(moved - weights[:2]).max() < 1e-12}"
    )

# %% [markdown]
# ## Backward, line by line
#
# Somebody above us has the derivative of a loss with respect to our output. We write it `dy`, and we
# owe them `dx`. First without any cleverness: the forward pass as lines that do one thing each
# (Eq. 1.11), then the same lines from last to first.
#
# | line | what it sends back |
# |---|---|
# | $m = \max x$ | $dm$ to the entry that was largest |
# | $s = x - m$ | $ds$ to $x$, and $-\sum ds$ to $m$ |
# | $e = \exp s$ | $de \cdot e$ to $s$, because exp is its own derivative |
# | $z = \sum e$ | $dz$ to every $e$ |
# | $r = 1/z$ | $-dr \cdot r^2$ to $z$ |
# | $y = e \cdot r$ | $dy \cdot r$ to $e$, and $\sum dy \cdot e$ to $r$ |
#
# Three rules cover all of it. A line $c = f(a)$ sends $dc \cdot f'(a)$ to $a$. A value that two lines
# read gets two parts, and they **add up** (here: $e$, and $x$). A value that was broadcast along the
# row collects the **sum** over the row (here: $r$ and $m$).

# %%
pages.source(steps.softmax_steps_forward, steps.softmax_steps_backward)

# %%
x = np.array([[2.0, 1.0, -3.0]])
dy = np.array([[1.0, 0.0, -1.0]])
values = steps.softmax_steps_forward(x)
gradients = steps.softmax_steps_backward(dy, values)
for name, value, gradient in zip(values._fields, values, gradients, strict=True):
    print(f"{name:13} {value[0]!s:28} gradient {gradient[0] + 0.0}")

# %% [markdown]
# Look at the gradient of `maximum`. It is 0 up to rounding, and it has to be: a common shift changes
# nothing, so nothing can be gained by moving $m$. This is why the short form below knows no maximum.
#
# ## Backward, fused
#
# Collect what reaches one score. Lines 6 to 4 give $de_j = dy_j\, r + dz$ with
# $dz = -r^2 \sum_k dy_k e_k$. Line 3 multiplies by $e_j$, and $e_j r$ is $y_j$:
#
# $$dx_j = e_j\,(dy_j\, r - r^2 \textstyle\sum_k dy_k e_k) = y_j\,(dy_j - \sum_k y_k\, dy_k)$$
#
# That is Eq. 1.2. In words: each share is pushed by how much better than *average* its own
# cotangent is, the average being taken with the shares.

# %%
pages.source(softmax.softmax_backward)

# %%
weights, cache = softmax.softmax_forward(x)
fused = softmax.softmax_backward(dy, cache)
print("line by line:", gradients.scores[0])
print("fused:       ", fused[0])
print("sum of dx is zero:", abs(fused.sum()) < 1e-15)

# %% [markdown]
# Two forms that agree may share a mistake. So ask a third party. The *complex step* moves one score
# by $10^{-30} i$ and reads the derivative off the imaginary part. Nothing is subtracted, so nothing
# is lost.
#
# It needs a loss. `softmax(x).sum()` would be a bad one: it is 1 whatever `x` is, its gradient is
# zero, and every mistake would pass. A random cotangent has no such blind spot.

# %%
x = np.random.default_rng(0).normal(size=(4, 5)) * 3
weights, cache = softmax.softmax_forward(x)
dy = cotangent(weights, seed=0)
errors = gradient_errors(
    lambda scores: softmax.softmax_forward(scores)[0],
    {"scores": softmax.softmax_backward(dy, cache)},
    {"scores": x},
    dy,
)
print("relative error below 1e-14:", errors["scores"] < 1e-14)

# %% [markdown]
# ## Its relatives
#
# **Log-sum-exp** is the logarithm of the denominator (Eq. 1.1). Its gradient is softmax (Eq. 1.3):
# a smooth maximum sends its cotangent to the scores in proportion to their shares.
#
# **Log-softmax** is $x - \mathrm{lse}$ (Eq. 1.4), with backward $dx = dy - y \sum dy$ (Eq. 1.5). A
# loss needs it, because the logarithm of softmax is not good enough:

# %%
x = np.array([0.0, -800.0])
with np.errstate(divide="ignore"):
    print("log(softmax(x)):", np.log(softmax.softmax_forward(x)[0]))
print("log-softmax(x): ", softmax.log_softmax_forward(x)[0])

# %% [markdown]
# **The online merge.** Must a row be seen as a whole? No. Attention over one half of the keys, and
# over the other half, joins into attention over all of them (Eq. 1.6):
#
# $$L = \log(e^{L_1} + e^{L_2}),\qquad a_i = e^{L_i - L},\qquad O = a_1 O_1 + a_2 O_2$$
#
# Eq. 1.7 is its backward. A kernel carries the same thing from tile to tile as three numbers, the
# running maximum, total and weighted sum (Eq. 1.8). This is all of the mathematics in
# FlashAttention's forward pass ([arXiv:1805.02867](https://arxiv.org/abs/1805.02867),
# [arXiv:2205.14135](https://arxiv.org/abs/2205.14135)).

# %%
pages.source(softmax.state_of, softmax.merge_states, softmax.finish_state)

# %%
rng = np.random.default_rng(1)
scores, v = rng.normal(size=(2, 12)) * 10, rng.normal(size=(12, 3))
whole = softmax.softmax_forward(scores)[0] @ v
for cut in (0, 1, 5, 12):
    state = softmax.merge_states(
        softmax.state_of(scores[:, :cut], v[:cut]), softmax.state_of(scores[:, cut:], v[cut:])
    )
    same = np.abs(softmax.finish_state(state).out - whole).max() < 1e-12
    print(f"{cut:2} keys and {12 - cut:2} keys: the same as the whole: {same}")

# %% [markdown]
# **The soft-cap** bounds scores before softmax, $c \tanh(x/c)$ (Eq. 1.9), and its slope is
# $1 - \tanh^2(x/c)$ (Eq. 1.10). It has to come before the mask: $\tanh(-\infty)$ is -1, and a masked
# key would be back with the score $-c$.
#
# ## See it: eleven bits
#
# float16 has a significand of 11 bits. Add ones to a running sum: from 2048 on, adding 1 changes
# nothing. So a softmax that adds up in float16 must fail for long rows. The library stores float16,
# computes in float32 and rounds once.
#
# Take $n$ equal scores. Each share is $1/n$. How far off are the two?

# %%
narrow = pages.wrong("attention.softmax", "narrow sums")
lengths = np.unique(np.geomspace(16, 16_000, 40).astype(int))
off = {"sums in float16": narrow, "the library: sums in float32": softmax}
fig = figure(6.4, 3.4)
ax = fig.subplots()
for (name, form), colour, line in zip(off.items(), (STOCHASTIC, DENSE), ("o-", "s--"), strict=True):
    errors = []
    for n in lengths:
        weights, _ = form.softmax_forward(np.zeros(n, dtype=np.float16))
        errors.append(abs(float(weights[0]) * n - 1))
    print(f"{name}: largest relative error {max(errors):.1e}")
    ax.plot(lengths, np.maximum(errors, 1e-6), line, color=colour, markersize=4, label=name)
ax.axvline(2048, color=BASELINE, linestyle=":")
ax.axhline(2.0**-11, color=BASELINE, linestyle=":")
ax.annotate("2048 keys", (2048, 2e-6), fontsize=8, xytext=(4, 0), textcoords="offset points")
ax.annotate(
    "2⁻¹¹, one rounding", (16, 2.0**-11), fontsize=8, xytext=(0, 4), textcoords="offset points"
)
ax.set_xscale("log")
ax.set_yscale("log")
tidy(
    ax,
    xlabel="keys in the row",
    ylabel="relative error of a share",
    title="A running sum in float16 stops at 2048",
)
ax.legend(fontsize=8, frameon=False)
pages.Picture(
    fig,
    "relative error of a share against the number of keys; sums in float16 grow wrong by a factor "
    "beyond 2048 keys, sums in float32 stay below one rounding",
)

# %% [markdown]
# Up to 2048 keys both err by the one rounding of storage, at most $2^{-11}$. Beyond, the sum in float16
# stands still: with 16,000 keys it still says 2048.
#
# ## Break it
#
# A property is a statement about *any* softmax. Here two mistakes stand before all properties that
# could notice, and each property says what it found. First: the guard of the dead row is forgotten.

# %%
pages.trial("attention.softmax", "dead row not guarded")

# %% [markdown]
# Most properties pass. They draw rows with finite scores, and there the mistake does not exist. Those
# that draw dead rows on purpose notice. (The last one that notices has another reason: this mutant
# adds up float16 in float16.)
#
# Second: the backward pass keeps the diagonal and forgets the sum.

# %%
pages.trial("attention.softmax", "gradient without the sum")

# %% [markdown]
# Only the derivative itself tells. The forward pass is right, the shapes are right, and a model
# would even train, badly.
#
# ## Where the ecosystem disagrees
#
# **A dead row.** Plain softmax in PyTorch and JAX gives NaN; JAX gives 0 if it is told by `where=`.
# So every attention function has to decide for itself, and they decided differently
# ([notebook 02](02_attention.ipynb)).
#
# **Narrow sums.** PyTorch accumulates float16 in float32. JAX computes in the dtype it is given: a
# sum beyond 65504 is infinite, and every share is 0.
#
# **Wide numbers.** JAX turns float64 into float32 unless `jax_enable_x64` is set.

# %% tags=["peer"]
torch, jax = pages.peer("torch"), pages.peer("jax")
dead, long = np.full(3, -np.inf), np.zeros(70_000, dtype=np.float16)
print("dead row:")
print("  here   ", softmax.softmax_forward(dead)[0])
if torch:
    print("  PyTorch", torch.softmax(torch.tensor(dead), -1).numpy())
if jax:
    print("  JAX    ", np.asarray(jax.nn.softmax(dead)))
    print("  JAX    ", np.asarray(jax.nn.softmax(dead, where=dead > 0)), "with where=")
print("70,000 equal scores in float16, first share (exact: 1.4286e-05):")
print(f"  here    {softmax.softmax_forward(long)[0][0]:.4e}")
if torch:
    print(f"  PyTorch {torch.softmax(torch.tensor(long), -1)[0].item():.4e}")
if jax:
    print(f"  JAX     {float(jax.nn.softmax(long)[0]):.4e}")
    print("float64 given, JAX returns", jax.nn.softmax(np.zeros(3)).dtype)

# %% [markdown]
# **ONNX.** Up to opset 12, `Softmax` flattened the input to two axes and normalised over *everything*
# from `axis` on. Since opset 13 it is one axis, as here
# ([operator page](https://onnx.ai/onnx/operators/onnx__Softmax.html),
# [the change](https://github.com/onnx/onnx/pull/2879)). The two agree for the last axis only.
#
# **FlashAttention.** Kernels take powers of two, with $\log_2 e$ folded into the scale, because the
# hardware has `exp2`. The log-sum-exp of a dead row is $+\infty$ there, where ours is $-\infty$
# ([softmax.h](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/softmax.h));
# with $+\infty$, $e^{s - L}$ is 0 without a guard. Merging such a row by Eq. 1.6 needs $-\infty$.
#
# **Elsewhere.** Softmax without the maximum
# ([tt-metal 12661](https://github.com/tenstorrent/tt-metal/issues/12661)), a bfloat16 running sum
# that stops at 256 ([executorch 20090](https://github.com/pytorch/executorch/pull/20090)), two empty
# parts merged into NaN ([vLLM 39148](https://github.com/vllm-project/vllm/pull/39148)): each of
# these was found in released code.
#
# ## What to do next
#
# * Write `softmax_backward` yourself, from the table above, before you look again.
# * In the cell on the online merge, cut the twelve keys into three parts, in any order.
# * Predict, then try: `pages.trial("attention.softmax", "epsilon in the denominator")`. Who notices
#   an epsilon of 10⁻⁶?
# * Check your own: `minitransformer verify mine.py:softmax --as softmax`.
# * Then [02 · Attention](02_attention.ipynb): where the scores come from.
