"""The scheduler against a slow one, its conservation laws, and the cases that made engines go wrong."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkit.budget import Budget
from cpkit.errors import ConfigError
from cpkit.topology import Topology
from cpkit.workload import Request, Scheduler, StepClock, Trace
from tests.workload.slow_scheduler import SlowScheduler


class OneSecond:
    def step_seconds(self, batch):
        return 1.0


def make_trace(requests):
    return Trace("made", "made", tuple(requests))


def make_budget(tokens=64, seqs=8, drafts=0):
    return Budget(1 << 20, max_num_batched_tokens=tokens, max_num_seqs=seqs, num_speculative_tokens=drafts)


def schedule(trace, *, block=4, dcp=1, budget=None, blocks=64, model_len=1000, rate=0.0, clock=None, seed=0):
    topology = Topology(tp=dcp, dcp=dcp, block_size=block)
    return Scheduler(
        trace,
        topology,
        budget or make_budget(),
        num_kv_blocks=blocks,
        max_model_len=model_len,
        acceptance_rate=rate,
        clock=clock or OneSecond(),
        seed=seed,
    )


def prompts(*lens, output=1, hashes=None, hash_size=4):
    """Requests at time 0; hashes: one list a request."""
    made = hashes or [[]] * len(lens)
    return make_trace(
        Request(i, 0.0, n, output, np.array(h, np.int32), hash_size)
        for i, (n, h) in enumerate(zip(lens, made, strict=True))
    )


@st.composite
def traces(draw):
    """Small requests with shared prefixes, some of them turns that wait for an earlier one."""
    size = draw(st.integers(1, 7))
    requests = []
    arrival = 0.0
    for i in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(0, 40))
        num_hashes = draw(st.integers(0, -(-prompt // size)))
        hashes = draw(st.lists(st.integers(0, 1), min_size=num_hashes, max_size=num_hashes))
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        arrival += draw(st.integers(0, 6))
        arrival_s = arrival if parent is None else 0.0
        think = draw(st.integers(0, 5)) if parent is not None else 0
        output = draw(st.integers(0, 12))
        requests.append(
            Request(i, arrival_s, prompt, output, np.array(hashes, np.int32), size, None, parent, float(think))
        )
    return make_trace(requests)


@st.composite
def settings_of(draw):
    return {
        "block": draw(st.integers(1, 4)),
        "dcp": draw(st.sampled_from([1, 2, 3])),
        "budget": make_budget(draw(st.integers(1, 24)), draw(st.integers(1, 4)), draw(st.integers(0, 3))),
        "blocks": draw(st.integers(2, 40)),
        "model_len": draw(st.integers(1, 60)),
    }


@settings(max_examples=80, deadline=None)
@given(trace=traces(), config=settings_of(), accept_all=st.booleans())
def test_same_steps_as_the_slow_scheduler(trace, config, accept_all):
    slow = SlowScheduler(
        trace.requests,
        config["block"] * config["dcp"],
        config["budget"],
        config["blocks"],
        config["model_len"],
        accept_all,
    )
    fast = schedule(trace, **config, rate=float(accept_all))
    steps = iter(fast)
    while slow.welcome():
        begins = slow.now
        expected = slow.step()
        step = next(steps)
        batch = step.batch
        columns = batch.req_ids, batch.query_lens, batch.seq_lens, batch.prompt_lens
        assert list(zip(*map(np.ndarray.tolist, columns), strict=True)) == expected
        assert step.time_s == begins
        fast.check()
    assert next(steps, None) is None
    stats = fast.stats
    assert (stats.num_finished, stats.num_refused) == (len(slow.finished), len(slow.refused))
    assert stats.prefix_hit_tokens == sum(slow.hits.values())


@settings(max_examples=50, deadline=None)
@given(trace=traces(), config=settings_of(), rate=st.floats(0, 1), seed=st.integers(0, 9))
def test_tokens_and_blocks_are_conserved(trace, config, rate, seed):
    fast = schedule(trace, **config, rate=rate, seed=seed)
    budget, span = config["budget"], config["block"] * config["dcp"]
    for step in fast:
        batch = step.batch
        assert (batch.query_lens >= 1).all()
        assert batch.num_tokens <= budget.max_num_batched_tokens
        assert batch.num_reqs <= budget.max_num_seqs
        assert len(set(batch.req_ids.tolist())) == batch.num_reqs
        written = []
        for computed, seq, table in zip(batch.num_computed, batch.seq_lens, batch.block_tables, strict=True):
            blocks = [int(table[position // span]) for position in range(int(seq))]
            assert 0 not in blocks, "a token in the null block"
            assert max(blocks) < config["blocks"]
            written.append(set(blocks[int(computed) :]))
        assert sum(map(len, written)) == len(set().union(*written)), "one block written by two requests"
        for row, (computed, table) in enumerate(zip(batch.num_computed, batch.block_tables, strict=True)):
            read_only = {int(table[position // span]) for position in range(int(computed))}
            others = set().union(*written[:row], *written[row + 1 :])
            assert not read_only & others, "a block in use written by another request"
    fast.check()
    stats = fast.stats
    assert stats.num_finished + stats.num_refused == stats.num_requests == len(trace.requests)
    assert stats.num_tokens == (
        stats.needed_tokens
        - stats.prefix_hit_tokens
        - stats.resumed_hit_tokens
        + stats.dropped_tokens
        + stats.rejected_tokens
    )
    assert stats.peak_blocks <= config["blocks"] - 1
    assert fast._blocks.num_held == 0
    assert len(stats.latency_s) == stats.num_finished


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "num_steps"),
    [
        pytest.param(1, 0, 1, id="no-output-is-a-prefill"),
        pytest.param(1, 1, 1, id="one-output-comes-with-the-prefill"),
        pytest.param(1, 2, 2, id="one-decode"),
        pytest.param(64, 1, 1, id="prompt-fills-the-step"),
        pytest.param(65, 1, 2, id="prompt-one-above-the-step"),
    ],
)
def test_number_of_steps(prompt_len, output_len, num_steps):
    fast = schedule(prompts(prompt_len, output=output_len))
    assert len(list(fast)) == num_steps
    assert len(fast.stats.ttft_s) == (output_len > 0)


def test_decodes_stand_before_prefills_and_are_served_first():
    fast = schedule(prompts(8, 30, output=5), budget=make_budget(tokens=10))
    steps = [
        list(zip(s.batch.req_ids.tolist(), s.batch.query_lens.tolist(), s.batch.is_prefilling.tolist(), strict=True))
        for s in fast
    ]
    assert steps[:3] == [[(0, 8, True), (1, 2, True)], [(0, 1, False), (1, 9, True)], [(0, 1, False), (1, 9, True)]]


def test_last_admitted_is_preempted_and_computes_its_outputs_again():
    # 6 blocks of 4: two prompts of 8 take 4, each decode then needs a third block, and at token 13 a fourth.
    fast = schedule(prompts(8, 8, output=8), blocks=7)
    steps = list(fast)
    assert fast.stats.num_preemptions == 1
    again = next(s for s in steps[1:] if 1 in s.batch.req_ids[s.batch.is_prefilling])
    row = again.batch.req_ids.tolist().index(1)
    assert again.batch.num_computed[row] == 0
    assert again.batch.prompt_lens[row] == 8 + 5  # five outputs were given before tokens 13 needed blocks
    assert fast.stats.dropped_tokens == 12
    assert fast.stats.num_finished == 2
    assert fast.stats.output_tokens == 2 * 8  # those given before the preemption once


@pytest.mark.parametrize(
    ("steps", "given"),
    [
        pytest.param(1, 1, id="the-first-comes-with-the-prompt"),
        pytest.param(3, 4, id="nobody-has-finished"),
        pytest.param(None, 10, id="all"),
    ],
)
def test_outputs_of_unfinished_requests_count(steps, given):
    # 0 is through its prompt in step 0, 1 in step 2: 9 + 1, 1 + 9, 1 + 3 tokens.
    fast = schedule(prompts(9, 13, output=5), budget=make_budget(tokens=10))
    list(itertools.islice(fast, steps))
    assert fast.stats.output_tokens == given


def test_preempted_prompt_finds_its_own_blocks_again():
    hashes = [[1, 2], [3, 4]]
    fast = schedule(prompts(8, 8, output=8, hashes=hashes), blocks=7)
    list(fast)
    assert fast.stats.num_preemptions == 1
    # When request 0 is through, its last two blocks are free; the two cached prompt blocks were not needed.
    assert fast.stats.resumed_hit_tokens == 8
    assert fast.stats.prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "reason"),
    [
        pytest.param(0, 5, "the prompt is empty", id="empty"),
        pytest.param(95, 5, None, id="model-len"),
        pytest.param(95, 6, "prompt and output exceed max_model_len=100", id="above-model-len"),
        pytest.param(40, 1, None, id="fills-the-pool"),
        pytest.param(40, 2, "its KV exceeds num_kv_blocks=11 of 4 tokens", id="one-token-above-the-pool"),
        pytest.param(1 << 40, 1 << 40, "prompt and output exceed max_model_len=100", id="huge"),
    ],
)
def test_refusals_are_counted_and_the_rest_goes_on(prompt_len, output_len, reason):
    blocks = 11 if prompt_len == 40 else 64
    trace = make_trace([Request(0, 0.0, prompt_len, output_len), Request(1, 1.0, 3, 1)])
    fast = schedule(trace, blocks=blocks, model_len=100)
    assert 1 in np.concatenate([s.batch.req_ids for s in fast])
    assert fast.stats.refused == ({reason: 1} if reason else {})
    assert fast.stats.num_finished == 2 - bool(reason)


def test_turns_wait_for_the_answer_and_the_think_time():
    trace = make_trace(
        [
            Request(0, 0.0, 4, 3, session="s"),
            Request(1, 0.0, 4, 1, session="s", depends_on=0, think_time_s=7.5),
            Request(2, 20.0, 4, 1, session="s", depends_on=0, think_time_s=1.0),
        ]
    )
    starts = {int(req): s.time_s for s in schedule(trace) for req in s.batch.req_ids if s.batch.is_prefilling[0]}
    assert starts == {0: 0.0, 1: 3.0 + 7.5, 2: 20.0}


def test_a_refused_turn_does_not_stop_its_session():
    trace = make_trace([Request(0, 2.0, 5000, 1), Request(1, 0.0, 4, 1, depends_on=0, think_time_s=3.0)])
    fast = schedule(trace)
    assert [s.time_s for s in fast] == [5.0]
    assert fast.stats.num_refused == 1


@pytest.mark.parametrize(
    ("rate", "queries", "kept"),
    [
        pytest.param(1.0, [4, 4, 4], [4, 4, 1], id="all-accepted"),
        pytest.param(0.0, [4] * 9, [1] * 9, id="all-rejected"),
    ],
)
def test_drafts_are_computed_and_rejected_ones_rolled_back(rate, queries, kept):
    fast = schedule(prompts(5, output=10), budget=make_budget(drafts=3), rate=rate)
    decodes = [s.batch for s in fast][1:]
    assert [int(b.query_lens[0]) for b in decodes] == queries
    computed = [int(b.num_computed[0]) for b in decodes] + [14]
    assert np.diff(computed).tolist() == kept
    assert fast.stats.rejected_tokens == sum(queries) - sum(kept)


def test_share_of_kept_drafts_follows_the_rate():
    fast = schedule(prompts(4, output=2_000), budget=make_budget(drafts=1), rate=0.3, blocks=1000, model_len=2_500)
    num_decodes = sum(1 for _ in fast) - 1
    kept_drafts = 2_000 - 1 - num_decodes
    assert abs(kept_drafts / num_decodes - 0.3) < 0.04  # more than three standard deviations of 1,500 draws


def test_no_more_drafts_are_drawn_than_a_step_has_room_for():
    """However many a decode may verify: 2^50 draws would take all memory."""
    fast = schedule(prompts(5, output=10), budget=make_budget(tokens=4, drafts=1 << 50), rate=1.0, model_len=40)
    assert [step.batch.query_lens.tolist() for step in fast] == [[4], [1], [4], [4], [4]]


def test_drafts_stay_within_the_model_length():
    fast = schedule(prompts(5, output=5), budget=make_budget(drafts=3), rate=0.0, model_len=10)
    assert [int(s.batch.seq_lens[0]) for s in fast] == [5, 9, 10, 10, 10]


def test_hit_is_whole_virtual_blocks_and_leaves_a_token():
    # 12 equal tokens: with blocks of 4 all three are kept, and the same prompt again may use two of them.
    trace = make_trace(
        [Request(i, 10.0 * i, 12, 1, np.arange(3, dtype=np.int32), 4) for i in range(2)]
        + [Request(2, 20.0, 13, 1, np.arange(4, dtype=np.int32), 4)]
    )
    fast = schedule(trace)
    assert [int(s.batch.num_computed[0]) for s in fast] == [0, 8, 12]
    assert fast.stats.prefix_hit_tokens == 20
    assert fast.stats.prefix_hit_rate == 20 / 37


@pytest.mark.parametrize(
    ("prompt_len", "expected"), [(1024, 0), (1025, 1024), (1500, 1024), (2048, 1024), (2049, 2048)]
)
def test_b61_b63_unit_of_a_hit_is_block_times_dcp(prompt_len, expected):
    hashes = np.arange(-(-prompt_len // 128), dtype=np.int32)
    trace = make_trace([Request(i, 100.0 * i, prompt_len, 1, hashes, 128) for i in range(2)])
    fast = schedule(trace, block=128, dcp=8, budget=make_budget(tokens=8192), model_len=4096)
    list(fast)
    assert fast.stats.prefix_hit_tokens == expected


def test_b37_ranks_that_schedule_alone_get_the_same_batches():
    lens = [80_000, 150_000, 220_000, 300_000]
    trace = make_trace(Request(i, 0.0, n, 3 + 2 * i) for i, n in enumerate(lens))
    runs = [
        schedule(trace, block=64, dcp=4, budget=make_budget(8192, 4, 1), blocks=4000, model_len=1 << 20, rate=0.5)
        for _ in range(4)
    ]
    num_steps = 0
    for steps in zip(*runs, strict=True):
        num_steps += 1
        batches = [step.batch for step in steps]
        for name in ("req_ids", "seq_lens", "query_lens", "prompt_lens", "block_tables"):
            assert len({getattr(batch, name).tobytes() for batch in batches}) == 1
        assert len({(step.time_s, step.num_waiting, step.num_held_blocks) for step in steps}) == 1
    assert num_steps >= 750_000 // 8192, "the prompts alone fill that many steps"


def test_b119_admission_charges_a_prompt_for_its_own_blocks_alone():
    # Eight prompts of 16,384 tokens need 8 * 4,096 blocks of 4; the step's token budget is charged to none of them.
    fast = schedule(prompts(*[16_384] * 8), budget=make_budget(tokens=16_384), blocks=8 * 4096 + 1, model_len=20_000)
    steps = list(fast)
    assert [s.batch.req_ids.tolist() for s in steps] == [[i] for i in range(8)]
    assert fast.stats.num_refused == 0


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"model_len": 0}, "max_model_len=0"),
        ({"rate": 1.5}, r"acceptance_rate=1\.5"),
        ({"rate": float("nan")}, "acceptance_rate=nan"),
        ({"blocks": 1}, "num_kv_blocks=1"),
    ],
)
def test_impossible_settings_are_refused(bad, match):
    with pytest.raises(ConfigError, match=match):
        schedule(prompts(4), **bad)


def test_a_clock_that_stands_still_in_nan_is_refused():
    class Broken:
        def step_seconds(self, batch):
            return float("nan")

    with pytest.raises(ConfigError, match="nan s"):
        list(schedule(prompts(4), clock=Broken()))


def test_stats_of_a_replay_cut_short_count_the_steps_given_out():
    fast = schedule(prompts(8, output=50))
    for _ in zip(range(3), fast, strict=False):
        pass
    assert (fast.stats.num_steps, fast.stats.num_tokens, fast.stats.num_finished) == (3, 10, 0)


def test_times_come_from_the_clock():
    clock = StepClock(step_s=0.5, token_s=0.01, pair_s=0.0)
    fast = schedule(prompts(4, output=2), clock=clock)
    steps = list(fast)
    assert [s.duration_s for s in steps] == [0.54, 0.51]
    assert steps[1].time_s == 0.54
    assert fast.stats.ttft_s.tolist() == [0.54]
    assert fast.stats.latency_s.tolist() == [0.54 + 0.51]
    assert fast.stats.elapsed_s == 0.54 + 0.51
