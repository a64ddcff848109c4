"""Which deployments a sweep tries, and the flags that start them."""

import pytest

from cpkit.cli.launch_line import read_launch_line
from cpkit.cli.main import make_parser
from cpkit.cli.options import read_settings
from cpkit.errors import ConfigError
from cpkit.planner.partition import STRATEGIES
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.candidates import Choices, candidates
from cpkit.sizing.sweep.engines import engine_flags, engine_sizes
from tests.sizing.sweep.small import make_allowed, make_setting


def test_candidates_are_every_legal_world_once():
    found = [(c.tp, c.pcp, c.dcp) for c in candidates(Choices((8,)), "cpkit", 64)]
    expected = {
        (tp, pcp, dcp)
        for tp in (1, 2, 4, 8)
        for pcp in (1, 2, 4, 8)
        if tp * pcp <= 8
        for dcp in ([d for d in (1, 2, 4, 8) if tp % d == 0] if pcp == 1 else {1, pcp, tp * pcp})
    }
    assert len(found) == len(set(found)) and set(found) == expected
    doubled = list(candidates(Choices((8,), (2048, 8192), ("head_tail", "round_robin"), (1, 0)), "cpkit", 64))
    names = [c.name for c in doubled]
    assert (
        len(set(names))
        == len(names)
        == sum(2 * (2 if pcp > 1 else 1) * (2 if dcp > 1 else 1) for _, pcp, dcp in expected)
    )


def test_the_others_are_refused_with_the_reason():
    allowed, refused = make_allowed()
    assert len(allowed) + len(refused) == len(list(candidates(Choices((8,)), "cpkit", 64)))
    assert all(one.candidate.tp * one.candidate.pcp == 8 for one in allowed), "half of 8 H200 does not hold the weights"
    assert all("no room for KV on h200" in one.reason for one in refused)
    _, by_vllm = make_allowed(engine="vllm")
    assert any(one.reason.startswith("vllm-flashmla-padding") and one.candidate.dcp == 8 for one in by_vllm)


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        pytest.param({"partitions": ("zigzag",)}, "zigzag", id="unknown-partition"),
        pytest.param({"batch_tokens": (2048, 2048)}, "batch tokens 2048, 2048: each once", id="twice"),
        pytest.param({"interleaves": ()}, "no interleaves to try", id="none"),
        pytest.param({"interleaves": (0, -1)}, "interleaves -1: at least 0", id="negative-interleave"),
        pytest.param({"batch_tokens": (2048, 0)}, "batch tokens 0: at least 1", id="no-tokens"),
    ],
)
def test_choices_that_are_none(choices, told):
    with pytest.raises(ConfigError, match=told):
        Choices((8,), **choices)


@pytest.mark.parametrize(
    ("engine", "model", "partitions", "splits"),
    [
        pytest.param("cpkit", "deepseek-v3.2", ("",), {"head_tail"}, id="cpkit-usual"),
        pytest.param("cpkit", "deepseek-v3.2", ("", "head_tail"), {"head_tail"}, id="usual-named-too"),
        pytest.param("vllm", "deepseek-v3.2", ("",), {"head_tail"}, id="vllm-usual"),
        pytest.param("vllm", "deepseek-v3.2", ("contiguous", "round_robin"), set(), id="vllm-has-none"),
        pytest.param("sglang", "deepseek-v3.2", ("",), {"round_robin"}, id="sglang-usual"),
        pytest.param("sglang", "deepseek-v3.2", STRATEGIES, {"round_robin"}, id="sglang-v3.2-no-zigzag"),
        pytest.param("sglang", "glm-5.2", STRATEGIES, {"round_robin", "head_tail"}, id="sglang-zigzag"),
    ],
)
def test_partitions_are_those_of_the_engine(engine, model, partitions, splits):
    allowed, refused = make_allowed(engine=engine, model=model, partitions=partitions)
    assert {one.candidate.partition for one in allowed if one.candidate.pcp > 1} == splits
    wanted = {partition or next(iter(splits)) for partition in partitions}
    others = {one.candidate.partition for one in refused if f"{engine} has no partition" in one.reason}
    known = {"cpkit": set(STRATEGIES), "vllm": {"head_tail"}, "sglang": {"head_tail", "round_robin"}}[engine]
    assert others == wanted - known
    assert any(one.candidate.pcp == 1 for one in allowed), "one PCP rank splits nothing"


