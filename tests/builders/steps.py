"""Random steps for the builders: every rank's batch of a world, and the truth about each token, placed one by one."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from cpkit.batch import Batch
from cpkit.builders.common import GatheredSlots, RankBatch, WholeRequests, rank_batch
from cpkit.planner.layout import gather_layout
from cpkit.planner.partition import partition_queries
from cpkit.planner.rows import rank_rows
from cpkit.topology import Shard
from tests import oracles

BLOCK = 8


@dataclass
class Step:
    """A step of a whole world; block tables of distinct blocks, the window cache with tables of its own."""

    batch: Batch
    pcp_size: int
    dcp_size: int
    interleave: int
    ratio: int
    strategy: str
    threshold: int
    padding: int

    def __post_init__(self):
        self.partition = partition_queries(
            self.batch.query_lens,
            self.batch.is_prefilling,
            pcp_size=self.pcp_size,
            dcp_size=self.dcp_size,
            strategy=self.strategy if self.pcp_size > 1 else "contiguous",
        )
        self.layout = gather_layout(self.partition)
        width = -(-int(self.batch.seq_lens.max(initial=1)) // BLOCK)
        self.tables = 1 + np.arange(self.batch.num_reqs * width).reshape(self.batch.num_reqs, width)
        self.rows = [
            rank_rows(self.batch, self.partition.segments(rank), self.threshold, split_extends=self.pcp_size > 1)
            for rank in range(self.pcp_size)
        ]

    def shard(self, pcp_rank, dcp_rank):
        return Shard(self.pcp_size, pcp_rank, self.dcp_size, dcp_rank, self.interleave)

    def held(self, req):
        """Per DCP rank, the states of a request in the order in which it stores them."""
        states = int(self.batch.seq_lens[req]) // self.ratio
        return oracles.deal(states, self.dcp_size, self.interleave // self.ratio if self.dcp_size > 1 else 1)

    def tokens(self, pcp_rank):
        """(request, position) of each of a rank's tokens."""
        rows = self.rows[pcp_rank]
        return list(zip(rows.reqs().tolist(), rows.positions().tolist(), strict=True))

    def flat_slots(self, dcp_rank):
        """Slot of each flat query token on one DCP rank."""
        return oracles.token_slots(
            self.batch.seq_lens.tolist(),
            self.batch.query_lens.tolist(),
            self.tables.tolist(),
            BLOCK,
            self.dcp_size,
            self.interleave,
        )[dcp_rank]

    def state_slots(self, dcp_rank):
        """Slot of the state that each flat query token completes, on one DCP rank."""
        return oracles.state_slots(
            self.batch.seq_lens.tolist(),
            self.batch.query_lens.tolist(),
            self.tables.tolist(),
            ratio=self.ratio,
            states_per_block=BLOCK // self.ratio,
            ranks=self.dcp_size,
            interleave=self.interleave,
        )[dcp_rank]

    def in_layout(self, flat):
        """Per place of the gathered layout, what the token there writes; -1 for padding and for masked copies."""
        places = zip(self.layout.gather_idx.tolist(), self.layout.writes_kv.tolist(), strict=True)
        return [flat[token] if writes else -1 for token, writes in places]

    def rank_batch(self, pcp_rank, dcp_rank, device="cpu"):
        rows = self.rows[pcp_rank]
        alone, slots = self.pcp_size == 1, self.in_layout(self.flat_slots(dcp_rank))
        own = slots[pcp_rank * self.layout.padded :][: rows.total_tokens]
        batch = rank_batch(
            rows.num_tokens,
            rows.seq_lens,
            self.tables[rows.req] if self.batch.num_reqs else np.zeros((len(rows.req), 1), int),
            own + [-1] * (self.padding if alone else 0),
            num_tokens=rows.total_tokens + (self.padding if alone else 0),
            is_prefilling=self.batch.is_prefilling[rows.req] if self.batch.num_reqs else [False],
            device=device,
        )
        return batch if alone else replace(batch, **self.pcp_fields(pcp_rank, slots, device))

    def pcp_fields(self, pcp_rank, slots, device):
        rows = self.rows[pcp_rank]
        segments = self.partition.segments(pcp_rank)
        writes = np.zeros(self.layout.padded, bool)
        writes[: rows.total_tokens] = np.repeat(segments.writes_kv, segments.count)
        lens, shares = self.batch.seq_lens, self.partition.largest_share()
        held = [len(oracles.deal(int(n), self.dcp_size, self.interleave)[0]) for n in lens]
        empty = not self.batch.num_reqs
        return {
            "row_stride": torch.tensor(rows.stride.astype(np.int32), device=device),
            "gathered": GatheredSlots(
                torch.tensor(slots, dtype=torch.int64, device=device), torch.tensor(writes, device=device)
            ),
            "requests": WholeRequests(
                rows.req,
                max_shard_lens=np.zeros(1, int) if empty else np.array(held)[rows.req],
                largest_shares=np.zeros(1, int) if empty else shares[rows.req],
            ),
        }


class TwoPassGather:
    """Ranks run one by one: a first pass collects what each sends, a second hands out all of it."""

    def __init__(self, size):
        self.size, self.sent, self.collecting = size, [], True

    def __call__(self, tensor):
        if self.collecting:
            self.sent.append(tensor.clone())
            return torch.full((self.size * len(tensor),), -7, dtype=tensor.dtype)
        assert len(self.sent) == self.size and all_equal([sent.shape for sent in self.sent])
        return torch.cat(self.sent)


@st.composite
def steps(draw, *, pcp=(1, 2, 3), dcp=(1, 2, 3), ratios=(1, 2, 4), max_reqs=3):
    ratio = draw(st.sampled_from(ratios))
    dcp_size = draw(st.sampled_from(dcp))
    interleave = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n % ratio == 0])) if dcp_size > 1 else 1
    decodes = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=max_reqs))
    prefills = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 18)), max_size=max_reqs))
    lens = [(before + new, new, before) for before, new in decodes]
    lens += [(before + new, new, before + new + 1) for before, new in prefills]
    seq, query, prompt = (list(part) for part in zip(*lens, strict=True)) if lens else ([], [], [])
    return Step(
        Batch.from_lens(seq, query, prompt),
        pcp_size=draw(st.sampled_from(pcp)),
        dcp_size=dcp_size,
        interleave=interleave,
        ratio=ratio,
        strategy=draw(st.sampled_from(["head_tail", "head_tail_even", "contiguous", "round_robin"])),
        threshold=4,
        padding=draw(st.integers(0, 3)),
    )


def all_equal(values):
    return all(value == values[0] for value in values)


__all__ = ["BLOCK", "RankBatch", "Step", "TwoPassGather", "all_equal", "steps"]
