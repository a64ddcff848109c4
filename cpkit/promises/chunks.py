"""Cover: every (prefill query token, visible key) of a rank is scored exactly once, and gathered keys have room.

The pairs of a row are a rectangle; the chunks' key spans tile its one side, their runs the other:

    row's keys      0 ........ 8 ........ 10        spans [0, 8) and [8, 10)
    query 0, 1      chunk 1    | chunk 2            run [0, 2)
    query 2, 3      chunk 1    | chunk 2            run [2, 4)
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cpkit.arrays import BoolArray, IntArray, prefix_sum, spread
from cpkit.promises.compare import by_key, first
from cpkit.promises.held import Held, Replica
from cpkit.promises.violation import Violation


class _Pairs(NamedTuple):
    """Every row of every chunk, [pairs] int64 each, in chunk order."""

    chunk: IntArray
    row: IntArray


class _Chunks(NamedTuple):
    """Chunks of one ratio as columns, [chunks] each, beside the rows they are made of.

    tokens, keys: [prefill rows] int64, query tokens of each row and keys that its last token sees.
    """

    row_start: IntArray
    row_stop: IntArray
    key_start: IntArray
    key_stop: IntArray
    num_keys: IntArray
    num_queries: IntArray
    run: IntArray
    last_span: BoolArray
    tokens: IntArray
    keys: IntArray


def cover_chunks(replica: Replica, unsound: set[int]) -> Iterator[Violation]:
    """Mark off rows, keys and query tokens of each rank's chunks. unsound: ranks whose rows cannot be counted."""
    for alike in by_key(replica.ranks, lambda held: (held.own, held.shared)):
        if alike[0].number in unsound:
            continue
        numbers = tuple(held.number for held in alike)
        for ratio in alike[0].plan.model.ratios:
            for rule, detail in _faults(alike[0], ratio):
                yield Violation("cover", rule, numbers, f"ratio {ratio}: {detail}")


def gathers_keys(held: Held) -> bool:
    """Prefill chunks gather whole requests over the DCP group, the same on each of its ranks."""
    return held.plan.topology.pcp > 1 and held.plan.topology.dcp > 1


def _faults(held: Held, ratio: int) -> Iterator[tuple[str, str]]:
    """Rules broken by the chunks of one ratio, with the first place."""
    if ratio not in held.rank.chunks:
        yield "spans", "no chunks planned"
        return
    chunks = _columns(held, ratio)
    bad = (chunks.row_start < 0) | (chunks.row_stop <= chunks.row_start) | (chunks.row_stop > len(chunks.tokens))
    if (at := first(bad)) is not None:
        rows = f"[{chunks.row_start[at]}, {chunks.row_stop[at]})"
        yield "spans", f"chunk {at} takes rows {rows} of {len(chunks.tokens)} prefill rows"
        return
    num_rows = chunks.row_stop - chunks.row_start
    pairs = _Pairs(np.repeat(np.arange(len(num_rows)), num_rows), spread(num_rows, chunks.row_start))
    yield from _spans(chunks, pairs)
    yield from _runs(held, ratio, chunks)
    if gathers_keys(held):
        yield from _gathers(held, ratio)
    else:
        yield from _keys(held, ratio, chunks, pairs)


def _columns(held: Held, ratio: int) -> _Chunks:
    names = _Chunks._fields[:7]
    planned = held.rank.chunks[ratio]
    table = np.array([[getattr(chunk, name) for name in names] for chunk in planned], np.int64).reshape(-1, len(names))
    last_span = np.array([chunk.last_span for chunk in planned], np.bool_)
    prefill = slice(held.rank.rows.num_decodes, None)
    return _Chunks(
        **dict(zip(names, table.T, strict=True)),
        last_span=last_span,
        tokens=held.rank.rows.num_tokens[prefill],
        keys=held.rank.rows.seq_lens[prefill] // ratio,
    )


def _spans(chunks: _Chunks, pairs: _Pairs) -> Iterator[tuple[str, str]]:
    """The spans of each row start at key 0, follow one another and reach its last visible key; the last one says so."""
    by_row = np.argsort(pairs.row, kind="stable")
    chunk, row = pairs.chunk[by_row], pairs.row[by_row]
    opens, closes = np.ones(len(row), np.bool_), np.ones(len(row), np.bool_)
    opens[1:] = closes[:-1] = row[1:] != row[:-1]
    start, stop = chunks.key_start[chunk], chunks.key_stop[chunk]
    due = np.zeros(len(row), np.int64)
    due[1:] = np.where(opens[1:], 0, stop[:-1])
    if (at := first(start != due)) is not None:
        yield "spans", f"chunk {chunk[at]} scores row {row[at]} from key {start[at]}, due from key {due[at]}"
    if (at := first(closes & (stop < chunks.keys[row]))) is not None:
        yield (
            "spans",
            f"row {row[at]} sees {chunks.keys[row[at]]} keys, its last chunk {chunk[at]} ends at key {stop[at]}",
        )
    if (at := first(chunks.last_span[chunk] != closes)) is not None:
        yield (
            "last_span",
            f"chunk {chunk[at]}, row {row[at]}: last_span={chunks.last_span[chunk[at]]}, but it is {closes[at]}",
        )
    absent = (chunks.tokens > 0) & (chunks.keys > 0) & (np.bincount(row, minlength=len(chunks.tokens)) == 0)
    if (at := first(absent)) is not None:
        yield "spans", f"row {at} with {chunks.tokens[at]} query tokens and {chunks.keys[at]} keys is in no chunk"


