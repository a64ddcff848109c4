"""What vLLM's layers take beside their kernels: fitted to one model's measured blocks, judged on another's."""

import statistics

import numpy as np
import pytest

from cpkit.batch import Batch
from cpkit.budget import default_budget
from cpkit.errors import ConfigError
from cpkit.model import load_model
from cpkit.settings import StepSettings
from cpkit.sizing.chips import chip
from cpkit.sizing.cost.engines import ENGINE_TIMES
from cpkit.sizing.cost.model import CostModel
from cpkit.sizing.cost.tables import decode_blocks
from cpkit.sizing.weights import load_weights
from cpkit.topology import Topology

HEADS = {"deepseek-v3.2": 128, "glm-5": 64}


def blocks(name, tp, engine=None, every=1):
    """(rows, measured, predicted) of vLLM's blocks of a rank with 1 / tp of the heads."""
    model, topology = load_model(name), Topology(tp=tp)
    cost = CostModel(model, load_weights(name, model, weight_bits=8), topology, chip("h200"), engine=engine)
    settings = StepSettings(topology, model, default_budget(model, max_num_seqs=1024))
    for (rows, context), measured in sorted(decode_blocks("vllm", name, HEADS[name] // tp).items())[::every]:
        plan = settings.plan(Batch.from_lens([context + 1] * rows, [1] * rows), 0)
        stages = cost.step_cost(plan).layers[0].stages
        yield rows, measured, sum(stage.seconds[0] for stage in stages if stage.name != "experts")


def test_the_constants_are_the_fit_of_deepseek_v32():
    points = [point for tp in (1, 2, 4, 8, 16, 32, 64, 128) for point in blocks("deepseek-v3.2", tp, every=2)]
    rows, measured, kernels = np.array(points).T
    terms = np.stack([np.ones_like(rows), rows], axis=1) / measured[:, None]  # least squares of relative errors
    (layer_s, decode_row_s), *_ = np.linalg.lstsq(terms, (measured - kernels) / measured, rcond=None)
    vllm = ENGINE_TIMES["vllm"]
    assert vllm.layer_s == pytest.approx(layer_s, rel=0.03)
    assert vllm.decode_row_s == pytest.approx(decode_row_s, rel=0.05)


@pytest.mark.parametrize("tp", [1, 8, 64])
def test_glm_5_that_nothing_was_fitted_to_is_within_18_per_cent(tp):
    points = list(blocks("glm-5", tp, engine="vllm", every=3))
    errors = [predicted / measured - 1 for _, measured, predicted in points]
    assert abs(statistics.median(errors)) < 0.06
    assert max(map(abs, errors)) < 0.18
    bare = [predicted / measured - 1 for _, measured, predicted in blocks("glm-5", tp, every=3)]
    assert statistics.median(bare) < -0.25, "without it vLLM's blocks are predicted too fast"


def test_an_engines_time_is_a_stage_of_its_own_with_its_source():
    model, topology = load_model("glm-5"), Topology()
    plan = StepSettings(topology, model, default_budget(model)).plan(Batch.from_lens([100] * 8, [1] * 8), 0)
    costs = {
        engine: CostModel(model, load_weights("glm-5", model), topology, chip("h200"), engine=engine).step_cost(plan)
        for engine in (None, "sglang", "cpkit", "vllm")
    }
    assert costs[None].seconds() == costs["sglang"].seconds()
    assert "engine" not in {stage.name for stage in costs["cpkit"].layers[0].stages if any(stage.seconds)}
    added = costs["vllm"].seconds() - costs[None].seconds()
    assert added == pytest.approx(78 * (75e-6 + 8 * 0.21e-6))
    stage = costs["vllm"].layers[0].stages[-1]
    assert (stage.name, stage.source.kind) == ("engine", "calibrated") and "vllm 0.24.0" in stage.source.source


@pytest.mark.parametrize(
    ("lens", "query"), [pytest.param([65536] * 16, [1] * 16, id="decodes"), pytest.param([65536], [4096], id="prefill")]
)
def test_sglangs_dcp_ranks_score_all_indexer_keys_and_exchange_nothing(lens, query):
    model = load_model("glm-5")
    found = {}
    for engine, dcp in (("cpkit", 1), ("cpkit", 8), ("sglang", 8)):
        topology = Topology(tp=8, dcp=dcp)
        cost = CostModel(model, load_weights("glm-5", model), topology, chip("b200"), engine=engine)
        plan = StepSettings(topology, model, default_budget(model)).plan(Batch.from_lens(lens, query), 0)
        found[engine, dcp] = cost.step_cost(plan)
    index = {key: max(step.stage_s()["index"]) for key, step in found.items()}
    assert index["sglang", 8] == pytest.approx(index["cpkit", 1], rel=1e-9)
    assert index["sglang", 8] > index["cpkit", 8]
    sent = found["cpkit", 8].collective_s()
    assert found["sglang", 8].collective_s() == {what: spent for what, spent in sent.items() if what != "candidates"}
    assert "candidates" in sent


def test_an_unknown_engine_is_refused():
    model = load_model("glm-5")
    with pytest.raises(ConfigError, match="engine='trt': use one of vllm, sglang, cpkit"):
        CostModel(model, load_weights("glm-5", model), Topology(), chip("h200"), engine="trt")
