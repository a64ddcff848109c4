"""Cache, candidate, attention, merge and activation kernels on a GPU: the same values as on the CPU.

python tests/gpu/check_layer_kernels.py        needs CUDA; exits 0, or 1 at the first difference, which it prints
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cpkit.activations.generate import DATA_KINDS, HEAD_STREAMS, STREAMS, Generated
from cpkit.kernels.candidates import KeyOrder, global_topk, local_candidates, pack_candidates
from cpkit.kernels.fp8 import dequantize_fp8, quantize_fp8
from cpkit.kernels.index_cache import gather_index_keys, insert_index_keys
from cpkit.kernels.latent_cache import (
    gather_v4_rows,
    gather_v32_rows,
    insert_v4_rows,
    insert_v32_rows,
    pack_v4_rows,
    pack_v32_rows,
    unpack_v4_rows,
    unpack_v32_rows,
)
from cpkit.kernels.merge_lse import apply_sink, merge_lse
from cpkit.kernels.sparse_attention import KeyRange, SelectedKeys, sparse_attention, used_slots
from cpkit.kernels.table_slots import table_slots

Tensors = tuple[torch.Tensor, ...]
NUM_TOKENS, BLOCK, BLOCKS = 200, 64, 8


def randoms(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def permuted(device: str, num: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed)).to(device)


def activations(device: str) -> Tensors:
    at = torch.arange(NUM_TOKENS, device=device)
    made = []
    for data in DATA_KINDS:
        source = Generated(3, data)
        made += [source.heads(stream, 1, at // 7, at, 128, range(2, 6)) for stream in HEAD_STREAMS]
        made += [source.rows(stream, 1, at // 7, at, 130) for stream in STREAMS if stream not in HEAD_STREAMS]
    return tuple(made)


def caches(device: str) -> Tensors:
    slots = permuted(device, BLOCK * BLOCKS)[:NUM_TOKENS]
    slots[::9] = -1
    latent = randoms(device, NUM_TOKENS, 576)
    out: list[torch.Tensor] = []
    for pow2 in (False, True):
        values, scales = quantize_fp8(latent[:, :128], pow2_scales=pow2)
        cache = torch.full((BLOCKS, BLOCK * 132), 255, dtype=torch.uint8, device=device)
        insert_index_keys(cache, values, scales[:, 0], slots, block_size=BLOCK)
        got, got_scales = gather_index_keys(cache, slots, block_size=BLOCK)
        out += [cache, got.view(torch.uint8), got_scales, dequantize_fp8(values, scales)]
    cache = torch.full((BLOCKS, BLOCK * 656), 255, dtype=torch.uint8, device=device)
    insert_v32_rows(cache, pack_v32_rows(latent), slots, block_size=BLOCK)
    out += [cache, unpack_v32_rows(gather_v32_rows(cache, slots, block_size=BLOCK))]
    cache = torch.full((BLOCKS, BLOCK * 584), 255, dtype=torch.uint8, device=device)
    insert_v4_rows(cache, pack_v4_rows(latent[:, :512]), slots, block_size=BLOCK)
    out += [cache, unpack_v4_rows(gather_v4_rows(cache, slots, block_size=BLOCK))]
    loc, tables = torch.tensor([0, 70, 100], device=device), torch.tensor([[3, 1], [2, 0]], device=device).int()
    out.append(table_slots(loc, tables, torch.tensor([70, 20], device=device), 110, block_size=BLOCK))
    return tuple(out)


def candidates(device: str) -> Tensors:
    """Many ties, NaN and infinities; what each rank keeps is any k of its keys."""
    logits = randoms(device, NUM_TOKENS, 600).mul(4).round()
    logits[:, ::50], logits[:, 1::50] = float("nan"), float("-inf")
    sent = []
    for rank in range(4):
        topk = torch.stack([permuted(device, 500, seed)[:256] for seed in range(NUM_TOKENS)])
        topk[:, -rank * 20 - 1 :] = -1
        start = torch.arange(NUM_TOKENS, device=device) % 100
        sent.append(pack_candidates(*local_candidates(topk, logits, start, KeyOrder(4, rank, 16))))
    return global_topk(torch.cat(sent), 4, 256)


def attention(device: str) -> Tensors:
    query, rows, window = (
        randoms(device, *shape, seed=i) for i, shape in enumerate([(70, 16, 512), (900, 512), (90, 512)])
    )
    rows[7] = float("nan")
    indices = torch.stack([permuted(device, 1000, seed)[:128] for seed in range(70)])
    indices[:2] = -1
    slots, places = used_slots(indices, 900)
    start = torch.zeros(70, device=device).int()
    keys = [
        SelectedKeys(rows[slots], places),
        SelectedKeys(window, torch.arange(70, device=device)[:, None] - torch.arange(30, device=device)),
        KeyRange(window, start, start + torch.arange(70, device=device).int()),
    ]
    some, all_keys = (sparse_attention(query, part, value_dim=512, softmax_scale=0.04) for part in (keys[:1], keys))
    outs, lses = torch.stack([some[0], all_keys[0]]), torch.stack([some[1], all_keys[1]])
    merged = merge_lse(outs, lses, base="2")
    return *some, *all_keys, *merged, apply_sink(*merged, randoms(device, 16), base="2")


EXACT: tuple[Callable[[str], Tensors], ...] = (activations, caches, candidates)
CLOSE: tuple[Callable[[str], Tensors], ...] = (attention,)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was compared")
        return 2
    for check in (*EXACT, *CLOSE):
        tolerance = 0.0 if check in EXACT else 1e-4
        results = list(zip(check("cuda"), check("cpu"), strict=True))
        for place, (got, want) in enumerate(results):
            differ = ~torch.isclose(got.cpu(), want, rtol=tolerance, atol=tolerance, equal_nan=True)
            if differ.any():
                at = tuple(differ.nonzero()[0].tolist())
                print(f"{check.__name__}: tensor {place} at {at}: {got[at].item()} on the GPU, {want[at].item()} here")
                return 1
        print(f"{check.__name__}: {len(results)} tensors agree {'within 1e-4' if tolerance else 'bit for bit'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
