"""The block pool against a model that keeps one list of free blocks, and the ways to misuse it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.arrays import ceil_div
from cpkit.errors import ConfigError
from cpkit.workload import BlockAllocator


@settings(max_examples=60, deadline=None)
@given(num_blocks=st.integers(2, 12), moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40))
def test_blocks_come_back_in_order_of_last_use(num_blocks, moves):
    evicted = []
    pool = BlockAllocator(num_blocks, evicted.extend)
    tables, kept, idle = [], set(), []  # idle: kept blocks that nobody holds, freed longest ago first
    for move, number in moves:
        if move == 0 and number <= pool.num_free:
            del evicted[:]
            table = pool.allocate(number).tolist()
            tables.append(table)
            assert 0 not in table
            assert evicted == idle[: len(evicted)], "not the least recently used"
            assert evicted == table[number - len(evicted) :]
            idle = idle[len(evicted) :]
            kept -= set(evicted)
        elif move == 1 and tables:
            table = tables.pop(number % len(tables))
            pool.free(np.array(table, np.int32))
            held = {block for other in tables for block in other}
            idle += [block for block in reversed(table) if block in kept and block not in held]
        elif move == 2 and tables:
            blocks = tables[number % len(tables)][: number // 2]
            pool.keep(blocks)
            kept |= set(blocks)
        elif move == 3 and kept:
            blocks = sorted(kept)[: number + 1]
            assert pool.num_idle(blocks) == len(set(blocks) & set(idle))
            pool.share(blocks)
            tables.append(blocks)
            idle = [block for block in idle if block not in blocks]
        pool.check()
        held = {block for table in tables for block in table}
        assert pool.num_held == len(held)
        assert pool.num_free == num_blocks - 1 - len(held)


def test_null_block_is_never_handed_out():
    assert sorted(BlockAllocator(5).allocate(4).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("again", [[1], [2, 2], [3]], ids=["freed-before", "named-twice", "never-held"])
def test_double_free_is_refused_and_changes_nothing(again):
    pool = BlockAllocator(5)
    pool.free(pool.allocate(2)[:1])  # 1 is free again, 2 is held, 3 never was
    with pytest.raises(RuntimeError, match="double free"):
        pool.free(np.array(again, np.int32))
    pool.check()
    assert pool.num_held == 1


def test_more_than_is_free_is_refused():
    pool = BlockAllocator(4)
    pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 of 3 are free"):
        pool.allocate(2)
    pool.check()


def test_what_nobody_holds_cannot_be_kept_and_what_is_not_kept_cannot_be_shared():
    pool = BlockAllocator(4)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.keep([1])
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="no content to share"):
        pool.share([1])
    pool.check()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, 1 << 31])
def test_pools_without_a_usable_block_are_refused(num_blocks):
    with pytest.raises(ConfigError, match=f"num_kv_blocks={num_blocks}"):
        BlockAllocator(num_blocks)


@pytest.mark.parametrize("damage", ["null", "lost", "twice"])
def test_check_finds_planted_damage(damage):
    pool = BlockAllocator(4)
    block = int(pool.allocate(1)[0])
    if damage == "null":
        pool.refs[0] = 1
    elif damage == "lost":
        pool.refs[block] = 0
    else:
        pool.refs[3] = 1
    with pytest.raises(AssertionError):
        pool.check()


def test_b59_only_sharded_caches_span_more_tokens_with_dcp():
    block_size, dcp, prefix = 16, 2, 64
    attention, replicated = BlockAllocator(9), BlockAllocator(9)
    attention.allocate(ceil_div(prefix, block_size * dcp))
    replicated.allocate(ceil_div(prefix, block_size))
    assert (attention.num_held, replicated.num_held) == (2, 4)
