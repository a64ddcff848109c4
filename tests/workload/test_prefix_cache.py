"""Keys of virtual blocks against the tokens they stand for, and hits in units of block_size * dcp."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.workload import PrefixCache, Request
from cpkit.workload.prefix_cache import block_keys


def request(prompt_len, hashes, hash_size):
    return Request(0, 0.0, prompt_len, 1, np.array(hashes, np.int32), hash_size)


def tokens_of(prompt_len, hashes, hash_size):
    """A token that has a hash is that hash and its place in the run; one without is known to nobody (None)."""
    named = [(h, place) for h in hashes for place in range(hash_size)]
    return (named + [None] * prompt_len)[:prompt_len]


@st.composite
def prompts(draw, hash_size):
    prompt_len = draw(st.integers(0, 40))
    num_hashes = draw(st.integers(0, -(-prompt_len // hash_size)))
    return prompt_len, draw(st.lists(st.integers(0, 1), min_size=num_hashes, max_size=num_hashes))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), hash_size=st.integers(1, 9), span=st.integers(1, 9))
def test_keys_are_equal_exactly_where_all_tokens_up_to_the_end_are(data, hash_size, span):
    (len_a, a), (len_b, b) = data.draw(prompts(hash_size)), data.draw(prompts(hash_size))
    keys_a, keys_b = (block_keys(request(n, h, hash_size), span) for n, h in ((len_a, a), (len_b, b)))
    tokens_a, tokens_b = tokens_of(len_a, a, hash_size), tokens_of(len_b, b, hash_size)
    whole_a = [tokens_a[: i + span] for i in range(0, len_a - span + 1, span) if None not in tokens_a[: i + span]]
    whole_b = [tokens_b[: i + span] for i in range(0, len_b - span + 1, span) if None not in tokens_b[: i + span]]
    assert (len(keys_a), len(keys_b)) == (len(whole_a), len(whole_b))
    for key_a, left in zip(keys_a, whole_a, strict=True):
        for key_b, right in zip(keys_b, whole_b, strict=True):
            assert (key_a == key_b) == (left == right)
    assert len(set(keys_a)) == len(keys_a)


def test_a_hundred_thousand_blocks_have_as_many_keys():
    keys = block_keys(request(6_400_000, range(100_000), 64), 64)
    assert len(set(keys)) == 100_000


def fill(cache, keys):
    blocks = cache.allocator.allocate(len(keys))
    cache.keep(keys, blocks)
    return blocks


def test_b57_hit_is_counted_in_virtual_blocks():
    # Hashes of 16 tokens, block ids of 16 * dcp 2: 150 common tokens are 9 hashes, 4 virtual blocks, 128 tokens.
    common = list(range(9))
    first, second = request(160, [*common, 100], 16), request(160, [*common, 200], 16)
    cache = PrefixCache(num_blocks=100, virtual_block=32)
    fill(cache, block_keys(first, 32))
    assert len(cache.find(block_keys(second, 32), second.prompt_len)) * 32 == 128
    cache.check()


@pytest.mark.parametrize(
    ("virtual_block", "prompt_len", "hit_tokens"),
    [
        pytest.param(1024, 1024, 0, id="one-unit-leaves-no-token"),
        pytest.param(1024, 1025, 1024, id="one-unit-and-a-token"),
        pytest.param(1024, 1500, 1024, id="b61"),
        pytest.param(12_288, 44_449, 36_864, id="b63"),
    ],
)
def test_hit_of_a_repeated_prompt(virtual_block, prompt_len, hit_tokens):
    repeated = request(prompt_len, range(-(-prompt_len // 64)), 64)
    keys = block_keys(repeated, virtual_block)
    cache = PrefixCache(1000, virtual_block)
    fill(cache, keys)
    assert len(cache.find(keys, prompt_len)) * virtual_block == hit_tokens


def test_first_of_two_equal_blocks_stays():
    cache = PrefixCache(10, 4)
    first, second = fill(cache, [7, 8]), fill(cache, [7, 9])
    assert cache.find([7, 8], 9) == first.tolist()
    assert cache.find([7, 9], 9) == [first[0], second[1]]
    assert len(cache) == 3
    cache.allocator.free(second)
    cache.check()
    assert cache.allocator.num_idle(second.tolist()) == 1


def test_evicted_blocks_are_no_longer_found_and_a_prefix_outlives_its_tail():
    cache = PrefixCache(5, 4)
    blocks = fill(cache, [1, 2, 3])
    cache.allocator.free(blocks)
    cache.allocator.allocate(2)  # the free one, then the tail of the three
    assert cache.find([1, 2, 3], 100) == blocks[:2].tolist()
    cache.allocator.allocate(2)
    assert cache.find([1, 2, 3], 100) == []
    assert len(cache) == 0
    cache.check()


def test_a_gap_ends_the_hit():
    cache = PrefixCache(10, 4)
    fill(cache, [1])
    fill(cache, [3])
    assert len(cache.find([1, 2, 3], 100)) == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_nothing_to_find_for_one_token(num_tokens):
    cache = PrefixCache(10, 1)
    fill(cache, [1])
    assert cache.find([1], num_tokens) == []
