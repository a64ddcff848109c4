"""What a sweep's outcomes say: which no other beats, why the others lose, and which one to take.

One outcome beats another when it is no worse in any of four figures and better in one: first token p99, time per
output token p99, tokens/s a GPU, tokens of context that fit. Figures within 2 per cent of each other count as equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cpkit.sizing.sweep.replay import Outcome

EQUAL = 0.02

FULL = 0.95
"""Share of a KV pool from which on a deployment has no room to spare: a little more load, and it evicts or preempts."""

KINDS = {
    (False, False): "without context parallelism",
    (True, False): "with only queries split (dcp 1)",
    (False, True): "with only keys split (pcp 1)",
    (True, True): "with queries and keys split",
}
"""What to call a candidate by (pcp > 1, dcp > 1)."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a service is held to: seconds of the 99th percentile, and no request refused that another deployment takes.

    unavoidable: requests of the trace that every deployment of the sweep refuses, such as those beyond max_model_len,
    as a share of all.
    """

    ttft_s: float = 10.0
    tpot_s: float = 0.1
    unavoidable: float = 0.0

    def miss(self, outcome: Outcome) -> float:
        """How far an outcome is over the aim, 1 or less being within it."""
        if not outcome.finished or refused_share(outcome) > self.unavoidable + EQUAL:
            return float("inf")
        return max(outcome.ttft_s[1] / self.ttft_s, outcome.tpot_s[1] / self.tpot_s)


@dataclass(frozen=True, slots=True)
class Loser:
    """An outcome, one that beats it, and by what."""

    outcome: Outcome
    by: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What outcomes of one sweep come to.

    aim: what was asked for, with what cannot be avoided. best: outcomes that none beats, in the order of GPUs and
    first token. losers: the others. take: the one to take, which is of the best; None where none served a request.
    why: the reasons, a sentence each.
    """

    aim: Aim
    best: tuple[Outcome, ...]
    losers: tuple[Loser, ...]
    take: Outcome | None
    why: tuple[str, ...]

    @property
    def keeps_aim(self) -> bool:
        """There is one to take, and it is within the aim."""
        return self.take is not None and self.aim.miss(self.take) <= 1


def choose(outcomes: Sequence[Outcome], aim: Aim) -> Choice:
    """The choice among outcomes of one sweep."""
    aim = replace(aim, unavoidable=min(map(refused_share, outcomes), default=0.0))
    best, losers = [], []
    for outcome in outcomes:
        winners = [other for other in outcomes if beats(other, outcome)]
        if not winners:
            best.append(outcome)
            continue
        # the nearest in GPUs tells most; of those, the one with the least waiting
        by = min(winners, key=lambda other: (abs(other.candidate.gpus - outcome.candidate.gpus), other.ttft_s[1]))
        losers.append(Loser(outcome, by, _comparison(by, outcome)))
    best.sort(key=lambda outcome: (outcome.candidate.gpus, outcome.ttft_s[1]))
    take = _take([outcome for outcome in best if outcome.finished], aim)
    why = _why(take, outcomes, aim) if take is not None else ()
    return Choice(aim, tuple(best), tuple(losers), take, why)


def figures(outcome: Outcome) -> tuple[float, float, float, float]:
    """The four figures, each the better the larger."""
    return -outcome.ttft_s[1], -outcome.tpot_s[1], outcome.tokens_s_gpu, outcome.capacity


def refused_share(outcome: Outcome) -> float:
    """Share of a replica's requests that could never fit."""
    return outcome.refused / max(outcome.refused + outcome.finished, 1)


def beats(one: Outcome, other: Outcome) -> bool:
    """One is no worse in any figure, and better in one; what refuses more requests beats nothing."""
    if refused_share(one) > refused_share(other) + EQUAL:
        return False
    signs = [_sign(a, b) for a, b in zip(figures(one), figures(other), strict=True)]
    return min(signs) >= 0 and max(signs) > 0


def _sign(a: float, b: float) -> int:
    """1 for better, -1 for worse, 0 for equal within EQUAL."""
    if not differs(a, b):
        return 0
    return 1 if a > b else -1


def differs(a: float, b: float) -> bool:
    """Two figures are further apart than EQUAL."""
    return abs(a - b) > EQUAL * max(abs(a), abs(b))


def _take(best: Sequence[Outcome], aim: Aim) -> Outcome | None:
    """Within the aim, and with a KV pool that was not full, the most tokens/s a GPU, of equals the farthest within;
    where nothing is within, the nearest to it.
    """
    within = [outcome for outcome in best if aim.miss(outcome) <= 1]
    within = [outcome for outcome in within if outcome.kv_peak < FULL] or within
    most = max((outcome.tokens_s_gpu for outcome in within), default=0.0)
    equal = [outcome for outcome in within if not _sign(outcome.tokens_s_gpu, most)]
    return min(equal or best, key=aim.miss, default=None)


