"""The kernels that spread rows over tokens on a GPU: the CPU reference's values, whatever their inputs hold.

python tests/gpu/check_metadata_rows.py        needs CUDA; exits 0, or 1 at the first difference, which it prints

Run it under compute-sanitizer to see that nothing outside the tensors is read or written.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cpkit.kernels.decode_lens import DecodeRows, flat_decodes, native_decodes
from cpkit.kernels.key_ranges import ChunkRows, KeyRanges, key_ranges_gathered, key_ranges_local
from cpkit.kernels.position_slots import KeyBlocks, compact_shard_slots, compact_slots, gathered_slots, shard_slots
from cpkit.kernels.swa_indices import WindowTokens, draft_swa_indices, swa_indices
from cpkit.kernels.tile_schedule import tile_schedule
from cpkit.topology import Shard

SHARD = Shard(dcp_size=3, dcp_rank=1, interleave=5)
Call = tuple[str, Callable[[str, str], tuple[torch.Tensor, ...]]]
"""A name, and what writes fresh outputs on a device by a backend."""


def ints(seed: int, low: int, high: int, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def corner(values: torch.Tensor, device: str) -> torch.Tensor:
    """The values as the upper left of a wider tensor, off its 16 bytes."""
    wide = torch.full((values.shape[0] + 1, values.shape[1] + 5), 77, dtype=values.dtype, device=device)
    wide[1:, 1 : values.shape[1] + 1] = values.to(device)
    return wide[1:, 1 : values.shape[1] + 1]


def garbage(device: str, *size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(size, -99, dtype=dtype, device=device)


def boundaries(num_rows: int, most: int, seed: int) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), ints(seed, 0, most + 1, num_rows).cumsum(0).int()])


def range_calls() -> Iterator[Call]:
    for num_rows, most, lens_to in ((1, 700, 2**31 - 1), (33, 40, 300), (5, 0, 9)):
        loc, lens = boundaries(num_rows, most, 1), ints(2, 0, lens_to, num_rows)
        rows = [loc, lens, ints(3, 0, 2**33, num_rows, dtype=torch.int64), boundaries(num_rows, 20, 4)]
        stride = ints(5, 1, 9, num_rows)
        tokens, keys = int(loc[-1]) + 3, int(rows[3][-1])
        shard = {"dcp_size": 3, "dcp_rank": 2, "interleave": 20}
        for kernel, options in ((key_ranges_gathered, {}), (key_ranges_local, shard)):
            for span in ({}, {"span": (3, 50)}):

                def call(
                    device,
                    backend,
                    rows=rows,
                    stride=stride,
                    sizes=(tokens, keys),
                    kernel=kernel,
                    options=options | span,
                ):
                    out = KeyRanges(garbage(device, sizes[0]), garbage(device, sizes[0]), garbage(device, sizes[1]))
                    chunk = ChunkRows(*(part.to(device) for part in (*rows, stride)))
                    kernel(chunk, token_start=0, compress_ratio=4, **options, out=out, backend=backend)
                    return tuple(out)

                yield f"{kernel.__name__} {num_rows} rows {options | span}", call


def window_calls() -> Iterator[Call]:
    """Rows of no request, blocks below 0, contexts far behind the table."""
    for num_rows, lens_to, width in ((3, 90, 100), (3, 2**31 - 1, 130), (40, 300, 1)):
        loc, tokens = boundaries(num_rows, 9, 1), 57
        fields = [loc, ints(2, 0, lens_to, num_rows), ints(3, -2, num_rows + 2, tokens), ints(4, 0, 4, tokens) > 0]
        tables, replay, stride = ints(5, -1, 99, num_rows, 6), ints(6, -3, 60, num_rows), ints(7, 1, 4, num_rows)
        for kernel, more in (
            (swa_indices, [replay, stride]),
            (swa_indices, [None, None]),
            (draft_swa_indices, [None, None]),
        ):

            def call(device, backend, fields=fields, tables=tables, more=more, kernel=kernel, width=width):
                own = [part.to(device) for part in fields]
                more = [None if part is None else part.to(device) for part in more]
                batch = WindowTokens(*own, corner(tables, device), 16, *more)
                indices, lens = corner(garbage("cpu", 50, width), device), garbage(device, 50)
                kernel(batch, window_size=width, token_offset=7, indices=indices, lens=lens, backend=backend)
                return indices, lens

            yield f"{kernel.__name__} {num_rows} rows, window {width}, replay {more[0] is not None}", call


def decode_calls() -> Iterator[Call]:
    for num_reqs, lens_to, width in ((1, 2**31 - 1, 3), (70, 500, 300), (5, 9, 0)):
        loc, lens = boundaries(num_reqs, 3, 1), ints(2, 0, lens_to, num_reqs)
        tables, num_rows = ints(3, -1, 99, num_reqs, width), int(loc[-1]) + num_reqs + 2
        for kernel, tokens in ((flat_decodes, 1), (native_decodes, 3)):

            def call(device, backend, parts=(loc, lens, tables), rows=num_rows, kernel=kernel, tokens=tokens):
                out = DecodeRows(
                    corner(garbage("cpu", rows, tokens), device),
                    *(garbage(device, rows) for _ in range(3)),
                    corner(garbage("cpu", rows, parts[2].shape[1]), device),
                )
                args = parts[0].to(device), parts[1].to(device), corner(parts[2], device)
                shard = Shard(dcp_size=4, dcp_rank=3, interleave=8)
                kernel(*args, shard, compress_ratio=2, out=out, backend=backend)
                return tuple(out)

            yield f"{kernel.__name__} {num_reqs} requests, tables of {width}", call


def slot_calls() -> Iterator[Call]:
    """Requests and mappings of nobody, blocks below 0, positions and rows beyond 2^31."""
    for dtype, far, k in ((torch.int32, 900, 3), (torch.int64, 2**35, 1500), (torch.int32, 2**31 - 1, 1024)):
        positions = ints(1, -2, far, 9, k, dtype=dtype)
        positions[:, ::2] %= 900
        req, mapping, tables = ints(2, -2, 9, 9), ints(3, -2, 7, 7), ints(4, -1, 2**30, 5, 40)
        for mapped in (False, True):

            def cache(device, positions=positions, parts=(req, tables), mapping=mapping if mapped else None):
                own = None if mapping is None else mapping.to(device)
                blocks = KeyBlocks(corner(parts[1], device), block_size=7, block_stride=2**10 + 1, idx_mapping=own)
                return corner(positions, device), parts[0].to(device), blocks, SHARD

            def remap(device, backend, cache=cache, k=k):
                out = corner(garbage("cpu", 9, k, dtype=torch.int64), device)
                shard_slots(*cache(device), out=out, backend=backend)
                return (out,)

            def compact(device, backend, cache=cache, k=k):
                out, counts = corner(garbage("cpu", 9, k, dtype=torch.int64), device), garbage(device, 9)
                compact_shard_slots(*cache(device), out=out, counts=counts, backend=backend)
                again, recount = out.clone(), garbage(device, 9)
                again[:, 1::3] = -1
                compact_slots(again, out=again, counts=recount, backend=backend)
                return out, counts, again, recount

            yield f"shard_slots {dtype} k={k} mapped={mapped}", remap
            yield f"compact_shard_slots {dtype} k={k} mapped={mapped}", compact

        def gathered(device, backend, positions=positions, k=k):
            out = corner(garbage("cpu", 9, k, dtype=torch.int64), device)
            start = ints(5, 0, 99, 9).to(device)
            gathered_slots(corner(positions, device), start, SHARD, rank_stride=2**33, out=out, backend=backend)
            return (out,)

        yield f"gathered_slots {dtype} k={k}", gathered


def schedule_calls() -> Iterator[Call]:
    for num_rows, most in ((1, 2**31 - 1), (255, 40), (257, 2**31 - 1), (3000, 9)):
        lens, req = ints(1, -3, most, num_rows), ints(2, 0, 2, num_rows).cumsum(0).int()
        for grouped in (None, req):

            def call(device, backend, lens=lens, grouped=grouped):
                out = corner(garbage("cpu", 133, 2), device)
                group = None if grouped is None else grouped.to(device)
                tile_schedule(lens.to(device), tile=64, req=group, out=out, backend=backend)
                return (out,)

            yield f"tile_schedule {num_rows} rows, grouped {grouped is not None}", call


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for calls in (range_calls, window_calls, decode_calls, slot_calls, schedule_calls):
        compared = 0
        for name, call in calls():
            want = call("cpu", "torch")
            for again in range(2):
                for at, (expected, found) in enumerate(zip(want, call("cuda", "triton"), strict=True)):
                    if not torch.equal(expected, found.cpu()):
                        print(f"{name}: output {at}, run {again} is\n{found.cpu()}\nand on the CPU\n{expected}")
                        return 1
                    compared += 1
        print(f"{calls.__name__}: {compared} outputs equal to the reference", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
