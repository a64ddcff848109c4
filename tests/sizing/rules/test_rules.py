"""Rules: each refuses what its engine refuses, and lets the mended deployment through."""

import dataclasses
import itertools

import pytest

from cpkit.errors import ConfigError
from cpkit.model import load_model
from cpkit.sizing.chips import chip
from cpkit.sizing.deployment import Deployment, kernel_heads
from cpkit.sizing.rules.backends import BACKENDS, backend
from cpkit.sizing.rules.defaults import complete
from cpkit.sizing.rules.engines import NOTES, RULES, notes, refusals
from cpkit.topology import Topology
from tests.sizing.rules.cases import CASES

BACKEND = {"vllm": "flashmla-sparse", "sglang": "trtllm", "cpkit": None}


def deployment(engine, model, **settings):
    if settings.get("chip"):
        settings["chip"] = chip(settings["chip"])
    if model == "no-index":
        found = load_model("deepseek-v3.2")
        layers = tuple(dataclasses.replace(layer, index=None, runs_index=False) for layer in found.layers)
        found = dataclasses.replace(found, layers=layers)
    else:
        found = load_model(model)
    return Deployment(engine=engine, model=found, **{"attention_backend": BACKEND[engine], **settings})


def ids(it):
    return [refusal.rule.id for refusal in refusals(it)]


ALL = [(engine, *case) for engine, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("engine", "rule", "broken", "mended"), ALL, ids=[case[1] for case in ALL])
def test_a_rule_refuses_and_its_way_out_is_one(engine, rule, broken, mended):
    assert rule in ids(deployment(engine, **broken))
    assert rule not in ids(deployment(engine, **{**broken, **mended}))


@pytest.mark.parametrize("engine", RULES)
def test_every_rule_has_a_case(engine):
    assert {case[0] for case in CASES[engine]} == {rule.id for rule in RULES[engine]}


@pytest.mark.parametrize(("engine", "rule", "broken", "mended"), ALL, ids=[case[1] for case in ALL])
def test_a_refusal_names_values_source_and_settings(engine, rule, broken, mended):
    it = deployment(engine, **broken)
    refusal = next(refusal for refusal in refusals(it) if refusal.rule.id == rule)
    assert "{" not in refusal.sentence and refusal.change
    assert refusal.rule.source.startswith(
        {"vllm": "vllm 0.33.0, ", "sglang": "sglang 0.5.23, ", "cpkit": "cpkit, "}[engine]
    )
    assert set(refusal.rule.knobs) <= {field.name for field in dataclasses.fields(Deployment)}
    changed = set(mended) - {"kv_heads", "remote_dcp"}  # what is not the engine's to choose
    assert changed <= set(refusal.rule.knobs)


@pytest.mark.parametrize("model", ["deepseek-v3.2", "deepseek-v4-pro", "glm-5.3-flash"])
def test_cpkit_refuses_what_its_nouns_refuse(model):
    """Over a grid of sizes: the rules say no exactly where Topology and Model raise."""
    found = load_model(model)
    refused = 0
    grid = itertools.product((1, 2, 3, 8), (1, 2, 3), (1, 2, 3, 4, 6, 8, 16, 24), (1, 16, 48, 128), (64, 96, 128))
    for tp, pcp, dcp, interleave, block_size in grid:
        sizes = {"tp": tp, "pcp": pcp, "dcp": dcp, "interleave": interleave, "block_size": block_size}
        try:
            topology = Topology(**sizes)
            found.check(topology)
            found.check_merge(topology)
            legal = True
        except ConfigError:
            legal = False
            refused += 1
        assert (not refusals(Deployment(engine="cpkit", model=found, **sizes))) == legal, sizes
    assert 0 < refused < 4 * 3 * 8 * 4 * 3


