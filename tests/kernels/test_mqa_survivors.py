"""Places of survivors, by a warp's own instructions on 32 lanes: every passing logit one place, no hole in a list."""

import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from cpkit.kernels.head_sums_gluon import owner_lane, owner_layout, token_lanes
from cpkit.kernels.mqa_survivors_gluon import CLAIM

LANES = np.arange(32)


def owners(num_tokens):
    """(key of a warp, token) -> (element of the lane, lane), read off the bits of the layout."""
    layout, held = owner_layout(num_tokens), {}
    bases = [*layout.reg_bases, *layout.lane_bases]
    for bits in range(2 ** len(bases)):
        key, token, half = np.bitwise_xor.reduce([base for i, base in enumerate(bases) if bits >> i & 1] or [[0] * 3])
        if half == 0:  # a lane holds both halves of its sums
            element, lane = (bits & 2 ** len(layout.reg_bases) - 1) >> 1, bits >> len(layout.reg_bases)
            assert held.setdefault((key, token), (element, lane)) == (element, lane), "two lanes own one sum"
    return held


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_lanes_are_those_of_the_layout(num_tokens):
    held = owners(num_tokens)
    assert sorted(held) == [(key, token) for key in range(16) for token in range(num_tokens)]
    for token in range(num_tokens):
        lanes = {lane for (_, other), (_, lane) in held.items() if other == token}
        assert {lane for lane in range(32) if token_lanes(num_tokens) << token >> lane & 1} == lanes
    assert all(owner_lane.fn(key, token, num_tokens) == lane for (key, token), (_, lane) in held.items())


INSTRUCTIONS = {
    "mov.u32": lambda x: x,
    "setp.ne.u32": lambda x, y: x != y,
    "setp.eq.u32": lambda x, y: x == y,
    "vote.sync.ballot.b32": lambda x, _: np.full(32, (x.astype(np.int64) << LANES).sum()),
    "and.b32": lambda x, y: x & y,
    "popc.b32": lambda x: np.array([int(bits).bit_count() for bits in x]),
    "selp.b32": lambda x, y, p: np.where(p, x, y),
}


def run_warp(inputs, counters, rng):
    """CLAIM's outputs for inputs of 32 numbers; an address is a place in counters, and lanes ask in any order."""
    regs = {f"${3 + i}": values for i, values in enumerate(inputs)}
    regs |= {"%lanemask_lt": (1 << LANES) - 1, "$0": np.full(32, -99)}
    for line in CLAIM.value.strip("{}\n").splitlines():
        guard, op, args = re.fullmatch(r"(?:@(\w+) )?([\w.]+) (.*);", line).groups()
        if op == ".reg":
            continue
        to, *names = args.replace("[", "").replace("]", "").split(", ")
        values = [regs[name] if name in regs else np.full(32, int(name, 0)) for name in names]
        if op == "atom.global.gpu.relaxed.add.u32":
            for lane in rng.permutation(np.flatnonzero(regs[guard])):
                address, more = (x[lane] for x in values)
                regs[to][lane] = counters[address]
                counters[address] += more
        else:
            regs[to] = INSTRUCTIONS[op](*values)
    return regs["$0"], regs["$1"], regs["$2"]


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(2, 4), (4, 8), (2, 3), (2, 1), (4, 5)])
def test_every_survivor_has_a_place_of_its_own(num_tokens, num_rows, share):
    """Rows 0 .. Q - 1 are a scorer's first column group, Q .. 2 Q - 1 its second; those from num_rows on are none."""
    rng, held, num_keys = np.random.default_rng(num_rows), owners(num_tokens), 128
    passes = rng.random((2 * num_tokens, num_keys)) < share
    passes[num_rows:] = False
    counters, lists = [0] * num_rows, [{} for _ in range(2 * num_tokens)]
    for key0 in rng.permutation(np.arange(0, num_keys, 16)):  # each time a warp's keys of a tile, in any order
        for element in range(num_tokens // 2):
            mine = {lane: at for at, (of, lane) in held.items() if of == element}
            token = np.array([mine[lane][1] for lane in LANES])
            key = key0 + np.array([mine[lane][0] for lane in LANES])
            group = np.where(LANES // num_tokens < 2, LANES // num_tokens + 1, 0)
            row = np.where(group == 2, token + num_tokens, token)
            group = np.where(row < num_rows, group, 0)
            found = passes[token, key], passes[token + num_tokens, key]
            same_row = np.array([sum(1 << lane for lane in LANES[token == own]) for own in token])
            before, *ranks = run_warp((*found, same_row, group, row), counters, rng)
            for which in (0, 1):
                for lane in np.flatnonzero(found[which]):
                    own_row = token[lane] + which * num_tokens
                    place = before[own_row] + ranks[which][lane]
                    assert lists[own_row].setdefault(place, key[lane]) == key[lane], "two keys at one place"
    for row, count in enumerate(counters):
        assert sorted(lists[row]) == list(range(count)), "a hole"
        assert sorted(lists[row].values()) == np.flatnonzero(passes[row]).tolist()
