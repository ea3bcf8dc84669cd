"""Sampling: greedy, the effect of each option, and independence of the batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests._utils import serving  # noqa: F401  puts triton_repo/torch/1 on the path

from sampler import Sampling, sample  # isort: skip


def draws(logits: list[float], count: int = 3000, **options: float) -> Counter[int]:
    """What `count` requests with seeds of their own draw from the same logits in one batch."""
    samplings = [Sampling(**{"temperature": 1.0, **options}, seed=seed) for seed in range(count)]
    return Counter(sample(torch.tensor([logits] * count), samplings))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=2.0, top_k=1)])
def test_greedy_takes_the_largest_and_the_first_of_equals(sampling: Sampling) -> None:
    assert sample(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), [sampling]) == [1]


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0]
    wanted, got = torch.tensor(logits).softmax(-1), draws(logits)
    for token in range(3):
        assert got[token] / 3000 == pytest.approx(float(wanted[token]), abs=0.03)


def test_temperature_flattens() -> None:
    assert draws([0.0, 2.0], temperature=0.5)[1] > draws([0.0, 2.0])[1] > draws([0.0, 2.0], temperature=4.0)[1]


def test_a_tiny_temperature_is_greedy_without_nan() -> None:
    assert draws([1.0, 5.0, 4.9], temperature=1e-6, count=50) == {1: 50}


def test_top_k_and_top_p_exclude_exactly_the_tail() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(draws(logits, top_k=2)) == {0, 1}
    assert set(draws(logits, top_p=0.79)) == {0, 1}
    assert set(draws(logits, top_p=0.81)) == {0, 1, 2}
    assert set(draws(logits, top_p=0.01)) == {0}
    assert set(draws(logits, top_k=100)) == {0, 1, 2, 3}


def test_a_row_is_drawn_alike_alone_and_in_any_batch() -> None:
    rows = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    options = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 9.0},
    ]

    def make(row: int) -> Sampling:
        return Sampling(**options[row], seed=row)

    alone = [
        [sample(rows[row : row + 1], [sampling])[0] for _ in range(20)] for row in range(5) for sampling in [make(row)]
    ]
    batch = [make(row) for row in range(5)]
    together = [sample(rows, batch) for _ in range(20)]
    assert [list(column) for column in zip(*together, strict=True)] == alone


def test_a_seed_gives_the_same_draws_and_uses_all_64_bits() -> None:
    def ten(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        return [sample(torch.zeros(1, 1000), [sampling])[0] for _ in range(10)]

    assert ten(2**64 - 1) == ten(2**64 - 1) != ten(2**63)
