"""Merge partial attention outputs of key shards by their LSE, and the attention sink that follows.

    top = max(lse)    weight = exp(lse - top)    out = sum(weight * out) / sum(weight)    lse = top + log(sum(weight))

Two shards, outputs 1 and 3:

    lse       0  0         out 2    lse log 2
    lse       0  -inf      out 1    lse 0         a shard without keys for this token and head
    lse    -inf  -inf      out 0    lse -inf      no shard has any

An LSE of NaN or +inf counts as -inf. What an empty shard's output holds, NaN included, has no influence, whether or not
other heads and tokens of the shard have keys. base: of the LSEs, "e" or "2" (some kernels return log2; weights of the
one read as the other are wrong without any sign of it).

outs: [num_shards, num_tokens, H, V] fp32; lses: [num_shards, num_tokens, H] fp32. Merged: the same without num_shards.
"""

import math

import torch

from cpkit.errors import ConfigError, PlanError
from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import INTS, check_tensor

LN_OF_BASE = {"e": 1.0, "2": math.log(2.0)}


def lse_weights(lses: torch.Tensor, *, base: str = "e") -> tuple[torch.Tensor, torch.Tensor]:
    """Share of each shard in the merged output, [num_shards, num_tokens, H], and the merged LSE, [num_tokens, H].

    The shares of a token and head sum to 1, or are all 0 where no shard has keys.
    """
    check_base(base)
    check_tensor("lses", lses, torch.float32, (None, None, None), lses.device)
    if not len(lses):
        raise PlanError("the LSEs of 0 shards: merge at least one")
    exp, log = (torch.exp, torch.log) if base == "e" else (torch.exp2, torch.log2)
    lses = lses.masked_fill(~lses.isfinite(), float("-inf"))
    top = lses.amax(0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = exp(lses - top)
    total = weights.sum(0)
    return weights / total.masked_fill(total == 0, 1.0), top + log(total)


def weigh_output(out: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight * out where the shard has keys, 0 where it has none: [..., V] from out [..., V] and lse, weight [...]."""
    return torch.where(lse.isfinite()[..., None], out, 0.0) * weight[..., None]


def merge_lse_reference(outs: torch.Tensor, lses: torch.Tensor, *, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    weights, lse = lse_weights(lses, base=base)
    return weigh_output(outs, lses, weights).sum(0), lse


def merge_lse(
    outs: torch.Tensor, lses: torch.Tensor, *, base: str = "e", backend: str = "torch"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE over all shards."""
    check_backend("merge_lse", backend)
    check_tensor("outs", outs, torch.float32, (*lses.shape, None), lses.device)
    return merge_lse_reference(outs, lses, base=base)


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, *, base: str = "e") -> torch.Tensor:
    """out / (1 + exp(sink - lse)): a sink takes its share of the softmax and gives no value. lse stays as it is.

    To be applied once, on the output over all keys: a sink in each shard's softmax would be counted once a shard.
    out: [num_tokens, H, V] fp32; lse: [num_tokens, H] fp32; sink: [H] fp32, a natural logit; -inf for none.
    """
    check_base(base)
    check_tensor("out", out, torch.float32, (None, None, None), out.device)
    check_tensor("lse", lse, torch.float32, tuple(out.shape[:2]), out.device)
    check_tensor("sink", sink, torch.float32, (out.shape[1],), out.device)
    keys = torch.sigmoid(lse * LN_OF_BASE[base] - sink)  # 1 / (1 + exp(sink - lse))
    return out * keys.masked_fill(lse == float("-inf"), 0.0)[..., None]


def mask_empty_rows(lse: torch.Tensor, num_keys: torch.Tensor) -> torch.Tensor:
    """lse with -inf in the rows of tokens that see no key of this shard, for kernels that leave anything there.

    By token: of a request's draft tokens some may see keys of the shard and others none.
    lse: [num_tokens, H] of any float type and strides; num_keys: [num_tokens] int32 or int64, of this shard.
    """
    check_tensor("num_keys", num_keys, INTS, (lse.shape[0],), lse.device)
    return lse.masked_fill((num_keys <= 0)[:, None], float("-inf"))


def check_base(base: str) -> None:
    """Raise ConfigError unless the base is one that kernels return."""
    if base not in LN_OF_BASE:
        raise ConfigError(f"LSE base {base!r}: it is 'e' or '2'")
