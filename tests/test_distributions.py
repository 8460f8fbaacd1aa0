import math

import mpmath
import numpy as np
import pytest
import torch

from mechkv import distributions
from mechkv.comparison import metric_floor
from mechkv.distributions import (
    compare_logit_rows,
    compare_logits,
    exact_tie,
    flip_certified,
    js,
    kl,
    margin,
    near_ties,
    require_certificate,
    top1_flip,
    top_k_overlap,
    total_variation,
)
from mechkv.errors import GuardError, InputError, NonFiniteError

LN2 = math.log(2.0)


def logits(noise: float, d_vocab: int = 101, seed: int = 0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    z_b = 4 * torch.randn(d_vocab, generator=g, dtype=torch.float64)
    return (z_b + noise * torch.randn(d_vocab, generator=g, dtype=torch.float64)).to(dtype), z_b.to(dtype)


def by_definition(z_a: torch.Tensor, z_b: torch.Tensor) -> dict[str, float]:
    """The definitions with 80 digits."""
    mpmath.mp.dps = 80
    p, q = ([mpmath.exp(mpmath.mpf(v)) for v in z.double().tolist()] for z in (z_a, z_b))
    p, q = ([v / mpmath.fsum(w) for v in w] for w in (p, q))
    m = [(u + v) / 2 for u, v in zip(p, q, strict=True)]

    def divergence(u, v):
        return mpmath.fsum(x * mpmath.log(x / y) for x, y in zip(u, v, strict=True))

    return {
        "kl": float(divergence(p, q)),
        "js": float((divergence(p, m) + divergence(q, m)) / 2),
        "tv": float(mpmath.fsum(abs(u - v) for u, v in zip(p, q, strict=True)) / 2),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("noise", [1e-13, 1e-9, 1e-5, 1e-2, 0.1, 1.0, 10.0])
def test_divergences_keep_their_relative_accuracy_at_every_size(noise, dtype):
    z_a, z_b = logits(noise, dtype=dtype)
    want, got = by_definition(z_a, z_b), compare_logits(z_a, z_b).to_dict()
    for name in ("kl", "js", "tv"):
        assert abs(got[name] - want[name]) <= metric_floor(name, len(z_a), want[name]), name
        assert abs(got[name] - want[name]) <= 1e-12 * want[name], name


def test_the_plain_sum_would_not():
    z_a, z_b = logits(1e-9)
    p, log_p, log_q = torch.softmax(z_a, 0), torch.log_softmax(z_a, 0), torch.log_softmax(z_b, 0)
    want = by_definition(z_a, z_b)["kl"]
    assert abs(float((p * (log_p - log_q)).sum()) - want) > 1e-3 * want


def test_closed_forms_of_two_tokens():
    """p = (1/4, 3/4), q = (1/2, 1/2)."""
    z_a, z_b = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    forward, backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl(z_a, z_b).item() == pytest.approx(forward, rel=1e-12)
    assert kl(z_b, z_a).item() == pytest.approx(backward, rel=1e-12)
    assert abs(forward - backward) > 0.01
    assert total_variation(z_a, z_b).item() == pytest.approx(0.25, rel=1e-12)


def test_disjoint_distributions_reach_the_limits():
    z_a, z_b = torch.tensor([6e4, 0.0, -6e4]), torch.tensor([-6e4, 0.0, 6e4])
    assert kl(z_a, z_b).item() == pytest.approx(1.2e5, rel=1e-12)
    assert js(z_a, z_b).item() == pytest.approx(LN2, rel=1e-12)
    assert total_variation(z_a, z_b).item() == pytest.approx(1.0, rel=1e-12)


def test_a_shift_of_all_logits_is_no_difference_and_one_logit_is():
    _, z_b = logits(0.0)
    z_b = (z_b * 64).round() / 64
    assert kl(z_b + 0.5, z_b).item() < 1e-30
    one = z_b.clone()
    one[7] += 0.5
    assert kl(one, z_b).item() > 1e-9


def test_js_tends_to_a_quarter_of_kl_and_does_not_for_large_drift():
    small, large = logits(1e-6), logits(5.0)
    assert (js(*small) / kl(*small)).item() == pytest.approx(0.25, rel=1e-4)
    assert (js(*large) / kl(*large)).item() < 0.24


def test_equal_logits_are_exactly_zero():
    _, z = logits(0.0, dtype=torch.float16)
    got = compare_logits(z, z.clone())
    assert (got.kl, got.js, got.tv, got.max_abs_dz, got.flip) == (0.0, 0.0, 0.0, 0.0, False)
    assert (got.top5_overlap, got.top10_overlap, got.certified) == (1.0, 1.0, True)


# ---------------------------------------------------------------------------------------------------------- ranks


def test_no_difference_is_no_negative_zero():
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert (
        math.copysign(1.0, compare_logits(b, a).max_abs_dz)
        == math.copysign(1.0, compare_logits(a, b).max_abs_dz)
        == 1.0
    )


def test_hand_worked_ranks():
    z_b = torch.tensor([1.0, 3.0, 2.75, 2.5, 2.0, 1.5, -1.0])
    z_a = torch.tensor([1.0, 2.5, 2.75, 2.5, 2.0, 0.5, -1.0])
    got = compare_logits(z_a, z_b)
    assert (got.top_a, got.top_b, got.flip, got.tie_a, got.tie_b) == (2, 1, True, False, False)
    assert (got.margin_a, got.margin_b, got.max_abs_dz, got.certified) == (0.25, 0.25, 1.0, False)
    near = (got.near_ties_0_25, got.near_ties_0_5, got.near_ties_1, got.near_ties_2)
    assert near == (1, 2, 3, 5)
    assert got.top5_overlap == 0.8  # z_a has token 0 (1.0) where z_b has token 5
    assert got.top10_overlap is None
    assert got.nonfinite == 0


def test_ties_go_to_the_lowest_token_id_and_are_reported():
    z_a, z_b = torch.tensor([0.0, 5.0, 1.0, 5.0]), torch.tensor([0.0, 5.0, 1.0, 5.5])
    got = compare_logits(z_a, z_b)
    assert (got.top_a, got.top_b, got.flip, got.tie_a, got.tie_b, got.margin_a) == (1, 3, True, True, False, 0.0)
    assert exact_tie(torch.stack([z_a, z_b])).tolist() == [True, False]
    assert not top1_flip(z_a, z_a.clone())
    assert top_k_overlap(z_a, z_b, 1).item() == 0.0
    assert top_k_overlap(z_a, z_b, 2).item() == 1.0
    many = torch.zeros(40)
    assert top_k_overlap(many, many + torch.arange(40) * -1.0, 7).item() == 1.0
    assert top_k_overlap(many, many + torch.arange(40) * 1.0, 7).item() == 0.0


def test_overlap_and_near_ties_against_plain_python():
    z_a, z_b = logits(0.5, dtype=torch.float16)
    for k in (1, 5, 10, 101):
        first, second = (set(np.argsort(-z.double().numpy(), kind="stable")[:k].tolist()) for z in (z_a, z_b))
        assert top_k_overlap(z_a, z_b, k).item() == pytest.approx(len(first & second) / k, rel=1e-15)
    for k, name in ((5, "top5_overlap"), (10, "top10_overlap")):
        for a, b in ((z_a, z_b), (z_a.round(), z_b.round())):  # without a tie at the k-th place, and with one
            first, second = (set(np.argsort(-z.double().numpy(), kind="stable")[:k].tolist()) for z in (a, b))
            assert getattr(compare_logits(a, b), name) == pytest.approx(len(first & second) / k, rel=1e-15)
    ranked = sorted(z_b.double().tolist(), reverse=True)
    assert margin(z_b).item() == ranked[0] - ranked[1]
    for distance in (0.25, 2.0, 5.0):
        assert near_ties(z_b, distance).item() == sum(v >= ranked[0] - distance for v in ranked) - 1


def test_certified_positions_never_flip_and_uncertified_ones_do():
    g = torch.Generator().manual_seed(1)
    z_b = torch.randn(4000, 13, generator=g)
    z_a = z_b + 0.2 * torch.randn(4000, 13, generator=g)
    rows = compare_logit_rows(z_a, z_b)
    certified, flip = rows["certified"] == 1, rows["flip"] == 1
    assert 0.05 < certified.mean() < 0.95
    assert not (certified & flip).any()
    assert (flip & ~certified).sum() > 100


def test_the_certificate_is_tight():
    z_b, z_a = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    assert compare_logits(z_a, z_b).certified is False  # margin = 2 max|dz|: a tie is possible
    assert compare_logits(torch.tensor([0.501, 0.499]), z_b).certified is True


def test_a_contradicted_certificate_is_an_error(monkeypatch):
    true, false = torch.tensor([True, False]), torch.tensor([False, True])
    require_certificate(true, false)
    with pytest.raises(GuardError, match="flip certificate"):
        require_certificate(true, true)
    assert flip_certified(torch.tensor([1.0, 1.0]), torch.tensor([0.4, 0.6])).tolist() == [True, False]
    monkeypatch.setattr(distributions, "flip_certified", lambda margin, dz: torch.ones_like(dz, dtype=torch.bool))
    with pytest.raises(GuardError, match="1 flips"):
        compare_logits(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]))


