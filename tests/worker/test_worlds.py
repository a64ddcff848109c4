"""Simulated ranks against the oracle: every legal world, kind of layer, interleave, partition and merge."""

import os
from dataclasses import replace
from itertools import product

import pytest

from cpkit.errors import ConfigError
from tests.worker.worlds import PARTITIONS, SHARES, WORLDS, Case, findings

TIGHT = {"workspace_tokens": 512, "logits_bytes": 4 * 640, "max_num_batched_tokens": 48, "num_speculative_tokens": 1}
"""Prompts take several steps, chunks several runs, and keys (where turns of shards allow) several spans."""
OPTIONS = [
    {"partition": partition, "merge": merge, "data": data, "budget": budget}
    for partition, merge, data, budget in product(PARTITIONS, ("ag_rs", "a2a"), ("exact", "random"), ({}, TIGHT))
]


def case(number, world, share):
    """Options go round as the cases do; 11 and 32 have no common factor, so neighbours differ in most of them."""
    kind, interleave = share
    options = dict(OPTIONS[number * 11 % len(OPTIONS)])
    if kind == "c128a" and options["budget"]:
        options["budget"] = {"workspace_tokens": 2048, "max_num_batched_tokens": 200, "num_speculative_tokens": 1}
    sharded = world["pcp"] > 1 and world["dcp"] == 1 and number % 2
    return Case(kind, interleave, world, shard=False if sharded else None, **options)


QUICK = [case(number, world, SHARES[number * 4 % len(SHARES)]) for number, world in enumerate(WORLDS)]
ALL = [case(number, *pair) for number, pair in enumerate(product(WORLDS, SHARES))]
SWEEP = ALL if os.environ.get("CPKIT_SWEEP") == "all" else ALL[::4]
"""A quarter of the sweep, in which kinds of layers still go round; CPKIT_SWEEP=all runs it whole, in minutes."""


POOLED_WORLDS = [world for world in WORLDS if 1 in (world["pcp"], world["dcp"])]
POOLED = [
    replace(case(number, world, ("kpool", (16, 64)[number % 2])), topk=4) for number, world in enumerate(POOLED_WORLDS)
]
"""Pools of 16 tokens, of which 4 are picked; PCP and DCP together are refused."""


def check(case):
    found = findings(case)
    steps = case.steps
    tokens = sum(batch.num_tokens for batch in steps.batches)
    size = case.settings.topology.world_size
    assert found.hidden_rows == size * tokens
    layers = len(case.model.layers)
    # every token is verified by each TP rank, and by each PCP rank that computes a copy
    assert layers * tokens * case.world["tp"] <= found.rows <= layers * tokens * size


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_world(case):
    check(case)


@pytest.mark.parametrize("case", POOLED[2::3], ids=str)
def test_pools(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in POOLED if case not in POOLED[2::3]], ids=str)
def test_pools_of_every_world(case):
    check(case)


def test_pools_under_pcp_and_dcp_are_refused():
    with pytest.raises(ConfigError, match="pcp=2 with dcp=2 and an indexer that scores pools of 16 keys"):
        findings(Case("kpool", 16, {"pcp": 2, "dcp": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_every_world_and_kind_of_layer(case):
    check(case)
