# %% [markdown]
# # 04 · Random masks, and what makes up for them
#
# **The question.** During training we hide some pairs *by chance*: token 7 may not read token 3 this
# time. That shall keep the model from leaning on few connections. But hiding changes the mean that
# attention takes. What should the remaining weights do about it?
#
# There are two honest answers, and learners ask about them more than about anything else here:
#
# * **renormalise**: what is left shares the whole 1 again;
# * **inverted**: what is left is divided by its chance of being left.
#
# This page settles by experiment how they differ. You need [03 · Masks](03_masks.ipynb).

# %%
import itertools

import numpy as np

from minitransformer import pages, philox, steps
from minitransformer.attention import dense, masks, softmax
from minitransformer.philox import Draw
from minitransformer.plots.canvas import BASELINE, DENSE, INK, STOCHASTIC, figure, panels, tidy
from minitransformer.plots.masks import random_mask_figure
from minitransformer.stochastic import compensation, samplers
from minitransformer.stochastic.samplers import RandomMask, Sampled, resolve

np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## What goes wrong without it
#
# Six keys, one query, a drop rate of 0.5. There are only $2^6$ masks. So we need no sampling: we take
# the mean over *all* of them, each with its probability. The values are an identity matrix, so that
# the output is the row of weights.

# %%
SCORES = np.array([2.5, 1.0, 0.5, 0.0, -0.5, -1.0])
ROW = softmax.softmax_forward(SCORES)[0]


def every_mask(rate, sure=()):
    """All keep-masks of six keys with their probabilities; the keys in `sure` are always kept."""
    free = [j for j in range(6) if j not in sure]
    keep = np.ones((2 ** len(free), 6), dtype=bool)
    keep[:, free] = list(itertools.product([True, False], repeat=len(free)))
    kept = keep[:, free].sum(axis=-1)
    return keep, (1 - rate) ** kept * rate ** (len(free) - kept)


def weights_of(keep, how, rate, sure=(), form=compensation):
    """The row of weights under each mask, by the library."""
    pi = np.where(np.isin(np.arange(6), sure), 1.0, 1 - rate)
    masked = keep[:, None, None]
    sampled = Sampled(masked, masked / pi if how == "inverted" else None)
    draws = (len(keep), 1, 1, 1)
    out, _ = form.compensated_attention_forward(
        np.ones(draws),
        np.broadcast_to(SCORES[:, None], (len(keep), 1, 6, 1)),
        np.broadcast_to(np.eye(6), (len(keep), 1, 6, 6)),
        sampled=sampled, compensation=how, scale=1.0,
    )  # fmt: skip
    return out[:, 0, 0]


keep, chance = every_mask(0.5)
print("full attention:             ", ROW, "sum", ROW.sum().round(3))
nothing_done = chance @ (ROW * keep)
print("mean, dropped and no more:  ", nothing_done, "sum", nothing_done.sum().round(3))

# %% [markdown]
# Without compensation the mean is $(1-p)$ times what evaluation will give. Every layer above was
# trained on attention outputs half as large.
#
# ## Where chance comes from
#
# A mask is a *function*, not a sequence: place, layer, step and seed go in, 32 bits come out (Eq. 4.1),
# and the pair is kept if the word is at least $p\cdot 2^{32}$ (Eq. 4.2). Forward, backward, another
# machine, a tile of a kernel: all get the same mask without storing it.

# %%
pages.source(philox.threshold)

# %%
L = 24
structural = masks.causal(L, L, align="lower_right").dense()
kinds = {
    "element": RandomMask("element"),
    "column": RandomMask("column"),
    "fixed k": RandomMask("fixed_k", k=4),
    "block": RandomMask("block", tile=6),
}
pictures = {
    name: [
        resolve(mask, Draw(seed=1), layer, (1, 1, L, L), keep=structural).keep[0, 0]
        for layer in range(3)
    ]
    for name, mask in kinds.items()
}
pages.Picture(
    random_mask_figure(
        pictures, structural, [f"layer {i}" for i in range(3)], title="Four kinds of chance"
    ),
    "element, column, fixed-k and block masks of three layers inside a causal mask",
    dpi=70,
)

# %% [markdown]
# Element masks (Eq. 4.3) draw a word for each pair, column masks (Eq. 4.4) one for each key, fixed-k
# masks (Eq. 4.6) keep k keys of each row. Blocks (Eq. 5.1) have a page of their own, notebook 05.
#
# ## Answer one: renormalise
#
# $$W = \frac{P \odot Z}{\mathrm{rowsum}(P \odot Z)} = \mathrm{softmax}(S \text{ where kept, else } -\infty)$$
#
# That is Eq. 4.10, and it claims that two computations are one. Why: $P_j = e^{S_j}/\Sigma$, with the same
# $\Sigma$ in the whole row. It cancels. Experiment, all 64 masks:

