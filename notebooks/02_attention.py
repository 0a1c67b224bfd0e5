# %% [markdown]
# # 02 · Attention, with the backward pass by hand
#
# **The question.** A token wants to know something from the others. Which of them to ask depends on
# what it is looking for. How does it find out whom to listen to, in one formula that can learn?
#
# Attention's answer: everybody hangs out a *key*, the token asks with a *query*, and it gets the mean
# of their *values*, weighted by how well each key fits ([arXiv:1706.03762](https://arxiv.org/abs/1706.03762)).
#
# You need [01 · Softmax](01_softmax.ipynb) and matrix products. Shapes are written as in the library:
# N queries, M keys, D the width of a key, E the width of a value.

# %%
import numpy as np

from minitransformer import pages, steps
from minitransformer.attention import dense
from minitransformer.checks.gradients import cotangent, gradient_errors
from minitransformer.plots.attention import attention_strip
from minitransformer.plots.canvas import BASELINE, DENSE, STOCHASTIC, figure, tidy

np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## What goes wrong without it
#
# Take five tokens. Each hangs out its own direction as a key, and has a number as its value. Query 0
# looks for token 3. Query 1 looks for token 1 *or* 2.
#
# **The plain mean** gives both the same answer. It cannot listen.
#
# **The best key alone** listens, but it picks one of two equals, and its derivative is zero almost
# everywhere: there is nothing to learn from.
#
# **A weighted mean** listens and shares, and moves when the query moves.

# %%
keys, values = np.eye(5) * 4, np.array([[10.0], [20.0], [30.0], [40.0], [50.0]])
queries = np.array([[0, 0, 0, 4, 0], [0, 4, 4, 0, 0]], dtype=float)
out, cache = dense.attention_forward(queries[None], keys[None], values[None])
print("plain mean:    ", values.mean(axis=0))
print("best key alone:", values[(queries @ keys.T).argmax(axis=-1), 0])
print("attention:     ", out[0, :, 0])
print("weights:\n", cache.weights[0])

# %% [markdown]
# ## Forward
#
# **Scores.** Row $i$ of $R = QK^T$ holds the products of query $i$ with every key. They are scaled by
# $s = 1/\sqrt D$. Pairs that are not allowed get $-\infty$. **Weights.** Softmax along each row.
# **Output.** The weighted mean of the values. Together, Eq. 2.1 and Eq. 2.2:
#
# $$S = s\,QK^T \text{ where allowed, else } -\infty,\qquad P = \mathrm{softmax}(S),\qquad O = P\,V,
#   \qquad L = \log \sum_j e^{S_j}$$
#
# As lines that do one thing each (Eq. 2.7):

# %%
pages.source(steps.attention_steps_forward)

# %% [markdown]
# ### Why divide by √D?
#
# A product of two random vectors of width D is a sum of D terms, each with mean 0 and variance 1. Its
# variance is D. So scores grow like √D, softmax saturates, and a saturated softmax has no gradient:
# $y(1-y)$ is nearly 0 for every share.
#
# That is a prediction. Here is the experiment: the gradient that reaches the scores, with the scale
# and with the mutant that has none.

# %%
widths = 2 ** np.arange(1, 12)
rng = np.random.default_rng(0)
forms = {
    "with 1/√D": (dense, DENSE),
    "no scale": (pages.wrong("attention.dense", "scale missing"), STOCHASTIC),
}
fig = figure(6.4, 3.4)
ax = fig.subplots()
for (name, (form, colour)), line in zip(forms.items(), ("s--", "o-"), strict=True):
    arriving = []
    for width in widths:
        q, k = rng.normal(size=(2, 64, 32, width))
        weights = form.attention_forward(q, k, k)[1].weights
        arriving.append((weights * (1 - weights)).sum(axis=-1).mean())
    print(f"{name}: width 2: {arriving[0]:.2f}, width 2048: {arriving[-1]:.2f}")
    ax.plot(widths, arriving, line, color=colour, markersize=4, label=name)
ax.axhline(1 - 1 / 32, color=BASELINE, linestyle=":")
ax.annotate(
    "all 32 keys alike", (2, 1 - 1 / 32), fontsize=8, xytext=(0, 4), textcoords="offset points"
)
ax.set_xscale("log", base=2)
ax.set_ylim(0, 1.1)
tidy(
    ax,
    xlabel="width D of queries and keys",
    ylabel="Σ y (1 - y), mean over rows",
    title="What is left of softmax's own slope",
)
ax.legend(fontsize=8, frameon=False)
pages.Picture(
    fig,
    "the sum of y(1-y) over a row against the width: level with the scale 1/√D, falling towards "
    "zero without it",
)

