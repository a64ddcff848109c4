"""Shapes of the kernels that spread rows over tokens, and whole metadata builds of a decode step."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.cases import Case
from benchmarks.metadata_slots import BACKENDS, same, works_of
from benchmarks.timing import Work, time_together
from cpkit.budget import Budget
from cpkit.builders.chip import chip_of
from cpkit.builders.common import RankBatch, rank_batch
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.builders.kpool import KpoolBuilder, KpoolConfig
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.kernels.decode_lens import DecodeRows, flat_decodes
from cpkit.kernels.key_ranges import ChunkRows, KeyRanges, key_ranges_gathered, key_ranges_local
from cpkit.kernels.position_slots import KeyBlocks, compact_shard_slots, gathered_slots, shard_slots
from cpkit.kernels.swa_indices import WindowTokens, draft_swa_indices, swa_indices
from cpkit.kernels.tile_schedule import tile_schedule
from cpkit.topology import Shard

BLOCK = 64
SHARD = Shard(dcp_size=8, dcp_rank=3, interleave=64)


def row_cases() -> Iterator[Case]:
    """Every kernel, at the shapes that peers were recorded at and at some that no peer has."""
    yield from _ranges(1, 65536, 131072, recorded=22.0, target=6.0)
    yield from _ranges(64, 1024, 2048, recorded=None, target=None)
    yield from _windows(1, 65536, recorded=94.0, target=14.0)
    yield from _windows(256, 256, recorded=None, target=None)
    yield from _decodes()
    yield from _positions()


def ints(*size: int, fill: int = -7) -> torch.Tensor:
    return torch.full(size, fill, dtype=torch.int32, device="cuda")


def batch_rows(num_rows: int, query_len: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    loc = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * query_len
    return loc, ints(num_rows, fill=seq_len)


def _ranges(
    num_rows: int, query_len: int, seq_len: int, recorded: float | None, target: float | None
) -> Iterator[Case]:
    tokens, keys = num_rows * query_len, num_rows * seq_len
    loc, lens = batch_rows(num_rows, query_len, seq_len)
    starts = torch.arange(num_rows + 1, device="cuda") * seq_len
    rows = ChunkRows(loc, lens, starts[:-1], starts.int())
    peer = {"vllm": recorded} if recorded else {}
    shape = f"{num_rows} x {query_len} queries, {keys} keys"
    shard = {"dcp_size": 8, "dcp_rank": 3, "interleave": 64}
    for kernel, options in ((key_ranges_gathered, {}), (key_ranges_local, shard)):
        outs = {name: KeyRanges(ints(tokens), ints(tokens), ints(keys)) for name in BACKENDS}
        works = works_of(
            lambda out, backend, kernel=kernel, options=options: kernel(
                rows, token_start=0, compress_ratio=1, **options, out=out, backend=backend
            ),
            outs,
        )
        parts = ({name: out[at] for name, out in outs.items()} for at in range(3))
        yield Case(kernel.__name__, shape, works, 8 * tokens + 4 * keys, same(*parts), peer, target)


def _windows(num_rows: int, query_len: int, recorded: float | None, target: float | None) -> Iterator[Case]:
    tokens, window, seq_len = num_rows * query_len, 128, 2 * query_len
    loc, lens = batch_rows(num_rows, query_len, seq_len)
    table = torch.randint(1, 1 << 20, (num_rows, seq_len // BLOCK), dtype=torch.int32, device="cuda")
    row = torch.arange(tokens, dtype=torch.int32, device="cuda") // query_len
    valid = torch.rand(tokens, device="cuda") < 0.99
    batch = WindowTokens(loc, lens, row, valid, table, BLOCK)
    peer, shape = {"vllm": recorded} if recorded else {}, f"{num_rows} x {query_len} tokens, window {window}"
    indices, num_keys = (
        {name: ints(tokens, window) for name in BACKENDS},
        {name: ints(tokens) for name in BACKENDS},
    )
    for kernel in (swa_indices, draft_swa_indices):
        works = works_of(
            lambda out, backend, kernel=kernel: kernel(
                batch, window_size=window, token_offset=0, indices=out[0], lens=out[1], backend=backend
            ),
            {name: (indices[name], num_keys[name]) for name in BACKENDS},
        )
        causal = kernel is swa_indices
        num_bytes = tokens * (4 * window + 9)
        yield Case(
            kernel.__name__, shape, works, num_bytes, same(indices, num_keys), peer if causal else {},
            target if causal else None,
        )  # fmt: skip


def _decodes(num_rows: int = 256, width: int = 2048) -> Iterator[Case]:
    loc = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda")
    lens = torch.randint(1, 131072, (num_rows,), dtype=torch.int32, device="cuda")
    table = torch.randint(1, 1 << 20, (num_rows, width), dtype=torch.int32, device="cuda")
    outs = {
        name: DecodeRows(ints(num_rows, 1), *(ints(num_rows) for _ in range(3)), ints(num_rows, width))
        for name in BACKENDS
    }
    works = works_of(
        lambda out, backend: flat_decodes(loc, lens, table, SHARD, out=out, backend=backend),
        outs,
    )
    parts = ({name: out[at] for name, out in outs.items()} for at in range(5))
    yield Case("flat_decodes", f"{num_rows} requests, {width} blocks each", works, 8 * num_rows * width, same(*parts))
    schedules = {name: ints(133, 2) for name in BACKENDS}
    works = works_of(lambda out, backend: tile_schedule(lens, tile=BLOCK, out=out, backend=backend), schedules)
    yield Case("tile_schedule", f"{num_rows} rows, 132 workers", works, 4 * num_rows + 8 * 133, same(schedules))


def _positions(num_tokens: int = 4096, k: int = 2048) -> Iterator[Case]:
    positions = torch.randint(-1, 131072, (num_tokens, k), dtype=torch.int32, device="cuda")
    req = torch.arange(num_tokens, dtype=torch.int32, device="cuda") % 64
    table = torch.randint(1, 1 << 20, (64, 2048), dtype=torch.int32, device="cuda")
    asked = positions, req, KeyBlocks(table, BLOCK, BLOCK), SHARD
    outs, counts = ({name: ints(*size) for name in BACKENDS} for size in ((num_tokens, k), (num_tokens,)))
    shape = f"{num_tokens} x {k} positions"
    works = works_of(lambda out, backend: shard_slots(*asked, out=out, backend=backend), outs)
    yield Case("shard_slots", shape, works, 8 * num_tokens * k, same(outs))
    works = works_of(
        lambda out, backend: compact_shard_slots(*asked, out=out[0], counts=out[1], backend=backend),
        {name: (outs[name], counts[name]) for name in BACKENDS},
    )
    yield Case("compact_shard_slots", shape, works, 8 * num_tokens * k, same(outs, counts))
    works = works_of(
        lambda out, backend: gathered_slots(positions, req, SHARD, rank_stride=1 << 20, out=out, backend=backend), outs
    )
    yield Case("gathered_slots", shape, works, 8 * num_tokens * k, same(outs))


def decode_builds(num_reqs: int = 256, rounds: int = 30) -> list[dict[str, object]]:
    """Whole metadata builds of a decode step: host and device until it is done, the host's part, graph replay."""
    rows = []
    for drafts in (0, 1):
        batch = decode_batch(num_reqs, 1 + drafts)
        works = {name: decode_build(batch, num_reqs, drafts, backend) for name, backend in BACKENDS.items()}
        for work in works.values():
            work()
        wall, host = wall_us(works, rounds)
        replay = {name: round(1e3 * ms, 1) for name, ms in time_together(works).items()}
        ratios = {"wall": wall["cpkit"] / wall["torch"], "graph": replay["cpkit"] / replay["torch"]}
        rows.append(
            {
                "work": "decode-step metadata build: indexer ratios 1 and 4, windows, kpool tail",
                "shape": f"{num_reqs} requests of {1 + drafts} tokens, dcp 8",
                "wall_us": wall,
                "host_us": host,
                "graph_replay_us": replay,
                "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
                "target_ratio": 0.5,
                "met": max(ratios.values()) <= 0.5,
            }
        )
    return rows