# %%
ours = weights_of(keep, "renormalise", 0.5)
by_hand = steps.renormalise_steps_forward(ROW, keep).renormalised
print("dividing after softmax = masking before it:", np.abs(ours - by_hand).max() < 1e-15)
sums = ours.sum(axis=-1).round(12)
print(
    "row sums that occur:",
    np.unique(sums),
    " of them 0:",
    (sums == 0).sum(),
    "of 64, the empty mask",
)

# %% [markdown]
# ### Backward, line by line
#
# | line (Eq. 4.14) | what it sends back |
# |---|---|
# | $a = P \odot Z$ | $dP = da \odot Z$ |
# | $c = \sum a$ | $dc$ to every $a$: the second part |
# | $r = 1/c$, or 0 | $-dr\,r^2$ to $c$ |
# | $W = a\,r$ | $dW\,r$ to $a$, and $\sum dW\,a$ to $r$ |

# %%
pages.source(steps.renormalise_steps_forward, steps.renormalise_steps_backward)

# %% [markdown]
# Go on through softmax (Eq. 1.2) and everything collapses: a dropped score gets exactly nothing, and the
# others get what softmax itself would give for $W$. So the fused backward is that of
# [02](02_attention.ipynb), with the mask as data. No new formula is needed.

# %%
z, dw = np.array([1, 0, 1, 1, 0, 1], dtype=bool), np.array([1.0, -1, 0, 2, 0, 1])
lines = steps.renormalise_steps_forward(ROW, z)
dp = steps.renormalise_steps_backward(dw, lines, z).weights
through_softmax = softmax.softmax_backward(dp, softmax.SoftmaxCache(ROW, -1))
fused = softmax.softmax_backward(dw, softmax.SoftmaxCache(lines.renormalised, -1))
print("line by line:", through_softmax + 0.0)
print("fused:       ", fused + 0.0)

# %% [markdown]
# A tempting shortcut treats $c$ as a constant. The forward pass is the same, the gradient is not: it
# leaks to dropped scores (Eq. 4.13). The library offers it as `stop_gradient`, and it is the derivative
# of nothing.
#
# ## Answer two: inverted
#
# $$W = P \odot Z / \pi,\qquad E[Z_j] = \pi_j \;\Rightarrow\; E[W] = P$$
#
# That is Eq. 4.11, and it is ordinary dropout on the weights. The denominator is that of the *full* row.
# What about its rows? $\sum_j P_j Z_j / \pi$ is 1 only on average.

# %%
inverted = weights_of(keep, "inverted", 0.5)
print("full attention:    ", ROW)
print(
    "mean of inverted:  ",
    chance @ inverted,
    " equal:",
    np.abs(chance @ inverted - ROW).max() < 1e-15,
)
print("mean of renormal.: ", chance @ ours)
sums = inverted.sum(axis=-1)
print(f"inverted row sums: from {sums.min():.2f} to {sums.max():.2f}, mean {chance @ sums:.2f}")

# %% [markdown]
# **So: inverted is unbiased, and its rows do not sum to one. Renormalised rows sum to one, and are
# biased.** You cannot have both, and neither is a bug. The same surprise, asked again and again:
# [fairseq 351](https://github.com/facebookresearch/fairseq/issues/351),
# [PyTorch 33360](https://github.com/pytorch/pytorch/issues/33360),
# [PyTorch 42929](https://github.com/pytorch/pytorch/issues/42929),
# [transformers 31468](https://github.com/huggingface/transformers/issues/31468),
# [a lecture on GPT](https://github.com/karpathy/ng-video-lecture/issues/30).

# %%
fig = figure(7.2, 2.8)
axes = panels(fig, 1, 2, titles=["sum of the row", "largest weight"])
bins = np.arange(-0.025, 2.1, 0.05)
for values, name, colour, style in (
    (ours, "renormalise", DENSE, {"hatch": "//", "fill": False, "edgecolor": DENSE}),
    (inverted, "inverted", STOCHASTIC, {"alpha": 0.7}),
):
    for ax, shown in zip(axes, (values.sum(axis=-1), values[:, 0]), strict=True):
        ax.hist(shown, bins=bins, weights=chance, color=colour, label=name, **style)
