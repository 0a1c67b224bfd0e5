# %% [markdown]
# # 05 · Randomness in blocks
#
# **The question.** Notebook 04 hid half of all pairs by chance. Is half of the pairs half of the work?
#
# No: work is not done pair by pair. A processor multiplies **tiles**: small matrices of, say,
# 16 × 16 scores. It can leave out a tile, but not a pair inside one. This page asks how often chance
# empties a whole tile, what changes if chance *decides* by tile, and how attention runs over a list of
# tiles, forward and backward.
#
# You need [04 · Random masks](04_random_masks.ipynb), and from [01](01_softmax.ipynb) how two parts of a
# softmax merge.

# %%
import numpy as np

from minitransformer import pages
from minitransformer.attention import dense, masks
from minitransformer.checks.gradients import cotangent, gradient_errors
from minitransformer.philox import Draw
from minitransformer.plots.canvas import BASELINE, DENSE, INK, STOCHASTIC, figure, panels, tidy
from minitransformer.plots.masks import mask_figure
from minitransformer.sparse import block_mask, tiled
from minitransformer.stochastic import samplers
from minitransformer.stochastic.samplers import RandomMask, resolve

np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## What goes wrong without it
#
# 256 queries, 256 keys, no causal mask. We drop pairs at ever higher rates and count the tiles of 16 × 16
# in which something is left. Their share is the share of the work (Eq. 10.5).

# %%
L, T = 256, 16


def drawn(kind, rate, *, tile=T, length=L, seed=1, **options):
    """One mask of one head, (length, length)."""
    mask = RandomMask(kind, rate=rate, tile=tile, **{"protect_diagonal": False, **options})
    return resolve(mask, Draw(seed), 0, (1, 1, length, length)).keep[0, 0]


for kind in ("element", "block"):
    for rate in (0.5, 0.9, 0.99):
        tiles = block_mask.from_dense(drawn(kind, rate), tile=T)
        print(
            f"{kind:8} rate {rate:<5} pairs left {block_mask.pair_density(tiles):.3f}   "
            f"tiles to compute {block_mask.tile_density(tiles):.3f}"
        )

# %% [markdown]
# At rate 0.9 nine pairs in ten are gone, and **not one tile** can be left out. At 0.99, with two or three
# pairs left in a tile of 256, still nearly nine tiles in ten must be computed. Blocks give back what they
# take.

# %%
small = {
    "element, 48 × 48": drawn("element", 0.5, length=48, tile=8),
    "block of 8": drawn("block", 0.5, length=48, tile=8),
}
shown = {}
for name, keep in small.items():
    tiles = block_mask.from_dense(keep, tile=8)
    ones = np.zeros(tiles.grid, dtype=bool)
    _, i, j = block_mask.listed(tiles).T
    ones[i, j] = True
    shown |= {name: keep, f"its tiles: {len(i)} of 36": np.kron(ones, np.ones((8, 8), dtype=bool))}
pages.Picture(
    mask_figure(shown, title="Rate 0.5: what is kept, and what must be computed"),
    "an element mask like noise, all of whose 36 tiles must be computed; a block mask, of whose tiles about half must",
    dpi=80,
)

# %% [markdown]
# ## How likely is an empty tile?
#
# A tile of $r \times c$ holds $rc$ pairs. Each is dropped with probability $p$, independently (Eq. 4.3).
# The tile is empty if all of them are:
#
# $$P(\text{tile is empty}) = p^{\,rc}$$
#
# The exponent is the *area*. Turn it round: for half of the tiles to be empty, $p = 2^{-1/rc}$. Formula
# against counting, 64 heads as draws:

# %%
rates = np.array([0.3, 0.5, 0.7, 0.9, 0.97])
for tile in (1, 2, 4, 8):
    counted = []
    for rate in rates:
        mask = RandomMask("element", rate=float(rate), protect_diagonal=False)
        keep = resolve(mask, Draw(2), 0, (1, 64, 64, 64)).keep[0]
        tiles = block_mask.from_dense(keep, tile=tile)
        counted.append(1 - block_mask.tile_density(tiles))
    print(f"tile {tile} × {tile}: predicted {rates ** (tile * tile)}  counted {np.array(counted)}")
for tile in (8, 16, 64, 128):
    print(
        f"tile {tile:3}: empty at rate 0.5 with probability 10^{tile * tile * np.log10(0.5):.0f}, half of them empty at rate {0.5 ** (1 / tile**2):.5f}"
    )

