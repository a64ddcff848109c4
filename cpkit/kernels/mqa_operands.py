"""What the kernels of the indexer logits score, as one value: queries, keys and the ranges of the query tokens."""

from dataclasses import dataclass

import torch

from cpkit.errors import PlanError
from cpkit.kernels.checks import INT32_MAX, check_ranges, check_tensor
from cpkit.kernels.gpu_kind import gpu_kind
from cpkit.kernels.key_shards import KeyShards, WorkspaceKeys
from cpkit.kernels.words import WORD

HEAD_DIM = 128
"""Values of an index head, and of a key, in the kernels of backend='triton'."""
ALIGNMENT = 16
"""Bytes that a kernel reads at once: rows of q, k and weights start at multiples of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """M query tokens against N keys; mqa_logits.py has the formula.

    q: [M, H, D] fp8 e4m3, weights: [M, H] fp32; keys: values [N, D] fp8 e4m3 and scales [N] fp32, or the N keys of
    shards; key_start, key_end: [M] int32.
    """

    q: torch.Tensor
    keys: WorkspaceKeys
    weights: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor

    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """In the order in which every kernel takes them; of shards the buffer, as rows of values and as scales."""
        return self.q, *self.key_memory(), self.weights, self.key_start, self.key_end

    def key_memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales side by side, or all lines and all words of the buffer that holds them."""
        if isinstance(self.keys, KeyShards):
            return self.keys.lines(), self.keys.words(torch.float32)
        return self.keys

    @property
    def num_keys(self) -> int:
        """N."""
        return self.keys.num_keys if isinstance(self.keys, KeyShards) else len(self.keys[1])

    def places(self) -> tuple[torch.Tensor, int, int, int, int, int]:
        """What kernels find the keys of shards by, local_start and KeyShards.sizes(); else what they do not read."""
        if isinstance(self.keys, KeyShards):
            return self.keys.local_start, *self.keys.sizes()
        return self.key_start, 0, 0, 0, 0, 0

    def row_units(self) -> tuple[int, int, int]:
        """From row to row of q, k and weights, in units of ALIGNMENT bytes."""
        q, weights = self.q.stride(0), self.weights.stride(0) * 4
        return q // ALIGNMENT, self.key_memory()[0].stride(0) // ALIGNMENT, weights // ALIGNMENT

    def rows(self, some: slice) -> "Operands":
        """The same keys for some of the rows."""
        return Operands(self.q[some], self.keys, self.weights[some], self.key_start[some], self.key_end[some])

    def check(self) -> None:
        """Raise PlanError unless the operands fit each other."""
        device = self.q.device
        check_tensor("q", self.q, torch.float8_e4m3fn, (None, None, None), device)
        if isinstance(self.keys, KeyShards):
            self.keys.check()  # how many there are is known of whole keys alone
        (M, H, D), N = self.q.shape, self.num_keys
        if isinstance(self.keys, KeyShards):
            if self.keys.dim != D or self.keys.packed.device != device:
                raise PlanError(
                    f"keys of {self.keys.dim} values on {self.keys.packed.device} for q of {D} values on {device}"
                )
        else:
            k, k_scale = self.keys
            check_tensor("k", k, torch.float8_e4m3fn, (N, D), device)
            check_tensor("k_scale", k_scale, torch.float32, (N,), device)
        check_tensor("weights", self.weights, torch.float32, (M, H), device)
        check_tensor("key_start", self.key_start, torch.int32, (M,), device)
        check_tensor("key_end", self.key_end, torch.int32, (M,), device)
        if device.type == "cpu":
            check_ranges(self.key_start, self.key_end)
        if N > INT32_MAX - 8192 or M * H > INT32_MAX - 512:  # positions and columns of a last, partly empty tile
            raise PlanError(f"M={M}, H={H}, N={N}: rows times heads and keys must stay below 2^31; split the chunk")

    def check_alignment(self) -> None:
        """Raise PlanError unless rows start where the kernels of backend='triton' read them."""
        if isinstance(self.keys, KeyShards) and not reads_shards(self.keys):
            raise PlanError(
                f"shards of {self.keys.keys_per_rank} keys, interleave {self.keys.interleave}: the kernels of "
                "backend='triton' on this device read them in token order alone; call gather_keys first"
            )
        for name, tensor in (("q", self.q), ("k", self.key_memory()[0]), ("weights", self.weights)):
            apart = tensor.stride(0) * tensor.element_size()
            several = len(tensor) > 1 or name == "k"  # TMA looks at the distance of a lone key, too
            if tensor.data_ptr() % ALIGNMENT or (several and apart % ALIGNMENT):
                raise PlanError(
                    f"{name} has rows {apart} bytes apart at address {tensor.data_ptr():#x}: the kernels of "
                    f"backend='triton' read {ALIGNMENT} bytes at once and want rows to start at multiples of that: "
                    "call .clone(), and keep values and scales in buffers of their own"
                )


def reads_shards(shards: KeyShards) -> bool:
    """Whether the kernels of backend='triton' score shards as they lie: values fill lines and, on Hopper, a tile of
    keys is one rank's and words are counted in int32. Other shards are put into token order first.
    """
    if shards.dim != HEAD_DIM or not shards.is_aligned:
        return False
    if gpu_kind(shards.packed.device) != "hopper":
        return True
    from cpkit.kernels.mqa_items_gluon import TILE  # Gluon exists for NVIDIA builds of Triton only

    return shards.interleave % TILE == 0 and shards.packed.numel() // WORD <= INT32_MAX
