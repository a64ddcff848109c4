"""A job with a fault to find: a rank without tokens returns early, and leaves the other alone in a collective.

Run: cpkit record --out logs -- torchrun --nproc-per-node 2 examples/rank_leaves.py
Then: cpkit check logs
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for num_tokens in (4, 3, 1, 4):
        step(torch.tensor(num_tokens))
    dist.destroy_process_group()


def step(num_tokens: torch.Tensor) -> None:
    """Rank 0 tells how many tokens there are; it takes the first half of them, rounded up, and both gather the keys."""
    dist.broadcast(num_tokens, src=0)
    first = -(-int(num_tokens) // 2)
    own = first if dist.get_rank() == 0 else int(num_tokens) - first
    if own == 0:
        return  # the fault: the other rank still gathers
    keys = torch.zeros(4)  # padded: all ranks send equal sizes
    dist.all_gather([torch.empty(4), torch.empty(4)], keys)


if __name__ == "__main__":
    main()
