"""Which of a rank's tokens a long step verifies: those at borders, and some others."""

import numpy as np

from cpkit.arrays import IntArray
from cpkit.worker.places import Places

MOST_ROW_BORDERS, MOST_SHARD_BORDERS, MOST_OTHERS = 8, 4, 4


def sample_tokens(places: Places, seed: int) -> IntArray:
    """Own tokens to verify in a long step, sorted: the first and last of rows and chunks, tokens at the borders of
    shards, and some others. The very first and last are always among them.
    """
    if not places.num_tokens:
        return np.zeros(0, np.int64)
    rng = np.random.default_rng(seed)
    topology, rows = places.plan.topology, places.rank.rows
    start, stop = rows.query_start_loc[:-1], rows.query_start_loc[1:]
    borders = np.concatenate([start[stop > start], stop[stop > start] - 1, _chunk_borders(places)])
    turn = topology.interleave * topology.dcp
    shard_borders = np.flatnonzero(np.isin(places.position % turn, (0, turn - 1)))
    picked = [
        np.array([0, places.num_tokens - 1]),
        _some_of(rng, np.unique(borders), MOST_ROW_BORDERS),
        _some_of(rng, shard_borders, MOST_SHARD_BORDERS),
        _some_of(rng, np.arange(places.num_tokens), MOST_OTHERS),
    ]
    return np.unique(np.concatenate(picked))


def _chunk_borders(places: Places) -> IntArray:
    """First and last own token of each run of query tokens of a chunk."""
    loc, first_row = places.rank.rows.query_start_loc, places.rank.rows.num_decodes
    borders = []
    for chunks in places.rank.chunks.values():
        for chunk in chunks:
            first, last = int(loc[first_row + chunk.row_start]), int(loc[first_row + chunk.row_stop])
            starts = np.arange(first, last, chunk.run)
            borders += [starts, np.minimum(starts + chunk.run, last) - 1]
    return np.concatenate([np.zeros(0, np.int64), *borders])


def _some_of(rng: np.random.Generator, tokens: IntArray, most: int) -> IntArray:
    return tokens if len(tokens) <= most else rng.choice(tokens, most, replace=False)
