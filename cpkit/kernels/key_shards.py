"""Index keys of all DCP ranks as an all-gather leaves them, rank after rank: where each lies, by formula.

A rank sends its keys' values in a row and their scales behind, but for the scales of the last few keys: these lie in
front, as many as let every key's values start at a multiple of dim bytes in the gathered buffer, and the scales behind
them, too. There is no byte but those of the keys, so a shard never says how it is laid out: its rank and its length do.
2 ranks, 5 keys each, dim=16, a word of 4 bytes each: vvvv the values of a key, 0 .. 4 the scales of keys 0 .. 4:

    line of dim bytes    0    1    2    3    4    5    6    7    8    9   10   11   12
                      vvvv vvvv vvvv vvvv vvvv 0123 4··· ···· ···· ···· ···· ···· ··      rank 0
                      ···· ···· ···· ···· ···· ···· ·234 vvvv vvvv vvvv vvvv vvvv 01      rank 1

With W words of values in a key and L keys of each rank, rank r starts at word b = r * L * (W + 1):

    front scales    h = -r * L mod W, so that the next word starts a line; at most L
    values of j     line r * L + ceil(r * L / W) + j
    scale of j      word b + h + L * W + j,  of the last h keys word b + j - (L - h)

Where L is less than the front scales should be, values are not aligned, and keys are put into token order before they
are scored (gather_keys.py).

Token order counts keys region by region, a region being the padded keys of a request. dcp_size=2, interleave=1,
requests of 3 and 1 keys, padded shards of 2 and 1 (-- is padding):

    local_start           0 2 3             where each region starts in what one rank sends
    rank 0 | rank 1       a0 a2 b0 | a1 -- --
    token order           a0 a1 a2 --   b0 --

Each key finds its region by bisection and its place by the formula of planner/interleave.py. Places behind a region's
last key stay inside the region.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cpkit.errors import PlanError
from cpkit.kernels.checks import INT32_MAX, check_positive, check_tensor
from cpkit.kernels.index_cache import SCALE_BYTES
from cpkit.kernels.words import WORD

IndexKeys = tuple[torch.Tensor, torch.Tensor]
"""Keys side by side: values [num_keys, dim] float8_e4m3fn and scales [num_keys] fp32."""

ROWS = 64
"""Keys of one program of the kernels that move keys."""
LINE_BYTES = 128
"""A rank's own shard starts as far behind a multiple of this as it will in the gathered buffer, if dim is 128."""


def packed_bytes(num_keys: int, dim: int) -> int:
    """Bytes of keys that travel in one piece: values and scales."""
    return num_keys * (dim + SCALE_BYTES)


def _num_front_scales(rank: int, keys_per_rank: int, dim: int) -> int:
    """Last keys of a rank's shard, whose scales lie before its values."""
    return min(_wanted_in_front(rank, keys_per_rank, dim), keys_per_rank)


