"""The oracle against sums written out in plain Python, on exact data, which caches store unchanged."""

import math

import pytest
import torch

from cpkit.activations.content import Content
from cpkit.activations.generate import Generated
from cpkit.oracle import Oracle, Scores, Token
from cpkit.worker.token_activations import TokenActivations
from tests.worker.worlds import Case

MAKE = Generated(5)


def vector(stream, number, req_id, position, dim):
    return MAKE.rows(stream, number, torch.tensor([req_id]), torch.tensor([position]), dim)[0].tolist()


def heads(stream, number, token, dim, num_heads):
    at = torch.tensor([token.req_id]), torch.tensor([token.position])
    return MAKE.heads(stream, number, *at, dim, range(num_heads))[0].tolist()


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def slow_selection(layer, indexer, token):
    """Positions of the best keys, or pools of keys, by score, then position."""
    num_keys = (token.position + 1) // layer.index.ratio
    weights = vector("index_weights", indexer, token.req_id, token.position, layer.index.num_heads)
    queries = heads("index_query", indexer, token, layer.index.head_dim, layer.index.num_heads)
    scores = []
    for key in range(num_keys):
        values = vector("index_key", indexer, token.req_id, key, layer.index.head_dim)
        scores.append(sum(w * max(0.0, dot(q, values)) for q, w in zip(queries, weights, strict=True)))
    return sorted(range(num_keys), key=lambda key: (-scores[key], key))[: layer.index.topk]


def slow_keys(layer, token, picked):
    """The keys of the picked pools, and those behind the last whole one."""
    size = layer.index.ratio // layer.compress_ratio
    if size == 1:
        return picked
    pools = [list(range(token.position + 1))[first : first + size] for first in range(0, token.position + 1, size)]
    return [key for one in picked for key in pools[one]] + (pools[-1] if len(pools[-1]) < size else [])


def slow_attention(layer, number, token, selection, head, num_heads):
    """Output and LSE of one head."""
    dim = layer.key_dim or layer.window_dim
    keys = [vector("latent", number, token.req_id, key, dim) for key in selection]
    if layer.window_size:
        first = max(0, token.position - layer.window_size + 1)
        keys += [vector("window", number, token.req_id, at, dim) for at in range(first, token.position + 1)]
    query = heads("query", number, token, dim, num_heads)[head]
    weights = [math.exp(dot(query, key) / math.sqrt(dim)) for key in keys]
    sink = math.exp(vector("sink", number, 0, 0, num_heads)[head]) if layer.window_size else 0.0
    out = [sum(w * key[i] for w, key in zip(weights, keys, strict=True)) / (sum(weights) + sink) for i in range(4)]
    return out, math.log(sum(weights))


@pytest.mark.parametrize("kind", ["dsa", "kpool", "c4a", "swa"])
@pytest.mark.parametrize("position", [0, 3, 8, 21, 31])
def test_oracle(kind, position):
    model = Case(kind, 1).model
    oracle = Oracle(TokenActivations(MAKE, Content(64), model.num_heads))
    token = Token(2, position)
    for number, layer in enumerate(model.layers):
        truth = oracle.about(model, number, [Token(1, 5), token], range(4, 6))
        chosen = []
        if layer.index:
            chosen = truth.scores(1).best(layer.index.topk).tolist()
            assert chosen == slow_selection(layer, 0, token)
            picked, chosen = torch.tensor(chosen, dtype=torch.int64), slow_keys(layer, token, chosen)
            assert truth.picked_keys(1, picked).tolist() == chosen
        found = truth.attend(1, torch.tensor(chosen, dtype=torch.int64))
        for at, head in enumerate((4, 5)):
            out, lse = slow_attention(layer, number, token, chosen, head, model.num_heads)
            assert found.lse[at].item() == pytest.approx(lse, abs=1e-12)
            assert found.out[at, :4].tolist() == pytest.approx(out, abs=1e-12)


def test_shared_prefix_has_one_truth():
    """Requests 0 and 1 share their first block of 4 tokens, and nothing behind it."""
    model = Case("dsa", 1).model
    names = {0: torch.tensor([9, 8]).numpy(), 1: torch.tensor([9, 7]).numpy()}
    oracle = Oracle(TokenActivations(MAKE, Content(4, names), model.num_heads))
    first, second = (oracle.keys("latent", model.layers[0], 0, req_id, 8) for req_id in (0, 1))
    assert torch.equal(first[:4], second[:4]) and not torch.equal(first[4:], second[4:])


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([1.0, 3.0, 3.0, 2.0], [1, 2]),
        ([-0.0, 0.0, -1.0], [0, 1]),
        ([math.nan, -math.inf, 1.0], [2, 1]),
        ([math.nan, math.nan], []),
    ],
    ids=["ties", "signed-zeros", "nan-and-inf", "nan-only"],
)
def test_best(scores, best):
    values = torch.tensor(scores, dtype=torch.float64)
    assert Scores(values, torch.zeros_like(values)).best(2).tolist() == best
