"""Where the keys of gathered shards lie: the formulas against a layout made byte by byte."""

import pytest
import torch

from cpkit.errors import PlanError
from cpkit.kernels.key_shards import KeyShards, empty_shard, packed_bytes
from tests.kernels.gathered import lay_out, starts

EDGES = [0, 1, 7, 8, 31, 32, 33, 63, 64, 65]


def key(rank, at, dim):
    return [(rank * 50 + at) % 199 + word % 50 for word in range(dim)], rank * 1000 + at + 0.5


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("dim", "num_keys"), [*((128, keys) for keys in EDGES), (36, 5), (36, 9), (12, 2), (4, 3)])
def test_values_start_lines_and_scales_lie_around_them(num_ranks, dim, num_keys):
    ranks = [[key(rank, at, dim) for at in range(num_keys)] for rank in range(num_ranks)]
    packed = torch.tensor(lay_out(ranks, dim), dtype=torch.uint8).view(num_ranks, packed_bytes(num_keys, dim))
    shards = KeyShards(packed, starts([num_keys]), dim, 1)
    shards.check()
    assert (shards.dcp_size, shards.keys_per_rank, shards.num_keys) == (num_ranks, num_keys, num_ranks * num_keys)
    if not num_keys:
        assert shards.is_aligned
        return
    values, scales = shards.by_rank()
    lines, words, line_words = shards.lines().view(torch.uint8), shards.words(torch.float32), dim // 4
    found_lines = []
    for rank, keys in enumerate(ranks):
        assert values[rank].view(torch.uint8).tolist() == [one for one, _ in keys]
        assert scales[rank].tolist() == [scale for _, scale in keys]
        before = rank * num_keys
        front = min(-before % line_words, num_keys)
        for at, (one, scale) in enumerate(keys):
            is_behind = at < num_keys - front
            place = front + num_keys * line_words + at if is_behind else at - (num_keys - front)
            assert words[before * (line_words + 1) + place] == scale
            line = before - -before // line_words + at
            found_lines.append(line < len(lines) and lines[line].tolist() == one)
    assert shards.is_aligned == all(found_lines)


@pytest.mark.parametrize("num_keys", EDGES)
def test_a_shard_to_be_sent_has_aligned_values(num_keys):
    for rank in range(4):
        shard = empty_shard(rank, num_keys, 128, torch.device("cpu"))
        assert shard.num_keys == num_keys and shard.packed.is_contiguous()
        if num_keys:
            assert sum(map(len, shard.scales())) == num_keys and shard.values().shape == (num_keys, 128)
            assert shard.values().data_ptr() % 16 == 0


def test_keys_of_broken_words_are_refused():
    with pytest.raises(PlanError, match="keys of 6 values: dim must be a multiple of 4"):
        empty_shard(0, 2, 6, torch.device("cpu"))