# %% [markdown]
# ## Backward, line by line
#
# Somebody hands us `dO`. One rule does most of the work. For a product $C = AB$,
#
# $$dA = dC\,B^T,\qquad dB = A^T\,dC$$
#
# You need not remember where the transposes go: the shapes leave no other choice. Last line first:
#
# | line | what it sends back | shapes |
# |---|---|---|
# | $O = PV$ | $dP = dO\,V^T$ and $dV = P^T dO$ | (N, M) and (M, E) |
# | $P = \mathrm{softmax}\,S$ | $dS = P \odot (dP - \mathrm{rowsum}(dP \odot P))$, Eq. 1.2 | (N, M) |
# | $S = s\,R$, or $-\infty$ | $dR = s\,dS$, and 0 where masked: a constant has no gradient | (N, M) |
# | $R = QK^T$ | $dQ = dR\,K$ and $dK = dR^T Q$ | (N, D) and (M, D) |

# %%
pages.source(steps.attention_steps_backward)

# %% [markdown]
# Run it, and ask the complex step about all three inputs. N, M, D and E are four different numbers,
# so that a wrong transpose cannot hide.

# %%
rng = np.random.default_rng(1)
q, k, v = rng.normal(size=(3, 4)), rng.normal(size=(5, 4)), rng.normal(size=(5, 2))
rule = {"scale": 0.5, "keep": np.tri(3, 5, 2, dtype=bool)}
values = steps.attention_steps_forward(q, k, v, **rule)
dout = cotangent(values.out, seed=0)
gradients = steps.attention_steps_backward(dout, values, **rule)
errors = gradient_errors(
    lambda q, k, v: steps.attention_steps_forward(q, k, v, **rule).out,
    {"q": gradients.q, "k": gradients.k, "v": gradients.v},
    {"q": q, "k": k, "v": v},
    dout,
)
print("gradient of the scores (masked pairs are 0):\n", gradients.scores)
print("relative errors below 1e-14:", {name: bool(error < 1e-14) for name, error in errors.items()})

# %% [markdown]
# Each row of that matrix sums to 0, as in notebook 01. Now follow it one line further: $dK$ is
# $dR^T Q$, so the sum of $dK$ over all keys is a mix of row sums, and it is 0 too. A common shift of
# all keys changes nothing. **The bias of a key projection never learns.** Many models carry one.

# %%
print("sum of dK over the keys:", np.abs(gradients.k.sum(axis=0)).max() < 1e-14)

# %% [markdown]
# ## Backward, fused
#
# The library has options, and one query head may share its keys with others: query head $h$ reads key
# head $h // (H // G)$. The lines stay the same. Tags Eq. 2.3 to Eq. 2.6:
#
# $$dV = \textstyle\sum_{\text{group}} W^T dO,\qquad dP = dO\,V^T,\qquad
#   dS = P \odot (dP - D + dL),\qquad dQ = s\,dR\,K,\qquad dK = s \sum_{\text{group}} dR^T Q$$
#
# Two things are new. The sum over a **group**: keys that several query heads read collect from all of
# them, by the rule for values that two lines read. And the short form of $D$ (Eq. 2.4):
#
# $$D_i = \sum_j dP_{ij} P_{ij} = \sum_j P_{ij} \sum_e dO_{ie} V_{je} = \sum_e dO_{ie} O_{ie}$$
#
# The left side needs a whole row of N × M numbers. The right side needs a row of the output. So a
# kernel that never stores P can still go back.

# %%
pages.source(dense.attention_backward)

# %%
out, cache = dense.attention_forward(q[None], k[None], v[None], **rule)
fused = dense.attention_backward(dout[None], cache)
for name in ("q", "k", "v"):
    difference = np.abs(getattr(fused, name)[0] - getattr(gradients, name)).max()
    print(f"d{name}: line by line and fused agree to 1e-14: {difference < 1e-14}")
dweights = dout @ v.T
left, right = (dweights * cache.weights[0]).sum(axis=-1), (dout * out[0]).sum(axis=-1)
print("D two ways:", left, right)

# %% [markdown]
# ### Many heads, fewer keys
#
# Four query heads, two key heads (grouped-query attention,
# [arXiv:2305.13245](https://arxiv.org/abs/2305.13245)). Copying the keys for every query head and
# adding up what comes back must be the same.

# %%
rng = np.random.default_rng(2)
q, (k, v) = rng.normal(size=(4, 6, 8)), rng.normal(size=(2, 2, 6, 8))
out, cache = dense.attention_forward(q, k, v)
dout = cotangent(out, seed=1)
grouped = dense.attention_backward(dout, cache)
copied, cache = dense.attention_forward(q, np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0))
dk = dense.attention_backward(dout, cache).k
print("outputs agree:", np.abs(out - copied).max() < 1e-14)
print(
    "dK is the sum over the group:", np.abs(grouped.k - dk.reshape(2, 2, 6, 8).sum(1)).max() < 1e-14
)