@pytest.mark.parametrize(
    ("model", "tp", "pcp", "dcp"),
    [
        pytest.param(model, tp, pcp, dcp, id=f"{model}-tp{tp}-pcp{pcp}-dcp{dcp}")
        for model in ("deepseek-v3.2", "glm-5.2")
        for tp, pcp in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (2, 4), (1, 8), (4, 2))
        for dcp in sorted({2, tp} if pcp == 1 else {pcp, tp * pcp})
        if 1 < dcp <= tp * pcp
    ],
)
def test_heads_that_score_a_shard(model, tp, pcp, dcp):
    """Counted rank by rank: which heads do the ranks of a DCP group hold together?"""
    it = deployment("vllm", model, tp=tp, pcp=pcp, dcp=dcp)
    heads = load_model(model).num_heads
    topology = Topology(tp=tp, pcp=pcp, dcp=dcp)
    group = topology.groups("dcp")[0]
    held = {head for rank in group for head in range(heads) if head * tp // heads == topology.coords(rank).tp}
    assert it.gathered_heads == len(held)
    wide = 64 if len(held) <= 64 else 128
    own = 64 if heads // tp <= 64 else 128
    assert ("vllm-flashmla-padding" in ids(it)) == (wide != own)


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 129)])
def test_kernel_heads(heads, padded):
    assert kernel_heads(heads) == padded


def test_gpus_are_counted_as_the_engine_counts():
    sizes = {"tp": 8, "pcp": 2, "pp": 3}
    assert deployment("vllm", "deepseek-v3.2", **sizes, dp=2).num_gpus == 96
    assert deployment("sglang", "deepseek-v3.2", **sizes).num_gpus == 24
    assert deployment("sglang", "deepseek-v3.2", **sizes, attn_dp=2).head_ranks == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"tp": 0}, "tp=0: every size is a whole number from 1", id="size"),
        pytest.param({"engine": "trt"}, "engine='trt': use one of vllm, sglang, cpkit", id="engine"),
        pytest.param({"graphs": "all"}, "graphs='all': use one of none, piecewise", id="graphs"),
        pytest.param({"speculation": "magic"}, "speculation='magic': use one of mtp, dspark, eagle", id="speculation"),
        pytest.param({"features": frozenset({"x"})}, "unknown feature 'x': use one of direct-dcp", id="feature"),
    ],
)
def test_what_is_no_deployment_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        Deployment(**{"engine": "vllm", "model": load_model("glm-5"), **changes})


@pytest.mark.parametrize("name", ["FLASHMLA_SPARSE", "flashmla-sparse", "FLASHMLA_SPARSE_DSV4"])
def test_backends_are_known_in_every_spelling(name):
    assert backend("vllm", name) is BACKENDS[0]


def test_notes_hold_where_they_should():
    held = {note.id for note, _ in notes(deployment("vllm", "deepseek-v4-pro", pcp=2))}
    assert held == {"vllm-pcp-full-kv", "vllm-pcp-graphs-off"}
    drafts = deployment("vllm", "glm-5", tp=8, dcp=4, interleave=64, speculation="mtp", prefix_caching=False)
    assert [note.id for note, _ in notes(drafts)] == ["vllm-interleave-drafts"]
    held = [text for _, text in notes(deployment("vllm", "glm-5", tp=8, dcp=4, kv_transfer="nixl"))]
    assert held == [
        "prefix-cache hits land on block_size * dcp = 64 * 4 tokens",
        "NIXL sets the interleave to the block size, 64",
    ]
    held = {note.id for note, _ in notes(deployment("sglang", "deepseek-v4-pro", tp=8, dcp=4))}
    assert held == {"sglang-dcp-replicates-index", "sglang-dcp-unread"}
    held = [note.id for note, _ in notes(deployment("cpkit", "glm-5.3-flash", pcp=2, interleave=16))]
    assert held == ["cpkit-planned-alone"]  # for its linear layers
    held = [note.id for note, _ in notes(deployment("cpkit", "glm-5.3-flash", pcp=2, dcp=2, interleave=16))]
    assert held == ["cpkit-planned-alone", "cpkit-pools-planned-alone"]
    assert not notes(deployment("cpkit", "glm-5.2", pcp=2, dcp=2))
    assert all(note.source for engine in NOTES for note in NOTES[engine])


@pytest.mark.parametrize(("transfer", "told"), [("nixl", False), ("mooncake", False), (None, False), ("nixxl", True)])
def test_a_transfer_without_rules_is_told(transfer, told):
    given = {} if transfer is None else {"kv_transfer": transfer}
    _, assumed = complete("vllm", load_model("glm-5"), None, given)
    assert any(f"kv-transfer {transfer}: no rule is about it" in text for text in assumed) == told