axes[0].axvline(1, color=BASELINE, linestyle=":")
axes[1].axvline(ROW[0], color=BASELINE, linestyle=":")
for ax in axes:
    tidy(ax, xlabel="value", ylabel="probability")
axes[0].legend(fontsize=8, frameon=False)
fig.suptitle("All 64 masks of a row at rate 0.5 (dotted: full attention)", fontsize=11, color=INK)
pages.Picture(
    fig,
    "histograms over all masks: renormalised rows sum to 1, or to 0 for the empty mask; inverted rows spread from 0 to 2",
)

# %% [markdown]
# Look at the right half. An inverted weight is 0 or $P_1/\pi$, and that is more than 1 here. A
# renormalised one is never more than 1.
#
# ## Biased which way, and by how much?
#
# To first order in $p$ at most one key is lost. If key $k$ is lost, the others grow by $1/(1 - P_k)$;
# if it is $j$ itself, $P_j$ is gone:
#
# $$E[W_j] - P_j \approx p\,P_j \Big(\sum_{k \ne j} \frac{P_k}{1 - P_k} - 1\Big)$$
#
# For two keys that is $p\,(1 - 2 P_j)$. **Large weights shrink, small ones grow: the mean row is
# flatter.** An even row has no bias at all, but for the empty mask. Formula against all masks at
# $p = 0.01$, then the size at larger rates:

# %%
odds = ROW / (1 - ROW)
predicted = 0.01 * ROW * (odds.sum() - odds - 1)
small, rare = every_mask(0.01)
print("predicted at p = 0.01:", predicted * 1000, "in thousandths")
print("exact     at p = 0.01:", (rare @ weights_of(small, "renormalise", 0.01) - ROW) * 1000)
for rate in (0.1, 0.3, 0.5):
    some, chances = every_mask(rate)
    mean = (
        chances @ weights_of(some, "renormalise", rate) / (1 - rate**6)
    )  # given that something is left
    print(
        f"largest weight {ROW[0]:.3f} becomes {mean[0]:.3f} at rate {rate}, smallest {ROW[-1]:.3f} becomes {mean[-1]:.3f}"
    )

# %% [markdown]
# ## See it: bias and variance against the drop rate
#
# What matters is the output, $o = \sum_j W_j v_j$. Its inverted form has the variance of Eq. 4.12,
# $\sum_j \frac{1-\pi_j}{\pi_j} P_j^2 v_j^2$, which depends on where zero lies: shift all values by 5,
# and it explodes. A renormalised row sums to one, so a shift of the values just shifts the output.
#
# One key, the token itself, is protected here, so that no row is empty.

# %%
v = np.array([1.0, -0.5, 0.3, -1.0, 0.8, 0.2])
rates = np.linspace(0, 0.9, 19)
fig = figure(7.6, 3.2)
axes = panels(fig, 1, 2, titles=["bias |E[o] - o|", "standard deviation of o"])
for how, colour in (("renormalise", DENSE), ("inverted", STOCHASTIC)):
    for shift, line in ((0.0, "-"), (5.0, "--")):
        bias, deviation = [], []
        for rate in rates:
            some, chances = every_mask(rate, sure=(5,))
            outputs = weights_of(some, how, rate, sure=(5,)) @ (v + shift)
            mean = chances @ outputs
            bias.append(abs(mean - ROW @ (v + shift)))
            deviation.append(np.sqrt(np.maximum(chances @ outputs**2 - mean**2, 0)))
        label = f"{how}, values shifted by {shift:g}"
        axes[0].plot(rates, bias, line, color=colour, label=label)
        axes[1].plot(rates, deviation, line, color=colour, label=label)
        print(f"{label:40} rate 0.5: bias {bias[10]:.3f}, deviation {deviation[10]:.3f}")
for ax in axes:
    tidy(ax, xlabel="drop rate p", ylabel="units of v")
axes[0].legend(fontsize=7, frameon=False)
axes[1].set_ylim(0, 8)
fig.suptitle(
    "Renormalise: a bias. Inverted: a variance that depends on where zero is",
    fontsize=11,
    color=INK,
)
pages.Picture(
    fig,
    "left: the bias of renormalising grows with the rate, that of inverted is zero; right: the deviation of inverted is larger at high rates and grows with a shift of the values, that of renormalising does not",
)

# %% [markdown]
# ## Empty rows and protected pairs
#
# A row with $n$ keys loses all of them with probability $p^n$. In a causal mask row 0 has *one* key. At
# rate 0.5 the first token is struck dumb every other time. Below, 4000 heads serve as draws.

