"""Draft tokens in the cost of a step: passes of a draft module, heads of every token, keys read once for two tokens."""

from fractions import Fraction

import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.drafts import kept_tokens
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.work import rank_work
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology


def step(drafts, *, name="deepseek-v3.2", context=32768, num_reqs=16, query=None, rank=0, **sizes):
    """Plan and cost of decodes that verify so many drafts each."""
    model, topology = load_model(name), Topology(**sizes)
    settings = StepSettings(topology, model, default_budget(model, num_speculative_tokens=drafts))
    query = 1 + drafts if query is None else query
    plan = settings.plan(Batch.from_lens([context] * num_reqs, [query] * num_reqs, [context - query] * num_reqs), rank)
    return plan, CostModel(model, load_weights(name, model), topology, chip("h200")).step_cost(plan)


@pytest.mark.parametrize(
    ("drafts", "passes"),
    [
        pytest.param(0, [], id="none"),
        pytest.param(1, [("first draft", 1)], id="one"),
        pytest.param(3, [("first draft", 1), ("later drafts", 2)], id="three"),
    ],
)
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "dcp": 2}, {"pcp": 2}, {"tp": 2, "pcp": 2, "dcp": 4}])
def test_each_draft_is_a_pass_of_its_own(drafts, passes, sizes):
    plan, cost = step(drafts, rank=None, **sizes)
    assert [(layer.kind, layer.num_layers) for layer in cost.layers[len(plan.model.layers) :]] == passes
    for layer in cost.layers[len(plan.model.layers) :]:
        assert {stage.name for stage in layer.stages} >= {"project", "index", "attend", "experts", "restore"}


def test_a_later_pass_has_one_token_of_each_request_and_the_first_all():
    _, cost = step(3)
    plain = step(0)[1].layers[0]
    _, first, later = cost.layers
    stages = [
        {stage.name: stage.seconds[0] for stage in layer.stages} for layer in (cost.layers[0], first, later, plain)
    ]
    assert stages[1]["attend"] == stages[0]["attend"] and stages[2]["attend"] == stages[3]["attend"]
    assert stages[2]["attend"] < stages[1]["attend"]
    assert stages[1]["project"] > stages[0]["project"], "hidden rows and embeddings are joined first"


def test_a_prompts_step_drafts_once():
    model = load_model("deepseek-v3.2")
    settings = StepSettings(Topology(), model, default_budget(model, num_speculative_tokens=3))
    plan = settings.plan(Batch.from_lens([5000], [3000], [5000]), 0)
    cost = CostModel(model, load_weights("deepseek-v3.2", model), Topology(), chip("h200")).step_cost(plan)
    assert [layer.kind for layer in cost.layers] == ["dsa", "first draft"]


def test_a_reused_selection_is_not_what_a_draft_module_has():
    plan, cost = step(1, name="glm-5.2")
    assert plan.model.layers[-1].index is not None and not plan.model.layers[-1].runs_index
    assert "index" in {stage.name for stage in cost.layers[-1].stages}


@pytest.mark.parametrize(("query", "reads"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_two_tokens_of_a_request_read_its_keys_once(query, reads):
    plan, cost = step(3, query=query, num_reqs=64, context=131072)
    assert rank_work(plan, plan.ranks[0]).decode_reads == 64 * reads
    index = next(stage for stage in cost.layers[0].stages if stage.name == "index")
    alone = next(
        stage for stage in step(3, query=1, num_reqs=64, context=131072)[1].layers[0].stages if stage.name == "index"
    )
    assert index.seconds[0] == pytest.approx(reads * alone.seconds[0], rel=0.1)
    assert "calibrated" in {part.kind for part in index.source.by_kind} or query == 1


def test_heads_score_every_token_that_is_verified():
    with_drafts, without = (step(drafts, num_reqs=256, context=300)[1].once for drafts in (3, 0))
    restore = [{stage.name: stage.seconds[0] for stage in once.stages}["restore"] for once in (with_drafts, without)]
    assert restore[0] > 1.5 * restore[1]


@pytest.mark.parametrize("rate", [0.0, 1e-300, 0.7, 1 - 1e-15, 1.0])
@pytest.mark.parametrize("drafts", [0, 1, 2, 50])
def test_kept_tokens_are_a_token_and_the_drafts_before_the_first_rejected_one(drafts, rate):
    exact = sum(Fraction(rate) ** place for place in range(1 + drafts))
    assert kept_tokens(drafts, rate) == pytest.approx(float(exact), rel=1e-13)


def test_kept_tokens_of_the_most_drafts_that_a_budget_takes():
    """At once, not draft by draft."""
    assert kept_tokens(1 << 50, 0.75) == pytest.approx(4)
    assert kept_tokens(1 << 50, 1.0) == 1 + (1 << 50)
