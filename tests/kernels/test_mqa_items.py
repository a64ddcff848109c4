"""Items of a prefill's logits against a walk: each (block, chunk) once, long ones first, equal shares for programs."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.kernels.mqa_items_gluon import CACHED_KEYS, TILE, block_and_chunk, choose_chunk, item_of_lap

SMS = 132


def walk(num_items, num_programs):
    """Items of each program, lap by lap, those behind the last included; the kernel's own arithmetic, on numbers."""
    laps = -(-num_items // num_programs)
    return [[item_of_lap.fn(lap, own, num_programs) for lap in range(laps)] for own in range(num_programs)]


def deal(num_items, num_programs):
    """The same by dealing: a row of programs that turns round after each lap."""
    hands, order = [[] for _ in range(num_programs)], list(range(num_programs))
    for first in range(0, num_items, num_programs):
        for item, own in enumerate(order, first):
            hands[own].append(item)
        order.reverse()
    return hands


@pytest.mark.parametrize(
    ("num_items", "num_programs"),
    [
        pytest.param(1, 1, id="one-item"),
        pytest.param(7, 1, id="one-program"),
        pytest.param(3, 5, id="more-programs-than-items"),
        pytest.param(8, 3, id="docstring"),
        pytest.param(6, 3, id="full-laps"),
        pytest.param(133, 132, id="one-behind-a-lap"),
        pytest.param(512, 132, id="backwards-last"),
    ],
)
def test_every_item_once(num_items, num_programs):
    taken = walk(num_items, num_programs)
    assert taken == deal(num_items, num_programs)
    assert sorted(item for items in taken for item in items if item < num_items) == list(range(num_items))


@pytest.mark.parametrize("num_keys", [1, 64, 65, 1025, 16_384, 16_385, 131_072])
@pytest.mark.parametrize("num_rows", [1, 8, 9, 1_056, 1_057, 2_048, 2_560, 8_192])
@pytest.mark.parametrize("H", [32, 64])
def test_every_row_meets_every_key_once(H, num_rows, num_keys):
    num_blocks = -(-num_rows * H // 512)
    chunk_keys = choose_chunk(num_rows, num_keys, num_blocks, SMS)
    num_chunks = -(-num_keys // chunk_keys)
    assert chunk_keys % TILE == 0 and (num_chunks - 1) * chunk_keys < num_keys <= num_chunks * chunk_keys
    items = range(num_blocks * num_chunks)
    met = [block_and_chunk.fn(item, num_blocks) for item in items]
    assert sorted(met) == [(block, chunk) for block in range(num_blocks) for chunk in range(num_chunks)]
    assert [chunk for _, chunk in met] == sorted(chunk for _, chunk in met), "programs read one chunk at a time"
    lens = [causal_keys(block, chunk, num_rows, num_keys, chunk_keys, 512 // H) for block, chunk in met]
    for chunk in range(num_chunks):
        of_chunk = lens[chunk * num_blocks : (chunk + 1) * num_blocks]
        assert of_chunk == sorted(of_chunk, reverse=True), "long items first"
    behind, chunk = block_and_chunk.fn(len(items) + 131, num_blocks)
    assert chunk * chunk_keys >= num_keys and 0 <= behind < num_blocks, "an item behind the last has no keys"


def causal_keys(block, chunk, num_rows, num_keys, chunk_keys, rows_each):
    """Keys of a chunk that the last row of a block sees, where the rows are the last tokens of a request."""
    last_row = min((block + 1) * rows_each, num_rows) - 1
    seen = max(num_keys - num_rows + last_row + 1, 0)
    return max(min(seen, (chunk + 1) * chunk_keys) - chunk * chunk_keys, 0)


def busiest_over_mean(num_rows, num_keys, H, chunk_keys):
    """Keys of the busiest program over the mean, of a causal request's last rows."""
    num_blocks = -(-num_rows * H // 512)
    num_items = num_blocks * -(-num_keys // chunk_keys)
    keys = [
        causal_keys(*block_and_chunk.fn(i, num_blocks), num_rows, num_keys, chunk_keys, 512 // H)
        for i in range(num_items)
    ]
    shares = [sum(keys[item] for item in items if item < num_items) for items in walk(num_items, min(SMS, num_items))]
    return max(shares) * len(shares) / sum(shares)


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "H", "chunk_keys"),
    [
        pytest.param(2_048, 16_384, 64, 16_384, id="1.94-laps-whole"),
        pytest.param(8_192, 8_192, 64, 8_192, id="square-whole"),
        pytest.param(8_192, 8_192, 32, 8_192, id="square-32-heads-whole"),
        pytest.param(2_560, 16_384, 64, 8_192, id="2.42-laps-halves"),
        pytest.param(4_096, 131_072, 64, 8_192, id="more-than-the-cache-holds"),
        pytest.param(2_048, CACHED_KEYS + 1, 64, 4_096, id="one-key-more-than-the-cache-holds"),
    ],
)
def test_shares_are_nearly_equal(num_rows, num_keys, H, chunk_keys):
    num_blocks = num_rows * H // 512
    assert choose_chunk(num_rows, num_keys, num_blocks, SMS) == chunk_keys
    assert busiest_over_mean(num_rows, num_keys, H, chunk_keys) < 1.04


def test_pairs_of_laps_are_equal_where_lengths_fall_evenly():
    lens = range(8 * SMS, 0, -1)
    shares = [sum(lens[item] for item in items) for items in walk(len(lens), SMS)]
    assert len(set(shares)) == 1


@pytest.mark.parametrize("num_blocks", [1, 8, 132])
def test_few_blocks_are_cut_into_chunks(num_blocks):
    """No more blocks than multiprocessors: whole rows of keys would leave some idle from the start."""
    assert choose_chunk(num_blocks * 8, 16_384, num_blocks, SMS) <= 2048
