"""The CUDA sources of top-k, run thread by thread on the CPU: what they select, against a sort."""

import numpy as np
import pytest

pytest.importorskip("torch")

from cpkit.kernels.topk_cuda import CAPACITY, CLUSTER_KERNELS, KERNELS, source_text
from tests.kernels.emulated_cuda import EmulatedCuda
from tests.kernels.test_topk import hostile_rows

NAN, INF = float("nan"), float("inf")
ANY_POS = 2**31 - 1
ALL_KERNELS = KERNELS | CLUSTER_KERNELS


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    return EmulatedCuda(source_text(clusters=True), ALL_KERNELS, tmp_path_factory.mktemp("topk"))


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


def select(cuda, rows, starts, ends, k, *, kernel="topk_rows", splits=1, offset=0, seed=0):
    (M, N), facts = np.shape(rows), ALL_KERNELS[kernel]
    logits = memory(M, N, offset)
    logits[:] = rows
    out = np.full((M, k), 7, np.int32)
    tensors = (logits, i32(starts), i32(ends), out)
    cuda.may_read(logits)
    if kernel == "topk_rows":
        room = min(CAPACITY, -(-N // splits) + 3) if splits > 1 else 0
        lists = np.full((M * splits, max(room, 1)), -1, np.int64)
        counts, arrived = np.full(M * splits, -1, np.int32), np.zeros(M, np.int32)
        scratch, sizes = (lists, counts, arrived), (N, N, k, k, splits, room)
        cuda.launch(kernel, M * splits, facts.threads, *tensors, *scratch, *sizes, seed=seed)
    else:
        blocks, sizes = M * facts.blocks, (M, N, N, k, k)
        cuda.launch(kernel, blocks, facts.threads, *tensors, *sizes, seed=seed, cluster=facts.blocks)
    for row, start, end, got in zip(logits, starts, ends, out.tolist(), strict=True):
        assert got == best(row, start, end, k)


@pytest.mark.parametrize("num_keys", [1, 511, 512, 513, 4097, 16383, 16384, 16385, 17001])
def test_row_lengths(cuda, num_keys):
    rows = np.random.default_rng(num_keys).standard_normal((2, num_keys))
    select(cuda, rows, [0, num_keys // 3], [num_keys] * 2, 512, offset=num_keys % 4, seed=num_keys)


@pytest.mark.parametrize("num_keys", [1, 127, 128, 129, 512, 513, 2047, 2048, 2049, 4097, 8191, 8192])
def test_lengths_of_rows_that_a_block_holds(cuda, num_keys):
    """A thread's bits of a row are 8, 16 or 32; the last 128 keys are filled up with NaN."""
    rows = np.random.default_rng(num_keys).standard_normal((2, num_keys))
    starts, ends, offset = [0, num_keys // 3], [num_keys] * 2, num_keys % 4
    select(cuda, rows, starts, ends, 2048, kernel="topk_rows_8k", offset=offset, seed=num_keys)


@pytest.mark.parametrize(
    ("kernel", "num_keys", "start"),
    [
        pytest.param("topk_rows_128k", 1, 0, id="one-key"),
        pytest.param("topk_rows_128k", 1025, 1, id="1024-keys-in-8-parts"),
        pytest.param("topk_rows_128k", 1025, 0, id="a-part-begins-where-another-ends"),
        pytest.param("topk_rows_128k", 33_003, 2, id="odd-parts"),
        pytest.param("topk_rows_128k", 131_072, 0, id="all-that-clusters-hold"),
        pytest.param("topk_rows_1m", 4097, 3, id="few-keys-read-twice"),
        pytest.param("topk_rows_1m", 131_073, 0, id="more-than-clusters-hold"),
    ],
)
def test_lengths_of_rows_that_a_cluster_shares(cuda, kernel, num_keys, start):
    row = np.random.default_rng(num_keys).standard_normal(num_keys)
    select(cuda, [row], [start], [num_keys], 1024, kernel=kernel, offset=start, seed=num_keys)


def more_hostile_rows(n):
    """Also scores that bins of equal width do not part: outliers, many magnitudes, few different ones."""
    rng = np.random.default_rng(n)
    noise = rng.standard_normal(n)
    yield from hostile_rows(n)
    yield "outlier-among-noise", np.where(np.arange(n) == 776, 1e30, noise)
    yield "outliers-among-noise", np.where(rng.random(n) < 0.01, noise * 1e30, noise)
    yield "many-magnitudes", np.exp(noise * 20) * np.where(rng.random(n) < 0.5, 1, -1)
    yield "largest", np.where(rng.random(n) < 0.5, 3.4e38, -3.4e38)
    yield "smallest", noise * 1e-42
    yield "far-from-zero", noise * 1e3 + 1e9
    yield "neighbours", np.where(rng.random(n) < 0.5, 1.0, 1.0000001)
    yield "infinities-among-noise", np.where(rng.random(n) < 0.1, INF, np.where(rng.random(n) < 0.5, -INF, noise))


HOSTILE = {(name, n): row for n in (3000, 20_000) for name, row in more_hostile_rows(n)}
KINDS = [name for name, n in HOSTILE if n == 3000]
IN_CLUSTERS = KINDS[:1] + KINDS[3:5] + KINDS[6:7] + KINDS[8:9] + KINDS[10:]
READ_TWICE = ["all-equal", "half-nan", "many-magnitudes", "outliers-among-noise"]


@pytest.mark.parametrize(("name", "num_keys"), HOSTILE)
def test_hostile_rows(cuda, name, num_keys):
    """3,000 keys are held in shared memory; 20,000 are sampled, sifted and, where chance fails, sifted again."""
    select(cuda, [HOSTILE[name, num_keys]], [1], [num_keys], 2048, seed=num_keys)


@pytest.mark.parametrize("name", KINDS)
def test_hostile_rows_in_bins(cuda, name):
    select(cuda, [HOSTILE[name, 3000]], [1], [3000], 512, kernel="topk_rows_8k", seed=len(name))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [*(("topk_rows_128k", name) for name in IN_CLUSTERS), *(("topk_rows_1m", name) for name in READ_TWICE)],
)
def test_hostile_rows_in_bins_of_a_cluster(cuda, kernel, name):
    row = np.tile(HOSTILE[name, 20_000], 2)[:33_000]  # long enough for bins that leave out most of a row
    select(cuda, [row], [1], [33_000], 2048, kernel=kernel, seed=len(name))


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
    """Three rows: one long, one of which little is left for the last block, one that a block holds."""
    rows = [HOSTILE[name, 20_000]] * 3
    select(cuda, rows, [0, 3000, 15_000], [20_000] * 3, 1024, splits=splits, seed=splits)


def test_a_long_row_with_its_positions_in_two_windows(cuda):
    row = np.random.default_rng(0).integers(-300, 300, 140_001)
    select(cuda, [row], [1], [140_001], 2048, splits=8)


@pytest.mark.parametrize("kernel", ["topk_rows", "topk_rows_8k", "topk_rows_128k"])
def test_places_outside_a_range_are_never_chosen(cuda, kernel):
    row = np.random.default_rng(0).standard_normal(700)
    row[:50] = row[690:] = INF
    starts, ends = [50, 0, -9, 50, 699, 650, 300, 300], [690, 0, 5, 700, 700, 650, 200, -(2**31)]
    few = slice(None) if ALL_KERNELS[kernel].blocks == 1 else slice(1, 8, 2)
    select(cuda, [row] * len(starts[few]), starts[few], ends[few], 512, kernel=kernel)


@pytest.mark.parametrize(
    ("kernel", "seed"),
    [*(("topk_rows", seed) for seed in range(6)), *(("topk_rows_8k", seed) for seed in range(6)),
     *(("topk_rows_128k", seed) for seed in range(2))],
)  # fmt: skip
def test_random_rows(cuda, kernel, seed):
    """Few or many different scores, among them NaN and infinities; any range, alignment and order of threads."""
    rng = np.random.default_rng(seed)
    num_keys = int(rng.integers(1, 8192 if kernel == "topk_rows_8k" else 24_000))
    scores = np.round(rng.standard_normal((3, num_keys)) * 10.0 ** rng.integers(-1, 4))
    scores[rng.random(scores.shape) < 0.01] = rng.choice([NAN, INF, -INF])
    starts, ends = np.sort(rng.integers(0, num_keys + 1, (2, 3)), axis=0).tolist()
    k, offset = int(rng.choice([512, 1024, 2048])), int(rng.integers(4))
    select(cuda, scores, starts, ends, k, kernel=kernel, offset=offset, seed=seed)


def test_bounds_and_survivors(cuda):
    """The two kernels of the top-k without logits: bounds from samples, then a selection among what passes them."""
    rng = np.random.default_rng(1)
    k, room, num_keys, starts = 512, 2048, 30_000, i32([0, 5, 20_000, 100])
    ends, M = i32([30_000, 29_000, 21_500, 400]), 4
    scores = memory(M, num_keys)
    scores[:] = np.round(rng.standard_normal((M, num_keys)) * 50)
    sampled = np.arange(3, num_keys, 16, dtype=np.int32)
    samples = memory(M, len(sampled))
    samples[:] = scores[:, sampled]
    sample_start, sample_end = (np.searchsorted(sampled, bound).astype(np.int32) for bound in (starts, ends))
    bound_score, bound_key = np.full(M, NAN, np.float32), np.full(M, -1, np.int32)
    cuda.may_read(samples)
    cuda.launch(
        "topk_bounds", M, KERNELS["topk_bounds"].threads, samples, sampled, sample_start, sample_end, starts, ends,
        bound_score, bound_key, num_keys, len(sampled), k, room, seed=1,
    )  # fmt: skip
    assert bound_score[2] == -INF and bound_key[2] == ANY_POS, "a row of 1,500 keys keeps all of them"
    lists, counts = np.full((M, room), -1, np.int64), np.zeros(M, np.int32)
    keys = np.arange(num_keys)
    for row in range(M):
        inside = (keys >= starts[row]) & (keys < ends[row])
        tied = (scores[row] == bound_score[row]) & (keys <= bound_key[row])
        passed = keys[inside & ((scores[row] > bound_score[row]) | tied)]
        counts[row] = len(passed)
        assert min(k, ends[row] - starts[row]) <= len(passed) <= room
        lists[row, : len(passed)] = rng.permutation(scores[row, passed].view(np.int32).astype(np.int64) << 32 | passed)
    counts[1] = k - 1  # as if the bound had let through too few: the row is left open
    kept_scores = np.full((M, k + 3), 7, np.float32)
    for wanted in (None, kept_scores):
        out, open_rows = np.full((M, k), 7, np.int32), np.zeros(1 + M, np.int32)
        cuda.launch(
            "topk_survivors", M, KERNELS["topk_survivors"].threads, lists, counts, starts, bound_score, bound_key, out,
            wanted, open_rows, num_keys, k, k + 3, k, room, seed=2,
        )  # fmt: skip
        assert open_rows.tolist() == [1, 1, 0, 0, 0] and (out[1] == 7).all()
        for row in (0, 2, 3):
            assert out[row].tolist() == best(scores[row], starts[row], ends[row], k)
    assert (kept_scores[1] == 7).all() and (kept_scores[:, k:] == 7).all()
    for row in (0, 2, 3):
        assert same_floats(kept_scores[row, :k], scores_at(scores[row], starts[row], out[row]))


def scores_at(row, start, positions):
    """Of what was chosen; -inf where there was nothing left to choose."""
    return np.where(positions < 0, np.float32(-INF), row[np.maximum(positions + max(start, 0), 0)])


def same_floats(a, b):
    return a.tobytes() == b.tobytes()


OPEN = {
    "none-open": (0, [5, 5, 5, 5, 5, 5], 0),
    "all-open": (6, [3, 0, 5, 1, 4, 2], 0),
    "two-open": (2, [4, 1, 0, 0, 0, 0], 0),
    "the-last-of-five": (5, [3, 0, 5, 1, 4, 2], 4),
    "round-begins-behind-the-last": (4, [3, 0, 5, 1, 4, 2], 4),
    "round-begins-far-behind": (1, [3, 0, 5, 1, 4, 2], 5),
    "count-beyond-the-rows": (2**31 - 1, [3, 0, 5, 1, 4, 2], 4),
    "count-below-zero": (-(2**31), [3, 0, 5, 1, 4, 2], 0),
}


@pytest.mark.parametrize(("count", "which", "first"), OPEN.values(), ids=OPEN)
def test_open_rows(cuda, count, which, first):
    """Blocks take the rows that are listed, and only those; what lies behind the results stays as it is."""
    M, N, k, blocks = 6, 17_003, 512, 4 if first else 6
    stride = N + 5  # rows of another memory are apart by other than their length
    logits = memory(blocks, stride, offset=3)
    logits[:] = INF
    starts, ends = [0, 5, 9000, 16_999, -3, 300], [N, N - 1, N, N + 9, 700, 200]
    names = ["all-equal", "half-nan", "falling", "minus-inf-tail", "many-magnitudes", "outlier-among-noise"]
    scores = [HOSTILE[name, 20_000][:N].astype(np.float32) for name in names]
    taken = which[first : min(count, M)] if count >= 0 else []
    for place, row in enumerate(taken[:blocks]):
        logits[place, max(starts[row], 0) : min(ends[row], N)] = scores[row][max(starts[row], 0) : min(ends[row], N)]
    open_rows, out = i32([count, *which, M, M, M, M]), np.full((M + 1, k + 3), 7, np.int32)
    kept_scores = np.full((M + 1, k + 5), 7, np.float32)
    cuda.may_read(logits)
    sizes = (first, M, N, stride, k + 3, k + 5, k)
    for wanted in (None, kept_scores):
        cuda.launch(
            "topk_open", blocks, KERNELS["topk_open"].threads, logits, open_rows, i32(starts), i32(ends), out, wanted,
            *sizes, seed=len(taken),
        )  # fmt: skip
    for row, got in enumerate(out):
        is_open = row in taken[:blocks]
        chosen = best(scores[row][:N], starts[row], min(ends[row], N), k) if is_open else [7] * k
        assert got.tolist() == [*chosen, 7, 7, 7]
        want = scores_at(scores[row], starts[row], got[:k]) if is_open else np.full(k, 7, np.float32)
        assert same_floats(kept_scores[row], np.append(want, np.full(5, 7, np.float32)))
