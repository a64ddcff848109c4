"""The collectives of small steps, written out by hand: 2 decodes of 1 and 2 query tokens, a prefill of 512 behind 128.

Sizes are products of the step's counts and the models' facts:

    V3.2      128 heads, hidden 7168, latent 576 (values 512), index key 128 (132 bytes), 656 bytes a row, 2048 picks
    V4-flash   64 heads, hidden 4096, latent 512,              index key 128 (132 bytes), 584 bytes a row,  512 picks
    GLM-5.2    64 heads, hidden 6144, like V3.2; 57 of 78 layers use an earlier selection again
    GLM-5.3-flash  64 heads, hidden 4096, latent 512, 656 bytes a row, picks 128 pools of 16 tokens
    V4.1       64 heads, hidden 5120, latent 512, 528 bytes a row, 512 picks; most layers read another's cache
"""

import pytest

from cpkit.batch import Batch
from cpkit.budget import Budget
from cpkit.errors import ConfigError
from cpkit.model import load_model
from cpkit.planner.collectives import Collective, StepShape, list_collectives
from cpkit.step import plan_step
from cpkit.topology import Topology

BATCH = Batch.from_lens([301, 1001, 640], [1, 2, 512], [300, 999, 640])
BUDGET = Budget(workspace_tokens=100_000, logits_bytes=4 * 300 * 640, num_speculative_tokens=1)
INTERLEAVE = {"deepseek-v4-flash": 128, "glm-5.3-flash": 16, "deepseek-v4.1-flash": 2}


def plan(name, merge="ag_rs", batch=BATCH, budget=BUDGET, **world):
    interleave = INTERLEAVE.get(name, 1)
    topology = Topology(**world, interleave=interleave, block_size=max(64, interleave))
    return plan_step(batch, topology, load_model(name), budget, merge=merge)


def listed(collectives):
    """[(op, group, what, dtype, elements, times), ...]"""
    return [(c.op, c.group, c.what, c.dtype, c.elements, c.times) for c in collectives]


def by_kind(plan):
    """{(kind, owns keys, runs its indexer): list} of every layer kind."""
    layers = zip(plan.model.layers, plan.collectives.layers, strict=True)
    return {(layer.kind, layer.owns_keys, layer.runs_index): listed(collectives) for layer, collectives in layers}


def gather(group, what, dtype, elements, times=1):
    return ("all_gather", group, what, dtype, elements, times)


def merged(merge, rows, heads):
    """ag_rs: LSE then outputs; a2a: both packed."""
    if merge == "a2a":
        return [("all_to_all", "dcp", "partials", "float32", rows * heads * 513, 1)]
    return [
        gather("dcp", "lse", "float32", rows * heads),
        ("reduce_scatter", "dcp", "outputs", "float32", rows * heads * 512, 1),
    ]


def pcp_inputs(tokens, latent=0, index=0, swa=0, slots=()):
    sizes = [("kv_latent", latent), ("index_key", index), ("swa_row", swa)]
    inputs = [gather("pcp", what, "bfloat16", tokens * dim) for what, dim in sizes if dim]
    return inputs + [gather("pcp", "slots", "int64", padded) for padded in slots]


def test_pcp_alone():
    # decodes are dealt out: rank 0 has 1 + 256 tokens, rank 1 has 2 + 256
    step = plan("deepseek-v3.2", tp=4, pcp=2)
    assert by_kind(step) == {("dsa", True, True): pcp_inputs(258, latent=576, index=128)}
    assert listed(step.collectives.step) == [gather("pcp", "hidden_rows", "bfloat16", 258 * 7168)]
    assert by_kind(plan("deepseek-v4-flash", tp=4, pcp=2)) == {
        ("swa", True, False): pcp_inputs(258, swa=512),
        ("c4a", True, True): pcp_inputs(258, latent=512, index=128, swa=512, slots=[258]),
        ("c128a", True, False): pcp_inputs(258, latent=512, swa=512, slots=[258]),
    }
    assert by_kind(plan("glm-5.2", tp=4, pcp=2)) == {
        ("dsa", True, True): pcp_inputs(258, latent=576, index=128),
        ("dsa", True, False): pcp_inputs(258, latent=576),
    }
    assert by_kind(plan("glm-5.3-flash", tp=4, pcp=2)) == {
        ("dsa", True, True): pcp_inputs(258, latent=512, index=128, slots=[258]),  # slots of the pools
        ("linear", True, False): [],
    }
    assert by_kind(plan("deepseek-v4.1-flash", tp=4, pcp=2)) == {
        ("swa", True, False): pcp_inputs(258, swa=512),
        ("c1a", False, False): pcp_inputs(258, swa=512),
        ("c1a", False, True): pcp_inputs(258, swa=512),
        ("c1a", True, True): pcp_inputs(258, latent=512, index=128, swa=512),
        ("c2a", False, False): pcp_inputs(258, swa=512),
        ("c2a", True, True): pcp_inputs(258, latent=512, index=128, swa=512, slots=[258]),
    }


