"""Small indexer builders and batches, made by hand."""

from dataclasses import replace

import numpy as np
import torch

from cpkit.budget import Budget
from cpkit.builders.chip import Chip
from cpkit.builders.common import GatheredSlots, rank_batch
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.topology import Shard

A100, HOPPER, BLACKWELL = (Chip("cuda", family=family, num_workers=2) for family in (80, 90, 100))


def builder(*, chip=HOPPER, drafts=1, shard=None, gather_slots=None, widen_lens=None, tokens=32, seqs=8, **options):
    limits = {name: options.pop(name) for name in ("workspace_tokens", "logits_bytes") if name in options}
    budget = Budget(
        **{"workspace_tokens": 1000, **limits},
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        num_speculative_tokens=drafts,
    )
    given = {"block_size": 4, "max_blocks": 12, "shard": Shard() if shard is None else shard, **options}
    return IndexerBuilder(IndexerConfig(budget, chip, **given), gather_slots=gather_slots, widen_lens=widen_lens)


def under_pcp(step, slots, writes_kv=None):
    """A batch with the slots of all ranks' tokens."""
    writes = None if writes_kv is None else torch.tensor(writes_kv)
    return replace(step, gathered=GatheredSlots(torch.tensor(slots, dtype=torch.int64), writes))


def batch(query_lens, seq_lens, *, padding=0, tables=None, **fields):
    tables = 1 + np.arange(12 * len(seq_lens)).reshape(-1, 12) if tables is None else tables
    slots = [0] * sum(query_lens) + [-1] * padding
    return rank_batch(query_lens, seq_lens, tables, slots, **fields)
