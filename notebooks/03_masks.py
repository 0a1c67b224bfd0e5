# %% [markdown]
# # 03 · Masks
#
# **The question.** Attention lets everybody read everybody. Often that is wrong: the future is not
# known yet, padding is not text, and two documents in one row have nothing to say to each other. How
# do we forbid a pair so that it *really* has no influence?
#
# You need [02 · Attention](02_attention.ipynb). In a mask, True means "may attend".

# %%
import numpy as np

from minitransformer import pages, steps
from minitransformer.attention import dense, masks
from minitransformer.plots.canvas import DENSE, STOCHASTIC, figure, tidy
from minitransformer.plots.masks import mask_figure

np.set_printoptions(precision=3, suppress=True)
LOWER = {"align": "lower_right"}

# %% [markdown]
# ## What goes wrong without it
#
# A language model predicts token 1 from token 0, token 2 from tokens 0 and 1, and so on, all at once.
# If row 0 may read token 4, the answer stands in the question. The loss looks wonderful, and the model
# has learned to copy.
#
# The test for such a leak needs no training. Change the last token and see who notices.

# %%
rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(3, 1, 5, 4))
k2, v2 = k.copy(), v.copy()
k2[:, -1] += 3
v2[:, -1] += 3


def who_notices(form, **options):
    """Rows whose output changes when key and value 4 do."""
    moved = (
        form.attention_forward(q, k2, v2, **options)[0]
        - form.attention_forward(q, k, v, **options)[0]
    )
    return np.flatnonzero(np.abs(moved[0]).max(axis=-1) > 1e-12).tolist()


causal = masks.causal(5, 5, **LOWER).dense()
print("rows that notice, no mask:    ", who_notices(dense))
print("rows that notice, causal mask:", who_notices(dense, keep=causal))

# %% [markdown]
# ## Forward: where does a mask go?
#
# A forbidden pair must get weight 0, **and** the others must share the whole 1. Both happen if its score
# is $-\infty$ *before* softmax, because $e^{-\infty} = 0$ in numerator and denominator (Eq. 2.1):
#
# $$S_{ij} = s\,(QK^T)_{ij}\ \text{ where allowed, else } -\infty,\qquad P = \mathrm{softmax}(S)$$
#
# Three other ways are popular. The library keeps each as a mutant, so we can just run them. Row 1 may
# read keys 0 and 1.

# %%
forms = {"before softmax, -inf": dense} | {
    name: pages.wrong("attention.dense", name)
    for name in ("logits multiplied by the mask", "mask applied after softmax", "mask added as one")
}
one = np.ones((1, 5, 1))
for name, form in forms.items():
    total = form.attention_forward(q, k, one, keep=causal)[0][0, 1, 0]
    forbidden = form.attention_forward(q, k, one * [[[0], [0], [1], [1], [1]]], keep=causal)[0][
        0, 1, 0
    ]
    print(
        f"{name:30} row sum {total:.3f}  weight on forbidden keys {forbidden:.3f}"
        f"  leak to rows {who_notices(form, keep=causal)}"
    )

# %% [markdown]
# **Multiplying the logits** makes a forbidden score 0, and $e^0 = 1$ is a fine weight. It may even be
# larger than that of the keys that are allowed. **Masking after softmax** hides the weight and leaves
# its share in the denominator: rows sum to less than 1, and what is forbidden still moves the rest.
# **Adding 0 or 1** is a mask of the wrong scale.
#
# ## Backward
#
# A masked score is the constant $-\infty$. A constant has no gradient. In the lines of Eq. 2.7, the line
# $S = s R$ *where allowed* sends back $dR = s\,dS$ where allowed, and 0 elsewhere. And since $P_{ij} = 0$
# there, $dS_{ij} = P_{ij}(dP_{ij} - D_i)$ is 0 already (Eq. 2.4).
#
# So a key that nobody may read gets no gradient. Here key 4 is forbidden to rows 0 to 3 and to itself:

# %%
pages.source(steps.attention_steps_backward)

# %%
keep = causal & (np.arange(5) != 4)
values = steps.attention_steps_forward(q[0], k[0], v[0], scale=0.5, keep=keep)
gradients = steps.attention_steps_backward(rng.normal(size=(5, 4)), values, scale=0.5, keep=keep)
print("gradient of the products:\n", gradients.products + 0.0)
print("gradient of key 4:", gradients.k[4] + 0.0)

# %% [markdown]
# There is a trap. $0 \cdot \mathrm{NaN}$ is NaN, in the product with V and again in $dK$. A buffer that
# was never written may hold anything. The library sets what nobody may read to 0 *before* it multiplies.