def _wanted_in_front(rank: int, keys_per_rank: int, dim: int) -> int:
    """As many as bring the values to a line."""
    return -rank * keys_per_rank % (dim // WORD)


@dataclass(frozen=True, slots=True, eq=False)
class KeyShards:
    """Keys of all ranks of a DCP group, to be read in token order.

    packed: [dcp_size, packed_bytes(keys_per_rank, dim)] uint8, contiguous. local_start: [num_regions + 1] int32, from 0
    to keys_per_rank. dim: values of a key, a multiple of 4. interleave in keys.
    """

    packed: torch.Tensor
    local_start: torch.Tensor
    dim: int
    interleave: int

    @property
    def dcp_size(self) -> int:
        """Ranks whose keys these are."""
        return len(self.packed)

    @property
    def keys_per_rank(self) -> int:
        """Keys of each rank, padding included."""
        return self.packed.shape[1] // packed_bytes(1, self.dim)

    @property
    def num_keys(self) -> int:
        """Keys in token order, padding included."""
        return self.dcp_size * self.keys_per_rank

    @property
    def is_aligned(self) -> bool:
        """Values of every key fill a line."""
        keys = self.keys_per_rank
        return all(_wanted_in_front(rank, keys, self.dim) <= keys for rank in range(self.dcp_size))

    def lines(self) -> torch.Tensor:
        """[lines, dim] float8_e4m3fn: the buffer, of which some lines are the values of a key if they are aligned."""
        num_lines = self.packed.numel() // self.dim
        return self.packed.view(-1)[: num_lines * self.dim].view(torch.float8_e4m3fn).view(num_lines, self.dim)

    def words(self, dtype: torch.dtype) -> torch.Tensor:
        """[words] fp32 or int32: the same buffer, of which some words are scales."""
        return self.packed.view(-1).view(dtype)

    def sizes(self) -> tuple[int, int, int, int, int]:
        """What kernels take behind local_start: num_regions, steps, dcp_size, interleave, keys_per_rank."""
        num_regions = self.local_start.numel() - 1
        return num_regions, search_steps(num_regions), self.dcp_size, self.interleave, self.keys_per_rank

    def shards(self) -> list["PackedShard"]:
        """What each rank sent, in the buffer."""
        return [
            PackedShard(row, _num_front_scales(rank, self.keys_per_rank, self.dim), self.dim)
            for rank, row in enumerate(self.packed)
        ]

    def by_rank(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [dcp_size, keys_per_rank, dim] and scales [dcp_size, keys_per_rank], copied out of the buffer."""
        shards = self.shards()
        values = torch.stack([shard.values().view(torch.uint8) for shard in shards])
        return values.view(torch.float8_e4m3fn), torch.stack([torch.cat(shard.scales()) for shard in shards])

    def check(self) -> None:
        """Raise PlanError for what the kernels cannot address; the values of local_start stay unseen, on the device."""
        check_tensor("packed", self.packed, torch.uint8, (None, None), self.packed.device)
        check_dim(self.dim)
        if self.packed.shape[1] % packed_bytes(1, self.dim) or not self.packed.is_contiguous():
            raise PlanError(
                f"packed has {self.packed.shape[1]} bytes of each rank and strides {self.packed.stride()}: it holds "
                f"whole keys of {packed_bytes(1, self.dim)} bytes, the ranks one after another"
            )
        if self.packed.data_ptr() % 16:
            raise PlanError(
                f"packed starts at byte {self.packed.data_ptr() % 16} of 16: kernels take keys from a 16-byte boundary "
                "on; call .clone() first"
            )
        check_regions(self.local_start, self.keys_per_rank, self.dcp_size, self.interleave, self.packed.device)


WorkspaceKeys = IndexKeys | KeyShards
"""Keys of a workspace: side by side, or as all DCP ranks sent them; counted in token order."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedShard:
    """What one rank sends. packed: [packed_bytes(num_keys, dim)] uint8, its values at a multiple of 16 bytes.

    num_front: its last keys, whose scales lie in front. dim: values of a key.
    """

    packed: torch.Tensor
    num_front: int
    dim: int

    @property
    def num_keys(self) -> int:
        """Keys of this rank."""
        return len(self.packed) // packed_bytes(1, self.dim)

    def values(self) -> torch.Tensor:
        """[num_keys, dim] float8_e4m3fn, in the buffer."""
        first = self.num_front * SCALE_BYTES
        return self.packed[first : first + self.num_keys * self.dim].view(torch.float8_e4m3fn).view(-1, self.dim)

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32, in the buffer, in the order of their keys: those behind the values, then those in front."""
        front = self.num_front * SCALE_BYTES
        behind = self.packed[front + self.num_keys * self.dim :]
        return behind.view(torch.float32), self.packed[:front].view(torch.float32)

    def fill(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Write all its keys: values [num_keys, dim] float8_e4m3fn, scales [num_keys] fp32."""
        self.values().view(torch.uint8).copy_(values.view(torch.uint8))
        behind, front = self.scales()
        behind.copy_(scales[: len(behind)])
        front.copy_(scales[len(behind) :])


def empty_shard(rank: int, num_keys: int, dim: int, device: torch.device) -> PackedShard:
    """A shard to be written by kernels (table_keys.py): a part of a wider buffer, so that its values are aligned."""
    check_dim(dim)
    num_front = _num_front_scales(rank, num_keys, dim)
    ahead = -num_front * SCALE_BYTES % LINE_BYTES
    wider = torch.empty(ahead + packed_bytes(num_keys, dim), dtype=torch.uint8, device=device)
    return PackedShard(wider[ahead:], num_front, dim)


def check_dim(dim: int) -> None:
    """Raise PlanError unless values and scales are whole words."""
    if dim < WORD or dim % WORD:
        raise PlanError(f"keys of {dim} values: dim must be a multiple of {WORD}, as kernels move words")


def check_regions(
    local_start: torch.Tensor, keys_per_rank: int, dcp_size: int, interleave: int, device: torch.device
) -> None:
    """Refuse what the kernels cannot address; the values of local_start stay unseen, on the device."""
    check_positive(dcp_size=dcp_size, interleave=interleave)
    check_tensor("local_start", local_start, torch.int32, (None,), device)
    check_positive(num_regions=local_start.numel() - 1)
    if not 0 <= keys_per_rank * dcp_size <= INT32_MAX - ROWS:
        raise PlanError(
            f"{keys_per_rank} keys of each of {dcp_size} ranks: a workspace holds less than 2^31 keys; split the chunk"
        )
    if interleave > INT32_MAX:
        raise PlanError(f"interleave={interleave}: kernels count it in int32; no turn is longer than a workspace")


def search_steps(num_regions: int) -> int:
    """Halvings that leave one region."""
    return (num_regions - 1).bit_length()


@triton.jit
def find_places(local_start, key, num_regions, steps, dcp_size, interleave):
    """Region of each key in token order, its place there, its owner, and its local index in the owner's region.

    Results stay inside 0 .. num_regions - 1 and 0 .. dcp_size - 1 whatever local_start holds.
    """
    region = key * 0
    last = region + (num_regions - 1)
    for _ in range(steps):
        middle = (region + last) // 2
        behind = (tl.load(local_start + middle + 1) * dcp_size <= key) & (region < last)
        region = tl.where(behind, middle + 1, region)
        last = tl.where(behind, last, middle)
    start = tl.load(local_start + region)
    at = tl.maximum(key - start * dcp_size, 0)
    turn = at // interleave
    rounds = turn // dcp_size
    local = rounds * interleave + at - turn * interleave
    return region, at, turn - rounds * dcp_size, local


@triton.jit
def shard_rows(local_start, key, num_regions, steps, dcp_size, interleave, keys_per_rank):
    """Owner of each key in token order and its row in what the owner sends, int64, in 0 .. keys_per_rank - 1."""
    region, _, owner, local = find_places(local_start, key, num_regions, steps, dcp_size, interleave)
    row = tl.minimum(tl.load(local_start + region) + local, tl.load(local_start + region + 1) - 1)
    return owner, tl.minimum(tl.maximum(row, 0), keys_per_rank - 1).to(tl.int64)


@triton.jit
def place_in_shards(owner, row, keys_per_rank, WORDS: tl.constexpr):
    """Line of a key's values where they are aligned, and word of its scale; int64."""
    before = owner.to(tl.int64) * keys_per_rank
    lines_of_scales = (before + WORDS - 1) // WORDS
    front = tl.minimum(lines_of_scales * WORDS - before, keys_per_rank)
    num_behind = keys_per_rank - front
    place = tl.where(row < num_behind, front + keys_per_rank.to(tl.int64) * WORDS + row, row - num_behind)
    return before + lines_of_scales + row, before * (WORDS + 1) + place


@triton.jit
def value_word_in_shards(owner, row, keys_per_rank, WORDS: tl.constexpr):
    """Word of a key's values, aligned or not; int64."""
    before = owner.to(tl.int64) * keys_per_rank
    front = (before + WORDS - 1) // WORDS * WORDS - before
    return before * (WORDS + 1) + tl.minimum(front, keys_per_rank) + row * WORDS
