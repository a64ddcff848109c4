"""Activations without a model and without communication: any rank makes exactly the values of its own tokens.

A value follows from (seed, layer, stream, request, position, place in the vector) alone. splitmix64 gives, for a 64-bit
state and a counter, a mixed 64-bit number; each field of the key picks a number of the generator seeded by the fields
before it:

    state = seed;   for field in layer, stream, request, position:  state = splitmix64(state, field)
    word i of the vector = splitmix64(state, i)           4 values of 16 bits each, lowest bits first

Whole-number operations only, so every device, library and rank agrees to the bit. A compressed state is one vector,
keyed by its state index in the place of the position.

stream          values        exact                                  random (uniform, 16 bits)
query           [heads, dim]  -1 0 1                                 -2 .. 2
index_query     [heads, dim]  -7 .. 7, every 64th is -7 or 7         -2 .. 2
index_weights   [heads] fp32  -1 or 1, times 1, 1/2, 1/4 or 1/8      -1/64 .. 1/64
index_key       [dim]         like index_query, times 1/2, 1 or 2    -2 .. 2
latent, window  [dim]         like index_query                       -2 .. 2
hidden          [dim]         like index_query                       -2 .. 2
sink            [heads]       like index_query, one vector a layer   -2 .. 2

All are bf16 but the weights, in which softmax and head scale are contained already.

Why no sum of exact data rounds. fp8 keeps such vectors unchanged: the largest of every group is 7 times a power of two,
which makes its scale a power of two (cpkit.kernels.fp8). Then, for H index heads of D values:

    q·k            whole, at most 49 D                         D=128: 6,272
    sum of w*q·k   whole eighths, at most 49 D H               D=128, H=64: 401,408, or 3,211,264 eighths < 2^24
    times k's power of two                                     costs no bit

and the same holds for every partial sum, in whatever order: fp32 holds them all. With scaled fp8 operands all of it is
multiplied by one power of two. An attention score before the softmax scale is whole, at most 7 * 576 = 4,032; and where
2,048 keys score alike, their values sum to at most 14,336. `check_exact_sums` refuses sizes beyond.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from cpkit.errors import ConfigError
from cpkit.kernels.checks import check_tensor

STREAMS = ("query", "index_query", "index_weights", "index_key", "latent", "window", "hidden", "sink")
HEAD_STREAMS = ("query", "index_query")
DATA_KINDS = ("exact", "random")

LARGEST = 7
"""Largest whole number of exact data: 7 / 448, its fp8 scale, is a power of two."""
LEAST_GROUP = 64
"""fp8 groups are multiples of this many values; each begins with a largest one."""
WEIGHTS = (1.0, 0.5, 0.25, 0.125, -1.0, -0.5, -0.25, -0.125)
KEY_POWERS = (0.5, 1.0, 2.0)
"""What exact index keys are multiplied with, so that their fp8 scales differ."""
EIGHTHS = 8
"""Exact weights are whole multiples of 1/8."""

GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""splitmix64: the state advances by GOLDEN; then shift, exclusive or and multiply, three times."""
VALUES_PER_WORD = 4
TILE_WORDS = 1 << 20


class Activations(Protocol):
    """Where a rank's inputs come from: generated, or read from files.

    data: random where sums may round. req, position: [num_tokens] int64 on the wanted device.
    """

    @property
    def data(self) -> str:
        """exact or random."""
        ...

    def rows(self, stream: str, layer: int, req: torch.Tensor, position: torch.Tensor, dim: int) -> torch.Tensor:
        """[num_tokens, dim] of a stream with one vector a token; bf16, or fp32 for index_weights."""
        ...

    def heads(
        self, stream: str, layer: int, req: torch.Tensor, position: torch.Tensor, dim: int, heads: range
    ) -> torch.Tensor:
        """[num_tokens, len(heads), dim] bf16 of some heads of query or index_query."""
        ...


