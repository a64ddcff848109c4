"""The cost of a planned step: its amounts against a slow count, its sums, and what parallelism does to it."""

import json

import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.errors import ConfigError
from cpkit.model import MODELS, load_config, load_model, published_fields
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.assumptions import Assumptions
from cpkit.sizing.cost.kernels import Kernels
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.step import STAGE_OF, STAGES
from cpkit.sizing.cost.tables import Curve, KernelTable, kernel_tables
from cpkit.sizing.cost.work import rank_work
from cpkit.sizing.figures import KINDS
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

PREFILL = Batch.from_lens([9000, 700], [3000, 700], [9000, 700])
DECODES = Batch.from_lens([32768] * 32, [1] * 32)
MIXED = Batch.from_lens([5000, 70000, 3, 2048], [1, 1, 1, 2048], [4000, 60000, 2, 2048])


def make(name="deepseek-v3.2", assumptions=Assumptions(), partition="head_tail", limits=None, **sizes):  # noqa: B008
    model = load_model(name)
    topology = Topology(**sizes)
    settings = StepSettings(topology, model, default_budget(model, **(limits or {})), partition)
    return CostModel(model, load_weights(name, model), topology, chip("h200"), assumptions), settings


def cost_of(batch, rank=None, **options):
    model, settings = make(**options)
    return model.step_cost(settings.plan(batch, rank))


@pytest.mark.parametrize(
    "sizes",
    [{}, {"tp": 2, "dcp": 2}, {"pcp": 2}, {"tp": 2, "pcp": 2, "dcp": 4}, {"pcp": 4}],
    ids=["alone", "dcp", "pcp", "both", "short-for-the-ranks"],
)
@pytest.mark.parametrize("limits", [{}, {"workspace_tokens": 4096, "logits_bytes": 1 << 20}], ids=["whole", "spans"])
def test_chunks_hold_every_pair_of_a_query_token_and_a_key(sizes, limits):
    batch = Batch.from_lens([900, 3100, 40], [1, 3000, 40], [800, 3100, 40])
    _, settings = make(limits=limits, **sizes)
    plan = settings.plan(batch)
    for rank in plan.ranks:
        work = rank_work(plan, rank)
        rows = rank.rows
        prefill = range(rows.num_decodes, len(rows.req))
        seen = sum(
            position + 1
            for row in prefill
            for position in range(rows.start_pos[row], rows.start_pos[row] + rows.num_tokens[row])
        )
        ratio = work.ratios[1]
        assert sum(chunk.tokens * chunk.mean_keys for chunk in ratio.chunks) == pytest.approx(seen, rel=0.01)
        assert work.tokens == rows.total_tokens
        if work.decode_tokens:
            assert ratio.decode_keys == 900


@pytest.mark.parametrize(
    ("name", "billions", "active"), [("deepseek-v3.2", 671, 37), ("glm-5", 744, 40), ("deepseek-v4-flash", 284, 13)]
)
def test_weights_add_up_to_the_published_sizes(name, billions, active):
    model = load_model(name)
    weights = load_weights(name, model)
    attention = sum(
        layer.num_layers * (each.replicated + each.queries + each.output)
        for layer, each in zip(model.layers, weights.attention, strict=True)
    )
    plain = attention + weights.num_dense * weights.dense + 2 * weights.head
    plain += weights.num_moe * (weights.shared + weights.router)
    total = plain + weights.num_moe * weights.num_experts * weights.expert
    used = plain + weights.num_moe * weights.active * weights.expert
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
    assert used / 1e9 == pytest.approx(active, rel=0.07)


