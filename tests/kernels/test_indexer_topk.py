"""Top-k without all logits in memory: the selection of topk(mqa_logits(...)), for every split of the rows."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.errors import ConfigError, PlanError  # noqa: E402
from cpkit.kernels.indexer_topk import (  # noqa: E402
    indexer_topk,
    indexer_topk_reference,
    list_bytes,
    list_sizes,
    sample_positions,
    select_listed,
    split_rows,
)
from cpkit.kernels.mqa_logits import mqa_logits, mqa_logits_reference  # noqa: E402
from cpkit.kernels.mqa_operands import Operands  # noqa: E402
from cpkit.kernels.topk import topk, topk_reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NEEDS_HOPPER = pytest.mark.skipif(not HOPPER, reason="lists are made by a kernel of wgmma: it takes a Hopper GPU")
INF = float("inf")


def operands(M, N, H=32, seed=0, *, whole=True):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)

    def draw(*shape):
        if whole:
            return torch.randint(-3, 4, shape, generator=generator, device=DEVICE).float()
        return torch.randn(shape, generator=generator, device=DEVICE)

    q, k = draw(M * H, 128).view(M, H, 128).to(torch.float8_e4m3fn), draw(N, 128).to(torch.float8_e4m3fn)
    return q, (k, 2.0 ** draw(N)), draw(M, H)


def ranges(*pairs):
    starts, ends = zip(*pairs, strict=True)
    return (torch.tensor(bounds, dtype=torch.int32, device=DEVICE) for bounds in (starts, ends))


def causal(M, N):
    return ranges(*((0, N - M + 1 + m) for m in range(M)))


def scores_of(data, start, end, kept):
    """The logits of what is kept, -inf behind the last; exact for whole numbers."""
    logits = mqa_logits_reference(*data, start, end)
    return logits.gather(1, (start[:, None].long() + kept).clamp(min=0)).masked_fill(kept < 0, -INF)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("workspace_bytes", [1, 8 * 360, 10**9], ids=["1-row", "8-rows", "all-rows"])
def test_rows_in_parts_give_the_selection_of_all(workspace_bytes, backend):
    data, (start, end) = operands(9, 90), ranges(*((m, 90 - 9 * m) for m in range(5)), *((0, 90 - m) for m in range(4)))
    scores = torch.full((9, 514), 7.0, device=DEVICE)
    sizes = {"workspace_bytes": workspace_bytes, "backend": backend}
    got = indexer_topk(*data, start, end, 512, scores=scores[:, 1:513], **sizes)
    want = indexer_topk_reference(*data, start, end, 512)
    assert got.sort(dim=1).values.tolist() == want.sort(dim=1).values.tolist()
    kept = scores_of(data, start, end, got)
    assert torch.equal(scores, torch.nn.functional.pad(kept, (1, 1), value=7.0))


@pytest.mark.parametrize(("M", "N"), [(0, 5), (3, 0), (1, 1)])
def test_few_rows_or_keys(M, N):
    start, end = ranges((0, N), (0, N), (0, N))
    got = indexer_topk(*operands(M, N), start[:M], end[:M], 512)
    assert got.tolist() == [[*range(N), *[-1] * (512 - N)]] * M


def test_refusals():
    data, (start, end) = operands(2, 9), ranges((0, 9), (0, 9))
    with pytest.raises(ConfigError, match=r"num_kept=100.*backend='torch'"):
        indexer_topk(*data, start, end, 100)
    with pytest.raises(PlanError, match="workspace_bytes=0"):
        indexer_topk(*data, start, end, 512, workspace_bytes=0)
    with pytest.raises(PlanError, match="key_end"):
        indexer_topk(*data, start, end[:1], 512)
    with pytest.raises(ConfigError, match="backend='cuda'"):
        indexer_topk(*data, start, end, 512, backend="cuda")


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "workspace_bytes", "parts"),
    [
        pytest.param(0, 100, 1000, [], id="no-rows"),
        pytest.param(20, 100, 1700, [(0, 16), (16, 20)], id="docstring"),
        pytest.param(20, 100, 800, [(0, 8), (8, 16), (16, 20)], id="just-8"),
        pytest.param(20, 100, 799, [(0, 7), (7, 14), (14, 20)], id="not-even-8"),
        pytest.param(3, 100, 1, [(0, 1), (1, 2), (2, 3)], id="1-at-the-least"),
        pytest.param(16, 100, 1600, [(0, 16)], id="just-fits"),
        pytest.param(17, 0, 16, [(0, 16), (16, 17)], id="no-bytes"),
        pytest.param(4096, 8 * 6016, 200_000_000, [(0, 4096)], id="a-prefill-chunk"),
    ],
)
def test_split_rows(num_rows, row_bytes, workspace_bytes, parts):
    assert [(part.start, part.stop) for part in split_rows(num_rows, row_bytes, workspace_bytes)] == parts


@pytest.mark.parametrize("stride", [1, 2, 48, 128])
@pytest.mark.parametrize("num_keys", [1, 47, 48, 49, 1000])
def test_one_sample_in_each_stratum(num_keys, stride):
    positions = sample_positions(num_keys, stride, torch.device("cpu")).tolist()
    more = sample_positions(8000, stride, torch.device("cpu")).tolist()
    whole = num_keys // stride
    assert [pos // stride for pos in positions[:whole]] == list(range(whole))
    assert positions == [pos for pos in more if pos < num_keys], "the last stratum has its key where this exists"
    if stride > 1 and num_keys == 1000:
        assert len({pos % stride for pos in positions}) > 1, "places within strata differ"


@pytest.mark.parametrize("num_keys", [1, 131072, 48 * 8192, 48 * 8192 + 1, 1 << 20, 1 << 22])
def test_samples_fit_the_block_that_sorts_them(num_keys):
    stride, room = list_sizes(num_keys)
    assert -(-num_keys // stride) <= 8192 and 2048 < room <= 8192


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "workspace_bytes", "num_bytes"),
    [
        pytest.param(4096, 131_072, 2 * 10**8, 4096 * 8 * 6016, id="lists"),
        pytest.param(10, 131_072, 2 * 10**8, 8 * 4 * 131_072, id="8-rows-of-logits-are-more"),
        pytest.param(3, 131_071, 2 * 10**8, 3 * 4 * 131_072, id="fewer-rows-than-8-each-on-a-line"),
        pytest.param(88, 131_072, 2 * 10**8, 88 * 8 * 6016, id="just-more-than-8-rows"),
        pytest.param(64, 1 << 20, 2 * 10**8, 8 * 4 * (1 << 20), id="long-rows"),
        pytest.param(2, 1 << 20, 8 << 20, 8 << 20, id="2-rows-of-logits-fit"),
        pytest.param(64, 1 << 20, (16 << 20) - 1, 3 * 4 * (1 << 20), id="3-rows-of-logits-fit"),
        pytest.param(64, 1 << 20, 1, 4 * (1 << 20), id="1-row-of-logits-at-the-least"),
    ],
)
def test_list_bytes(num_rows, num_keys, workspace_bytes, num_bytes):
    assert list_bytes(num_rows, num_keys, workspace_bytes) == num_bytes


@pytest.mark.parametrize(("fitting", "most"), [(0, 1), (1, 1), (3, 3), (7, 7), (8, 8), (15, 8), (16, 16)])
def test_no_more_logits_are_written_than_the_workspace_holds(monkeypatch, fitting, most):
    written = []

    def counted(q, *others, **options):
        written.append(len(q))
        return mqa_logits(q, *others, **options)

    monkeypatch.setattr("cpkit.kernels.indexer_topk.mqa_logits", counted)
    data, (start, end) = operands(20, 30, H=1), ranges(*((m, 30) for m in range(20)))
    got = indexer_topk(*data, start, end, 8, workspace_bytes=max(4 * 30 * fitting, 1), backend="torch")
    assert sum(written) == 20 and max(written) == most
    want = indexer_topk_reference(*data, start, end, 8)
    assert got.sort(dim=1).values.tolist() == want.sort(dim=1).values.tolist()


def launches_on_the_cpu(monkeypatch, num_rows, open_rows):
    """In the place of Hopper's kernels what they do: some rows are left open, those of `open_rows`, out of order.

    Returns the rounds, as they come: first place among the open rows, places.
    """
    every_row, rounds = iter(range(num_rows)), []

    def which(left, first, places):
        return list(enumerate(left[1:].tolist()))[first : min(first + places, int(left[0]))]

    def list_and_select(rows, positions, samples, lists, found, left):
        own = [next(every_row) for _ in range(len(rows.q))]
        some = [i for i, row in enumerate(own) if row in open_rows][::-1]
        left[: 1 + len(some)] = torch.tensor([len(some), *some])
        operands, (out, scores) = (rows.q, rows.keys, rows.weights, rows.key_start, rows.key_end), found
        out[:] = indexer_topk_reference(*operands, out.shape[1])
        scores[:] = scores_of(operands[:3], *operands[3:], out)
        out[some] = scores[some] = -7
        lists.fill_(-1)  # NaN where logits are not written over it

    def open_logits(rows, left, first, logits):
        rounds.append((first, len(logits)))
        for place, row in which(left, first, len(logits)):
            one = rows.rows(slice(row, row + 1))
            scores = mqa_logits_reference(one.q, one.keys, one.weights, one.key_start, one.key_end)
            logits[place - first] = torch.where(scores.isnan(), logits[place - first], scores)

    def launch(name, blocks, device, logits, left, start, end, out, scores, first, *sizes):
        strides = logits.stride(0), out.stride(0), scores.stride(0)
        assert (name, *sizes) == ("topk_open", len(start), logits.shape[1], *strides, out.shape[1])
        for place, row in which(left, first, blocks):
            some = slice(row, row + 1)
            own = logits[place - first]
            out[some] = topk_reference(own[None], start[some], end[some], out.shape[1])
            scores[some] = own[start[row] + out[some]].masked_fill(out[some] < 0, -INF)

    monkeypatch.setattr("cpkit.kernels.indexer_topk._list_and_select", list_and_select)
    monkeypatch.setattr("cpkit.kernels.indexer_topk.launch", launch)
    monkeypatch.setattr("cpkit.kernels.mqa_logits_gluon.mqa_open_logits_hopper", open_logits)
    return rounds


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels' places are taken on the CPU")
@pytest.mark.parametrize(
    ("num_keys", "room", "workspace_bytes", "rounds"),
    [
        pytest.param(300, 32, 8 * 1280, [(0, 8), (8, 8), (16, 4)], id="8-rows-where-lists-hold-4"),
        pytest.param(300, 32, 24 * 256, [(first, 4) for first in range(0, 20, 4)], id="not-even-8-rows"),
        pytest.param(300, 1, 1, [(0, 1)] * 20, id="workspace-of-less-than-a-row"),
        pytest.param(30, 32, 24 * 256, [(0, 20)], id="lists-hold-all"),
        pytest.param(33, 16, 24 * 128, [(0, 8), (8, 8), (16, 4)], id="rows-are-256-bytes-apart"),
        pytest.param(32, 16, 24 * 128, [(0, 16), (16, 4)], id="rows-are-128-bytes-apart"),
        pytest.param(300, 96, 16 * 768, [(0, 8), (8, 8), (0, 4)], id="last-part-is-shorter"),
    ],
)
@pytest.mark.parametrize("open_rows", [(), (3,), (0, 9, 19), range(20)], ids=["none", "one", "three", "all"])
def test_open_rows_are_closed_in_rounds(monkeypatch, num_keys, room, workspace_bytes, rounds, open_rows):
    monkeypatch.setattr("cpkit.kernels.indexer_topk.ROOM", room)
    data, (start, end) = operands(20, num_keys), ranges(*((m % 3, num_keys - m) for m in range(20)))
    out, scores = torch.full((20, 24), -7, dtype=torch.int32)[:, 4:20], torch.zeros(20, 20)[:, 1:17]
    launched = launches_on_the_cpu(monkeypatch, 20, open_rows)
    select_listed(Operands(*data, start, end), (out, scores), workspace_bytes)
    assert torch.equal(out, indexer_topk_reference(*data, start, end, 16))
    assert torch.equal(scores, scores_of(data, start, end, out))
    assert launched == rounds


def selections(data, start, end, k, workspace_bytes=2**22):
    """By lists, as so small a workspace holds no more than 26 rows of 40,000 logits, and by all logits."""
    listed = indexer_topk(*data, start, end, k, workspace_bytes=workspace_bytes)
    return listed, topk(mqa_logits(*data, start, end), start, end, k)


@NEEDS_HOPPER
@pytest.mark.parametrize("H", [32, 64])
@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("whole", [True, False], ids=["ties", "random"])
def test_lists_select_what_all_logits_do(H, k, whole):
    data = operands(77, 40000, H, k, whole=whole)
    listed, written = selections(data, *causal(77, 40000), k)
    assert torch.equal(listed, written)


@NEEDS_HOPPER
@pytest.mark.parametrize("H", [32, 64])
def test_lists_of_more_blocks_than_multiprocessors(H):
    data = operands(2501, 13_000, H, whole=False)
    listed, written = selections(data, *causal(2501, 13_000), 2048, workspace_bytes=125_000_000)
    assert torch.equal(listed, written)


@NEEDS_HOPPER
@pytest.mark.parametrize("case", ["equal", "spike", "minus-inf", "nan", "sorted", "same-rows"])
def test_lists_of_hostile_rows(case):
    q, (k, scale), weights = operands(50, 40000, 64, whole=False)
    if case == "equal":
        q = torch.zeros_like(q)
    elif case == "spike":
        scale[777] = 1e30
    elif case == "minus-inf":
        scale[5000:], weights = INF, -weights.abs()
    elif case == "nan":
        scale[1500:] = float("nan")
    elif case == "sorted":
        scale = torch.arange(40000, device=DEVICE).float()
    else:
        q, weights = q[:1].repeat(50, 1, 1), weights[:1].repeat(50, 1)
    listed, written = selections((q, (k, scale), weights), *causal(50, 40000), 2048)
    assert torch.equal(listed, written)


@NEEDS_HOPPER
def test_lists_of_ranges_apart_in_parts():
    data = operands(100, 40000, 64, whole=False)
    start, end = ranges(*((39 * m, 40000 - 300 * m) if m % 3 else (20000 + m, 20000 + 2 * m) for m in range(100)))
    listed, written = selections(data, start, end, 1024, workspace_bytes=10**6)
    assert torch.equal(listed, written)


@NEEDS_HOPPER
def test_rows_left_open_are_selected_by_their_logits(monkeypatch):
    monkeypatch.setattr("cpkit.kernels.indexer_topk.ROOM", 2100)  # lists overflow
    listed, written = selections(operands(60, 40000, 64, whole=False), *causal(60, 40000), 2048, workspace_bytes=2**21)
    assert torch.equal(listed, written)
