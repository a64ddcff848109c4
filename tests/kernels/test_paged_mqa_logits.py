"""Decode logits over pages against float64 loops of numpy: exact on small integers, untouched behind a token's keys."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.errors import ConfigError, PlanError  # noqa: E402
from cpkit.kernels.paged_mqa_logits import PAGE_BYTES, paged_mqa_logits  # noqa: E402
from cpkit.kernels.tile_schedule import tile_schedule  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")
KEPT = 77.0


class Step:
    """Random decode rows: keys of every row are small integers in pages in random order, all other pages are NaN."""

    def __init__(self, seq_lens, H, seed=0, *, table_gap=0, page_gap=0, missing=()):
        rng = np.random.default_rng(seed)
        self.ends = np.array(seq_lens)
        rows, tokens = self.ends.shape
        self.max_keys = max(int(self.ends.max()), 1)
        width = -(-self.max_keys // 64)
        self.q = rng.integers(-3, 4, (rows, tokens, H, 128))
        self.weights = rng.integers(-4, 5, (rows * tokens, H)) / 4
        self.keys, self.scales = np.zeros((rows, width * 64, 128)), np.zeros((rows, width * 64))
        pages = rng.permutation(rows * width + 1)
        cache = np.full((len(pages), PAGE_BYTES + page_gap), 0xFF, np.uint8)
        table = np.full((rows, width + table_gap), 1 << 30, np.int32)
        for row in range(rows):
            for number in range(-(-int(self.ends[row].max()) // 64)):
                if (row, number) in missing:
                    table[row, number] = missing[row, number]
                    continue
                keys, scales = rng.integers(-3, 4, (64, 128)), 2.0 ** rng.integers(-3, 3, 64)
                part = slice(number * 64, number * 64 + 64)
                self.keys[row, part], self.scales[row, part] = keys, scales
                page = table[row, number] = pages[row * width + number]
                as_fp8 = torch.tensor(keys, dtype=torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
                cache[page, :8192] = as_fp8.numpy().ravel()
                cache[page, 8192:PAGE_BYTES] = scales.astype(np.float32).view(np.uint8)
        put = lambda x: torch.tensor(x, device=DEVICE)  # noqa: E731
        self.args = (
            put(self.q.astype(np.float32)).to(torch.float8_e4m3fn),
            put(cache),
            put(self.weights.astype(np.float32)),
            put(self.ends.astype(np.int32)),
            put(table)[:, :width],
        )

    def run(self, backend, **options):
        shape = (self.ends.size, self.max_keys + 3)
        out = torch.full(shape, KEPT, device=DEVICE)
        paged_mqa_logits(*self.args, max_keys=self.max_keys, out=out[:, : self.max_keys], backend=backend, **options)
        return out.cpu().numpy()

    def expected(self):
        rows, tokens = self.ends.shape
        out = np.full((rows * tokens, self.max_keys + 3), KEPT)
        for row in range(rows):
            for i in range(tokens):
                at, end = row * tokens + i, int(self.ends[row, i])
                products = np.maximum(self.q[row, i] @ self.keys[row, :end].T, 0)
                out[at, :end] = (self.weights[at] @ products) * self.scales[row, :end]
        return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("seq_lens", "H"),
    [
        pytest.param([[1]], 64, id="one-key"),
        pytest.param([[63], [64], [65]], 32, id="around-a-page"),
        pytest.param([[129, 130], [1, 2]], 64, id="draft-token"),
        pytest.param([[5, 6, 7], [70, 71, 72]], 64, id="odd-number-of-tokens"),
        pytest.param([[66, 67, 68, 69, 70]], 64, id="more-tokens-than-a-pass"),
        pytest.param([[0], [130], [0], [0], [3]], 32, id="rows-without-keys"),
        pytest.param([[0, 0]], 64, id="nothing-at-all"),
        pytest.param([[700], [1], [2]], 32, id="one-long-row"),
    ],
)
def test_exact_on_small_integers(backend, seq_lens, H):
    step = Step(seq_lens, H)
    assert (step.run(backend) == step.expected()).all()


@pytest.mark.parametrize("page_gap", [128, *([4, 16] if DEVICE == "cpu" else [])])  # Hopper reads pages of whole lines
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_tables_and_pages_and_blocks_outside_the_cache(backend, page_gap):
    step = Step([[130], [200]], 64, table_gap=3, page_gap=page_gap, missing={(0, 1): -1, (1, 2): 1 << 29})
    assert (step.run(backend) == step.expected()).all()


@pytest.mark.parametrize("num_workers", [1, 2, 5, 40])
@pytest.mark.parametrize(
    "seq_lens",
    [
        pytest.param([[300], [0], [64], [129]], id="few-rows"),
        pytest.param([[65 * 64 + 1], *([n] for n in range(7))], id="pages-of-three-steps-then-rows-of-one"),
    ],
)
def test_any_number_of_workers_writes_the_same(num_workers, seq_lens):
    step = Step(seq_lens, 32)
    schedule = torch.empty(num_workers + 1, 2, dtype=torch.int32, device=DEVICE)
    tile_schedule(step.args[3].amax(1), tile=64, out=schedule)
    assert (step.run("triton", schedule=schedule) == step.expected()).all()


def test_refusals():
    step = Step([[130]], 64)
    q, cache, weights, seq_lens, tables = step.args
    with pytest.raises(PlanError, match="48 index heads"):
        paged_mqa_logits(q[:, :, :48], cache, weights[:, :48], seq_lens, tables, max_keys=130)
    with pytest.raises(PlanError, match="pages of 8447 bytes"):
        paged_mqa_logits(q, cache[:, :8447], weights, seq_lens, tables, max_keys=130)
    odd = torch.zeros(cache.numel() + 4, dtype=torch.uint8, device=DEVICE)[4:].view(cache.shape)
    with pytest.raises(PlanError, match="the first at one of 16"):
        paged_mqa_logits(q, odd, weights, seq_lens, tables, max_keys=130)
    with pytest.raises(PlanError, match="cannot hold max_keys=200"):
        paged_mqa_logits(q, cache, weights, seq_lens, tables, max_keys=200)
    with pytest.raises(PlanError, match=r"seq_lens is int64"):
        paged_mqa_logits(q, cache, weights, seq_lens.long(), tables, max_keys=130)
    with pytest.raises(ConfigError, match="torch, triton"):
        paged_mqa_logits(q, cache, weights, seq_lens, tables, max_keys=130, backend="cuda")