def _runs(held: Held, ratio: int, chunks: _Chunks) -> Iterator[tuple[str, str]]:
    """The runs of each chunk tile its queries, and those are its rows' tokens (with gathers: at least those)."""
    if (at := first(chunks.run < 1)) is not None:
        yield "runs", f"chunk {at} scores runs of {chunks.run[at]} query tokens"
        return
    starts = prefix_sum(chunks.tokens)
    tokens = starts[chunks.row_stop] - starts[chunks.row_start]
    wrong = chunks.num_queries < tokens if gathers_keys(held) else chunks.num_queries != tokens
    if (at := first(wrong)) is not None:
        yield "runs", f"chunk {at} plans {chunks.num_queries[at]} query tokens, its rows have {tokens[at]}"
    tried: set[tuple[int, int]] = set()
    for at, chunk in enumerate(held.rank.chunks[ratio]):
        if (chunk.num_queries, chunk.run) in tried:
            continue
        tried.add((chunk.num_queries, chunk.run))
        due = 0
        for start, stop in chunk.runs():
            if start != due or not start < stop <= start + chunk.run:
                break
            due = stop
        if due != chunk.num_queries:
            yield "runs", f"runs of {chunk.run} cover {due} of the {chunk.num_queries} query tokens of chunk {at}"
            return


def _keys(held: Held, ratio: int, chunks: _Chunks, pairs: _Pairs) -> Iterator[tuple[str, str]]:
    """Without gathers a chunk's keys are its rows' keys inside its span; under DCP spans start with a round."""
    if held.rank.gathers.get(ratio):
        yield "gathers", f"{len(held.rank.gathers[ratio])} gathers, but with pcp=1 or dcp=1 nothing is gathered"
    if not len(chunks.run):
        return
    start, stop = chunks.key_start[pairs.chunk], chunks.key_stop[pairs.chunk]
    topology = held.plan.topology
    round_keys = topology.dcp * max(1, topology.interleave // ratio)
    if topology.dcp > 1 and (at := first(chunks.key_start % round_keys != 0)) is not None:
        yield (
            "spans",
            f"chunk {at} starts at key {chunks.key_start[at]}, inside a round of the ranks' turns ({round_keys} keys)",
        )
    seen = np.clip(chunks.keys[pairs.row], start, stop) - start
    num_keys = np.add.reduceat(seen, prefix_sum(chunks.row_stop - chunks.row_start)[:-1])
    if (at := first(chunks.num_keys != num_keys)) is not None:
        yield "chunk_keys", f"chunk {at} plans {chunks.num_keys[at]} keys, its rows have {num_keys[at]} in its span"


def _gathers(held: Held, ratio: int) -> Iterator[tuple[str, str]]:
    """One gather a chunk, each with room for every key of its requests on every rank."""
    chunks, gathers = held.rank.chunks[ratio], held.rank.gathers.get(ratio, ())
    if len(gathers) != len(chunks):
        yield "gathers", f"{len(gathers)} gathers for {len(chunks)} chunks"
        return
    for at in range(len(chunks)):
        if fault := _gather_fault(held, ratio, at):
            yield "gathers", f"chunk {at}: {fault}"
            return


def _gather_fault(held: Held, ratio: int, at: int) -> str | None:
    """What is wrong with one gather, or None."""
    chunk, gather = held.rank.chunks[ratio][at], held.rank.gathers[ratio][at]
    dcp_size, turn = held.plan.topology.dcp, max(1, held.plan.topology.interleave // ratio)
    if (gather.dcp_size, gather.interleave) != (dcp_size, turn):
        return f"dcp_size={gather.dcp_size}, interleave={gather.interleave} keys; the shards have {dcp_size} and {turn}"
    row = held.rank.rows.num_decodes
    req = held.rank.rows.req[row + chunk.row_start : row + chunk.row_stop]
    opens = np.ones(len(req), np.bool_)
    opens[1:] = req[1:] != req[:-1]
    region_req = req[opens]
    if len(gather.row_region) != len(req) or (gather.row_region != np.cumsum(opens) - 1).any():
        return (
            f"regions {gather.row_region[:8].tolist()} of the rows of requests {req[:8].tolist()}: one region a request"
        )
    if len(gather.shard_keys) != len(region_req):
        return f"{len(gather.shard_keys)} regions for {len(region_req)} requests"
    if chunk.key_start % (dcp_size * turn) or gather.first_local * dcp_size != chunk.key_start:
        return f"keys from {chunk.key_start}, shards from {gather.first_local}: turns are {dcp_size} x {turn} keys"
    keys = np.minimum(held.plan.batch.seq_lens[region_req] // ratio, chunk.key_stop) - chunk.key_start
    due = first_rank_keys(keys, dcp_size, turn)
    if (region := first(gather.shard_keys < due)) is not None:
        sent = f"{due[region]} keys of request {region_req[region]}"
        return f"region {region} has room for {gather.shard_keys[region]} keys a rank, the first rank sends {sent}"
    if (total := sum(gather.shard_keys.tolist()) * dcp_size) != chunk.num_keys:
        return f"gathers {total} keys, the chunk plans {chunk.num_keys}"
    return None


def first_rank_keys(keys: IntArray, dcp_size: int, turn: int) -> IntArray:
    """[n] int64, how many of some keys, dealt from the start of a round, the first rank gets: the most of all ranks.

    dcp_size=2, turn=2:   keys        0 1 2 3 4 5 6 7
                          first rank  0 1 2 2 2 3 4 4
    """
    rounds, rest = np.divmod(np.maximum(keys, 0), dcp_size * turn)
    most: IntArray = rounds * turn + np.minimum(rest, turn)
    return most
