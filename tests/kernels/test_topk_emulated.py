"""The CUDA source of top-k, run thread by thread on the CPU: what it selects, against a sort."""

import numpy as np
import pytest

pytest.importorskip("torch")

from cpkit.kernels.topk_cuda import CAPACITY, KERNELS, THREADS
from tests.kernels.emulated_cuda import EmulatedCuda
from tests.kernels.test_topk import hostile_rows
from tests.kernels.test_topk_cuda import SOURCE

NAN, INF = float("nan"), float("inf")
ANY_POS = 2**31 - 1


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    return EmulatedCuda(SOURCE.read_text(), KERNELS, tmp_path_factory.mktemp("topk"))


def i32(values):
    return np.array(values, dtype=np.int32)


def memory(rows, columns, offset=0):
    """fp32 that begins `offset` places behind a multiple of 64 bytes, as rows of a GPU's tensors may."""
    raw = np.empty(rows * columns + offset + 16, np.float32)
    first = -raw.ctypes.data // 4 % 16 + offset
    return raw[first : first + rows * columns].reshape(rows, columns)


def best(row, start, end, k):
    """Positions of the k best, ascending, then -1; by a sort of (score down, position up)."""
    start = max(start, 0)
    scores = [(-score, pos) for pos, score in enumerate(row[start : max(end, start)].tolist()) if score == score]
    picked = sorted(pos for _, pos in sorted(scores)[:k])
    return picked + [-1] * (k - len(picked))


