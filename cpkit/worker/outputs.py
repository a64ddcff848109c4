"""Outputs of query tokens whose keys come part by part: the window, then one key span after another."""

import torch

from cpkit.kernels.merge_lse import merge_lse
from cpkit.worker.attend import Partial


class Outputs:
    """Over the keys attended so far; `add` alone writes them.

    out: [tokens, heads, values] fp32, lse: [tokens, heads] fp32; 0 and -inf where nothing was added.
    """

    def __init__(self, num_tokens: int, num_heads: int, value_dim: int, device: torch.device) -> None:
        self.out = torch.zeros(num_tokens, num_heads, value_dim, device=device)
        self.lse = torch.full((num_tokens, num_heads), float("-inf"), device=device)

    def add(self, tokens: slice, found: Partial) -> None:
        """Merge in what further keys give to some tokens."""
        if not bool(self.lse[tokens].isneginf().all()):  # the first keys of some tokens need no merge
            outs, lses = zip((self.out[tokens], self.lse[tokens]), found, strict=True)
            found = merge_lse(torch.stack(outs), torch.stack(lses))
        self.out[tokens], self.lse[tokens] = found
