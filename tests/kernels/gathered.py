"""Shards of keys as an all-gather leaves them, laid out byte by byte."""

import itertools

import torch

from tests import oracles
from tests.kernels.pages import GARBAGE, fp32_bytes


def lay_out(ranks, dim):
    """Bytes of all ranks' keys, (values, scale) each: scales of as few last keys ahead as let values begin lines."""
    out = []
    for keys in ranks:
        front = 0
        while front < len(keys) and (len(out) + 4 * front) % dim:
            front += 1
        scales = [fp32_bytes(scale) for _, scale in keys]
        behind = len(keys) - front
        for part in (*scales[behind:], *(values for values, _ in keys), *scales[:behind]):
            out.extend(part)
    return out


def gathered_bytes(lens, dcp_size, interleave, dim, key_of):
    """Padded shards of requests of some lengths, and [dcp_size, bytes] uint8 of all ranks; padding is NaN.

    key_of(request, position) gives dim bytes and a scale.
    """
    hands = [oracles.deal(length, dcp_size, interleave) for length in lens]
    shards = [max(map(len, held)) for held in hands]
    padding = [GARBAGE] * dim, float("nan")
    ranks = [
        [
            key_of(request, held[rank][at]) if at < len(held[rank]) else padding
            for request, (held, shard) in enumerate(zip(hands, shards, strict=True))
            for at in range(shard)
        ]
        for rank in range(dcp_size)
    ]
    return shards, torch.tensor(lay_out(ranks, dim), dtype=torch.uint8).view(dcp_size, -1)


def starts(shards, device="cpu"):
    return torch.tensor([0, *itertools.accumulate(shards)], dtype=torch.int32, device=device)
