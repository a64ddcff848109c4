"""Indexer logits against float64 loops of numpy: exact on small integers, close on random data, untouched outside."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.errors import ConfigError, PlanError  # noqa: E402
from cpkit.kernels.mqa_logits import mqa_logits, mqa_logits_reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn


def inputs(M, N, H, seed, *, exact):
    rng = np.random.default_rng(seed)
    if exact:
        q, k = rng.integers(-3, 4, (M, H, 128)), rng.integers(-3, 4, (N, 128))
        scale, weights = 2.0 ** rng.integers(-3, 3, N), rng.integers(-4, 5, (M, H)) / 4
    else:
        q, k = rng.standard_normal((M, H, 128)), rng.standard_normal((N, 128))
        scale, weights = rng.random(N) + 0.5, rng.standard_normal((M, H))
    q, k = (torch.tensor(x, dtype=torch.float32, device=DEVICE).to(FP8) for x in (q, k))
    scale, weights = (torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in (scale, weights))
    return q, (k, scale), weights


def counted(q, keys, weights):
    k, scale = keys
    q, k = q.float().cpu().double().numpy(), k.float().cpu().double().numpy()
    products = np.maximum(np.einsum("mhd,nd->mhn", q, k), 0)
    return np.einsum("mhn,mh->mn", products, weights.cpu().double().numpy()) * scale.cpu().double().numpy()


def bounds(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("H", [32, 64])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (3, 63), (4, 64), (5, 129)])
def test_exact_on_small_integers(H, M, N):
    data = inputs(M, N, H, M * N, exact=True)
    start, end = bounds(*([0] * M)), bounds(*(max(N - M + 1 + m, 1) for m in range(M)))  # a request's last M tokens
    got, reference = mqa_logits(*data, start, end), mqa_logits_reference(*data, start, end)
    want = counted(*data)
    for m in range(M):
        assert got[m, : end[m]].tolist() == want[m, : end[m]].tolist()
        assert reference[m, : end[m]].tolist() == want[m, : end[m]].tolist()


def test_random_data_within_the_bound():
    data = inputs(5, 130, 64, 3, exact=False)
    got = mqa_logits(*data, bounds(0, 0, 0, 0, 0), bounds(130, 130, 130, 130, 130))
    want = counted(*data)
    error = np.abs(got.double().cpu().numpy() - want).max() / np.abs(want).max()
    assert error < (1e-3 if DEVICE == "cuda" else 1e-6)


@pytest.mark.parametrize("outside", ["unwritten", "-inf"])
def test_nothing_outside_a_range_is_written(outside):
    M, N = 9, 200
    data = inputs(M, N, 64, 5, exact=True)
    last = 50 if DEVICE == "cpu" else 0  # on a GPU a range may end before it starts: it is empty
    start = bounds(0, 100, -7, 199, 200, 64, 63, 90, 50)
    end = bounds(200, 101, 999, 200, 200, 128, 65, 90, last)
    out = torch.full((M, N + 3), 77.0, device=DEVICE)[:, :N]
    mqa_logits(*data, start, end, out=out, outside=outside)
    want, key = counted(*data), np.arange(N)
    for m in range(M):
        allowed = (key >= int(start[m])) & (key < int(end[m]))
        expected = np.where(allowed, want[m], 77.0 if outside == "unwritten" else -np.inf)
        assert out[m].tolist() == expected.tolist(), f"row {m}"
    assert out.as_strided((M, 3), (N + 3, 1), N).eq(77.0).all(), "wrote behind the row"


def test_a_nan_key_spoils_its_own_logits_only():
    q, (k, scale), weights = inputs(2, 70, 32, 6, exact=True)
    scale[7] = float("nan")
    if DEVICE == "cuda":  # the interpreter reads fp8 NaN as a number
        k[9] = torch.tensor(float("nan")).to(FP8)
    got = mqa_logits(q, (k, scale), weights, bounds(0, 0), bounds(70, 70))
    assert got[0].isnan().nonzero().flatten().tolist() == ([7, 9] if DEVICE == "cuda" else [7])


def test_head_tail_rows_far_apart():
    data = inputs(6, 300, 32, 7, exact=True)
    start, end = bounds(0, 0, 0, 0, 0, 0), bounds(1, 2, 3, 298, 299, 300)
    got, want = mqa_logits(*data, start, end), counted(*data)
    for m in range(6):
        assert got[m, : end[m]].tolist() == want[m, : end[m]].tolist()


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU no program of a GPU takes more than one item")
@pytest.mark.parametrize("H", [32, 64])
@pytest.mark.parametrize(
    ("M", "N"),
    [
        pytest.param(4096, 1000, id="whole-rows-in-laps"),
        pytest.param(1500, 4001, id="few-chunks-in-laps"),
        pytest.param(1, 16_385, id="one-row"),
        pytest.param(700, 20_000, id="chunks-of-many-keys"),
    ],
)
def test_all_items_on_a_gpu(M, N, H):
    data = inputs(M, N, H, 12, exact=True)
    end = (N - M + 1 + torch.arange(M, device=DEVICE)).clamp(0, N).int()
    got, want = (
        mqa_logits(*data, torch.zeros_like(end), end, outside="-inf", backend=one) for one in ("triton", "torch")
    )
    assert torch.equal(got, want)


def test_empty():
    q, (k, scale), weights = inputs(2, 5, 32, 8, exact=True)
    assert mqa_logits(q[:0], (k, scale), weights[:0], bounds(), bounds()).shape == (0, 5)
    assert mqa_logits(q, (k[:0], scale[:0]), weights, bounds(0, 0), bounds(0, 0)).shape == (2, 0)


def test_refusals():
    q, keys, weights = inputs(2, 5, 32, 9, exact=True)
    narrow = (keys[0][:, :64].contiguous(), keys[1])
    start, end = bounds(0, 0), bounds(5, 5)
    with pytest.raises(PlanError, match="16 index heads"):
        mqa_logits(q[:, :16].contiguous(), keys, weights[:, :16].contiguous(), start, end)
    with pytest.raises(PlanError, match="key_start is int64"):
        mqa_logits(q, keys, weights, start.long(), end)
    with pytest.raises(PlanError, match="k is float8"):
        mqa_logits(q, narrow, weights, start, end)
    with pytest.raises(PlanError, match="heads of 64 values"):
        mqa_logits(q[..., :64].contiguous(), narrow, weights, start, end)
    apart = torch.zeros(5, 132, dtype=torch.uint8, device=DEVICE)[:, :128].view(FP8)  # values and scales in one row
    for num_keys in (5, 1):
        with pytest.raises(PlanError, match="k has rows 132 bytes apart"):
            mqa_logits(q, (apart[:num_keys], keys[1][:num_keys]), weights, start, bounds(num_keys, num_keys))
    with pytest.raises(ConfigError, match="backend='gluon'"):
        mqa_logits(q, keys, weights, start, end, backend="gluon")
    with pytest.raises(PlanError, match="outside='zero'"):
        mqa_logits(q, keys, weights, start, end, outside="zero")
    with pytest.raises(PlanError, match="heads of a token"):
        mqa_logits(q.transpose(0, 1).contiguous().transpose(0, 1), keys, weights, start, end)


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU the host does not look at ranges")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_range_that_ends_before_it_starts_is_refused(backend):
    with pytest.raises(PlanError, match="row 1: key_start=3 lies behind key_end=2"):
        mqa_logits(*inputs(2, 5, 32, 10, exact=True), bounds(0, 3), bounds(0, 2), backend=backend)


@pytest.mark.parametrize("H", [32, 64])
def test_backends_agree_to_the_bit_on_small_integers(H):
    data, start, end = inputs(6, 150, H, 11, exact=True), bounds(0, 0, 3, 70, 150, 149), bounds(1, 150, 3, 99, 150, 150)
    torch_logits, triton_logits = (
        mqa_logits(*data, start, end, outside="-inf", backend=one) for one in ("torch", "triton")
    )
    assert torch_logits.tolist() == triton_logits.tolist()
