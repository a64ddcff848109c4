"""Outputs whose keys come part by part, against one softmax over all keys."""

import torch

from cpkit.worker.outputs import Outputs


def partial(scores, values):
    """Output and LSE of tokens over some keys: scores [tokens, heads, keys], values [keys, dim]."""
    return torch.softmax(scores, 2) @ values, scores.logsumexp(2)


def test_parts_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(5, 2, 9, generator=generator), torch.randn(9, 4, generator=generator)
    outputs = Outputs(5, 2, 4, torch.device("cpu"))
    outputs.add(slice(None), partial(scores[..., :2], values[:2]))
    outputs.add(slice(1, 4), partial(scores[1:4, :, 2:7], values[2:7]))
    outputs.add(slice(1, 4), partial(scores[1:4, :, 7:], values[7:]))
    for token in range(5):
        num_keys = 9 if 1 <= token < 4 else 2
        out, lse = partial(scores[token : token + 1, :, :num_keys], values[:num_keys])
        torch.testing.assert_close(outputs.out[token : token + 1], out)
        torch.testing.assert_close(outputs.lse[token : token + 1], lse)


def test_tokens_without_keys_stay_empty():
    outputs = Outputs(3, 1, 2, torch.device("cpu"))
    nothing = torch.full((1, 1, 2), float("nan")), torch.full((1, 1), float("-inf"))
    outputs.add(slice(0, 1), (torch.ones(1, 1, 2), torch.zeros(1, 1)))
    outputs.add(slice(0, 1), nothing)  # what an empty part's output holds has no influence
    outputs.add(slice(2, 3), (torch.ones(1, 1, 2), torch.zeros(1, 1)))
    assert outputs.out.tolist() == [[[1, 1]], [[0, 0]], [[1, 1]]]
    assert outputs.lse.flatten().tolist() == [0, float("-inf"), 0]
    outputs.add(slice(0, 0), (torch.ones(0, 1, 2), torch.zeros(0, 1)))