# %% [markdown]
# ## The whole forward pass
#
# The same four passes, with options: `bias`, `softcap`, `multiplier`, narrow dtypes. Pass 0 is there
# because $0 \cdot \mathrm{NaN}$ is NaN: a weight of zero does not silence what it multiplies.

# %%
pages.source(dense.attention_forward)

# %% [markdown]
# ## See it: temperature
#
# The scale is a temperature. Here are the weights of one head at four scales. On the left a plain
# mean, on the right the best key alone: the two answers that we began with.

# %%
rng = np.random.default_rng(3)
q, k = rng.normal(size=(2, 1, 12, 16))
shown = {
    f"scale {scale:g}": dense.attention_forward(q, k, k, scale=scale)[1].weights[0]
    for scale in (0.0, 0.25, 1.0, 8.0)
}
pages.Picture(
    attention_strip(shown, title="From a plain mean to the best key alone (1/√D = 0.25)"),
    "weights of twelve queries over twelve keys at scales 0, 0.25, 1 and 8: from even rows to one "
    "key a row",
)

# %% [markdown]
# ## Break it
#
# First: query heads read their key heads in the wrong order, `h % G` for `h // (H // G)`. Shapes fit,
# nothing crashes.

# %%
pages.trial("attention.dense", "key heads tiled instead of repeated")

# %% [markdown]
# Second, in the backward pass: $dS = P \odot dP$, the subtracted mean forgotten.

# %%
pages.trial("attention.dense", "softmax derivative without its mean")

# %% [markdown]
# One property that notices needs no reference at all: a common shift of the keys must have no
# gradient. Such laws are the cheapest tests there are.
#
# ## Where the ecosystem disagrees
#
# | question | answers |
# |---|---|
# | order of the axes | (batch, head, position, width): PyTorch, ONNX in 4-D. (batch, position, head, width): [JAX](https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html), [FlashAttention](https://github.com/Dao-AILab/flash-attention) |
# | fewer key heads | JAX, FlashAttention, [ONNX](https://onnx.ai/onnx/operators/onnx__Attention.html): by shape. PyTorch: only with `enable_gqa=True` |
# | a query that may read nothing | PyTorch: 0 (NaN before 2.5, [103963](https://github.com/pytorch/pytorch/issues/103963)). JAX: the mean of all values |
# | scale | 1/√D, and [vit-pytorch](https://github.com/lucidrains/vit-pytorch/issues/65) once took the width of the model for D |
# | dtype | FlashAttention: float16 and bfloat16 only. ONNX: `softmax_precision` says what softmax computes in |
#
# The first row is the dangerous one. With as many heads as positions, both layouts fit, and nobody
# complains:

# %% tags=["peer"]
torch, jax = pages.peer("torch"), pages.peer("jax")
rng = np.random.default_rng(4)
q, k, v = rng.normal(size=(3, 1, 4, 4, 8)).astype(np.float32)
ours, _ = dense.attention_forward(q, k, v)
if torch:
    theirs = torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)))
    print(
        f"PyTorch, same layout:       differs by less than 1e-6: {np.abs(ours - theirs.numpy()).max() < 1e-6}"
    )
if jax:
    theirs = np.asarray(jax.nn.dot_product_attention(q, k, v))
    print(f"JAX, our layout given:      differs by {np.abs(ours - theirs).max():.1f}, no complaint")
    turned = np.asarray(jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v))))
    print(
        f"JAX, its own layout given:  differs by less than 1e-6: {np.abs(ours - turned.swapaxes(1, 2)).max() < 1e-6}"
    )

# %% [markdown]
# And the query that may read nothing:

# %% tags=["peer"]
keep = np.array([[True, True, False], [False, False, False]])
q, k, v = (
    np.ones((1, 1, 2, 1)),
    np.ones((1, 1, 3, 1)),
    np.array([1.0, 3.0, 8.0]).reshape(1, 1, 3, 1),
)
print("here    ", dense.attention_forward(q, k, v, keep=keep)[0].ravel())
if torch:
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (q, k, v)), attn_mask=torch.tensor(keep)
    )
    print("PyTorch ", theirs.numpy().ravel())
if jax:
    theirs = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (q, k, v)), mask=keep[None, None]
    )
    print("JAX     ", np.asarray(theirs).ravel())

# %% [markdown]
# JAX masks with a large negative number. Where everything is masked, everything is equal again: the
# answer 4 is the mean of 1, 3 and 8, all of them forbidden.
#
# ## What to do next
#
# * Write `attention_steps_backward` from the table, with four different sizes, and ask
#   `gradient_errors`.
# * Predict which properties notice "scale applied twice", then run
#   `pages.trial("attention.dense", "scale applied twice")`.
# * Is your own attention right? `minitransformer verify mine.py:attention --framework torch --detect`
#   tells, and names the mistake.
# * Then [03 · Masks](03_masks.ipynb): who may read whom.
