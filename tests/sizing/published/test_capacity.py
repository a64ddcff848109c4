"""Published capacities within their bounds, published refusals as they are."""

import pytest

from tests.sizing.published.capacity import answers, figures


@pytest.mark.parametrize("figure", [it for it in figures() if it.within], ids=lambda it: it.what)
def test_published_capacity(figure):
    assert abs(figure.difference) <= figure.within


def test_the_gains_are_judged():
    judged = {round(it.published, 2) for it in figures() if it.within}
    assert judged >= {1.98, 3.96, 7.85, 8.0, 3.7}


@pytest.mark.parametrize("answer", list(answers()), ids=lambda it: f"{it.model}-tp{it.tp}-pcp{it.pcp}-dcp{it.dcp}")
def test_published_refusal(answer):
    assert answer.ours == answer.published


def test_the_padding_rule_is_what_refuses():
    rules = {(it.model, it.tp, it.pcp, it.dcp): it.rules for it in answers()}
    assert rules["deepseek-v3.2", 8, 1, 8] == ("vllm-flashmla-padding",)
    assert rules["deepseek-v3.2", 2, 4, 8] == ("vllm-flashmla-padding",)
