"""Keys of layers that attend all complete ones: each token's range of the rows that its rank stores."""

import numpy as np
import pytest
import torch

from cpkit.batch import Batch
from cpkit.worker.attend import all_stored_keys
from cpkit.worker.caches import make_caches
from cpkit.worker.places import Places
from tests import oracles
from tests.worker.worlds import Case

RATIO, INTERLEAVE = 128, 256


@pytest.mark.parametrize("dcp", [1, 2], ids=["alone", "dcp"])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        pytest.param([1300, 600], [3, 500], id="decode-and-prefill"),
        pytest.param([127], [127], id="one-below-a-state"),
        pytest.param([128, 129], [1, 1], id="at-and-above-a-state"),
        pytest.param([256, 512], [256, 512], id="whole-turns"),
    ],
)
def test_ranges_are_the_complete_keys_that_a_rank_stores(seq_lens, query_lens, dcp):
    case = Case("c128a", INTERLEAVE, {"tp": dcp, "dcp": dcp}, budget={"max_num_batched_tokens": 2048})
    width = -(-max(seq_lens) // (256 * dcp))
    tables = 1 + np.arange(len(seq_lens) * width, dtype=np.int32).reshape(len(seq_lens), width)
    plan = case.settings.plan(Batch.from_lens(seq_lens, query_lens, block_tables=tables))
    layer = case.model.layers[0]
    for rank in plan.ranks:
        pool = int(tables.max()) + 1
        caches = make_caches(layer, case.settings.topology, pool, torch.device("cpu"), backend="torch")
        places = Places(plan, rank, torch.device("cpu"))
        held = [oracles.deal(n // RATIO, dcp, INTERLEAVE // RATIO)[rank.dcp_rank] for n in seq_lens]
        for req, keys in enumerate(held):  # a key's values name it
            slots = [int(tables[req, i // 2]) * 2 + i % 2 for i in range(len(keys))]  # a block holds two states
            values = torch.tensor([[req + 1.0, key] for key in keys]).reshape(-1, 2).repeat(1, caches.form.dim // 2)
            caches.insert_latent(values.bfloat16(), torch.tensor(slots, dtype=torch.int64))
        group = all_stored_keys(slice(0, places.num_tokens), places, caches)
        for token, (req, position) in enumerate(zip(places.req.tolist(), places.position.tolist(), strict=True)):
            seen = group.rows[int(group.start[token]) : int(group.end[token]), -2:].tolist()
            assert seen == [[req + 1.0, key] for key in held[req] if key < (position + 1) // RATIO], (rank, token)