@pytest.mark.parametrize(
    ("changes", "bits", "reason"),
    [
        pytest.param({"v_head_dim": None}, None, "v_head_dim=None in the config: weights are counted", id="attention"),
        pytest.param({"vocab_size": None}, None, "vocab_size=None in the config", id="head"),
        pytest.param({"num_experts_per_tok": None}, None, "num_experts_per_tok=None in the config", id="experts"),
        pytest.param({"quantization_config": {"quant_method": "awq"}}, None, "by 'awq' .* --weight-bits", id="awq"),
        pytest.param({}, 5, "weights of 5 bits: 16, 8 or 4", id="bits"),
    ],
)
def test_weights_that_cannot_be_counted_are_refused(tmp_path, changes, bits, reason):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**published_fields(*load_config("deepseek-v3.2")), **changes}))
    with pytest.raises(ConfigError, match=reason):
        load_weights(path, load_model("deepseek-v3.2"), weight_bits=bits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "batch", [PREFILL, DECODES, MIXED, Batch.from_lens([1], [1], [1])], ids=["prefill", "decodes", "mixed", "one-token"]
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_every_model_has_a_cost_with_sources(name, batch, drafts):
    block_size = 1024 if load_model(name).pool_ratios else 256
    limits = {"num_speculative_tokens": drafts}
    cost = cost_of(batch, name=name, limits=limits, tp=2, pcp=2, block_size=block_size)
    assert 0 < cost.seconds() < 60
    assert set(cost.seconds_by_kind()) <= set(KINDS)
    for layer in cost.layers:
        assert {stage.name for stage in layer.stages} <= {*STAGES, "restore"}  # a draft has an output head
        assert all(len(stage.seconds) == len(cost.ranks) and min(stage.seconds) >= 0 for stage in layer.stages)
        assert all(each.stage == STAGE_OF[each.collective.what] and each.seconds > 0 for each in layer.collectives)


def test_a_step_is_the_sum_of_its_slowest_ranks_and_its_collectives():
    cost = cost_of(MIXED, tp=2, pcp=2)
    total = 0.0
    for layer in (*cost.layers, cost.once):
        slowest = max(sum(stage.seconds[at] for stage in layer.stages) for at in range(len(cost.ranks)))
        total += layer.num_layers * (slowest + sum(each.seconds for each in layer.collectives))
    assert cost.seconds() == pytest.approx(total)
    hidden = cost_of(MIXED, assumptions=Assumptions(overlap=1.0), tp=2, pcp=2)
    least = total - sum(cost.collective_s().values())
    assert least <= hidden.seconds() < total


def test_idle_ranks_wait_for_the_one_with_work():
    cost = cost_of(Batch.from_lens([100], [1]), pcp=2)  # decodes are dealt out: the second rank has none
    idle = cost.idle_s()
    assert idle[0] < 0.01 * cost.seconds() < idle[1]


def test_head_tail_is_even_and_contiguous_is_not():
    even, uneven = (cost_of(PREFILL, pcp=4, partition=name) for name in ("head_tail", "contiguous"))
    assert max(even.idle_s()) < 0.05 * even.seconds()
    assert uneven.seconds() > even.seconds() and max(uneven.idle_s()) == uneven.idle_s()[0]


def test_dcp_splits_the_indexer_of_decodes_and_pays_in_collectives():
    long = Batch.from_lens([131072] * 32, [1] * 32)
    one, eight = cost_of(long, 0, tp=8), cost_of(long, 0, tp=8, dcp=8)
    assert max(eight.stage_s()["index"]) < 0.5 * max(one.stage_s()["index"])
    assert {"query_heads", "candidates", "lse", "outputs"} <= eight.collective_s().keys() - one.collective_s().keys()


def test_b95_index_work_that_tp_repeats_is_seen_and_split_by_pcp_or_dcp():
    alone, repeated = (max(cost_of(PREFILL, 0, tp=tp).stage_s()["index"]) for tp in (1, 8))
    assert repeated == pytest.approx(alone), "tp leaves every rank the whole indexer"
    long = Batch.from_lens([131072], [4096], [131072])
    whole, split = (max(cost_of(long, 0, tp=8, dcp=dcp).stage_s()["index"]) for dcp in (1, 8))
    assert split < 0.5 * whole, "short contexts pay more for the candidates than the split saves"
    before, after = cost_of(PREFILL, 0, tp=8), cost_of(PREFILL, 0, tp=4, pcp=2)
    assert max(after.stage_s()["index"]) == pytest.approx(0.5 * max(before.stage_s()["index"]), rel=0.1)
    assert after.seconds() < before.seconds()


def test_pipeline_stages_are_refused():
    with pytest.raises(ConfigError, match="pp=2"):
        make(pp=2)


@pytest.mark.parametrize(
    ("name", "heads", "padded"),
    [("h200", 8, 64), ("h200", 64, 64), ("h200", 65, 128), ("h200", 130, 256), ("mi300x", 8, 16), ("b200", 8, 128)],
)
def test_heads_are_padded_as_the_kernel_pads_them(name, heads, padded):
    assert Kernels(chip(name), Assumptions()).padded_heads("sparse_prefill", heads) == padded


def test_outside_its_table_a_kernel_is_scaled_and_says_so():
    kernels = Kernels(chip("h200"), Assumptions())
    inside, more_heads = kernels.seconds("mqa_logits", 4096, 65536, 32), kernels.seconds("mqa_logits", 4096, 65536, 64)
    assert (inside.kind, more_heads.kind) == ("measured", "calibrated")
    assert more_heads.value == pytest.approx(2 * inside.value, rel=0.02)
    longer = kernels.seconds("mqa_logits", 4096, 1 << 20, 32)
    edge = kernels.seconds("mqa_logits", 4096, 200704.5, 32)
    assert longer.kind == "calibrated" and longer.value == pytest.approx((1 << 20) / 200704.5 * edge.value, rel=0.02)
    assert kernels.topk_seconds(1024, 4096, 65536).kind == "calibrated"
    assert Kernels(chip("mi300x"), Assumptions()).seconds("mqa_logits", 4096, 65536, 32).kind == "calibrated"


@pytest.mark.parametrize(("rows", "keys"), [(128, 131072), (256, 32768), (256, 131072), (1024, 65536)])
def test_outside_its_table_a_kernel_reads_no_faster_than_the_memory(rows, keys):
    """Short contexts were measured out of the L2; scaled up alone they would beat the memory's own bandwidth."""
    figure = Kernels(chip("h200"), Assumptions()).seconds("mqa_logits_decode", rows, keys, 64)
    assert figure.kind == "calibrated"
    assert figure.value >= rows * keys * 132 / chip("h200").hbm_bandwidth.value
    at_64 = kernel_tables("h200")["mqa_logits_decode"].read(64, 131072).seconds / (64 * 131072)
    assert figure.value / (rows * keys) == pytest.approx(at_64, rel=0.1), "64 x 131,072 was measured"


@pytest.mark.parametrize(
    ("name", "shape", "who"),
    [
        pytest.param("mqa_logits", (4096, 65536, 32), "(aiconfigurator-core 0.12.0)", id="vendor's"),
        pytest.param("sparse_decode", (64, 2048, 128), "(this project)", id="own"),
        pytest.param("mqa_logits_decode", (64, 65536, 64), "(aiconfigurator-core 0.12.0, this project)", id="both"),
    ],
)
def test_a_time_names_all_who_measured_its_table(name, shape, who):
    figure = Kernels(chip("h200"), Assumptions()).seconds(name, *shape)
    assert (figure.kind, figure.source) == ("measured", f"{name} on h200 {who}")


def test_tables_that_are_given_take_the_place_of_the_shipped_ones():
    own = {"mqa_logits": (KernelTable((64.0, 128.0), (Curve((1, 9), (1, 9)), Curve((1, 9), (2, 18)))), 64)}
    kernels = Kernels(chip("h200"), Assumptions(), own)
    assert kernels.seconds("mqa_logits", 96, 5, 64).value == pytest.approx(7.5)
    assert kernels.seconds("mqa_logits", 96, 5, 64).kind == "measured"


def test_cpkit_as_the_engine_is_timed_by_its_own_kernels_where_they_ran():
    """Elsewhere, and for a kernel of which nothing was measured, by the vendor's."""

    def source(engine, name, kernel):
        model = load_model("deepseek-v3.2")
        made = CostModel(model, load_weights("deepseek-v3.2", model), Topology(), chip(name), engine=engine)
        return made.kernels.seconds(kernel, 1024, 65536, 64).source

    assert source("cpkit", "h200", "mqa_logits") == "mqa_logits of cpkit on h200"
    assert "aiconfigurator" in source("vllm", "h200", "mqa_logits")
    assert "aiconfigurator" in source("cpkit", "h200", "sparse_prefill")
    assert "aiconfigurator" in source("cpkit", "b200", "mqa_logits")


@pytest.mark.parametrize(
    "wrong", [{"gemm_share": 0}, {"gemm_share": 1.1}, {"overlap": -0.1}, {"kernel_s": -1}, {"head_tile": 0}]
)
def test_assumptions_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Assumptions(**wrong)