# %%
causal = masks.causal(5, 5, align="lower_right").dense()
shape = (1, 4000, 5, 5)
for protect in (False, True):
    mask = RandomMask("element", rate=0.5, protect_diagonal=protect)
    drawn = resolve(mask, Draw(seed=7), 0, shape, keep=causal).keep
    print(
        f"diagonal protected: {protect!s:5}  empty rows:", 1 - drawn.any(axis=-1).mean(axis=(0, 1))
    )
print("p^n:                              ", 0.5 ** np.arange(1, 6))

# %% [markdown]
# A **protected** pair is certain, $\pi = 1$. So the inverted form must *not* divide it by $1 - p$. The
# other way out draws empty rows again (`min_keep=1`). That changes the probabilities:
# $\pi = (1-p)/(1-p^n)$ (Eq. 4.9). Counting agrees:

# %%
mask = RandomMask("element", rate=0.8, protect_diagonal=False, min_keep=1)
shape = (1, 1, 20_000, 3)
counted = resolve(mask, Draw(seed=8), 0, shape).keep.mean()
stated = samplers.inclusion_probabilities(mask, shape)[0, 0, 0, 0]
print(f"1 - p = 0.2, stated {stated:.3f}, counted {counted:.2f}")

# %% [markdown]
# ## What happens at test time?
#
# Nothing is dropped, and nothing is scaled: `training=False` is dense attention, bit for bit.

# %%
rng = np.random.default_rng(0)
q, k, x = rng.normal(size=(3, 1, 2, 6, 4))
mask = RandomMask("element", rate=0.5)
evaluated, _ = compensation.stochastic_attention_forward(
    q, k, x, random_mask=mask, draw=Draw(seed=1, training=False), layer=0
)
print(
    "evaluation is dense attention:", np.array_equal(evaluated, dense.attention_forward(q, k, x)[0])
)

# %% [markdown]
# Is that the mean of what training saw? For inverted, the mean of the *weights* is right. But then comes
# a non-linear layer, and the mean of a function is not the function of the mean. With tanh(3 o) for the
# rest of the network:

# %%
some, chances = every_mask(0.5, sure=(5,))
print(f"{'full attention':14} f(o) {np.tanh(3 * ROW @ v):.3f}")
for how in ("renormalise", "inverted"):
    outputs = weights_of(some, how, 0.5, sure=(5,)) @ v
    print(
        f"{how:14} E[f(o)] {chances @ np.tanh(3 * outputs):.3f}   f(E[o]) {np.tanh(3 * chances @ outputs):.3f}"
    )

# %% [markdown]
# So neither form makes evaluation the mean of training. Whoever wants the mean draws masks at test time
# as well and averages what the *model* says (Monte-Carlo: `Draw(seed, training=False, sample=s)`).
#
# ## Multiplying logits by a mask is not masking
#
# It is in articles, and in at least one abstract: "randomly zeroes out top-k attention logits"
# ([arXiv:2504.12088](https://arxiv.org/abs/2504.12088)). A dropped score becomes 0, and 0 is a score like any other. If the
# score was negative, "dropping" the pair *raises* its weight.

# %%
zeroed = softmax.softmax_forward(SCORES * z)[0]
print("scores:            ", SCORES)
print("kept:              ", z)
print("full attention:    ", ROW)
print("logits times mask: ", zeroed)
print("masked:            ", weights_of(z[None], "renormalise", 0.5)[0])
print("weight that hidden keys still have:", zeroed[~z].sum().round(3))

# %% [markdown]
# ## Find the faults
#
# Articles about this method show code like this. It runs. Find at least five faults before you go on.
#
# ```python
# class RandomAttention(nn.Module):
#     def forward(self, x):                               # (B, N, C)
#         B, N, C = x.shape
#         mask = (torch.rand(B, N, N) > self.drop_rate).float()
#         x = x * mask
#         q, k, v = self.q(x), self.k(x), self.v(x)
#         scores = q @ k.transpose(-2, -1) / math.sqrt(C)
#         return scores.softmax(dim=-1) @ v
# ```
#
# Two experiments first. The one line that matters, with N ≠ C; then with N = C. There we ask which
# pairs are really silent: does output $i$ change when token $j$ changes, the mask being the same?

# %%
rng = np.random.default_rng(3)
article_mask = rng.random((1, 6, 6)) > 0.5
try:
    print((rng.normal(size=(1, 6, 8)) * article_mask).shape)
except ValueError as error:
    print("N = 6, C = 8:", error)