# %%
fig = figure(6.6, 3.6)
ax = fig.subplots()
p = np.linspace(0, 1, 400)
for tile, line in zip((1, 2, 4, 8, 16), ("-", "--", "-.", ":", (0, (1, 3))), strict=True):
    ax.plot(
        p,
        p ** (tile * tile),
        linestyle=line,
        color=DENSE,
        linewidth=1.5,
        label=f"element, tile {tile} × {tile}",
    )
ax.plot(p, p, color=STOCHASTIC, linewidth=4, alpha=0.45, label="block, any tile")
ax.axvspan(0.3, 0.6, color=BASELINE, alpha=0.2, linewidth=0)
ax.annotate("rates that are used", (0.31, 0.93), fontsize=8, color=INK)
tidy(ax, xlabel="drop rate p", ylabel="probability", title="A tile is empty, and its work saved")
ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.55))
pages.Picture(
    fig,
    "probability of an empty tile against the drop rate: the diagonal for blocks; for element masks it falls to zero at usual rates, the faster the larger the tile",
)

# %% [markdown]
# In the band of rates that people use, a tile of 4 × 4 is hardly ever empty, a larger one never. This also answers the claim
# that a random mask makes attention $O(n \log n)$: with a constant rate $(1-p)n^2$ pairs are left, which
# is $O(n^2)$, and the tiles are *all* left. $\log_2 n$ keys a query would need the rate
# $1 - \log_2 n / n$:

# %%
for n in (128, 1024, 4096):
    print(f"n = {n:4}: log2(n) keys a query means a rate of {1 - np.log2(n) / n:.4f}")

# %% [markdown]
# Move the slider. The same rate of 0.5, and every pair as likely as before, with larger and larger blocks.
# Below it, for readers without a kernel, three of its pictures side by side.

# %%
sides = (1, 2, 4, 8, 16)
kept_by = {side: drawn("block", 0.5, tile=side, length=48) for side in sides}
frames = {}
for side, keep in kept_by.items():
    work = [block_mask.tile_density(block_mask.from_dense(keep, tile=t)) for t in sides]
    frame = figure(6.0, 2.9)
    left, right = panels(
        frame, 1, 2, titles=[f"blocks of {side} × {side}", "share of tiles to compute"]
    )
    left.imshow(keep, cmap="Blues", interpolation="nearest", vmin=0, vmax=1.3)
    tidy(left, xlabel="key", ylabel="query")
    right.bar(range(len(sides)), work, color=[STOCHASTIC if t == side else DENSE for t in sides])
    right.set_xticks(range(len(sides)), [str(t) for t in sides])
    right.set_ylim(0, 1.05)
    tidy(right, xlabel="side of the tiles of the kernel")
    frames[f"{side}",] = frame
pages.Slider(
    ["side of a block"],
    frames,
    "a block mask at rate 0.5 and the share of tiles that a kernel must compute: half, as long as its tiles are no larger than the blocks",
)

# %%
pages.Picture(
    mask_figure(
        {f"blocks of {side}": kept_by[side] for side in (1, 4, 16)},
        title="Half of the pairs each time, on average",
    ),
    "block masks with sides 1, 4 and 16 at the same rate: noise, small squares, large squares",
    dpi=80,
)

# %% [markdown]
# Blocks help only as far as they are as large as the *kernel's* tiles. Blocks of 8 under tiles of 16 are
# empty with $p^4$.
#
# ## Forward: one word for each tile
#
# The law is that of notebook 04, asked at tile indices (Eq. 5.1):
#
# $$Z_{ij} = 1[\,u(h, \lfloor i/r \rfloor, \lfloor j/c \rfloor) \ge T\,],\qquad \pi = 1 - p$$

# %%
pages.source(samplers._block)

# %% [markdown]
# Two consequences. **A query's own tile.** A token must be able to read itself, so the diagonal is
# protected. For blocks that keeps every tile that the diagonal crosses. In a causal mask of $R$ rows of
# tiles, $R$ of the $R(R+1)/2$ are certain:
#
# $$E[\text{share of all } R^2] = \frac{R + (1-p)\,R(R-1)/2}{R^2}$$

