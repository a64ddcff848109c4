"""Slot, length and index kernels on a GPU: equal to their references, inside their buffers, compiled beforehand.

python tests/gpu/check_metadata.py [--small]     needs CUDA; exits 0 and prints what was compared

Outputs lie between guards, in buffers full of garbage; row counts, offsets and strides change from case to case. With
--small a few hundred launches of small cases, for compute-sanitizer.
"""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cpkit.kernels.compressed_slots import (
    StateBlocks,
    _compressed_slots_kernel,
    _unpack_kernel,
    compressed_slots,
    packed_compressed_slots,
    unpack_compressed_slots,
)
from cpkit.kernels.dcp_local_lens import _dcp_local_lens_kernel, dcp_local_lens
from cpkit.kernels.deinterleave import _deinterleave_kernel, deinterleave_idx
from cpkit.kernels.gather_lens import _gather_lens_kernel, gather_lens
from cpkit.kernels.registry.sizes import KernelSizes
from cpkit.kernels.step_slots import StateSlots, TailSlots, TokenSlots, _step_slots_kernel, step_slots
from cpkit.kernels.tail_slots import _tail_slots_kernel, tail_slots
from cpkit.kernels.token_to_req import BatchRows, _token_to_req_kernel, token_to_req
from cpkit.kernels.warmup import warm_up
from cpkit.topology import Shard

GUARD, GARBAGE = 64, -7777
KERNELS = (
    _compressed_slots_kernel,
    _unpack_kernel,
    _dcp_local_lens_kernel,
    _deinterleave_kernel,
    _gather_lens_kernel,
    _step_slots_kernel,
    _tail_slots_kernel,
    _token_to_req_kernel,
)
WORLDS = (
    KernelSizes(block_size=64, states=((4, 64), (128, 2)), kpool=16),
    KernelSizes(block_size=64, dcp_size=3, interleave=128, states=((4, 16), (128, 1))),
    KernelSizes(block_size=16, pcp_size=2, dcp_size=8, interleave=64, states=((4, 16), (2, 8)), kpool=4),
)


