"""A small sweep for the tests: a trace, its setting, candidates that are allowed, outcomes as a replay would give."""

from cpkit.budget import default_budget
from cpkit.model import load_config, load_model, published_fields
from cpkit.sizing.chips import chip
from cpkit.sizing.memory.deployment import Limits
from cpkit.sizing.sweep.candidate import Candidate
from cpkit.sizing.sweep.candidates import Choices, sort_out
from cpkit.sizing.sweep.replay import Outcome, SweepSetting
from cpkit.sizing.weights import load_weights
from cpkit.workload.request import Request, Trace

NAME = "deepseek-v3.2"
MODEL = load_model(NAME)
TRACE = Trace("made", "plain", tuple(Request(i, 0.2 * i, 900 + 700 * (i % 5), 1 + 3 * (i % 4)) for i in range(24)))


def make_setting(model=NAME, drafts=0, **changes):
    known = load_model(model)
    budget = default_budget(known, num_speculative_tokens=drafts)
    return SweepSetting(known, load_weights(model, known), "h200", budget, 20_000, **changes)


def make_allowed(gpus=(8,), engine="cpkit", model=NAME, on="h200", drafts=0, **choices):
    limits = Limits(published_fields(*load_config(model)), 20_000, budget={"num_speculative_tokens": drafts})
    return sort_out(load_model(model), chip(on), engine, limits, Choices(gpus, **choices))


def outcome(gpus, ttft, tpot, tokens, capacity, **changes):
    candidate = Candidate(gpus, 8, 1, 1, 64, 64, "head_tail", ttft)  # the budget only tells them apart
    plain = {"kv_peak": 0.5, "busy": 0.5, "prefix_hit_rate": 0.0, "steps": 9, "wall_s": 1.0}
    plain |= {"finished": 9, "refused": 0, "preemptions": 0}
    return Outcome(
        candidate, (0.0, float(ttft)), (0.0, tpot), (0.0, 0.0), tokens, capacity, **{**plain, **changes}
    )  # fmt: skip
