"""Top-k against a count in plain Python: the order of scores, ties, NaN, and rows that mislead the sampling."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.errors import ConfigError, PlanError  # noqa: E402
from cpkit.kernels import topk_torch  # noqa: E402
from cpkit.kernels.topk import topk, topk_reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")


def expected(logits, start, end, k):
    """One row by Python's sort: score down, then position up; NaN dropped; as a set with its -1s."""
    start = max(start, 0)
    scores = logits[start : min(end, len(logits))] if end > start else []
    ranked = sorted((-score, pos) for pos, score in enumerate(scores) if score == score)
    best = [pos for _, pos in ranked[:k]]
    return sorted(best), k - len(best)


def check(rows, starts, ends, k, *, stride=0):
    logits = torch.full((len(rows), len(rows[0]) + stride), NAN)[:, : len(rows[0])]
    logits.copy_(torch.tensor(rows))
    device = logits.to(DEVICE) if not stride else torch.empty(len(rows), len(rows[0]) + stride, device=DEVICE)
    if stride:
        device.fill_(INF)  # what lies between the rows must not be read
        device = device[:, : len(rows[0])]
        device.copy_(logits)
    start, end = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, ends))
    out = torch.full((len(rows), k), 7, dtype=torch.int32, device=DEVICE)
    topk(device, start, end, k, out=out)
    reference = topk_reference(device, start, end, k)
    by_torch = topk(device, start, end, k, backend="torch")
    for i, row in enumerate(rows):
        want, missing = expected(row, starts[i], ends[i], k)
        assert by_torch[i].tolist() == reference[i].tolist(), "torch gives the order of the reference"
        for name, got in (("kernel", out[i].tolist()), ("reference", reference[i].tolist())):
            assert got[k - missing :] == [-1] * missing, f"{name} row {i}: -1 belongs at the end"
            assert sorted(got[: k - missing]) == want, f"{name} row {i}"


@pytest.mark.parametrize("num_keys", [1, 511, 512, 513, 4095, 4096, 4097, 8193])
def test_row_lengths(num_keys):
    rng = np.random.default_rng(num_keys)
    check(rng.standard_normal((2, num_keys)).astype(np.float32).tolist(), [0, num_keys // 3], [num_keys] * 2, 512)


@pytest.mark.parametrize("k", [1024, 2048])
def test_every_k(k):
    rng = np.random.default_rng(k)
    check(rng.standard_normal((1, 9001)).astype(np.float32).tolist(), [5], [9000], k)


def hostile_rows(n):
    pos = np.arange(n)
    yield "all-equal", np.zeros(n)
    yield "zeros-of-both-signs", np.where(pos % 3 == 0, -0.0, 0.0)
    yield "few-values", pos % 7
    yield "ties-at-the-last-place", np.where(pos % 20 == 0, 1.0, np.where(pos % 3 == 0, 0.5, -1.0))
    yield "rising", pos
    yield "falling", -pos
    yield "one-spike", np.where(pos == 777, 1e30, pos % 2)
    yield "all-minus-inf", np.full(n, -INF)
    yield "minus-inf-tail", np.where(pos < 100, 1.0, -INF)
    yield "all-inf", np.full(n, INF)
    yield "all-nan", np.full(n, NAN)
    yield "fewer-scores-than-k", np.where(pos < 300, pos, NAN)
    yield "half-nan", np.where(pos % 2, NAN, pos % 1000)
    yield "one-lane-holds-the-best", np.where(pos % 512 == 5, 1e3 + pos, 0.0) + pos * 1e-4


HOSTILE = dict(hostile_rows(5000))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows(name):
    check([HOSTILE[name].astype(np.float32).tolist()], [0], [5000], 512)


def test_places_outside_a_range_are_never_chosen():
    row = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    row[:50] = row[690:] = INF
    last = 300 if DEVICE == "cpu" else -(2**31)  # on a GPU a range may end before it starts: it is empty
    starts, ends = [50, 0, -9, 50, 699, 650, 300], [690, 0, 5, 10**6, 700, 650, last]
    check([row.tolist()] * 7, starts, ends, 512)


def test_rows_may_lie_apart():
    rows = np.random.default_rng(1).standard_normal((3, 600)).astype(np.float32).tolist()
    check(rows, [0, 1, 2], [600] * 3, 512, stride=5)


def test_no_rows():
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert topk(torch.empty(0, 10, device=DEVICE), empty, empty, 512).shape == (0, 512)


def test_refusals():
    logits, bound = torch.zeros(1, 8, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ConfigError, match=r"k=100.*backend='torch' takes any"):
        topk(logits, bound, bound, 100)
    with pytest.raises(PlanError, match="k=0"):
        topk(logits, bound, bound, 0, backend="torch")
    with pytest.raises(ConfigError, match="backend='cuda'"):
        topk(logits, bound, bound, 512, backend="cuda")
    with pytest.raises(PlanError, match="key_end"):
        topk(logits, bound, bound.long(), 512)
    with pytest.raises(PlanError, match="logits"):
        topk(logits.double(), bound, bound, 512)
    with pytest.raises(PlanError, match="2147483648 apart"):
        topk(logits.as_strided((1, 8), (2**31, 1)), bound, bound, 512)


@pytest.mark.skipif(DEVICE == "cpu", reason="16 million keys take the interpreter minutes")
def test_positions_that_a_float_cannot_hold():
    num_keys = 2**24 + 5001
    logits = torch.arange(num_keys, device=DEVICE).float()[None]  # neighbours beyond 2^24 score the same
    start, end = (torch.tensor([bound], dtype=torch.int32, device=DEVICE) for bound in (0, num_keys))
    picked = topk(logits, start, end, 512)
    assert picked.tolist() == topk(logits, start, end, 512, backend="torch").sort(dim=1).values.tolist()


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the host does not look at ranges")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_range_that_ends_before_it_starts_is_refused(backend):
    start, end = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 3], [0, 2]))
    with pytest.raises(PlanError, match="row 1: key_start=3 lies behind key_end=2"):
        topk(torch.zeros(2, 8), start, end, 512, backend=backend)


@pytest.mark.parametrize("k", [1, 3, 7, 8, 9])
def test_torch_takes_any_k_tile_by_tile(k, monkeypatch):
    monkeypatch.setattr(topk_torch, "TILE_SCORES", 20)  # rows of 8: two at a time
    rows = torch.randint(-2, 3, (5, 8), generator=torch.Generator().manual_seed(k)).float()
    starts, ends = [0, 1, 2, 5, 8], [8, 8, 7, 5, 8]
    picked = topk(rows, torch.tensor(starts).int(), torch.tensor(ends).int(), k, backend="torch")
    for row, start, end, got in zip(rows.tolist(), starts, ends, picked.tolist(), strict=True):
        order = sorted(range(start, end), key=lambda pos: (-row[pos], pos))[:k]
        assert got == [pos - start for pos in order] + [-1] * (k - len(order))
