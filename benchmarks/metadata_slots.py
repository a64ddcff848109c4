"""Shapes of the slot, length and index kernels: one long prefill, many short rows, a plan of a million keys."""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.cases import Case
from benchmarks.timing import Work
from cpkit.arrays import IntArray
from cpkit.kernels.compressed_slots import StateBlocks, compressed_slots, packed_compressed_slots
from cpkit.kernels.dcp_local_lens import dcp_local_lens
from cpkit.kernels.deinterleave import deinterleave_idx
from cpkit.kernels.gather_lens import gather_lens
from cpkit.kernels.step_slots import StateSlots, TailSlots, TokenSlots, step_slots
from cpkit.kernels.tail_slots import tail_slots
from cpkit.kernels.token_to_req import BatchRows, token_to_req
from cpkit.planner.chunks import Chunk
from cpkit.planner.gather import plan_gather
from cpkit.topology import Shard

BACKENDS = {"cpkit": "triton", "torch": "torch"}


def slot_cases() -> Iterator[Case]:
    """Slots of one long row and of many rows, then lengths and rows of tokens."""
    yield from _slots(1, 65536, recorded=101.0, target=6.0)
    yield from _slots(64, 1024, recorded=6.9, target=6.0)
    yield from _slots(1, 1 << 20, recorded=None, target=None)
    yield from _lengths()


def plan_cases() -> Iterator[Case]:
    """The plan of a chunk of a million keys expanded on the device; from the host's plan to the device's array."""
    for num_reqs in (1, 256):
        plan = plan_gather(*rows_of_chunk(num_reqs), dcp_size=8, interleave=64)
        local_start = torch.from_numpy(plan.local_start()).cuda()
        outs = {name: torch.empty(plan.num_keys, dtype=torch.int64, device="cuda") for name in BACKENDS}
        works = works_of(
            lambda out, backend, start=local_start: deinterleave_idx(
                start, dcp_size=8, interleave=64, out=out, backend=backend
            ),
            outs,
        )
        want = torch.from_numpy(plan.deinterleave_idx())
        shape = f"{num_reqs} x {(1 << 20) // num_reqs} keys, 8 ranks"
        yield Case("deinterleave_idx", shape, works, 8 * plan.num_keys, same(outs, want=want))


def plan_to_device(rounds: int = 100) -> list[dict[str, object]]:
    """Wall-clock microseconds from the rows of a chunk to the finished array, the device waited for."""
    rows = []
    for num_reqs, recorded in ((1, 40_000.0), (256, 19_000.0)):
        chunk_rows, times, planning = rows_of_chunk(num_reqs), [], []
        for _ in range(rounds):
            start = time.perf_counter()
            plan = plan_gather(*chunk_rows, dcp_size=8, interleave=64)
            planned = time.perf_counter()
            out = torch.empty(plan.num_keys, dtype=torch.int64, device="cuda")
            local_start = torch.from_numpy(plan.local_start()).to("cuda", non_blocking=True)
            deinterleave_idx(local_start, dcp_size=8, interleave=64, out=out, backend="triton")
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
            planning.append(1e6 * (planned - start))
        assert torch.equal(out.cpu(), torch.from_numpy(plan.deinterleave_idx()))
        us = statistics.median(times)
        rows.append(
            {
                "work": "global chunk plan to the device, host and device",
                "shape": f"{num_reqs} x {(1 << 20) // num_reqs} keys, 8 ranks",
                "wall_us": round(us, 1),
                "of_which_planning_us": round(statistics.median(planning), 1),
                "recorded_us": {"vllm": recorded},
                "times_faster_than": {"vllm": round(recorded / us, 1)},
                "target_us": 200.0,
                "met": us <= 200.0,
            }
        )
    return rows


