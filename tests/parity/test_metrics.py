"""Figures of logits, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from openkda.parity.metrics import ErrorSum, Thresholds, last_tokens, summarize, token_figures


def test_figures_of_two_tokens_by_hand() -> None:
    reference = torch.tensor([[0.0, math.log(3.0)], [1.0, 0.0]])  # p = 1/4, 3/4
    ours = torch.tensor([[0.0, 0.0], [1.0, 0.0]])  # q = 1/2, 1/2
    t = token_figures(reference, ours)
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert t.kl.tolist() == pytest.approx([kl, 0.0], abs=1e-7)
    assert t.max_diff.tolist() == pytest.approx([math.log(3.0), 0.0], abs=1e-6)
    assert t.top1.tolist() == [False, True]
    assert t.kl.dtype == torch.float64
    figures = summarize([t])
    assert (figures.kl, figures.mean_kl) == pytest.approx((kl, kl / 2), abs=1e-7)
    assert figures.top1 == 0.5
    assert figures.tokens == 2


def test_kl_is_resolved_far_below_single_precision() -> None:
    reference = torch.randn(4, 50, dtype=torch.float64)
    t = token_figures(reference, reference + 1e-7 * torch.randn(4, 50, dtype=torch.float64))
    assert 0 < t.kl.max() < 1e-13


def test_top5_counts_shared_tokens_in_any_order() -> None:
    reference = torch.arange(8.0)[None]
    ours = reference.clone()
    ours[0, [3, 7]] = ours[0, [7, 3]]  # still the same five
    assert token_figures(reference, ours).top5.tolist() == [1.0]
    ours = reference.clone()
    ours[0, [2, 7]] = ours[0, [7, 2]]  # 7 leaves, 2 enters
    assert token_figures(reference, ours).top5.tolist() == [0.8]


def test_line_has_the_published_form() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    line = summarize([token_figures(logits, logits)]).line()
    assert line == "KL=0.0000e+00 cos=1.000000000 max_diff=0.0000e+00 top1=Y top5=100%"


def test_nan_is_the_worst_and_breaks_every_limit() -> None:
    a, b = torch.randn(3, 9), torch.randn(3, 9)
    b[1, 2] = float("nan")
    figures = summarize([token_figures(a, b)])
    assert math.isnan(figures.kl)
    assert Thresholds(max_kl=1e9).broken({"max_kl": figures.kl}) == ["kl must be at most 1e+09, got nan"]
    assert Thresholds(min_cos=-1.0).broken({"min_cos": figures.cos})


def test_last_tokens_are_one_of_each_text() -> None:
    texts = [token_figures(torch.randn(n, 7), torch.randn(n, 7)) for n in (3, 5)]
    last = last_tokens(texts)
    assert [len(t.kl) for t in last] == [1, 1]
    assert summarize(last).kl == max(t.kl[-1].item() for t in texts)


def test_limit_on_what_was_not_measured_is_broken() -> None:
    assert Thresholds(max_grad_error=1.0).broken({}) == ["max_grad_error 1 was asked for, and was not measured"]
    assert Thresholds().broken({}) == []


def test_error_sum_adds_up_over_texts() -> None:
    error = ErrorSum()
    error.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))
    assert error.relative == 0
    error.add(torch.zeros(2), torch.tensor([0.0, 5.0]))
    assert error.relative == 1.0
    with pytest.raises(ValueError, match=r"sizes must agree, got \[2\] and \[3\]"):
        error.add(torch.zeros(2), torch.zeros(3))


def test_logits_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must agree in shape, got \[2, 3\] and \[2, 4\]"):
        token_figures(torch.zeros(2, 3), torch.zeros(2, 4))