# %%
v3 = v.copy()
v3[:, 4] = np.nan
out, cache = dense.attention_forward(q, k, v3, keep=keep)
naive = pages.wrong("attention.dense", "zero weight taken for silence")
spoiled, _ = naive.attention_forward(q, k, v3, keep=keep)
print("the library:                 finite:", np.isfinite(out).all())
print("zero weight taken for silence: finite:", np.isfinite(spoiled).all())

# %% [markdown]
# ## Where does a query stand?
#
# Row $i$ is not always token $i$. With a cache, one query stands at the end of a hundred keys. The
# library says where rows stand by an offset $o$ (Eq. 3.1):
#
# $$\text{row } i \text{ stands at } i + o,\qquad o = M - N \text{ (lower right)}\quad\text{or}\quad
#   o = 0 \text{ (upper left)}$$
#
# and causal means $j \le i + o$ (Eq. 3.2). For N = M nobody sees a difference. That is why the library
# has no default here: `align` must be said.

# %%
pages.source(masks.causal, masks.offset)

# %%
both = {a: masks.causal(3, 8, align=a).dense() for a in ("lower_right", "upper_left")}
pages.Picture(
    mask_figure(both, title="Three new queries, eight keys"),
    "two causal masks of three rows and eight keys; at the lower right the last row reads all keys, "
    "at the upper left it reads three",
)

# %% [markdown]
# At the upper left, the newest token reads the oldest keys and never itself. Generation with a cache
# then degrades without any error.
#
# ## Rules, not arrays
#
# A mask is a rule over row and key, not a table. Evaluate it everywhere and you have the dense mask.
# Evaluate it on one tile and you have what a kernel needs, without N × M numbers. Both must be the same
# mask, so the rule gets *positions in the whole*.

# %%
pages.source(masks.Mask, masks.window)

# %%
whole = masks.window(64, 64, left=9, right=0, **LOWER)
tile = whole(np.arange(32, 48)[:, None], np.arange(16, 32))
print("a tile is a slice of the whole:", np.array_equal(tile, whole.dense()[32:48, 16:32]))

# %% [markdown]
# ## The others, as pictures
#
# | mask | rule | tag |
# |---|---|---|
# | window | a stretch around oneself, both ends included | Eq. 3.3 |
# | dilated | every d-th key around oneself ([arXiv:2004.05150](https://arxiv.org/abs/2004.05150)) | Eq. 3.4 |
# | strided | the last few, and every n-th before ([arXiv:1904.10509](https://arxiv.org/abs/1904.10509)) | Eq. 3.5 |
# | fixed | the own block, and the last of each block before | Eq. 3.6 |
# | global | some tokens see all and are seen by all | Eq. 3.7 |
# | padding | keys that exist; a row of its own for each sentence | Eq. 3.8 |
# | packed | several documents in one row, each reads itself | Eq. 3.9 |
#
# `&` allows what both allow. `|` allows what either does: a window *or* some global tokens, *and* causal.

# %%
N = 16
past = masks.causal(N, N, **LOWER)
near = masks.window(N, N, left=3, right=0, **LOWER)
documents = np.repeat([0, 1, 2], [5, 4, 7])
gallery = {
    "window": near.dense(),
    "dilated, causal": (masks.dilated(N, N, width=3, dilation=2, **LOWER) & past).dense(),
    "strided": masks.strided(N, N, stride=4, **LOWER).dense(),
    "fixed": masks.fixed(N, N, block=4, summary=1, **LOWER).dense(),
}
more = {
    "global": masks.global_tokens(N, N, tokens=[0, 8], **LOWER).dense(),
    "(window | global) & causal": (
        (near | masks.global_tokens(N, N, tokens=[0, 8], **LOWER)) & past
    ).dense(),
    "padding, 11 tokens": masks.padding(np.array([11]), queries=N, keys=N).dense()[0, 0],
    "packed & causal": (masks.packed(documents, documents) & past).dense()[0],
}
pages.Picture(mask_figure(gallery), "four sparse causal masks of 16 rows and keys")

# %%
pages.Picture(mask_figure(more), "global, combined, padding and packed masks of 16 rows and keys")

# %% [markdown]
# ## See it: how far does a token hear?
#
# A sparse mask cuts a row's cost. It does not have to cut its reach: layers are hops. Token A reads B
# in layer 1, and C reads A in layer 2. How many layers until the last token has heard of all others?
#
# We give each rule about the same number of pairs, multiply masks, and count.