x = rng.normal(size=(1, 6, 6))
heard = np.zeros((6, 6), dtype=bool)
first, _ = dense.attention_forward(*[x * article_mask] * 3)
for j in range(6):
    moved = x.copy()
    moved[0, j] += 1
    second, _ = dense.attention_forward(*[moved * article_mask] * 3)
    heard[:, j] = np.abs(second - first)[0].max(axis=-1) > 1e-12
print("N = 6, C = 6: pairs that the mask calls hidden:", int((~article_mask).sum()),
      " pairs that are silent:", int((~heard).sum()))  # fmt: skip

# %% [markdown]
# 1. **It hides no pair.** A mask over pairs (N, N) is laid over features (N, C). Every token still hears
#    every other. What is zeroed is feature $c$ of token $i$, for everybody.
# 2. **It crashes or not by accident.** The shapes fit only for N = C (or C = 1, where broadcasting makes
#    something else of it again).
# 3. **It belongs behind the scores**: $-\infty$ where dropped, before softmax (Eq. 4.10), or a
#    multiplier after it (Eq. 4.11).
# 4. **Nothing makes up for it.** Features are dropped and not scaled, in q and k *and* v, so scores
#    shrink by $(1-p)^2$ on average off the diagonal.
# 5. **It is random in evaluation**: `self.training` is never asked.
# 6. One mask for all heads; no causal mask for it to stay inside; nothing protected, so nothing
#    prevents an empty row; `torch.rand` on the CPU whatever the device of x, and no seed of its own, so
#    recomputing the layer in the backward pass may draw another mask.
#
# ## Break it
#
# First: logits multiplied by the mask.

# %%
pages.trial("stochastic.compensation", "logits multiplied by the mask")

# %% [markdown]
# Second: renormalised where inverted was asked for. Weights look tidier than before. Only a property
# that knows the expectation notices.

# %%
pages.trial("stochastic.compensation", "always renormalised")

# %% [markdown]
# Third: a protected pair divided by $1 - p$ like the others.

# %%
pages.trial("stochastic.compensation", "protected pairs scaled")

# %% [markdown]
# ## Where the ecosystem disagrees
#
# | who | what |
# |---|---|
# | PyTorch | `dropout_p` of SDPA is inverted, of the weights. The function has no training flag: it drops in evaluation too, unless the caller passes 0 ([124464](https://github.com/pytorch/pytorch/issues/124464)) |
# | JAX | `jax.nn.dot_product_attention` has no dropout. [Flax](https://github.com/google/flax/blob/main/flax/linen/attention.py) has it, inverted, and by default one mask for all batch rows and heads (`broadcast_dropout`) |
# | [ONNX](https://onnx.ai/onnx/operators/onnx__Attention.html) | the operator has none: it is for inference |
# | FlashAttention | inverted; the factor 1/(1-p) is applied to the output, once, which is the same ([93](https://github.com/Dao-AILab/flash-attention/issues/93)) |
# | DropAttention ([arXiv:1907.11065](https://arxiv.org/abs/1907.11065)) | columns or elements, renormalised |
# | DropKey ([arXiv:2208.02646](https://arxiv.org/abs/2208.02646)) | keys dropped before softmax, so renormalised |
# | apex | once scaled by p instead of 1/(1-p) in the backward pass ([816](https://github.com/NVIDIA/apex/pull/816)) |
#
# Which *mask* a seed stands for, none of them promises
# ([PyTorch on reproducibility](https://docs.pytorch.org/docs/stable/notes/randomness.html)). Ask PyTorch with equal scores and an identity matrix: what was kept counts double.

# %% tags=["peer"]
torch = pages.peer("torch")
if torch:
    _ = torch.manual_seed(0)
    q, k, values = torch.zeros(1, 1, 1000, 4), torch.zeros(1, 1, 8, 4), torch.eye(8)[None, None]
    dropped = torch.nn.functional.scaled_dot_product_attention(q, k, values, dropout_p=0.5)[0, 0]
    print("8 times a weight is one of", np.unique((dropped * 8).numpy().round(4)))
    print("row sums occur from", dropped.sum(-1).min().item(), "to", dropped.sum(-1).max().item())

# %% [markdown]
# ## What to do next
#
# * Which of the two would you take for values that are far from zero? The second figure answers.
# * Predict the bias for an even row, put `SCORES = np.zeros(6)` at the top, and run all cells.
# * Write `renormalise_steps_backward` from the table. Then hold $c$ constant, and see who notices:
#   `pages.trial("steps", "denominator held constant")`.
# * Mend the article's code. `minitransformer verify` judges the attention in it.
# * Element masks hide work without saving any. Notebook 05 drops whole tiles.