def _why(take: Outcome, outcomes: Sequence[Outcome], aim: Aim) -> tuple[str, ...]:
    """Whether the aim is met, and what each other way of parallelism on as many GPUs would have given instead."""
    same = [outcome for outcome in outcomes if outcome.candidate.gpus == take.candidate.gpus and outcome is not take]
    said = [_aim_text(take, aim), *_room_text(take, same)]
    for kind, name in KINDS.items():
        others = [outcome for outcome in same if _kind(outcome) == kind]
        if others and kind != _kind(take):
            other = min(others, key=aim.miss)
            said.append(f"{name}, at best {other.candidate.name}: {_instead(other, take)}{_cause(other, take)}")
    return (*said, *_other_gpus_text(take, outcomes, aim))


def _other_gpus_text(take: Outcome, outcomes: Sequence[Outcome], aim: Aim) -> Iterator[str]:
    """What the next smaller and the next larger number of GPUs would have given."""
    numbers = sorted({outcome.candidate.gpus for outcome in outcomes})
    at = numbers.index(take.candidate.gpus)
    for number in (*numbers[max(at - 1, 0) : at], *numbers[at + 1 : at + 2]):
        other = min((outcome for outcome in outcomes if outcome.candidate.gpus == number), key=aim.miss)
        kept = "" if aim.miss(other) <= 1 else ", which does not keep it"
        where = f"on {number:,} GPU{'s' if number > 1 else ''}"
        yield f"{where}, at best {other.candidate.name}{kept}: {_instead(other, take)}"


def _kind(outcome: Outcome) -> tuple[bool, bool]:
    return outcome.candidate.pcp > 1, outcome.candidate.dcp > 1


def _aim_text(take: Outcome, aim: Aim) -> str:
    asked = f"{aim.ttft_s:g} s to the first token and {1e3 * aim.tpot_s:g} ms a token at p99"
    if aim.miss(take) <= 1:
        return f"it keeps {asked}, with the most tokens/s a GPU of those that do and have KV blocks to spare"
    return f"nothing replayed keeps {asked}; this comes nearest"


def _room_text(take: Outcome, same: Sequence[Outcome]) -> Iterator[str]:
    """Whether the trace fills the room that splitting keys would buy, or buys."""
    held = f"{take.kv_peak * take.capacity / 1e6:,.2f}M"
    if take.candidate.dcp == 1 and take.kv_peak < 0.9:
        yield (
            f"at most {held} tokens were held of {take.capacity / 1e6:,.2f}M: splitting keys (dcp) would buy room that "
            "this trace does not fill"
        )
    whole = [other for other in same if other.candidate.dcp == 1 and other.kv_peak >= FULL]
    if take.candidate.dcp > 1 and whole:
        most = max(other.capacity for other in whole)
        yield (
            f"up to {held} tokens were held, prefixes of later turns among them; with whole keys on every rank (dcp 1) "
            f"there is room for {most / 1e6:,.2f}M at most, and it was full"
        )


def _instead(other: Outcome, take: Outcome) -> str:
    """What another one would have given."""
    return _comparison(other, take, "instead of") or "figures as good"


def _comparison(one: Outcome, other: Outcome, beside: str = "against") -> str:
    """Figures that differ, `one` first."""
    parts = [
        ("first token p99", one.ttft_s[1], other.ttft_s[1], _seconds),
        ("a token p99", one.tpot_s[1], other.tpot_s[1], _seconds),
        ("tokens/s a GPU", one.tokens_s_gpu, other.tokens_s_gpu, lambda value: f"{value:,.0f}"),
        ("room for tokens", one.capacity, other.capacity, lambda value: f"{value / 1e6:,.2f}M"),
    ]
    return ", ".join(f"{name} {show(a)} {beside} {show(b)}" for name, a, b, show in parts if _sign(a, b))


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{1e3 * value:,.0f} ms"


def _cause(other: Outcome, take: Outcome) -> str:
    """What held the other one back, where a replay shows it."""
    causes = []
    if other.kv_peak >= FULL and take.kv_peak < other.kv_peak:
        number = other.preemptions
        preempted = f" ({number:,} preemption{'' if number == 1 else 's'})" if number else ""
        causes.append(f"its KV pool was full{preempted}")
    if other.prefix_hit_rate < take.prefix_hit_rate - 0.05:
        causes.append(f"prefixes were evicted (hits {other.prefix_hit_rate:.0%} against {take.prefix_hit_rate:.0%})")
    if other.busy > 0.98 > take.busy:
        causes.append("it had no idle step left")
    return f"; {' and '.join(causes)}" if causes else ""
