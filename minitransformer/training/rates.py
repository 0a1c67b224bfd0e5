"""Learning rates as functions of the step.

    cosine   η_t = η (t + 1) / T_w  for t < T_w,  then
             η_t = η_min + ½ (η - η_min) (1 + cos π (t - T_w) / (T - T_w))  (Eq. 16.24)
    inverse square root   η_t = W^-½ min((t + 1)^-½, (t + 1) T_w^-1.5)  (Eq. 16.25)

t = 0 is the first update. arXiv:1608.03983, arXiv:1706.03762.
"""

import math


def cosine_rate(
    step: int, *, peak: float, steps: int, warmup: int = 0, final_fraction: float = 0.0
) -> float:
    """Rise over `warmup` steps to `peak`, then fall along a cosine to `peak · final_fraction`,
    where it stays after `steps`  (Eq. 16.24)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    if not (step >= 0 and steps >= 1 and 0 <= warmup <= steps):
        raise ValueError(
            f"step must be >= 0, steps >= 1 and 0 <= warmup <= steps, got {step}, {steps}, {warmup}"
        )
    if not 0 <= peak < math.inf:
        raise ValueError(f"peak must be finite and at least 0, got {peak}")
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction must lie in [0, 1], got {final_fraction}")
    if step < warmup:
        return peak * (step + 1) / warmup
    low = peak * final_fraction
    if step >= steps or steps == warmup:
        return low
    share = (step - warmup) / (steps - warmup)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * share))


def inverse_root_rate(step: int, *, width: int, warmup: int) -> float:
    """The rate of the first Transformer  (Eq. 16.25)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    if not (step >= 0 and width >= 1 and warmup >= 1):
        raise ValueError(f"step must be >= 0, width and warmup >= 1, got {step}, {width}, {warmup}")
    t = step + 1
    return width**-0.5 * min(t**-0.5, t * warmup**-1.5)