class Batch:
    """Random rows: ragged, some empty; wild lengths and block ids where `hostile`."""

    def __init__(self, rng: random.Random, num_tokens: int, num_rows: int, *, hostile: bool) -> None:
        cuts = sorted(rng.randint(0, num_tokens) for _ in range(num_rows - 1))
        self.loc = int32([0, *cuts, num_tokens - rng.choice([0, 0, min(3, num_tokens)])])
        self.loc = self.loc.cummax(0).values.int()
        query_lens = self.loc.diff()
        self.lens = query_lens + torch.randint(0, 5000, (num_rows,), dtype=torch.int32, device="cuda")
        width = max(int(self.lens.max()) // 16 + 1, 1)
        wide = torch.randint(1, 1 << 20, (num_rows, width + 9), dtype=torch.int32, device="cuda")
        if hostile:
            wild = torch.randint(-(2**31), 2**31 - 1, (num_rows,), device="cuda").int()
            self.lens = torch.where(torch.rand(num_rows, device="cuda") < 0.3, wild, self.lens)
            wide = torch.where(torch.rand(wide.shape, device="cuda") < 0.3, wide % 3 - 1, wide)
            wide[rng.randrange(num_rows)] = 2**31 - 1
        self.table = wide[:, rng.randint(0, 4) :][:, : width if not hostile else rng.randint(1, width)]
        self.stride = rng.choice([None, torch.randint(1, 9, (num_rows,), dtype=torch.int32, device="cuda")])
        self.tokens, self.offset = num_tokens, rng.randint(0, 3)

    @property
    def rows(self) -> BatchRows:
        return BatchRows(self.loc, self.lens, self.stride)

    def slots(self) -> torch.Tensor:
        """A slot for each token, -1 for some; no multiple of 16 bytes behind its buffer."""
        every = torch.randint(-1, 3, (self.tokens + self.offset,), device="cuda")
        return every[self.offset :]

    def writes(self) -> torch.Tensor:
        return torch.rand(self.tokens + self.offset, device="cuda")[self.offset :] < 0.8


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Compared:
    """Runs a call with both backends, each into a garbage-filled buffer between guards."""

    def __init__(self) -> None:
        self.calls = self.values = 0

    def __call__(self, name: str, call: Callable[..., None], *sizes: int, dtype: torch.dtype = torch.int64) -> None:
        found = []
        for backend in ("torch", "triton"):
            whole = [torch.full((size + 2 * GUARD + 1,), GARBAGE, dtype=dtype, device="cuda") for size in sizes]
            outs = [buffer[GUARD + 1 :][:size] for buffer, size in zip(whole, sizes, strict=True)]
            call(*outs, backend=backend)
            for buffer, size in zip(whole, sizes, strict=True):
                outside = torch.cat([buffer[: GUARD + 1], buffer[GUARD + 1 + size :]])
                assert (outside == GARBAGE).all(), f"{name}: {backend} wrote outside its buffer"
            found.append(outs)
        for want, got in zip(*found, strict=True):
            differ = (want != got).nonzero()
            assert not len(differ), (
                f"{name}: {len(differ)} differ, first {int(differ[0])}: {want[differ[0]]} {got[differ[0]]}"
            )
            self.values += want.numel()
        self.calls += 1


def check_rows(compared: Compared, batch: Batch, world: KernelSizes, rng: random.Random) -> None:
    """Every kernel over the rows of a batch, on one rank of a deployment."""
    rows, extra, tokens = batch.rows, rng.choice([0, 1, 300]), batch.tokens
    shard = Shard(dcp_size=world.dcp_size, dcp_rank=rng.randrange(world.dcp_size), interleave=world.interleave)
    slots, writes = batch.slots(), batch.writes()
    for ratio, per_block in world.states:
        blocks = StateBlocks(batch.table, ratio, per_block)
        if world.pcp_size > 1 and world.dcp_size > 1:
            compared(
                "packed",
                lambda out, blocks=blocks, **b: packed_compressed_slots(writes, rows, blocks, shard, out=out, **b),
                tokens + extra,
            )
            compared(
                "unpack",
                lambda out, **b: unpack_compressed_slots(slots, shard, out=out, **b),
                tokens + extra,
            )
        else:
            compared(
                "compressed",
                lambda out, blocks=blocks, **b: compressed_slots(slots, rows, blocks, shard, out=out, **b),
                tokens + extra,
            )
    for kind in (None, *world.states):
        check_step(compared, batch, world, shard, kind, rng.choice([None, writes]))
    if world.kpool:
        pos = torch.randint(-2, 1 << 40, (tokens,), device="cuda")
        some = rng.randint(0, tokens)
        compared(
            "tail",
            lambda out, **b: tail_slots(
                slots, pos, batch.loc, batch.table, kpool=world.kpool, num_tokens=some, out=out, **b
            ),
            tokens,
        )
    mapped = rng.choice([0, tokens // 2, tokens, tokens + 5])
    compared(
        "token_to_req",
        lambda out, **b: token_to_req(batch.loc, num_mapped=mapped, out=out, **b),
        tokens + extra,
        dtype=torch.int32,
    )


def check_step(
    compared: Compared,
    batch: Batch,
    world: KernelSizes,
    shard: Shard,
    kind: tuple[int, int] | None,
    writes: torch.Tensor | None,
) -> None:
    """All kinds of slots in one launch."""

    def call(*outs: torch.Tensor, backend: str) -> None:
        token_out, *others = outs
        step_slots(
            batch.rows,
            TokenSlots(batch.table, token_out, world.block_size, shard),
            StateSlots(StateBlocks(batch.table, *kind), others.pop(0)) if kind else None,
            TailSlots(batch.table, others.pop(0), world.kpool) if world.kpool else None,
            writes_kv=writes,
            backend=backend,
        )

    compared("step_slots", call, *[batch.tokens] * (1 + (kind is not None) + (world.kpool > 0)))


def check_lens(compared: Compared, world: KernelSizes, rng: random.Random, num_rows: int) -> None:
    """Lengths of shards and of gathers, and the way back to token order."""
    loc = torch.randint(0, 50, (num_rows + 1,), device="cuda").cumsum(0).int()
    lens = loc.diff() + torch.randint(0, 5000, (num_rows,), dtype=torch.int32, device="cuda")
    replay, stride = rng.choice([None, lens // 2]), rng.choice([None, torch.ones_like(lens)])
    options = {"window_size": rng.choice([1, 16, 127]), "replay_start": replay, "row_stride": stride}
    compared(
        "gather_lens", lambda out, **b: gather_lens(loc, lens, **options, out=out, **b), num_rows, dtype=torch.int32
    )
    for ratio in {1, *(ratio for ratio, _ in world.states)}:
        place = {"dcp_size": world.dcp_size, "interleave": max(world.interleave // ratio, 1)}
        rank = rng.randrange(world.dcp_size)
        for dtype, longest in ((torch.int32, 2**31 - 1), (torch.int64, 2**60)):
            many = torch.randint(0, longest, (num_rows, 7), device="cuda").to(dtype)[:, 2:]
            compared(
                "dcp_local_lens",
                lambda out, many=many, place=place, rank=rank, **b: dcp_local_lens(
                    many, **place, dcp_rank=rank, out=out.view(num_rows, 5), **b
                ),
                num_rows * 5,
                dtype=dtype,
            )
        if world.pcp_size > 1 and world.dcp_size > 1:
            shards = torch.randint(0, 2000, (num_rows,), device="cuda")
            start = torch.cat([shards[:1] * 0, shards.cumsum(0)])
            compared(
                "deinterleave",
                lambda out, start=start, place=place, **b: deinterleave_idx(start, **place, out=out, **b),
                int(start[-1]) * world.dcp_size,
            )


def sizes(small: bool) -> Iterator[tuple[int, int]]:
    """Tokens and rows: around a block of the kernels, one row, more rows than tokens, a million tokens."""
    yield from ((1, 1), (3, 8), (255, 2), (256, 3), (257, 33))
    if not small:
        yield from ((5000, 1), (4096, 300), (65537, 1), (100_003, 999), (1 << 20, 7), ((1 << 20) + 1, 4097))


def compiled() -> int:
    """Kernels that Triton holds for this device."""
    return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())


def main() -> None:
    small = "--small" in sys.argv
    torch.manual_seed(0)
    rng, compared = random.Random(0), Compared()
    listed = sum(warm_up(world, torch.device("cuda")) for world in WORLDS)
    before = compiled()
    for world in WORLDS:
        for num_tokens, num_rows in sizes(small):
            for hostile in (False, True):
                check_rows(compared, Batch(rng, num_tokens, num_rows, hostile=hostile), world, rng)
            check_lens(compared, world, rng, num_rows)
    torch.cuda.synchronize()
    print(f"{compared.calls} calls, {compared.values} values equal to the references, nothing outside the buffers")
    print(f"{listed} keys listed, {before} kernels before the first step, {compiled()} after the last")
    assert before and compiled() == before, "a step compiled a kernel that the warm-up had not listed"


if __name__ == "__main__":
    main()