def rows_of_chunk(num_reqs: int) -> tuple[Chunk, IntArray, IntArray]:
    """One chunk of a million keys in all, one row a request: the chunk, each row's request and its shard's keys."""
    shard_keys = np.full(num_reqs, (1 << 20) // num_reqs // 8)
    chunk = Chunk(0, num_reqs, 0, (1 << 20) // num_reqs, 1 << 20, num_reqs, num_reqs)
    return chunk, np.arange(num_reqs), shard_keys


def _slots(num_rows: int, query_len: int, recorded: float | None, target: float | None) -> Iterator[Case]:
    tokens, shape = num_rows * query_len, f"{num_rows} x {query_len} tokens"
    loc = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * query_len
    lens = torch.full((num_rows,), 2 * query_len, dtype=torch.int32, device="cuda")
    table = torch.randint(1, 1 << 20, (num_rows, query_len // 32), dtype=torch.int32, device="cuda")
    rows, peer = BatchRows(loc, lens), {"vllm": recorded} if recorded else {}
    states, alone = StateBlocks(table, compress_ratio=4, states_per_block=64), Shard()
    slots, writes = (
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        torch.ones(tokens, dtype=torch.bool, device="cuda"),
    )

    def outs() -> dict[str, torch.Tensor]:
        return {name: torch.full((tokens,), 7, dtype=torch.int64, device="cuda") for name in BACKENDS}

    own, packed, tail = outs(), outs(), outs()
    works = works_of(lambda out, backend: compressed_slots(slots, rows, states, alone, out=out, backend=backend), own)
    yield Case("compressed_slots", shape, works, 16 * tokens, same(own), peer, target)

    shard = Shard(dcp_size=8, interleave=64)
    works = works_of(
        lambda out, backend: packed_compressed_slots(writes, rows, states, shard, out=out, backend=backend), packed
    )
    yield Case("packed_compressed_slots", shape, works, 9 * tokens, same(packed))

    pos = torch.arange(tokens, device="cuda") % query_len
    works = works_of(
        lambda out, backend: tail_slots(slots, pos, loc, table, kpool=16, num_tokens=tokens, out=out, backend=backend),
        tail,
    )
    yield Case("tail_slots", shape, works, 16 * tokens, same(tail))

    kinds = {name: [own[name], packed[name], tail[name]] for name in BACKENDS}
    works = works_of(
        lambda out, backend: step_slots(
            rows,
            TokenSlots(table, out[0], 64, alone),
            StateSlots(states, out[1]),
            TailSlots(table, out[2], 16),
            backend=backend,
        ),
        kinds,
    )
    yield Case("step_slots: token, state and tail", shape, works, 24 * tokens, same(own, packed, tail))


def _lengths() -> Iterator[Case]:
    tokens, num_rows = 65536, 256
    loc = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * (tokens // num_rows)
    lens = torch.randint(1, 1 << 20, (num_rows,), dtype=torch.int32, device="cuda")
    found = {name: torch.empty(tokens, dtype=torch.int32, device="cuda") for name in BACKENDS}
    works = works_of(lambda out, backend: token_to_req(loc, num_mapped=tokens, out=out, backend=backend), found)
    yield Case("token_to_req", f"{num_rows} x {tokens // num_rows} tokens", works, 4 * tokens, same(found))
    local, gather = ({name: torch.empty_like(lens) for name in BACKENDS} for _ in range(2))
    works = works_of(
        lambda out, backend: dcp_local_lens(lens, dcp_size=8, dcp_rank=3, interleave=64, out=out, backend=backend),
        local,
    )
    yield Case("dcp_local_lens", f"{num_rows} rows", works, 8 * num_rows, same(local))
    works = works_of(lambda out, backend: gather_lens(loc, lens, window_size=128, out=out, backend=backend), gather)
    yield Case("gather_lens", f"{num_rows} rows", works, 12 * num_rows, same(gather))


def works_of(call: Callable[..., None], outs: dict[str, object]) -> dict[str, Work]:
    """The same call for each backend, each into its own out."""
    return {name: lambda name=name: call(outs[name], BACKENDS[name]) for name in outs}


def same(*outs: dict[str, torch.Tensor], want: torch.Tensor | None = None) -> Callable[[], None]:
    """Kernel and torch form agree, and with what is wanted if it is known."""

    def check() -> None:
        for out in outs:
            assert torch.equal(out["cpkit"], out["torch"])
            assert want is None or torch.equal(out["cpkit"].cpu(), want)

    return check
