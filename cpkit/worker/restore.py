"""Hidden rows of all query tokens, back in batch order: P=2, one prefill A..G (head_tail).

rank 0, rank 1     A B G - | C D E F      each rank's rows, padded to the fullest
restore_idx        0 1 4 5 6 7 2
batch              A B C D E F G
"""

import torch

from cpkit.comm.base import Comm
from cpkit.worker.places import Places


def gather_hidden(comm: Comm, places: Places, hidden: torch.Tensor) -> torch.Tensor:
    """[own tokens, hidden_size] -> [tokens of the batch, hidden_size], in batch order, on every rank."""
    if places.plan.topology.pcp > 1 and places.plan.padded:
        sent = hidden.new_zeros(places.plan.padded, hidden.shape[1])
        sent[: len(hidden)] = hidden
        hidden = comm.all_gather(sent, "pcp", what="hidden_rows")
    return hidden[torch.tensor(places.layout.restore_idx, device=hidden.device)]
