"""Rows of scores that mislead a selection over DCP ranks, and a rank's way through it: what it must end in is a sort.

Rows of up to NUM_KEYS keys are dealt out to the ranks; a rank sees the scores of its own keys, NaN before, between and
behind them. Its shard is one key span, or several that are scored one after another, as the worker's Selector does:

    scores of a span ─► top-k ─► packed, joined with the spans before ─► all-gather ─► best of all ranks
"""

import numpy as np
import torch

from cpkit.kernels.candidates import KeyOrder
from cpkit.kernels.exchange_candidates import best_of_packed, join_packed
from cpkit.worker.score import best_keys
from tests import oracles

INF, NAN = float("inf"), float("nan")
NUM_KEYS = 900
SPANS = {"one-span": (NUM_KEYS,), "three-spans": (64, 1, NUM_KEYS - 65), "spans-of-a-page": (64,) * 15}
"""Keys of the shard in each span; shards that are shorter leave the last spans empty."""
SKEWED = 64
"""Interleave at which some of the rows have their best keys, or all, on one rank."""


def hostile_rows(k):
    """Scores by name, float32; equal ones lie on both sides of every border between shards."""
    rng, pos = np.random.default_rng(k), np.arange(NUM_KEYS)
    noise = rng.standard_normal(NUM_KEYS)
    rows = {
        "random": noise,
        "all-equal": np.full(NUM_KEYS, 2.5),
        "zeros-of-both-signs": np.where(pos % 3, 0.0, -0.0),
        "two-values": np.where(rng.random(NUM_KEYS) < 0.5, 1.0, -1.0),
        "ties-at-the-last-place": np.where(pos % 7 == 0, 3.0, np.where(pos % 2, 1.0, -2.0)),
        "rising": pos,
        "falling": -pos,
        "one-spike": np.where(pos == 777, 1e30, pos % 2),
        "minus-inf-tail": np.where(pos < k // 2, noise, -INF),
        "all-minus-inf": np.full(NUM_KEYS, -INF),
        "infinities": rng.choice([INF, -INF, 0.0], NUM_KEYS),
        "nan-and-few": np.where(pos % 5, NAN, pos % 3),
        "all-nan": np.full(NUM_KEYS, NAN),
        "best-on-one-rank": np.where(pos // SKEWED % 2, noise + 9, noise),
        "fewer-than-k": noise[: k - 1],
        "just-k": np.zeros(k),
        "one-more-than-k": np.zeros(k + 1),
        "other-shards-empty": noise[: SKEWED // 2],
        "one-key": noise[:1],
        "no-keys": noise[:0],
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def expected(row, k):
    """Positions of the k best in ascending order, -1 in front where there are fewer."""
    ranked = sorted((-float(score), pos) for pos, score in enumerate(row) if score == score)
    best = sorted(pos for _, pos in ranked[:k])
    return [-1] * (k - len(best)) + best


def select(comm, rows, k, *, interleave, spans, backend):
    """[rows, k] int64 in ascending order, as every rank of the DCP group has it after the exchange."""
    group = comm.group("dcp")
    hands = [oracles.deal(len(row), group.size, interleave)[group.place] for row in rows]
    found, first = None, 0
    for span in spans:
        held = [row[hand[first : first + span]] for row, hand in zip(rows, hands, strict=True)]
        order = KeyOrder(group.size, group.place, interleave, first)
        packed = best_keys(*scores_side_by_side(held, comm.device), k, order, backend=backend)
        found = packed if found is None else join_packed(torch.cat([found, packed]), 2, k, backend=backend)
        first += span
    gathered = comm.all_gather(found, "dcp", what="candidates")
    return best_of_packed(gathered, group.size, k, backend=backend)[1].sort(dim=1).values


def scores_side_by_side(held, device):
    """Logits [rows, keys] and the range of each row in them, as of a workspace: 3 columns of NaN around every range."""
    lens = [len(scores) for scores in held]
    start = np.cumsum([3, *(length + 3 for length in lens)])
    logits = torch.full((len(held), int(start[-1]) + 7), NAN, device=device)[:, : int(start[-1])]
    for i, scores in enumerate(held):
        logits[i, start[i] : start[i] + lens[i]] = torch.from_numpy(scores).to(device)
    bounds = torch.tensor(np.stack([start[:-1], start[:-1] + lens]), dtype=torch.int32, device=device)
    return logits, *bounds