def test_replicated_decodes_send_no_kv_but_their_slots_and_hidden_rows():
    topology = Topology(tp=4, pcp=2, block_size=128)
    step = plan_step(BATCH, topology, load_model("deepseek-v4-flash"), BUDGET, shard_decode_requests=False)
    assert by_kind(step)["c4a", True, True] == pcp_inputs(256, latent=512, index=128, swa=512, slots=[259])
    assert listed(step.collectives.step) == [gather("pcp", "hidden_rows", "bfloat16", 259 * 4096)]


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_dcp_alone(merge):
    # all 515 rows are merged over 2 ranks' heads; 300 x 640 logits fit, so the 512 prefill rows run as 300 + 212
    def candidates(topk, *runs):
        return [gather("dcp", "candidates", "uint8", rows * topk * 12) for rows in (3, *runs)]

    def layer(own, latent, *chosen):
        return [gather("dcp", "query_heads", "bfloat16", 515 * own * latent), *chosen, *merged(merge, 515, 2 * own)]

    v32 = plan("deepseek-v3.2", merge, tp=4, dcp=2)
    assert by_kind(v32) == {("dsa", True, True): layer(32, 576, *candidates(2048, 300, 212))}
    assert v32.collectives.step == ()
    assert by_kind(plan("glm-5.2", merge, tp=4, dcp=2)) == {
        ("dsa", True, True): layer(16, 576, *candidates(2048, 300, 212)),
        ("dsa", True, False): layer(16, 576),
    }
    # 640 tokens are 160 states: all 512 rows run at once
    assert by_kind(plan("deepseek-v4-flash", merge, tp=4, dcp=2)) == {
        ("swa", True, False): [],
        ("c4a", True, True): layer(16, 512, *candidates(512, 512)),
        ("c128a", True, False): layer(16, 512),
    }
    assert by_kind(plan("glm-5.3-flash", merge, tp=4, dcp=2)) == {
        ("dsa", True, True): layer(16, 512, *candidates(128, 512)),
        ("linear", True, False): [],
    }
    assert by_kind(plan("deepseek-v4.1-flash", merge, tp=4, dcp=2)) == {
        ("swa", True, False): [],
        ("c1a", False, False): layer(16, 512),
        ("c1a", False, True): layer(16, 512, *candidates(512, 300, 212)),
        ("c1a", True, True): layer(16, 512, *candidates(512, 300, 212)),
        ("c2a", False, False): layer(16, 512),
        ("c2a", True, True): layer(16, 512, *candidates(512, 512)),
    }