def select(cuda, rows, starts, ends, k, *, splits=1, offset=0, seed=0):
    (M, N) = np.shape(rows)
    logits = memory(M, N, offset)
    logits[:] = rows
    out = np.full((M, k), 7, np.int32)
    room = min(CAPACITY, -(-N // splits) + 3) if splits > 1 else 0
    lists = np.full((M * splits, max(room, 1)), -1, np.int64)
    counts, arrived = np.full(M * splits, -1, np.int32), np.zeros(M, np.int32)
    cuda.may_read(logits)
    cuda.launch(
        "topk_rows", M * splits, THREADS, logits, i32(starts), i32(ends), out, lists, counts, arrived, N, N, k, k,
        splits, room, seed=seed,
    )  # fmt: skip
    for row, start, end, got in zip(logits, starts, ends, out.tolist(), strict=True):
        assert got == best(row, start, end, k)


@pytest.mark.parametrize("num_keys", [1, 511, 512, 513, 4097, 8191, 8192, 8193, 8704, 9001])
def test_row_lengths(cuda, num_keys):
    rows = np.random.default_rng(num_keys).standard_normal((2, num_keys))
    select(cuda, rows, [0, num_keys // 3], [num_keys] * 2, 512, offset=num_keys % 4, seed=num_keys)


HOSTILE = {(name, n): row for n in (3000, 20_000) for name, row in hostile_rows(n)}


@pytest.mark.parametrize(("name", "num_keys"), HOSTILE)
def test_hostile_rows(cuda, name, num_keys):
    """3,000 keys are held in registers; 20,000 are sampled, sifted and, where chance fails, sifted again."""
    select(cuda, [HOSTILE[name, num_keys]], [1], [num_keys], 2048, seed=num_keys)


def sampled_places(num_keys, seeds):
    """Where topk.cu looks in a row that begins at a multiple of 32 bytes: 8 neighbours of each of 1,024 strata."""
    strata = np.arange(1024, dtype=np.uint64)
    sampled = np.zeros(num_keys, bool)
    for seed in seeds:
        hashed = ((strata + seed * 1024 + 1) * 0x9E3779B1 % 2**32 * (num_keys // 1024)) >> 32
        sector = np.maximum((strata * num_keys // 1024 + hashed).astype(int) & ~7, 8)
        sampled[sector[:, None] + np.arange(8)] = True
    return sampled


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("seeds", [[0], [0, 1]], ids=["once", "twice"])
@pytest.mark.parametrize("best_are", ["sampled", "not-sampled"])
def test_rows_made_to_mislead_the_samples(cuda, best_are, seeds, splits):
    """Too few keys pass the bound, or more than fit: the row is read again with other samples, then by bisection."""
    num_keys = 40_000 if best_are == "not-sampled" else 20_000
    sampled = sampled_places(num_keys, seeds)
    favoured = sampled if best_are == "sampled" else ~sampled
    row = np.random.default_rng(0).random(num_keys) + favoured
    select(cuda, [row], [0], [num_keys], 2048, splits=splits)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("name", ["all-equal", "ties-at-the-last-place", "minus-inf-tail", "half-nan", "falling"])
def test_blocks_that_share_rows(cuda, name, splits):
    """Three rows: one long, one of which little is left, one that fits a block."""
    rows = [HOSTILE[name, 20_000]] * 3
    select(cuda, rows, [0, 11_000, 15_000], [20_000] * 3, 1024, splits=splits, seed=splits)


def test_a_long_row_with_its_positions_in_two_windows(cuda):
    row = np.random.default_rng(0).integers(-300, 300, 140_001)
    select(cuda, [row], [1], [140_001], 2048, splits=8)


def test_places_outside_a_range_are_never_chosen(cuda):
    row = np.random.default_rng(0).standard_normal(700)
    row[:50] = row[690:] = INF
    starts, ends = [50, 0, -9, 50, 699, 650, 300], [690, 0, 5, 700, 700, 650, 200]
    select(cuda, [row] * 7, starts, ends, 512)


@pytest.mark.parametrize("seed", range(8))
def test_random_rows(cuda, seed):
    """Few or many different scores, among them NaN and infinities; any range, alignment and order of threads."""
    rng = np.random.default_rng(seed)
    num_keys = int(rng.integers(1, 12_000))
    scores = np.round(rng.standard_normal((3, num_keys)) * 10.0 ** rng.integers(-1, 4))
    scores[rng.random(scores.shape) < 0.01] = rng.choice([NAN, INF, -INF])
    starts, ends = np.sort(rng.integers(0, num_keys + 1, (2, 3)), axis=0).tolist()
    select(cuda, scores, starts, ends, int(rng.choice([512, 1024, 2048])), offset=int(rng.integers(4)), seed=seed)


def test_bounds_and_survivors(cuda):
    """The two kernels of the top-k without logits: bounds from samples, then a selection among what passes them."""
    rng = np.random.default_rng(1)
    k, room, num_keys, starts = 512, 2048, 30_000, i32([0, 5, 20_000])
    ends, M = i32([30_000, 29_000, 21_500]), 3
    scores = memory(M, num_keys)
    scores[:] = np.round(rng.standard_normal((M, num_keys)) * 50)
    sampled = np.arange(3, num_keys, 16, dtype=np.int32)
    samples = memory(M, len(sampled))
    samples[:] = scores[:, sampled]
    sample_start, sample_end = (np.searchsorted(sampled, bound).astype(np.int32) for bound in (starts, ends))
    bound_score, bound_key = np.full(M, NAN, np.float32), np.full(M, -1, np.int32)
    cuda.may_read(samples)
    cuda.launch(
        "topk_bounds", M, THREADS, samples, sampled, sample_start, sample_end, starts, ends, bound_score, bound_key,
        num_keys, len(sampled), k, room, seed=1,
    )  # fmt: skip
    assert bound_score[2] == -INF and bound_key[2] == ANY_POS, "a row of 1,500 keys keeps all of them"
    lists, counts = np.full((M, room), -1, np.int64), np.zeros(M, np.int32)
    keys = np.arange(num_keys)
    for row in range(M):
        inside = (keys >= starts[row]) & (keys < ends[row])
        tied = (scores[row] == bound_score[row]) & (keys <= bound_key[row])
        passed = keys[inside & ((scores[row] > bound_score[row]) | tied)]
        counts[row] = len(passed)
        assert k <= len(passed) <= room
        lists[row, : len(passed)] = rng.permutation(scores[row, passed].view(np.int32).astype(np.int64) << 32 | passed)
    counts[1] = k - 1  # as if the bound had let through too few: the row is left open
    out, open_rows = np.full((M, k), 7, np.int32), np.zeros(1 + M, np.int32)
    cuda.launch(
        "topk_survivors", M, THREADS, lists, counts, starts, bound_score, bound_key, out, open_rows, num_keys, k, k,
        room, seed=2,
    )  # fmt: skip
    assert open_rows.tolist() == [1, 1, 0, 0] and (out[1] == 7).all()
    for row in (0, 2):
        assert out[row].tolist() == best(scores[row], starts[row], ends[row], k)
