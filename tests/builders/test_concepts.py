"""The builders' drawings in docs/concepts.md show what the builders give for that batch."""

import re
from pathlib import Path

import pytest

from cpkit.budget import Budget
from cpkit.builders.chip import Chip
from cpkit.builders.common import rank_batch
from cpkit.builders.indexer import IndexerBuilder, IndexerConfig
from cpkit.builders.kpool import KpoolBuilder, KpoolConfig
from cpkit.builders.swa import SwaBuilder, SwaConfig
from cpkit.topology import Shard

PAGE = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Builders")[2].partition("\n## ")[0]
BATCH, INDEXER, WINDOW, TAIL = re.findall(r"^```\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
RANKS = re.split(r"^rank \d .*\n", INDEXER, flags=re.MULTILINE)

BUDGET = Budget(workspace_tokens=100, max_num_batched_tokens=16, max_num_seqs=4, num_speculative_tokens=1)
HOPPER = Chip("cuda", family=90, num_workers=2)


def numbers(drawing, name, entries=None):
    """The first `entries` numbers behind a name at the start of a line; words may follow them."""
    line = re.search(rf"^{name} +(.*)$", drawing, re.MULTILINE)
    assert line, f"{name} is not drawn"
    return [int(number) for number in re.findall(r"-?\d+", line[1])][:entries]


@pytest.fixture
def batch():
    entries = numbers(BATCH, "block_tables", 9)
    positions = numbers(BATCH, "position")
    return rank_batch(
        [2, 3, 4],
        numbers(BATCH, "seq_lens"),
        [entries[:3], entries[3:6], entries[6:]],
        [0] * len(positions) + [-1],
        positions=[*positions, 0],
        is_prefilling=[False, True, True],
    )


def test_the_batch_is_drawn_as_it_is(batch):
    lens = zip(batch.query_lens.tolist(), batch.max_seq_lens.tolist(), strict=True)
    assert numbers(BATCH, "position") == [pos for new, whole in lens for pos in range(whole - new, whole)]
    assert numbers(BATCH, "token") == list(range(batch.num_tokens))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_indexers_drawing(batch, rank):
    shard, drawn = Shard(dcp_size=2, dcp_rank=rank, interleave=2), RANKS[1 + rank]
    built = IndexerBuilder(IndexerConfig(BUDGET, HOPPER, shard, block_size=4, max_blocks=3)).build(batch)
    assert numbers(RANKS[0], "global_seq_lens") == built.decode.global_seq_lens.tolist()
    assert [numbers(drawn, "seq_lens")] == built.decode.seq_lens.tolist()
    assert numbers(drawn, "schedule", 6) == built.decode.schedule.flatten().tolist()
    (chunk,) = built.prefill.chunks
    assert numbers(drawn, "key_start") == chunk.key_start.tolist()
    assert numbers(drawn, "key_end") == chunk.key_end.tolist()


def test_the_windows_drawing(batch):
    config = SwaConfig(BUDGET, HOPPER, window_size=3, block_size=4, num_blocks=9, max_model_len=12)
    built = SwaBuilder(config).build(batch)
    found = [
        [token, row, *slots, num_keys]
        for token, (row, slots, num_keys) in enumerate(
            zip(
                built.token_to_req.tolist(),
                built.decode.indices.tolist() + built.prefill.indices.tolist(),
                built.decode.lens.tolist() + built.prefill.lens.tolist(),
                strict=True,
            )
        )
    ]
    rows = re.findall(r"^[a-z ]{12}(\d) +(\d) +\S+ +(.*)$", WINDOW, re.MULTILINE)
    assert [[int(token), int(row), *map(int, rest.split())] for token, row, rest in rows] == found
    assert numbers(WINDOW, "gather_lens", 2) == built.prefill.gather_lens.tolist()
    decodes = re.search(r"^decode .*?(?=^prefill)", WINDOW, re.MULTILINE | re.DOTALL)[0]
    assert decodes.count("\n") == built.split.num_decode_tokens


def test_the_tails_drawing(batch):
    built = KpoolBuilder(KpoolConfig(BUDGET, 4)).build(batch)
    assert numbers(TAIL, "slot_mapping") == built.slot_mapping.tolist()