def both(merge, *, own, keys, key_bytes, rows, row_bytes, heads, topk=0, queries=()):
    """PCP + DCP: gathered chunk, query heads, candidates of 3 decode rows, merge, own heads again."""
    chunk = [gather("dcp", "index_keys", "uint8", keys * key_bytes)] if key_bytes else []
    chosen = [gather("dcp", "candidates", "uint8", 3 * topk * 12)] if topk else []
    return [
        *chunk,
        gather("dcp", "latent_rows", "uint8", rows * row_bytes),
        *queries,
        *chosen,
        *merged(merge, 3, heads),
        gather("pcp", "output_heads", "float32", 3 * own * 512),
    ]


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_dcp_is_pcp(merge):
    """tp=4, pcp=2, dcp=2: 256 prefill tokens a rank, 320 of 640 keys; a group holds the same heads and halves them."""
    v32 = plan("deepseek-v3.2", merge, tp=4, pcp=2, dcp=2)
    sizes = {"keys": 320, "key_bytes": 132, "rows": 320, "row_bytes": 656, "topk": 2048}
    assert by_kind(v32) == {
        ("dsa", True, True): pcp_inputs(256, latent=576, index=128) + both(merge, own=16, heads=32, **sizes)
    }
    assert listed(v32.collectives.step) == [gather("pcp", "hidden_rows", "bfloat16", 259 * 7168)]
    assert by_kind(plan("glm-5.2", merge, tp=4, pcp=2, dcp=2)) == {
        ("dsa", True, True): pcp_inputs(256, latent=576, index=128) + both(merge, own=8, heads=16, **sizes),
        ("dsa", True, False): pcp_inputs(256, latent=576)
        + both(merge, own=8, heads=16, **(sizes | {"key_bytes": 0, "topk": 0})),
    }
    # 160 states of 4 tokens, dealt in turns of 32: 3 + 2 turns; 5 states of 128 tokens, dealt one by one
    v4 = by_kind(plan("deepseek-v4-flash", merge, tp=4, pcp=2, dcp=2))
    assert v4["swa", True, False] == pcp_inputs(256, swa=512)
    assert v4["c4a", True, True] == pcp_inputs(256, latent=512, index=128, swa=512, slots=[259]) + both(
        merge, own=8, heads=16, keys=96, key_bytes=132, rows=96, row_bytes=584, topk=512
    )
    assert v4["c128a", True, False] == pcp_inputs(256, latent=512, swa=512, slots=[259]) + both(
        merge, own=8, heads=16, keys=3, key_bytes=0, rows=3, row_bytes=584
    )
    # 40 pools of 16 tokens: 20 a rank, 320 latent rows
    kpool = by_kind(plan("glm-5.3-flash", merge, tp=4, pcp=2, dcp=2))
    assert kpool["dsa", True, True] == pcp_inputs(256, latent=512, index=128, slots=[259]) + both(
        merge, own=8, heads=16, keys=20, key_bytes=132, rows=320, row_bytes=656, topk=128
    )
    assert kpool["linear", True, False] == []
    v41 = by_kind(plan("deepseek-v4.1-flash", merge, tp=4, pcp=2, dcp=2))
    assert v41["c2a", False, False] == pcp_inputs(256, swa=512) + both(
        merge, own=8, heads=16, keys=160, key_bytes=0, rows=160, row_bytes=528
    )
    assert v41["c1a", False, True] == pcp_inputs(256, swa=512) + both(
        merge, own=8, heads=16, keys=320, key_bytes=132, rows=320, row_bytes=528, topk=512
    )


@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
def test_dcp_is_tp_times_pcp(merge):
    """tp=4, pcp=2, dcp=8: heads are gathered over TP, an eighth of all heads comes back, 80 of 640 keys a rank."""
    queries = [gather("tp", "query_heads", "bfloat16", 3 * 32 * 576)]
    sizes = {"keys": 80, "key_bytes": 132, "rows": 80, "row_bytes": 656, "topk": 2048}
    assert by_kind(plan("deepseek-v3.2", merge, tp=4, pcp=2, dcp=8)) == {
        ("dsa", True, True): pcp_inputs(256, latent=576, index=128)
        + both(merge, own=16, heads=128, queries=queries, **sizes)
    }
    v4 = by_kind(plan("deepseek-v4-flash", merge, tp=4, pcp=2, dcp=8))
    queries = [gather("tp", "query_heads", "bfloat16", 3 * 16 * 512)]
    assert v4["c128a", True, False] == pcp_inputs(256, latent=512, swa=512, slots=[259]) + both(
        merge, own=8, heads=64, keys=1, key_bytes=0, rows=1, row_bytes=584, queries=queries
    )


def test_one_rank_sends_nothing():
    step = plan("deepseek-v4-flash", tp=1)
    assert (set(step.collectives.layers), step.collectives.step) == ({()}, ())


def test_key_spans_are_gathered_each_and_selected_from_once():
    budget = Budget(workspace_tokens=256, logits_bytes=4 << 20, num_speculative_tokens=1)
    spans = by_kind(plan("deepseek-v3.2", tp=1, pcp=2, dcp=2, budget=budget))["dsa", True, True]
    sent = [(row[2], row[4]) for row in spans if row[2] in ("index_keys", "latent_rows")]
    # every span is scored before the selection is known, and then attended
    assert sent == [
        (what, keys * size) for what, size in (("index_keys", 132), ("latent_rows", 656)) for keys in (128, 128, 64)
    ]
    alone = by_kind(plan("deepseek-v3.2", tp=2, dcp=2, budget=budget))["dsa", True, True]
    assert [row[4:] for row in alone if row[2] == "candidates"] == [(3 * 2048 * 12, 1), (512 * 2048 * 12, 1)]


