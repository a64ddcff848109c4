"""What a sweep's outcomes say: what beats what, and which one to take."""

from dataclasses import replace

from cpkit.sizing.sweep.choice import Aim, choose
from tests.sizing.sweep.small import outcome


def test_what_nothing_beats_is_kept_and_the_others_are_told_why():
    fast, roomy = outcome(8, 1, 0.05, 100.0, 10), outcome(8, 5, 0.05, 100.0, 99)
    slow, equal = outcome(8, 9, 0.09, 100.0, 10), outcome(16, 1, 0.0501, 50.0, 10)
    choice = choose([slow, fast, roomy, equal], Aim())
    assert choice.best == (fast, roomy)
    assert [(loser.outcome, loser.by) for loser in choice.losers] == [(slow, fast), (equal, fast)]
    assert choice.losers[0].reason == "first token p99 1.0 s against 9.0 s, a token p99 50 ms against 90 ms"
    assert "tokens/s a GPU 100 against 50" in choice.losers[1].reason


def test_the_one_to_take_keeps_the_aim_with_the_most_tokens_a_gpu():
    cheap, quick = outcome(8, 8, 0.05, 100.0, 10), outcome(16, 1, 0.05, 50.0, 10)
    assert choose([cheap, quick], Aim(10, 0.1)).take is cheap
    assert choose([cheap, quick], Aim(2, 0.1)).take is quick
    nothing = choose([cheap, quick], Aim(0.5, 0.1))
    assert nothing.take is quick and "nothing replayed keeps" in nothing.why[0]
    assert choose([cheap, quick], Aim(10, 0.1)).keeps_aim and not nothing.keeps_aim
    assert choose([], Aim()).take is None and not choose([], Aim()).keeps_aim


def test_what_serves_no_request_is_not_taken():
    refusing = outcome(8, 0, 0.0, 0.0, 99, finished=0, refused=9)
    choice = choose([refusing], Aim())
    assert choice.take is None and choice.best == (refusing,) and choice.why == () and choice.aim.unavoidable == 1
    serving = outcome(8, 5, 0.05, 100.0, 10)
    assert choose([refusing, serving], Aim()).take is serving


def test_a_full_pool_has_no_room_to_spare():
    full, roomy = outcome(8, 1, 0.05, 200.0, 10, kv_peak=0.99), outcome(8, 5, 0.05, 100.0, 99)
    assert choose([full, roomy], Aim()).take is roomy
    assert choose([full], Aim()).take is full


def test_requests_that_only_some_deployments_refuse_count_against_them():
    small, large = outcome(8, 1, 0.05, 200.0, 10, refused=3, finished=6), outcome(8, 5, 0.05, 100.0, 99)
    assert choose([small, large], Aim()).take is large
    alike = [replace(small, refused=3), replace(large, refused=3, finished=6)]
    assert choose(alike, Aim()).take is alike[0], "what every deployment refuses is the trace's"


def test_the_reasons_name_what_a_replay_showed():
    plain = outcome(8, 20, 0.05, 100.0, 10, kv_peak=1.0, preemptions=7)
    split = outcome(8, 1, 0.05, 100.0, 99)
    split = replace(split, candidate=replace(split.candidate, dcp=8))
    why = " ".join(choose([plain, split], Aim()).why)
    assert "without context parallelism" in why and "KV pool was full (7 preemptions)" in why
    assert "with whole keys on every rank (dcp 1)" in why
    once = " ".join(choose([replace(plain, preemptions=1), split], Aim()).why)
    assert "KV pool was full (1 preemption)" in once
    assert "buy room that this trace does not fill" in " ".join(choose([outcome(8, 1, 0.05, 100.0, 99)], Aim()).why)


def test_the_reasons_name_the_next_numbers_of_gpus():
    few, taken, many = outcome(4, 50, 0.3, 200.0, 5), outcome(8, 5, 0.05, 100.0, 10), outcome(16, 1, 0.02, 50.0, 20)
    fewest, most = outcome(2, 90, 0.9, 300.0, 2), outcome(32, 0.5, 0.01, 20.0, 40)
    choice = choose([most, few, taken, many, fewest], Aim())
    assert choice.take is taken
    told = [reason for reason in choice.why if reason.startswith("on ")]
    assert len(told) == 2 and told[0].startswith(f"on 4 GPUs, at best {few.candidate.name}, which does not keep it: ")
    assert "first token p99 50.0 s instead of 5.0 s, a token p99 300 ms instead of 50 ms" in told[0]
    assert told[1].startswith(f"on 16 GPUs, at best {many.candidate.name}: first token p99 1.0 s instead of 5.0 s")
