"""The step that benchmarks/indexer_step.py times: every world and way selects what one rank does, and a plain sort.

So does the worker's own way, which is not timed.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.indexer_rank import RankStep, make_activations  # noqa: E402
from benchmarks.indexer_step import settings_of, worlds_of  # noqa: E402
from cpkit.comm.key_gather import make_key_gather  # noqa: E402
from cpkit.comm.simulated import run_ranks  # noqa: E402
from cpkit.kernels.fp8 import quantize_fp8  # noqa: E402
from cpkit.topology import Topology  # noqa: E402
from cpkit.worker.score import quantize_queries  # noqa: E402

SIZES = [(700, 100, 2, 8), (65, 65, 2, 100), (3, 3, 1, 2), (130, 2, 2, 500)]
"""context, query tokens, index heads, keys picked."""


def selections(topology, sizes, backend):
    """By rank: what it calls each of its ways, the tokens it has, and their selections as sorted lists."""
    context, num_new, heads, k = sizes
    settings, layer = settings_of(topology, context, logits_bytes=4 * context * 7)
    layer = replace(layer, index=replace(layer.index, num_heads=heads, topk=k))

    def program(comm):
        data = make_activations(context, num_new, heads, comm.device)
        gather = None
        if topology.dcp > 1 and topology.pcp > 1:
            gather = make_key_gather(comm, "collective", dim=128, max_keys=context, backend=backend, timeout_s=9)
        step = RankStep(comm, settings, layer, data, backend, gather)
        marks = []
        found = {way: torch.cat(step.run(way, marks.append)).sort(dim=1).values for way in step.ways}
        queries = quantize_queries(step.q, step.weights, backend=backend)
        by_worker = [step.selector.prefill([runs], queries) for runs, _ in step.sets]
        found["worker"] = torch.cat(by_worker).sort(dim=1).values
        return step.own_tokens.tolist(), {way: rows.tolist() for way, rows in found.items()}, marks, step.num_scores()

    return run_ranks(topology, program)


def sorted_plainly(sizes):
    """Of each new token, by float64 scores: positions of the best keys, behind -1s where there are too few.

    None where the last that is kept and the first that is not score alike, but for fp32's rounding.
    """
    context, num_new, heads, k = sizes
    data = make_activations(context, num_new, heads, torch.device("cpu"))
    (q, q_scale), (keys, key_scale) = quantize_fp8(data.q.view(-1, 128)), quantize_fp8(data.keys)
    products = (q.double() @ keys.double().T).clamp(min=0).view(num_new, heads, context)
    weights = data.weights.double() * q_scale.view(num_new, heads).double()
    scores = (products * weights[..., None]).sum(1) * key_scale.view(-1).double()
    rows = []
    for token, row in enumerate(scores.tolist()):
        seen = range(context - num_new + token + 1)
        order = sorted(seen, key=lambda position, row=row: -row[position])
        clear = len(order) <= k or row[order[k - 1]] - row[order[k]] > 1e-4 * max(map(abs, row))
        rows.append([-1] * (k - len(order)) + sorted(order[:k]) if clear else None)
    return rows


def agrees(rows, tokens, wanted):
    return all(wanted[token] in (None, row) for token, row in zip(tokens, rows, strict=True))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_world_selects_what_one_rank_does(sizes):
    [(tokens, alone, marks, num_scores)] = selections(Topology(), sizes, "torch")
    context, num_new = sizes[:2]
    assert tokens == list(range(num_new)) and set(alone) == {"written", "listed", "worker"}
    assert set(marks) == {"queries", "insert", "keys", "logits", "top-k", "logits and top-k"}
    assert num_scores == sum(range(context - num_new + 1, context + 1))
    wanted = sorted_plainly(sizes)
    assert sum(row is not None for row in wanted) > num_new // 2
    assert all(agrees(rows, tokens, wanted) for rows in alone.values())
    for name, world in worlds_of(2).items():
        ranks = selections(world.topology, sizes, "torch")
        for tokens, found, marks, _ in ranks:
            assert ("exchange" in marks) == ("candidates" in found) == (name == "tp 2, dcp 2")
            for way, rows in found.items():
                assert rows == [alone["written"][token] for token in tokens], (name, way)
        assert {token for tokens, *_ in ranks for token in tokens} == {*range(num_new)}


@pytest.mark.slow
def test_the_kernels_take_what_the_step_gives_them():
    sizes = (520, 2, 32, 512)
    wanted = sorted_plainly(sizes)
    for tokens, found, *_ in selections(Topology(pcp=2, dcp=2, interleave=64), sizes, "triton"):
        assert len(found) == 3 and all(agrees(rows, tokens, wanted) for rows in found.values())
