"""Which tokens are equal: each token's name, from which its activations follow on whichever rank computes it.

Two requests share the KV of a common prefix only if that prefix has the same activations for both. virtual_block=2, a
prompt block that both requests begin with (named X), the rest their own:

    request 5     X X 5 5 5
    request 6     X X 6 6
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cpkit.arrays import IntArray
from cpkit.errors import PlanError

SHARED = 1 << 62
"""Names of shared blocks start here, out of reach of request ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Names of tokens.

    virtual_block: tokens of a block that can be shared. block_names: for a request id the names of its leading whole
    blocks, [n] int64 in 0 .. 2^62 - 1, equal where all tokens up to the block's end are; other tokens are named by
    their request.
    """

    virtual_block: int
    block_names: Mapping[int, IntArray] = field(default_factory=dict)

    def names(self, req_ids: IntArray, positions: IntArray) -> IntArray:
        """[n] int64, the name of the token at each position of each request; raises PlanError for a negative id."""
        if req_ids.size and (req_ids.min() < 0 or req_ids.max() >= SHARED):
            raise PlanError(f"request id {int(req_ids.min())}..{int(req_ids.max())}: ids of a run are from 0 to 2^62")
        out = req_ids.copy()
        block = positions // self.virtual_block
        for req_id in np.unique(req_ids).tolist():
            names = self.block_names.get(req_id)
            if names is None or not len(names):
                continue
            at = np.flatnonzero((req_ids == req_id) & (block < len(names)))
            out[at] = SHARED + names[block[at]]
        return out