def test_sglang_has_no_interleave():
    allowed, refused = make_allowed(engine="sglang", model="glm-5.2", interleaves=(0, 64))
    assert {one.candidate.interleave for one in allowed if one.candidate.dcp > 1} <= {1}
    assert any("sglang has no interleave 64" in one.reason for one in refused)


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (4, 2, 8), (1, 8, 1), (8, 1, 4)], ids=lambda sizes: "-".join(map(str, sizes))
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_flags_say_the_candidate(engine, sizes, drafts):
    tp, pcp, dcp = sizes
    partition = {"vllm": "head_tail", "sglang": "round_robin"}[engine]
    candidate = Candidate(16, tp, pcp, dcp, 1, 64, partition, 2048)
    start = {"vllm": "vllm serve m", "sglang": "python -m sglang.launch_server --model-path m"}[engine]
    setting = make_setting(engine=engine, merge="a2a", drafts=drafts)
    line = read_launch_line([f"{start} {engine_flags(candidate, setting)}"])
    told = engine_sizes(candidate, engine) | ({"merge": "a2a"} if dcp > 1 else {})
    told |= {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 20_000}
    if drafts:
        told |= {"speculation": "mtp", "num_speculative_tokens": drafts}
        told |= {"eagle_topk": 1} if engine == "sglang" else {}
    ones = {"pcp": 1, "dcp": 1}  # what says nothing may be left out
    more = {f"--speculative-num-steps {drafts}"} if drafts and engine == "sglang" else set()
    assert set(line.ignored) == more and ones | line.settings == ones | told


@pytest.mark.parametrize("partition", STRATEGIES)
@pytest.mark.parametrize("drafts", [0, 2])
def test_flags_of_cpkit_plan_the_candidate(partition, drafts):
    candidate = Candidate(16, 4, 2, 8, 32, 64, partition, 2048)
    flags = engine_flags(candidate, make_setting(merge="a2a", drafts=drafts))
    settings = read_settings(args := make_parser().parse_args(["plan", *flags.split()]))
    assert settings.budget.num_speculative_tokens == drafts
    topology = settings.topology
    assert (topology.tp, topology.pcp, topology.dcp, topology.interleave, topology.block_size) == (4, 2, 8, 32, 64)
    assert (settings.partition, settings.merge) == (partition, "a2a")
    assert (settings.budget.max_num_batched_tokens, settings.budget.max_num_seqs) == (2048, 256)
    assert args.max_model_len == 20_000


@pytest.mark.parametrize(
    ("engine", "chip", "token_bytes", "shared"),
    [("cpkit", "h200", 656 + 132, True), ("vllm", "h200", 656 + 132, True), ("sglang", "b200", 576 + 132, False)],
)
def test_drafts_take_room_for_a_module_and_its_rows(engine, chip, token_bytes, shared):
    """A draft module is one layer more; SGLang's DCP ranks keep all of its keys each."""
    plain, drafting = (make_allowed(engine=engine, model="glm-5.2", on=chip, drafts=drafts)[0] for drafts in (0, 3))
    rooms = {one.candidate: one.memory for one in plain}
    assert drafting and any(one.candidate.dcp > 1 for one in drafting)
    for one in drafting:
        more = one.memory.token_bytes - rooms[one.candidate].token_bytes
        assert more == pytest.approx(token_bytes / (one.candidate.dcp if shared else 1))
        assert one.memory.num_blocks < rooms[one.candidate].num_blocks


def test_rules_about_drafts_count():
    allowed, refused = make_allowed(engine="vllm", model="deepseek-v4.1-flash", drafts=1)
    assert not any(one.candidate.pcp > 1 for one in allowed)
    assert any(one.candidate.pcp > 1 and "speculation" in one.reason for one in refused)
