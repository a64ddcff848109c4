"""Lists of survivors, by the kernel's own functions on numpy: every passing logit one place, no hole in a list."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.kernels import mqa_logits_gluon, mqa_survivors_gluon
from tests.kernels.gluon_on_numpy import on_numpy, pointer, tensor

FAR = 2**31 - 1
SPECIAL = [0.0, -0.0, np.inf, -np.inf, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, -1.2e-38, 3.4028235e38, -3.4028235e38]
NANS = np.array([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)


DRAWN = [(0, 448, 2.0, 300), (100, 448, 3.0, 447)]
"""The two rows drawn in the kernel's file: range and bound."""
SPANS = {
    "whole": (0, 0, 448),
    "ragged": (100, 100, 389),
    "from-inside-a-tile": (128, 150, 500),
    "one-key": (64, 80, 81),
}
"""Where an item's tiles begin; the keys that it may score."""


@pytest.fixture
def kernel(monkeypatch):
    """Puts the kernel's functions on numpy, with these memories."""

    def use(*memories, seed=0):
        on_numpy(monkeypatch, (mqa_logits_gluon, mqa_survivors_gluon), memories, np.random.default_rng(seed))
        monkeypatch.setattr(mqa_survivors_gluon, "uniform", lambda x: x)
        return mqa_survivors_gluon

    return use


def test_runs_end_where_a_row_is_tested_otherwise(kernel):
    """Each of the drawn rows a column group of its own."""
    rows = [[tensor(np.array([x], t)) for x, t in zip(row, "iifi", strict=True)] for row in DRAWN]
    end_of_run, ends = kernel().end_of_run, [0]
    while ends[-1] < 448:
        ends.append(int(end_of_run(ends[-1], 448, *rows)))
    assert ends == [0, 64, 128, 256, 320, 448]


@pytest.mark.parametrize(("last_key", "tie"), [(9, False), (10, True), (FAR, True)], ids=["above", "tie", "all-tie"])
def test_threshold_is_the_bound(kernel, last_key, tie):
    """Of key 10, for bounds and logits at the edges of fp32."""
    bounds = np.array([*SPECIAL, *np.random.default_rng(1).standard_normal(50)], np.float32)
    with np.errstate(all="ignore"):
        near = [np.nextafter(bounds, np.float32(side)) for side in (-np.inf, np.inf)]
    bounds = np.concatenate([bounds, NANS])
    start, end, last_keys = (tensor(np.full(len(bounds), x, np.int32)) for x in (10, 11, last_key))
    tests = start, end, tensor(bounds), last_keys
    reach = kernel().thresholds(tensor(np.array([[9], [10], [11]], np.int32)), tests)
    assert reach.dtype == np.float32
    for logit in np.concatenate([bounds, *near]):
        expected = [logit > bound or (tie and logit == bound) for bound in bounds]
        assert (logit >= reach[1]).tolist() == expected, logit
        assert not (logit >= reach[[0, 2]]).any(), "out of the range"


def listed(kernel, monkeypatch, rows, logits, told, room, seed):
    """What _list_keys lists of a scorer's rows, its loop over a run's tiles apart: lists, counts, and tiles scored."""
    key_start, key_end, score, last_key = rows
    num_rows, Q = len(key_start), len(logits) // 2
    survivors, counts = np.full(num_rows * room + 1, -1), np.zeros(num_rows, np.int32)
    lists = kernel(key_start, key_end, score, last_key, survivors, counts, seed=seed)
    tiles = []

    def score_keys(halves, span, tile, key_source, work, sink, buffers, state, *constants):
        assert told[0] <= span[0] < span[1] <= told[2]
        reach, found = state
        groups = halves[0][2], halves[1][2]
        for key in range(*map(int, span), 64):
            keys = tensor(np.arange(key, key + 64, dtype=np.int32)[:, None])
            claimed = lists.claim_places(found, reach, groups, sink[3])
            lists.list_passing(found, keys - 64, claimed, groups, sink[2], sink[4])
            found = tensor(logits[:Q, key : key + 64].T), tensor(logits[Q:, key : key + 64].T)
            tiles.append(key)
        return tile + len(range(*map(int, span), 64)), found

    monkeypatch.setattr(mqa_logits_gluon, "_score_keys", score_keys)
    groups = [tensor(np.arange(first, first + Q, dtype=np.int32)) for first in (0, Q)]
    halves = [(None, None, group) for group in groups]
    sink = *map(pointer, (2, 3, 4, 5)), room
    of_rows = pointer(0), pointer(1), num_rows
    tile = mqa_logits_gluon._list_keys(halves, told, 7, None, None, of_rows, sink, None, 128 // Q, False)
    assert tile == 7 + len(tiles) and survivors[-1] == -1
    return survivors[:-1].reshape(num_rows, room), counts, tiles


def edges(rng, told, num_rows):
    """Places beside the edges of tiles, of what is scored, and of nothing at all."""
    first, begin, stop = told
    places = [-1, 0, begin - 1, begin, begin + 1, first + 63, first + 64, first + 65, stop - 1, stop, stop + 9, 600]
    return rng.choice(places, num_rows).astype(np.int32)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("told", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize(("Q", "num_rows"), [(2, 4), (4, 8), (2, 3), (2, 1), (4, 5)])
def test_every_survivor_has_a_place_of_its_own(kernel, monkeypatch, Q, num_rows, told, seed):
    """Rows 0 .. Q - 1 are a scorer's first column group, Q .. 2 Q - 1 its second; those from num_rows on are none."""
    rng = np.random.default_rng([seed, num_rows])
    values = np.array([*SPECIAL, *NANS[:2], 2.0, 2.0], np.float32)
    logits = rng.choice(values, (2 * Q, 640))  # many are equal
    key_start, key_end = edges(rng, told, num_rows), edges(rng, told, num_rows)
    full = rng.random(num_rows) < 0.5
    key_start[full], key_end[full] = rng.integers(0, 200), 600
    if seed > 3:  # none of these rows is why keys are scored so far: others of their block are
        key_end = np.minimum(key_end, (told[1] + 70, told[0])[seed - 4]).astype(np.int32)
    last_key = np.where(rng.random(num_rows) < 0.3, FAR, edges(rng, told, num_rows)).astype(np.int32)
    rows = key_start, key_end, rng.choice(values, num_rows), last_key
    room = (1000, 20)[seed % 2]  # of those that pass some fit, or all
    lists, counts, tiles = listed(kernel, monkeypatch, rows, logits, told, room, seed)
    first, begin, stop = told
    assert tiles == list(range(first, stop, 64))
    for row, (start, end, bound, last) in enumerate(zip(*rows, strict=True)):
        seen = [(key, logits[row, key]) for key in range(begin, stop) if start <= key < end]
        passing = {key: x for key, x in seen if x > bound or (x == bound and key <= last)}
        assert counts[row] == len(passing)
        entries = lists[row, : counts[row]]
        assert (lists[row, len(entries) :] == -1).all(), "written behind the last"
        found = dict(zip((entries & FAR).tolist(), (entries >> 32).astype(np.int32), strict=True))
        assert len(found) == len(entries) == min(room, len(passing)), "a key twice, or a hole"
        assert all(bits == passing[key].view(np.int32) for key, bits in found.items())
