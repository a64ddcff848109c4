"""Partial outputs of every rank against attention over all keys, on every kind of DCP group."""

import numpy as np
import pytest
import torch

from cpkit.comm.simulated import run_ranks
from cpkit.errors import ConfigError
from cpkit.merge import gather_heads, merge_shards, merged_heads
from cpkit.topology import Topology

VALUES, DIM = 3, 4


def attend(query, keys):
    """One query vector over keys [n, DIM], float64: output of VALUES and natural LSE."""
    if not len(keys):
        return np.full(VALUES, np.nan), -np.inf  # what a kernel may leave behind
    scores = keys @ query
    weights = np.exp(scores - scores.max())
    return weights @ keys[:, :VALUES] / weights.sum(), scores.max() + np.log(weights.sum())


def partial(query, keys_of_token, base):
    """Outputs and LSEs of all tokens and heads over one rank's keys."""
    tokens, heads, _ = query.shape
    out, lse = np.zeros((tokens, heads, VALUES)), np.zeros((tokens, heads))
    for token in range(tokens):
        for head in range(heads):
            out[token, head], lse[token, head] = attend(query[token, head], keys_of_token[token])
    return torch.from_numpy(out).float(), torch.from_numpy(lse / (1 if base == "e" else np.log(2))).float()


def make(num_tokens, num_heads, ranks, seed):
    """Queries, and for each token its keys dealt to the ranks: some ranks get none, the last token has none at all."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(num_tokens, num_heads, DIM))
    lens = [*rng.integers(0, 2 * ranks, max(num_tokens - 1, 0)), 0][:num_tokens]
    keys = [rng.normal(size=(length, DIM)) for length in lens]
    return query, keys


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("merge", ["ag_rs", "a2a"])
@pytest.mark.parametrize(
    "world",
    [
        pytest.param({"tp": 1, "dcp": 1}, id="one-rank"),
        pytest.param({"tp": 2, "dcp": 2}, id="dcp-alone"),
        pytest.param({"tp": 4, "dcp": 2}, id="two-groups"),
        pytest.param({"pcp": 2, "tp": 2, "dcp": 2}, id="dcp-is-pcp"),
        pytest.param({"pcp": 2, "tp": 2, "dcp": 4}, id="dcp-is-tp-times-pcp"),
        pytest.param({"pcp": 4, "tp": 1, "dcp": 4}, id="pcp-of-four"),
    ],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_every_rank_ends_with_its_own_heads(world, merge, base, num_tokens):
    topology, num_heads = Topology(**world), 8
    query, keys = make(num_tokens, num_heads, topology.dcp, seed=num_tokens)
    # heads that the ranks of a group attend with: all, or those of one TP rank where dcp = pcp
    own = num_heads // topology.tp
    whole = partial(query, keys, base)

    def program(comm):
        tp, group = topology.coords(comm.rank).tp, comm.group("dcp")
        if topology.pcp > 1:
            first, count = (tp * own, own) if topology.dcp == topology.pcp else (0, num_heads)
        else:
            first, count = tp // topology.dcp * topology.dcp * own, topology.dcp * own
        mine = [keys_of_token[group.place :: group.size] for keys_of_token in keys]
        out, lse = partial(query[:, first : first + count], mine, base)
        out, lse = merge_shards(comm, out, lse, merge=merge, base=base)
        heads = merged_heads(comm, count)
        merged = slice(first + heads.start, first + heads.stop)
        if topology.pcp > 1 and topology.dcp > 1:
            out = gather_heads(comm, out)
        return out, lse, merged

    for rank, (out, lse, merged) in enumerate(run_ranks(topology, program)):
        tp = topology.coords(rank).tp
        want = whole[0][:, tp * own : (tp + 1) * own].nan_to_num(0.0)
        assert out.shape == want.shape and torch.allclose(out, want, rtol=1e-4, atol=1e-5)
        assert torch.allclose(lse, whole[1][:, merged], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("merge", "sent"),
    [
        ("ag_rs", [("all_gather", "dcp", "lse", 5 * 8), ("reduce_scatter", "dcp", "outputs", 5 * 8 * VALUES)]),
        ("a2a", [("all_to_all", "dcp", "partials", 5 * 8 * (VALUES + 1))]),
    ],
)
def test_what_travels(merge, sent):
    def program(comm):
        out, _ = merge_shards(comm, torch.zeros(5, 8, VALUES), torch.zeros(5, 8), merge=merge)
        gather_heads(comm, out)
        return [(one.op, one.group, one.what, one.elements) for one in comm.ledger.take()]

    for issued in run_ranks(Topology(pcp=2, tp=2, dcp=4), program):
        assert issued == [*sent, ("all_gather", "pcp", "output_heads", 5 * 2 * VALUES)]


@pytest.mark.parametrize(("merge", "heads", "words"), [("ring", 2, "merge 'ring'"), ("a2a", 3, "3 heads do")])
def test_refusals(merge, heads, words):
    def program(comm):
        merge_shards(comm, torch.zeros(1, heads, VALUES), torch.zeros(1, heads), merge=merge)

    with pytest.raises(ConfigError, match=words):
        run_ranks(Topology(tp=2, dcp=2), program)