# --------------------------------------------------------------------------------------------- rows and bad input


def test_rows_equal_single_vectors_and_bad_rows_stay_alone():
    pairs = [logits(noise, seed=seed, dtype=torch.float32) for seed, noise in enumerate((0.0, 1e-3, 2.0, 0.1, 0.1))]
    z_a, z_b = (torch.stack(side) for side in zip(*pairs, strict=True))
    z_a[3, 5], z_b[4, 6] = math.nan, -math.inf
    rows = compare_logit_rows(z_a, z_b)
    assert rows["nonfinite"].tolist() == [0, 0, 0, 1, 1]
    for step in range(5):
        single = compare_logits(z_a[step], z_b[step])
        assert (single.kl is None) == (step > 2)
        for name, value in single.to_dict().items():
            np.testing.assert_allclose(rows[name][step], float(value), rtol=1e-12, err_msg=name)


def test_single_metrics_refuse_non_finite_logits():
    z = torch.tensor([1.0, math.nan, 0.0])
    for function in (kl, js, total_variation, top1_flip):
        with pytest.raises(NonFiniteError, match="non-finite"):
            function(z, z)
    with pytest.raises(NonFiniteError):
        margin(z)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kl(torch.zeros(3), torch.zeros(4)),
        lambda: kl(torch.zeros(3), torch.zeros(3, dtype=torch.float16)),
        lambda: compare_logits(torch.zeros(2, 3), torch.zeros(2, 3)),
        lambda: compare_logits(torch.zeros(1), torch.zeros(1)),
        lambda: compare_logit_rows(torch.zeros(3), torch.zeros(3)),
        lambda: top_k_overlap(torch.zeros(3), torch.zeros(3), 4),
        lambda: top_k_overlap(torch.zeros(3), torch.zeros(3), 0),
    ],
)
def test_bad_logits_are_refused(call):
    with pytest.raises(InputError):
        call()