# %%
N = 128
past = masks.causal(N, N, **LOWER)
rules = {
    "window of 23": masks.window(N, N, left=22, right=0, **LOWER),
    "dilated by 4": masks.dilated(N, N, width=25, dilation=4, **LOWER) & past,
    "strided by 12": masks.strided(N, N, stride=12, **LOWER),
    "fixed, blocks of 12": masks.fixed(N, N, block=12, summary=2, **LOWER),
}
fig = figure(6.4, 3.4)
ax = fig.subplots()
for (name, mask), line in zip(rules.items(), ("o-", "s--", "^-.", "v:"), strict=True):
    keep = mask.dense().astype(int)
    reached, heard = np.eye(N, dtype=int), []
    for _ in range(8):
        reached = np.minimum(reached @ keep + reached, 1)
        heard.append(reached[-1].mean())
    print(f"{name:20} pairs in the last row {keep[-1].sum():3}, heard after 1, 2, 8 layers:",
          f"{heard[0]:.0%}, {heard[1]:.0%}, {heard[7]:.0%}")  # fmt: skip
    colour = DENSE if name.startswith(("strided", "fixed")) else STOCHASTIC
    ax.plot(range(1, 9), heard, line, color=colour, markersize=4, label=name)
ax.set_ylim(0, 1.05)
tidy(
    ax,
    xlabel="layers",
    ylabel="share of the 128 tokens",
    title="What the last token can have heard of",
)
ax.legend(fontsize=8, frameon=False)
pages.Picture(
    fig,
    "share of tokens that can have reached the last one, against layers: strided and fixed masks "
    "reach all in two, a window grows by its width, the dilated mask never reaches more than a quarter",
)

# %% [markdown]
# Two hops are enough for strided and fixed masks: that is what they were made for. The window grows by
# its width in every layer. The dilated mask alone *never* hears three tokens in four, however many
# layers there are: its steps are all multiples of 4. So papers give heads different dilations, or
# combine it with a window.
#
# ## Break it
#
# First: the causal rule without its offset. Square masks hide the mistake.

# %%
pages.trial("attention.masks", "always aligned at the upper left")

# %% [markdown]
# Second: $-10^9$ instead of $-\infty$. It works until a row has nothing else. Then all its scores are
# equal again, and it answers with the mean of what it may not read. In float16 there is no $10^9$ at all.

# %%
pages.trial("attention.dense", "minus a billion for minus infinity")

# %% [markdown]
# ## Where the ecosystem disagrees
#
# | question | answers |
# |---|---|
# | True means | may attend: PyTorch SDPA, JAX, [ONNX](https://onnx.ai/onnx/operators/onnx__Attention.html). Ignore: `torch.nn.MultiheadAttention` ([a book that met both](https://github.com/rasbt/LLMs-from-scratch/issues/1061)) |
# | `causal` with N ≠ M | upper left: PyTorch ([103082](https://github.com/pytorch/pytorch/issues/103082)), JAX. Lower right: [FlashAttention](https://github.com/Dao-AILab/flash-attention) since 2.1. ONNX: two runtimes of one library differed ([29020](https://github.com/microsoft/onnxruntime/issues/29020)) |
# | a window of W | FlashAttention: W left *and* oneself, so W + 1 keys ([39408](https://github.com/huggingface/transformers/issues/39408)) |
# | window -1 | no limit; taken literally by some ([7](https://github.com/proger/hippogriff/issues/7)) |
# | nothing allowed | 0: PyTorch since 2.5, FlashAttention. The mean: JAX. See notebook 02 |
#
# To ask a library, make all scores equal and the values an identity matrix. The output *is* the mask,
# each row divided by its number of keys.

# %% tags=["peer"]
torch, jax = pages.peer("torch"), pages.peer("jax")
q, k, v = np.zeros((1, 1, 2, 4)), np.zeros((1, 1, 4, 4)), np.eye(4)[None, None]
print("two queries, four keys, causal; keys that are read:")
keep = masks.causal(2, 4, **LOWER).dense()
seen, _ = dense.attention_forward(q, k, v, keep=keep)
print("here, lower right\n", (seen[0, 0] > 0).astype(int))
if torch:
    seen = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (q, k, v)), is_causal=True
    )
    print("PyTorch, is_causal=True\n", (seen.numpy()[0, 0] > 0).astype(int))
    layer = torch.nn.MultiheadAttention(2, 1, batch_first=True)
    x, tril = torch.ones(1, 3, 2), np.tri(3, dtype=bool)
    weights = layer(x, x, x, attn_mask=torch.tensor(tril))[1]
    print("MultiheadAttention given a lower triangle of True\n", weights.detach().numpy()[0])
if jax:
    seen = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True)
    print("JAX, is_causal=True\n", (np.asarray(seen)[0, :, 0] > 0).astype(int))

# %% [markdown]
# `MultiheadAttention` reads the triangle as "ignore": token 0 hears of the future only, and the last
# row, where everything is ignored, is NaN.
#
# ## What to do next
#
# * Write `window` with an offset, then ask `pages.trial` about "window without the offset".
# * In the hop experiment, join the dilated mask with a window of 4 by `|`. How many layers now?
# * Which of the mutants above would a test with a square, batch-1, causal mask find? That is the test
#   that most projects have.
# * Then [04 · Random masks](04_random_masks.ipynb): forbid pairs by chance.
