"""From the pools that an indexer picks to the keys that a token attends: those of each pool, and always the tail.

A pool is `pool` keys in a row, whole or not picked at all. pool=4, 2 picked at most:

    num_keys    pools    keys
    10          1 0      4 5 6 7   0 1 2 3   8 9 -       the last keys, which fill no pool, are attended by all
    8           0 -      0 1 2 3   - - - -   - - -
    3           - -      - - - -   - - - -   0 1 2

pools: [num_tokens, k] int64, -1 for none; what is no complete pool of the token counts as none, whatever it is.
num_keys: [num_tokens] int64, keys that each token sees. Result: [num_tokens, k * pool + pool - 1] int64, -1 for none.
"""

import torch

from cpkit.kernels.backends import check_backend
from cpkit.kernels.checks import check_positive, check_tensor


def pool_keys_reference(pools: torch.Tensor, num_keys: torch.Tensor, *, pool: int) -> torch.Tensor:
    complete = (num_keys // pool)[:, None]
    within = torch.arange(pool, device=pools.device)
    picked = torch.where((pools >= 0) & (pools < complete), pools, -1)[:, :, None]
    members = torch.where(picked >= 0, picked * pool + within, -1).flatten(1)
    tail = complete * pool + within[:-1]
    return torch.cat([members, torch.where(tail < num_keys[:, None], tail, -1)], dim=1)


def pool_keys(pools: torch.Tensor, num_keys: torch.Tensor, *, pool: int, backend: str = "torch") -> torch.Tensor:
    """Keys of each token; those of one pool stand side by side."""
    check_backend("pool_keys", backend)
    check_positive(pool=pool)
    check_tensor("pools", pools, torch.int64, (None, None), pools.device)
    check_tensor("num_keys", num_keys, torch.int64, (pools.shape[0],), pools.device)
    return pool_keys_reference(pools, num_keys, pool=pool)