def test_repeated_runs_are_counted():
    budget = Budget(workspace_tokens=1000, logits_bytes=4 * 100 * 640)
    alone = by_kind(plan("deepseek-v3.2", tp=2, dcp=2, batch=Batch.from_lens([640], [512]), budget=budget))
    assert [row[4:] for row in alone["dsa", True, True] if row[2] == "candidates"] == [
        (100 * 2048 * 12, 5),
        (12 * 2048 * 12, 1),
    ]


def test_bytes_of_a_collective():
    assert Collective("all_gather", "dcp", "lse", "float32", 10, times=3).bytes == 120
    assert Collective("all_gather", "pcp", "kv_latent", "bfloat16", 1 << 40).bytes == 1 << 41
    assert Collective("all_gather", "pcp", "slots", "int64", 5).bytes == 40


def test_layers_weigh_by_their_number():
    step = plan("glm-5.2", tp=4, pcp=2)
    assert [(c.what, layers) for c, layers in step.collectives.weighted(step.model)] == [
        ("kv_latent", 21), ("index_key", 21), ("kv_latent", 57), ("hidden_rows", 1),
    ]  # fmt: skip


def test_decodes_alone_issue_no_chunk_gathers():
    kinds = by_kind(plan("deepseek-v3.2", tp=1, pcp=2, dcp=2, batch=Batch.from_lens([301], [1])))
    assert [row[2] for row in kinds["dsa", True, True]] == ["candidates", "lse", "outputs", "output_heads"]


def test_b01_two_token_prefill_gathers_on_both_ranks():
    topology = Topology(pcp=2, dcp=2)
    batch = Batch.from_lens([2], [2])
    lists = [plan_step(batch, topology, load_model("deepseek-v3.2"), BUDGET, rank=r).collectives for r in range(2)]
    assert lists[0] == lists[1]
    # both compute both tokens; each holds one key
    assert listed(lists[0].layers[0]) == [
        *pcp_inputs(2, latent=576, index=128),
        gather("dcp", "index_keys", "uint8", 132),
        gather("dcp", "latent_rows", "uint8", 656),
    ]


def test_b19_gather_names_its_group():
    step = plan("glm-5.2", tp=1, pcp=8)
    assert {row.group for row in step.collectives.layers[0]} == {"pcp"}
    assert step.topology.groups("pcp") == (tuple(range(8)),)


def test_b37_rows_of_the_merge_follow_the_batch_alone():
    long = Batch.from_lens([80_000, 150_000, 220_000, 300_000], [1] * 4)
    after = Batch.from_lens([80_001, 150_001, 300_001], [1] * 3)
    for batch, rows in ((long, 4), (after, 3)):
        ranks = [
            plan_step(batch, Topology(tp=4, dcp=4), load_model("glm-5.2"), BUDGET, rank=r).collectives for r in range(4)
        ]
        assert all(one == ranks[0] for one in ranks)
        assert [c.elements for c in ranks[0].layers[0] if c.what == "lse"] == [rows * 64]


@pytest.mark.parametrize(
    ("world", "words"),
    [
        pytest.param({"tp": 2, "pcp": 3, "dcp": 6}, r"128 heads cannot be scattered over dcp=6", id="all-heads"),
        pytest.param({"tp": 2, "pcp": 3, "dcp": 3}, r"64 heads cannot be scattered over dcp=3", id="own-heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(world, words):
    with pytest.raises(ConfigError, match=words):
        plan("deepseek-v3.2", **world)
    prefills = Batch.from_lens([640], [512])
    assert plan("deepseek-v3.2", batch=prefills, **world).collectives.step  # merges nothing


def test_unknown_merge_names_the_choices():
    shape = StepShape(1, 1, 1, 1, {}, {})
    with pytest.raises(ConfigError, match="merge 'ring': use one of ag_rs, a2a"):
        list_collectives(shape, Topology(), load_model("glm-5.2"), "ring")
