"""Make the pictures of the README: python docs/pictures.py"""

from pathlib import Path

from minitransformer.attention.masks import causal
from minitransformer.philox import Draw
from minitransformer.plots.masks import random_mask_figure
from minitransformer.stochastic.samplers import RandomMask, resolve
from minitransformer.stochastic.schedules import Schedule

LAYERS, LENGTH, STEP = 5, 40, 0


def main() -> None:
    schedule = Schedule(0.5, "linear", warmup="none")
    rates = [schedule.drop_rate(layer, LAYERS, STEP, 1, 1) for layer in range(LAYERS)]
    keep = causal(LENGTH, LENGTH, align="lower_right").dense()
    shape, rows = (1, 1, LENGTH, LENGTH), {}
    for kind in ("element", "block"):
        mask = RandomMask(kind, tile=8)
        drawn = [
            resolve(mask, Draw(1), layer, shape, keep=keep, drop_rate=rate)
            for layer, rate in enumerate(rates)
        ]
        rows[kind] = [sampled.keep[0, 0] for sampled in drawn]
    titles = [f"layer {layer}: drop {float(rate):.1f}" for layer, rate in enumerate(rates)]
    figure = random_mask_figure(rows, keep, titles)
    figure.savefig(Path(__file__).parent / "masks.png", dpi=100)


if __name__ == "__main__":
    main()