@dataclass(frozen=True, slots=True)
class Generated:
    """Activations from a seed. data: exact or random. Raises ConfigError."""

    seed: int = 0
    data: str = "exact"

    def __post_init__(self) -> None:
        if self.data not in DATA_KINDS:
            raise ConfigError(f"data {self.data!r}: it is {' or '.join(DATA_KINDS)}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed={self.seed}: it is a whole number from 0 to 2^64 - 1")

    def rows(self, stream: str, layer: int, req: torch.Tensor, position: torch.Tensor, dim: int) -> torch.Tensor:
        """One vector a token, as Activations.rows."""
        check_stream(stream, HEAD_STREAMS, wanted=False)
        if stream == "index_weights":
            return self._vectors(stream, layer, req, position, dim, range(1), torch.float32)[:, 0]
        return self._vectors(stream, layer, req, position, dim, range(1), torch.bfloat16)[:, 0]

    def heads(
        self, stream: str, layer: int, req: torch.Tensor, position: torch.Tensor, dim: int, heads: range
    ) -> torch.Tensor:
        """Vectors of some heads, as Activations.heads."""
        check_stream(stream, HEAD_STREAMS, wanted=True)
        if stream == "index_query" and self.data == "exact":
            check_exact_sums(heads.stop, dim)
        return self._vectors(stream, layer, req, position, dim, heads, torch.bfloat16)

    def _vectors(
        self,
        stream: str,
        layer: int,
        req: torch.Tensor,
        position: torch.Tensor,
        dim: int,
        heads: range,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        check_tensor("req", req, torch.int64, (None,), req.device)
        check_tensor("position", position, torch.int64, (len(req),), req.device)
        state = splitmix64(splitmix64(torch.tensor([_signed(self.seed)]), layer), STREAMS.index(stream))
        state = splitmix64(splitmix64(state.to(req.device), req), position)
        words = -(-dim // VALUES_PER_WORD)
        counter = torch.arange(heads.start * words, heads.stop * words, device=req.device)
        out = torch.empty(len(req), len(heads), dim, dtype=dtype, device=req.device)
        tile = max(1, TILE_WORDS // max(1, len(counter)))
        for start in range(0, len(req), tile):
            some = state[start : start + tile, None]
            # [tokens, heads, words * 4] int16
            lanes = splitmix64(some, counter).view(len(some), len(heads), words).view(torch.int16)[..., :dim]
            out[start : start + tile] = self._values(stream, lanes, some)
        return out

    def _values(self, stream: str, lanes: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Values of 16-bit numbers in -2^15 .. 2^15 - 1."""
        if self.data == "random":
            return lanes.float() * (2.0**-21 if stream == "index_weights" else 2.0**-14)
        if stream == "index_weights":
            return torch.tensor(WEIGHTS, device=lanes.device)[(lanes & len(WEIGHTS) - 1).long()]
        if stream == "query":
            return _whole(lanes, 1)
        values = _whole(lanes, LARGEST)
        first = values[..., ::LEAST_GROUP]
        first.copy_(torch.where(first < 0, -LARGEST, LARGEST))
        if stream == "index_key":
            return values * torch.tensor(KEY_POWERS, device=lanes.device)[(state >> 8 & 0xFF) % 3, None]
        return values


def check_exact_sums(num_heads: int, dim: int) -> None:
    """Raise ConfigError unless the logits of exact data are sums that fp32 holds in any order."""
    eighths = num_heads * dim * LARGEST**2 * EIGHTHS
    if eighths >= 1 << 24:
        most = ((1 << 24) - 1) // (LARGEST**2 * EIGHTHS)
        raise ConfigError(
            f"exact data with {num_heads} index heads of {dim} values: logits reach {eighths} eighths, and fp32 holds "
            f"whole numbers below 2^24 only; heads * values may be {most} at most, or use random data"
        )


def check_stream(stream: str, streams: tuple[str, ...], *, wanted: bool) -> None:
    """Raise ConfigError unless the stream exists and is (or is not) among some."""
    fit = [name for name in STREAMS if (name in streams) == wanted]
    if stream not in fit:
        raise ConfigError(f"stream {stream!r}: this call is for {', '.join(fit)}")


def splitmix64(state: torch.Tensor, counter: torch.Tensor | int) -> torch.Tensor:
    """Number `counter` (from 0) of the generator that starts at `state`; int64 as 64 bits, broadcast, wraps around."""
    if isinstance(counter, int):
        mixed = state + _signed((counter + 1) * GOLDEN)
    else:
        mixed = state + (counter + 1) * _signed(GOLDEN)
    for shift, factor in MIX:
        # >> repeats the sign bit; the mask takes the copies away
        mixed = mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(_signed(factor))
    return mixed


def _whole(lanes: torch.Tensor, most: int) -> torch.Tensor:
    """-most .. most, int32: the 2^16 numbers cut into 2 * most + 1 runs as equal as can be."""
    return ((lanes.int() + (1 << 15)) * (2 * most + 1) >> 16) - most


def _signed(number: int) -> int:
    """The int64 with the lowest 64 bits of a number."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
