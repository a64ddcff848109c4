"""Prefill chunks: which rows are gathered and scored together, within the workspace and the logits budget.

Rows join a chunk in order while their keys fit the workspace and (query tokens x keys) fits the logits. A row that
alone breaks a budget stands alone and is cut: along its queries into runs, and, when its keys alone break one, along
its keys into spans, outside the runs, so that each span is gathered once.

    workspace 8 keys, logits 16:    row            0  1  2     query tokens   1  1  4     keys   3  4  10
        chunk 0    rows 0, 1        7 keys         queries [0, 2)             one run
        chunk 1    row 2            keys [0, 8)    queries [0, 2), [2, 4)     16 // 8 = 2 query tokens a run
        chunk 2    row 2            keys [8, 10)   queries [0, 2), [2, 4)
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from cpkit.arrays import IntArray, ceil_div
from cpkit.errors import PlanError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [row_start, row_stop) with keys [key_start, key_stop) of each, scored in runs of query tokens.

    key_start, key_stop: the span of a lone row's keys; 0 and the widest context where rows are whole.
    num_keys: keys that the chunk gathers, of all its rows. num_queries: query tokens, counted from the chunk's first;
    on a rank that has fewer the last runs are short or empty. run: query tokens scored at once. last_span: no later
    chunk holds further keys of these rows, so the selection of their queries is complete.
    """

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    num_keys: int
    num_queries: int
    run: int
    last_span: bool = True

    @property
    def num_runs(self) -> int:
        """Runs of query tokens, the last one shorter."""
        return int(ceil_div(self.num_queries, self.run))

    @property
    def peak_logits(self) -> int:
        """fp32 logits of the largest run."""
        return min(self.run, self.num_queries) * self.num_keys

    def runs(self) -> Iterator[tuple[int, int]]:
        """Query ranges [start, stop) in order."""
        for start in range(0, self.num_queries, self.run):
            yield start, min(start + self.run, self.num_queries)


def split_chunks(
    query_lens: IntArray, context_keys: IntArray, *, workspace_keys: int, max_logits: int, span_unit: int
) -> list[Chunk]:
    """Chunks of prefill rows in order; none of them exceeds a budget.

    query_lens, context_keys: [rows] int64, query tokens and keys (compressed states) of each row.
    workspace_keys: keys a chunk may gather; max_logits: query tokens x keys a run may score.
    span_unit: key spans are multiples of it (dcp_size * interleave, in keys).
    Raises PlanError when a budget is below one unit. A chunk without query tokens is left out.
    """

    def span(num_keys: int) -> int:
        most = min(workspace_keys, max_logits)
        if num_keys <= most:
            return num_keys
        if most < span_unit:
            raise PlanError(
                f"no key span fits: workspace={workspace_keys} keys and {max_logits} logits are below one round of "
                f"the ranks' turns, {span_unit} keys (dcp * interleave); raise the workspace or logits budget or lower "
                "interleave"
            )
        return most // span_unit * span_unit

    return _split(query_lens, context_keys, workspace_keys, max_logits, span)


def split_chunks_keeping_keys(
    query_lens: IntArray, context_keys: IntArray, *, workspace_keys: int, max_logits: int
) -> list[Chunk]:
    """The same without key spans: a row that alone breaks a budget keeps all its keys, over the workspace or not."""
    return _split(query_lens, context_keys, workspace_keys, max_logits, span=lambda num_keys: num_keys)


def _split(
    query_lens: IntArray, context_keys: IntArray, workspace_keys: int, max_logits: int, span: Callable[[int], int]
) -> list[Chunk]:
    """span: from the keys of a row that alone breaks a budget to the keys gathered at once."""
    rows_queries, rows_keys = query_lens.tolist(), context_keys.tolist()
    queries = list(accumulate(rows_queries, initial=0))
    keys = list(accumulate(rows_keys, initial=0))
    chunks: list[Chunk] = []
    row = 0
    while row < len(rows_keys):
        stop = _chunk_stop(queries, keys, row, workspace_keys, max_logits)
        if stop > row:
            num_queries = queries[stop] - queries[row]
            chunks.append(
                Chunk(
                    row_start=row,
                    row_stop=stop,
                    key_start=0,
                    key_stop=max(rows_keys[row:stop]),
                    num_keys=keys[stop] - keys[row],
                    num_queries=num_queries,
                    run=max(1, num_queries),
                )
            )
        else:
            stop = row + 1
            chunks.extend(_cut(row, rows_queries[row], rows_keys[row], span(rows_keys[row]), max_logits))
        row = stop
    return [chunk for chunk in chunks if chunk.num_queries]


def _chunk_stop(queries: list[int], keys: list[int], row: int, workspace_keys: int, max_logits: int) -> int:
    """End of the longest run of rows from `row` that keeps both budgets; `row` itself when not even one row does.

    queries, keys: of the rows before each, then of all: sums that never fall, and so does their product.
    """

    def logits(stop: int) -> int:
        return (queries[stop] - queries[row]) * (keys[stop] - keys[row])

    stop = bisect_right(keys, keys[row] + workspace_keys) - 1
    return bisect_right(range(stop + 1), max_logits, lo=row, key=logits) - 1


def _cut(row: int, num_queries: int, num_keys: int, span: int, max_logits: int) -> Iterator[Chunk]:
    """Chunks of one row that breaks a budget alone: key spans outside, query runs inside."""
    for start in range(0, num_keys, span):
        stop = min(start + span, num_keys)
        yield Chunk(
            row_start=row,
            row_stop=row + 1,
            key_start=start,
            key_stop=stop,
            num_keys=stop - start,
            num_queries=num_queries,
            run=max(1, max_logits // span),
            last_span=stop == num_keys,
        )


def widen(chunks: list[Chunk], row_bounds: IntArray) -> list[Chunk]:
    """Chunks over requests as chunks over rows: request i is rows [row_bounds[i], row_bounds[i + 1])."""
    bounds = row_bounds.tolist()
    return [replace(chunk, row_start=bounds[chunk.row_start], row_stop=bounds[chunk.row_stop]) for chunk in chunks]