def decode_batch(num_reqs: int, query_len: int) -> RankBatch:
    rng = np.random.default_rng(0)
    lens = rng.integers(1000, 131072, num_reqs)
    positions = (lens[:, None] - query_len + np.arange(query_len)).ravel()
    tables = rng.integers(1, 1 << 20, (num_reqs, 2048))
    slots = rng.integers(0, 1 << 30, num_reqs * query_len)
    batch = rank_batch([query_len] * num_reqs, lens, tables, slots, positions=positions, device="cuda")
    return dataclasses.replace(batch, is_prefilling=np.zeros(num_reqs, np.bool_))


def decode_build(batch: RankBatch, num_reqs: int, drafts: int, backend: str) -> Work:
    """One call that builds the step's metadata for every kind of layer."""
    budget = Budget(
        workspace_tokens=1 << 20, max_num_batched_tokens=8192, max_num_seqs=num_reqs, num_speculative_tokens=drafts
    )
    chip = chip_of(torch.device("cuda"))
    settings = [IndexerConfig(budget, chip, SHARD, BLOCK, 2048, ratio) for ratio in (1, 4)]
    options = {"device": "cuda", "backend": backend}
    windows = SwaConfig(budget, chip, 128, BLOCK, 1 << 20, 1 << 20, (1, 4, 128), index_topk=512)
    builders = [
        *(IndexerBuilder(config, **options) for config in settings),
        SwaBuilder(windows, **options),
        KpoolBuilder(KpoolConfig(budget, 16), **options),
    ]
    return lambda: [one.build(batch) for one in builders]


def wall_us(works: dict[str, Work], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds until the device is done, and until the host is, works in turn."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            returned = time.perf_counter() - start
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start, returned))

    def median(pick: Callable[[tuple[float, float]], float]) -> dict[str, float]:
        return {name: round(1e6 * statistics.median(map(pick, times)), 1) for name, times in found.items()}

    return median(lambda pair: pair[0]), median(lambda pair: pair[1])
