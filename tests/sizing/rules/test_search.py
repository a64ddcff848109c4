"""The nearest legal settings, against trying every size."""

import itertools
import math

import pytest

from cpkit.model import load_model
from cpkit.sizing.chips import chip
from cpkit.sizing.deployment import Deployment
from cpkit.sizing.rules.engines import RULES, broken_rules
from cpkit.sizing.rules.search import SIZES, STEPS, nearest

BACKEND = {"vllm": "flashmla-sparse", "sglang": "flashmla-sparse", "cpkit": None}


def deployment(engine="vllm", model="deepseek-v3.2", **settings):
    return Deployment(
        engine=engine, model=load_model(model), chip=chip("h200"), attention_backend=BACKEND[engine], **settings
    )


def brute(it):
    """Least distance of a legal world, other settings as they are; inf without one."""
    sizes = [1, 2, 4, 8, 16, 32, 64]
    best = math.inf
    for tp, pcp, dcp in itertools.product(sizes, sizes, sizes):
        here = Deployment(
            **{
                **{name: getattr(it, name) for name in Deployment.__dataclass_fields__},
                "tp": tp,
                "pcp": pcp,
                "dcp": dcp,
            }
        )
        if not broken_rules(here):
            pairs = ((it.tp, tp), (it.pcp, pcp), (it.dcp, dcp))
            best = min(best, sum(abs(math.log2(b / a)) for a, b in pairs))
    return best


@pytest.mark.parametrize(
    ("engine", "model", "sizes"),
    [
        pytest.param("vllm", "deepseek-v3.2", (8, 1, 8), id="padding"),
        pytest.param("vllm", "deepseek-v3.2", (4, 1, 4), id="heads-and-padding"),
        pytest.param("vllm", "deepseek-v3.2", (2, 4, 8), id="padding-under-pcp"),
        pytest.param("vllm", "deepseek-v3.2", (8, 2, 4), id="two-rules"),
        pytest.param("vllm", "deepseek-v4-pro", (8, 1, 8), id="no-dcp-at-all"),
        pytest.param("vllm", "glm-5.2", (2, 1, 2), id="too-many-heads"),
        pytest.param("cpkit", "deepseek-v3.2", (8, 4, 2), id="cpkit"),
    ],
)
def test_the_first_answer_is_as_near_as_any(engine, model, sizes):
    it = deployment(engine, model, **dict(zip(("tp", "pcp", "dcp"), sizes, strict=True)))
    found = nearest(it)
    only_sizes = [near for near in found if all(name in SIZES for name, _, _ in near.changes)]
    assert only_sizes[0].distance == pytest.approx(brute(it))
    assert found[0].distance <= only_sizes[0].distance


def test_answers_are_legal_sorted_and_say_what_they_change():
    it = deployment(tp=8, dcp=8)
    found = nearest(it)
    assert [near.changes for near in found[:2]] == [(("dcp", 8, 4),), (("tp", 8, 16),)]  # as many GPUs comes first
    assert [near.distance for near in found] == sorted(near.distance for near in found)
    for near in found:
        assert not broken_rules(near.deployment)
        for name, asked, here in near.changes:
            assert getattr(it, name) == asked != here == getattr(near.deployment, name)


def test_a_legal_deployment_is_its_own_answer():
    (near,) = nearest(deployment(tp=8, dcp=4))
    assert near.changes == () and near.distance == 0


def test_no_answer_changes_more_than_a_nearer_one():
    found = nearest(deployment(model="glm-5.3-flash", tp=8, pcp=2, dcp=3, features=frozenset({"lora"})), count=8)
    changes = [{(name, here) for name, _, here in near.changes} for near in found]
    assert len(found) > 1
    for i, later in enumerate(changes):
        assert not any(nearer <= later for nearer in changes[:i])


def test_a_feature_may_be_given_up():
    found = nearest(deployment(tp=8, pcp=2, features=frozenset({"lora"})))
    assert (("features", frozenset({"lora"}), frozenset()),) in [near.changes for near in found]


def test_several_features_are_given_up_where_it_takes_several():
    found = nearest(deployment(tp=8, pcp=2, features=frozenset({"lora", "multimodal", "mega-moe"})))
    (given_up,) = [near for near in found if [name for name, _, _ in near.changes] == ["features"]]
    assert given_up.deployment.features == {"mega-moe"} and given_up.distance == 2 * STEPS["features"]


def test_every_setting_has_a_distance():
    knobs = {knob for rules in RULES.values() for rule in rules for knob in rule.knobs}
    assert knobs <= {*SIZES, *STEPS}


def test_a_backend_that_the_chip_has_is_found():
    it = Deployment(engine="vllm", model=load_model("glm-5"), chip=chip("mi300x"), attention_backend="flashmla-sparse")
    changes = [near.changes for near in nearest(it)]
    assert changes == [(("attention_backend", "flashmla-sparse", "rocm-aiter-mla-sparse"),)]
