"""Kinds of mistakes: what the flags of a vector mean. Most are kinds of public reports."""

from collections.abc import Mapping
from typing import Any

FLAGS = {
    "alibi_offset": "ALiBi counted from another origin: equal in exact arithmetic, not in float16",
    "alibi_slopes": "slopes of a number of heads that is no power of two",
    "batch_dependence": "the answer depends on what else is in the batch, or on the chunk size",
    "bigbird_random": "random tiles drawn anew in evaluation, or from a part of the text",
    "bigbird_state": "one call changes what the next one does",
    "block_sparse": "tiles that are listed, full or partial, computed wrongly",
    "bwd_layout": "the backward pass reads a width or a stride that is not the forward's",
    "bwd_mask": "the backward pass masks other pairs than the forward",
    "bwd_nan": "0 · NaN in the backward pass of what was masked",
    "bwd_tail": "the backward pass at a ragged end, features combined",
    "causal_alignment": "where a causal mask stands if there are not as many queries as keys",
    "cross_attention": "the decoder's mask, window or width applied to the encoder's keys",
    "dropout_eval": "dropout that is active where nothing should be dropped",
    "dropout_rng": "a dropout mask inferred, drawn again, or drawn from the wrong seed",
    "fully_masked_row": "a query that may attend to nothing",
    "gqa_gradient": "the gradient of a shared key or value head: a sum over its query heads",
    "gqa_head_order": "which key/value head a query head reads: repeat, not tile",
    "gradient": "a gradient under a cotangent that can be read by hand",
    "head_layout": "heads and positions exchanged by a reshape without a transpose",
    "head_pruning": "numbers of heads that are no longer those of the model",
    "hostile_shape": "sizes of 1, primes, N != M, D != E: what square shapes hide",
    "index_overflow": "an index that does not fit its integer",
    "input_contract": "input that makes no sense must be refused",
    "kernel_tail": "the last, incomplete tile of keys or queries",
    "kv_cache_offset": "where a new token stands after a cache",
    "left_padding_positions": "positions of rows that are padded on the left",
    "linear_attn_normalizer": "the denominator of linear attention: padding, overflow",
    "longformer": "tokens that see all and are seen by all",
    "low_precision_accumulate": "a sum in a narrow dtype that stops growing",
    "lse": "the log-sum-exp: its base, its gradient, dead parts in a merge",
    "mask_broadcast": "a mask that is read along the wrong axis",
    "mask_combination": "several masks at once: all of them hold",
    "mask_dropped": "a mask that another option switches off",
    "mask_polarity": "what True means; a float mask multiplied where it should be added",
    "mask_value_overflow": "a large finite number in the place of minus infinity",
    "memory": "an argument is changed, or an array is read as if it lay otherwise in memory",
    "narrow_dtype": "float16 and bfloat16: stored narrow, computed in float32",
    "nondeterminism": "the same call, another answer",
    "ordinary": "random numbers that tell all indices apart",
    "packing_leak": "documents packed in one row that attend to each other",
    "performer": "the stabiliser of random features",
    "poison": "NaN and infinity where nobody may read",
    "relpos_shift": "the shift of Transformer-XL, the roll of Swin",
    "rope_cache": "tables of angles kept under a key that is too short",
    "rope_layout": "which channels turn together",
    "rope_partial": "only some of the channels turn",
    "rope_precision": "angles of large positions in a narrow dtype",
    "rope_scaling": "frequencies changed for longer texts",
    "scale": "1/√D: of which width, applied once",
    "schedule": "how much is dropped in which layer, at which step",
    "sink": "a logit that takes part in the denominator alone",
    "softcap_dropped": "a soft-cap that some path forgets",
    "softcap_formula": "c · tanh(x / c), before the mask and the bias",
    "softmax_numeric": "large logits: the maximum must be subtracted",
    "strides": "arrays that are views: transposed, sliced, broadcast",
    "t5_bucket": "which distances share a bucket of T5's bias",
    "window_cache": "a window counted in cache slots",
    "window_dropped": "a window that is not applied",
    "window_off_by_one": "a window one key too wide or too narrow",
    "zero_length": "axes of length 0",
}


def notes(flags: set[str], reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a file says about its flags, with the links of the reports."""
    found = {}
    for flag in sorted(flags):
        links = [r["url"] for r in reports.values() if r["kind"] == flag]
        found[flag] = {"description": FLAGS[flag], "links": links}
    return found