# %%
R = L // T
causal = masks.causal(L, L, align="lower_right").dense()
mask = RandomMask("block", rate=0.5, tile=T)
keep = resolve(mask, Draw(3), 0, (1, 64, L, L), keep=causal).keep[0]
tiles = block_mask.from_dense(keep, tile=T)
print(f"causal, everything kept: {(R + 1) / (2 * R):.4f}")
print(
    f"causal, rate 0.5: predicted {(R + 0.5 * R * (R - 1) / 2) / R**2:.4f}, counted over 64 heads {block_mask.tile_density(tiles):.4f}"
)

# %% [markdown]
# **It costs variance.** All keys of a block stay or go together. The mean of what is kept is the same, but
# the row is cut by fewer, larger decisions: $M/c$ of them instead of $M$. A row of 16 keys is empty with
# probability $p^{16/c}$, and what is left varies more. Below, 20 000 heads are 20 000 draws of the same
# row, renormalised (Eq. 4.10), and values that neighbours share, as neighbours in a text do.

# %%
M, heads = 16, 20_000
rng = np.random.default_rng(0)
scores = rng.normal(size=M)
v = np.sin(np.arange(M) / 2.5)
spread = {}
for tile in (1, 2, 4, 8):
    row = RandomMask("block", rate=0.5, tile=(1, tile), protect_diagonal=False)
    keep = resolve(row, Draw(4), 0, (1, heads, 1, M)).keep[0, :, 0]
    weights = np.where(keep, np.exp(scores), 0)
    total = weights.sum(axis=-1)
    live = total > 0
    outputs = (weights[live] @ v) / total[live]
    spread[tile] = outputs
    print(
        f"blocks of {tile}: kept {keep.mean():.3f}   empty rows {1 - live.mean():.4f} (p^(16/c) = {0.5 ** (M / tile):.4f})"
        f"   deviation of the output {outputs.std():.3f}"
    )

# %%
fig = figure(7.2, 2.6)
for ax, (tile, outputs) in zip(
    panels(fig, 1, 4, sharex=True, sharey=True), spread.items(), strict=True
):
    ax.hist(
        outputs,
        bins=np.linspace(-1, 1, 41),
        weights=np.full(len(outputs), 1 / len(outputs)),
        color=STOCHASTIC,
    )
    full = np.exp(scores) @ v / np.exp(scores).sum()
    ax.axvline(full, color=BASELINE, linestyle=":")
    tidy(ax, xlabel="output")
    ax.set_title(f"blocks of {tile}", fontsize=9, color=INK)
fig.suptitle(
    "The same rate of 0.5, larger blocks, wilder outputs (dotted: full attention)",
    fontsize=11,
    color=INK,
)
pages.Picture(
    fig,
    "histograms of one output under block masks of width 1, 2, 4, 8: the wider the blocks, the wider the histogram, until a few spikes are left",
    dpi=80,
)

# %% [markdown]
# With blocks of 8 only three outcomes are left besides the empty row. That is the price of skipping work:
# a stronger, coarser noise at the same rate.
#
# ## The list of tiles
#
# A kernel wants to know which tiles exist: forward row by row (Eq. 10.2), and backward column by column
# for keys and values (Eq. 10.3). So the list is stored twice. A tile in which everything is allowed needs
# no more words. A partial one has one bit for each pair (Eq. 10.4), and equal tiles share their bits: in a
# causal mask all diagonal tiles are the same triangle.

# %%
tiny = resolve(
    RandomMask("block", rate=0.5, tile=4), Draw(5), 0, (1, 1, 16, 16),
    keep=masks.causal(16, 16, align="lower_right").dense(),
).keep[0, 0]  # fmt: skip
tiles = block_mask.from_dense(tiny, tile=4)
for i in range(4):
    row = slice(*tiles.row_pointers[0, i : i + 2])
    print(f"row {i}: columns {tiles.columns[row].tolist()}, patterns {tiles.pattern[row].tolist()}")
for j in range(4):
    column = slice(*tiles.column_pointers[0, j : j + 2])
    print(f"column {j}: rows {tiles.rows[column].tolist()}")
print(
    "patterns stored:",
    len(tiles.bits),
    " words of the first:",
    [f"{w:04b}" for w in tiles.bits[0, :, 0]],
)

# %% [markdown]
# Each word reads from the right: bit $x$ is column $x$. **Memory** (Eq. 10.7), against a byte a pair and
# against the scores in float32, which no tiled kernel ever stores:

# %%
for n in (256, 1024, 2048):
    tiles_of_n = block_mask.from_tiles(
        np.argwhere(resolve(RandomMask("block", rate=0.5, tile=1), Draw(6), 0, (1, 1, n // 32, n // 32),
                            keep=masks.causal(n // 32, n // 32, align="lower_right").dense()).keep[0]),
        queries=n, keys=n, tile=32, rule=lambda b, h, i, j: j <= i,
    )  # fmt: skip
    print(
        f"n = {n:4}: list of tiles {block_mask.memory(tiles_of_n):6,} bytes   mask {n * n:9,}   scores {4 * n * n:10,}"
    )

# %% [markdown]
# ## Forward over tiles
#
# A row of tiles must not wait for all its scores. It carries three numbers for each query from tile to
# tile: the maximum so far $m$, the sum $\ell$, the weighted values $a$. That is the merge of notebook 01
# (Eq. 1.8), one tile at a time (Eq. 11.1 to 11.3):
#
# $$m' = \max(m, \max_j S),\quad \tilde P = e^{S-m'},\quad
#   \ell \leftarrow e^{m-m'}\ell + \sum_j \tilde P,\quad a \leftarrow e^{m-m'} a + \tilde P V_J,\qquad
#   O = a/\ell,\quad L = m + \log \ell$$
#
# A tile that is not listed does not occur in these lines at all. Nothing is multiplied by zero.

# %%
pages.source(tiled.tiled_attention_forward)

# %%
rng = np.random.default_rng(1)
q, k, v = rng.normal(size=(3, 2, 16, 4))
out, cache = tiled.tiled_attention_forward(q, k, v, tiles)
expanded = block_mask.to_dense(tiles)
reference, reference_cache = dense.attention_forward(q, k, v, keep=expanded)
print("equals dense attention under the same mask:", np.abs(out - reference).max() < 1e-14)
print("and so does its LSE:", np.abs(cache.lse - reference_cache.lse).max() < 1e-14)

# %% [markdown]
# Not computed, or computed and hidden? Put NaN into the keys of the first tile. A NaN that is read cannot be
# hidden by a weight of zero. So whoever turns NaN has read that tile.

# %%
spoiled = k.copy()
spoiled[:, :4] = np.nan
touched, _ = tiled.tiled_attention_forward(q, spoiled, v, tiles, check_finite=False)
print(
    "rows of tiles that list column 0:", tiles.rows[slice(*tiles.column_pointers[0, :2])].tolist()
)
print(
    "rows of tiles that turned NaN:   ",
    np.flatnonzero(np.isnan(touched[0]).reshape(4, 16).any(axis=1)).tolist(),
)

# %% [markdown]
# ## Backward over tiles
#
# Only $L$ and the output were kept. The weights come back from the scores: $P = e^{S-L}$, already divided.
# Line by line, last first; each line is that of notebook 02, for one tile:
#
# | line | what it sends back | who sums it |
# |---|---|---|
# | $O_I = \sum_J P V_J$ | $dV_J \mathrel{+}= P^T dO_I$ and $dP = dO_I V_J^T$ | a column of tiles owns $dV_J$ (Eq. 11.7) |
# | $P = e^{S-L}$ | $dS = P \odot (dP - D)$, $D = \mathrm{rowsum}(dO \odot O)$ (Eq. 11.4, 11.5) | needs the *whole* row only through $D$ |
# | $S = s\,Q_I K_J^T$ | $dQ_I \mathrel{+}= s\,dS\,K_J$ | a row of tiles owns $dQ_I$ (Eq. 11.6) |
# | | $dK_J \mathrel{+}= s\,dS^T Q_I$ | a column of tiles owns $dK_J$ (Eq. 11.7) |
#
# $D$ is why this works at all: softmax's backward needs a sum over the row, and Eq. 2.4 gets it from the
# output. No second pass, and no row of weights.

# %%
pages.source(tiled.tiled_attention_backward)

# %%
dout = cotangent(out, seed=0)
gradients = tiled.tiled_attention_backward(dout, cache)
errors = gradient_errors(
    lambda q, k, v: tiled.tiled_attention_forward(q, k, v, tiles)[0],
    {"q": gradients.q, "k": gradients.k, "v": gradients.v},
    {"q": q, "k": k, "v": v},
    dout,
)
theirs = dense.attention_backward(dout, reference_cache)
print(
    "against the complex step, below 1e-13:",
    {name: bool(error < 1e-13) for name, error in errors.items()},
)
print(
    "against dense attention, below 1e-13: ",
    {
        name: bool(np.abs(getattr(gradients, name) - getattr(theirs, name)).max() < 1e-13)
        for name in "qkv"
    },
)

# %% [markdown]
# ### Which compensation?
#
# Renormalised (Eq. 4.10), always. The inverted form keeps the *full* row in its denominator: dropped tiles
# would have to be computed to be divided by. So an inverted block mask hides work and skips none.
#
# ## Break it
#
# First: dense attention under the expanded mask. Every output is right, every gradient is right. It merely
# does all the work. Two properties notice: one weighs the memory, one spoils what may not be read.

# %%
pages.trial("sparse.tiled", "dense under the expanded mask")

# %% [markdown]
# Second: a tile that holds something holds everything. It was a real bug of a real library.

# %%
pages.trial("sparse.block_mask", "partial tiles made full")

# %% [markdown]
# Third, the mistake of many a speed-up claim: the share of *pairs* taken for the share of work.

# %%
pages.trial("sparse.block_mask", "pairs counted as work")

# %% [markdown]
# ## Where the ecosystem disagrees
#
# | who | what |
# |---|---|
# | PyTorch SDPA | `attn_mask` and `dropout_p` hide pairs; only `is_causal` tells a fused kernel of tiles that it may leave out |
# | [PyTorch FlexAttention](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html) | `BlockMask`: the same list, tiles of 128 unless told otherwise; made from a rule, asked pair by pair, so *making* it uncompiled takes a whole mask ([134756](https://github.com/pytorch/pytorch/issues/134756)) |
# | JAX | `jax.nn.dot_product_attention` hides. Its Pallas guide [skips tiles](https://docs.jax.dev/en/latest/pallas/tpu/sparse.html) by a list that is fetched first |
# | [ONNX](https://onnx.ai/onnx/operators/onnx__Attention.html) | the operator knows masks, no tiles |
# | FlashAttention | version 1 took a block mask ([arXiv:2205.14135](https://arxiv.org/abs/2205.14135)); in version 2 that call was left without its kernel ([506](https://github.com/Dao-AILab/flash-attention/issues/506)); later forward again, and asked for backward ([2011](https://github.com/Dao-AILab/flash-attention/issues/2011)) |
# | BigBird ([arXiv:2007.14062](https://arxiv.org/abs/2007.14062)) | random *tiles* for exactly this reason; drawn once for a model, not once a step |
# | DropKey ([arXiv:2208.02646](https://arxiv.org/abs/2208.02646)) | tried blocks in vision models and found them "not essential": there they were a regulariser, not a way to skip |
#
# `BlockMask` counts as we do. The same causal block mask, asked tile by tile; PyTorch lists full and
# partial tiles apart:

# %% tags=["peer"]
torch = pages.peer("torch")
if torch:
    from torch.nn.attention.flex_attention import create_block_mask

    given = torch.tensor(expanded)
    theirs = create_block_mask(
        lambda b, h, i, j: given[i, j], None, None, 16, 16, device="cpu", BLOCK_SIZE=4
    )
    partial = theirs.kv_num_blocks[0, 0].numpy()
    print(
        "PyTorch: tiles of each row ",
        partial + theirs.full_kv_num_blocks[0, 0].numpy(),
        " of them partial",
        partial,
    )
    print(
        "here:    tiles of each row ",
        np.diff(tiles.row_pointers[0]),
        " of them partial",
        np.bincount(block_mask.listed(tiles)[:, 1], tiles.pattern >= 0).astype(int),
    )
    print(
        f"PyTorch: {theirs.sparsity():.2f} % left out, here: {100 * (1 - block_mask.tile_density(tiles)):.2f} %"
    )

# %% [markdown]
# ## What to do next
#
# * Derive the probability that a tile *on the diagonal* of a causal mask is empty. It holds
#   $r(r+1)/2$ pairs. Count and compare.
# * Which rate, in blocks, has the same deviation of the output as element masks at 0.5? Change the rate in
#   the histogram cell until the numbers meet.
# * `pages.trial("sparse.tiled", "delta forgotten")`: predict first which properties notice.
# * Then [06 · Schedules](06_schedules.ipynb): how much to drop, where, and when.
