"""Metrics against sums done by hand."""

from __future__ import annotations

import pytest

from specjax.eval.compare import PLAIN, Generation
from specjax.eval.metrics import chain_acceptance, step_shares, summarize
from specjax.eval.tables import notes


def generation(row: int, method: str, tokens: list[int], seconds: float, **fields) -> Generation:
    defaults = {"batch": row, "num_steps": len(tokens), "tried_at_depth": [], "accepted_at_depth": []}
    times = {"prefill_seconds": 0.5, "decode_seconds": seconds, "compile_seconds": 1.0}
    return Generation(row=row, method=method, tokens=tokens, **(defaults | times | fields))


TWO_PROMPTS = [
    generation(0, PLAIN, [1, 2, 3, 4], 4.0),
    generation(0, "fast", [1, 2, 3, 4], 1.0, num_steps=2, tried_at_depth=[2, 1], accepted_at_depth=[1, 1]),
    generation(1, PLAIN, [5, 6], 2.0),
    generation(1, "fast", [5, 7], 2.0, num_steps=2, tried_at_depth=[1, 0], accepted_at_depth=[0, 0]),
]


def test_sums_over_prompts() -> None:
    fast = summarize(TWO_PROMPTS, greedy=True)["fast"]
    assert fast["tokens_per_step"] == 6 / 4
    assert fast["acceptance"] == 2 / 4
    assert fast["acceptance_by_depth"] == {"conditional": [1 / 3, 1.0], "unconditional": [1 / 4, 1 / 4]}
    assert fast["tokens_per_second"] == 6 / 3
    assert fast["speedup"]["value"] == pytest.approx(2.0)
    # 0.75 s a pass, where plain decoding takes 1 s.
    assert fast["break_even_tokens_per_step"] == pytest.approx(0.75)
    assert fast["identical_to_greedy"] == {"identical": 1, "of": 2}
    assert (fast["prefill_seconds"], fast["decode_seconds"], fast["compile_seconds"]) == (1.0, 3.0, 2.0)


def test_n_alpha_is_for_chains_only() -> None:
    fast = summarize(TWO_PROMPTS, greedy=True)["fast"]
    assert chain_acceptance(fast, is_chain=True) == {"alpha": 2 / 4, "n_alpha": [1 / 3, 1.0]}
    assert chain_acceptance(fast, is_chain=False) == {"alpha": None, "n_alpha": None}


def test_shares_are_of_the_parts_and_their_sum_is_checked_against_the_step() -> None:
    seconds = {"draft": 1.0, "verify": 2.0, "accept": 0.5, "commit": 0.5, "step": 5.0}
    found = step_shares(seconds)
    assert found["shares"] == {"draft": 0.25, "verify": 0.5, "accept": 0.125, "commit": 0.125}
    assert found["parts_over_step"] == 0.8
    assert step_shares({"step": 5.0}) == {"seconds": {"step": 5.0}, "shares": {}, "parts_over_step": None}


def test_plain_decoding_is_the_reference() -> None:
    plain = summarize(TWO_PROMPTS, greedy=False)[PLAIN]
    assert plain["tokens_per_step"] == 1.0
    assert plain["speedup"]["value"] == 1.0 and plain["speedup"]["interval"] is None
    assert plain["acceptance"] is None
    assert plain["acceptance_by_depth"] == {"conditional": [], "unconditional": []}
    assert plain["identical_to_greedy"] is None


def test_interval_covers_the_extremes_of_two_prompts_and_does_not_change() -> None:
    first, second = (summarize(TWO_PROMPTS, greedy=True)["fast"]["speedup"]["interval"] for _ in range(2))
    assert first == second == pytest.approx([1.0, 4.0])


def test_rows_of_one_batch_are_one_observation() -> None:
    together = [g._replace(batch=0) for g in TWO_PROMPTS]
    speedup = summarize(together, greedy=True)["fast"]["speedup"]
    assert speedup["value"] == pytest.approx(2.0)
    assert speedup["interval"] is None and speedup["why_no_interval"]


def test_notes_say_when_speculation_was_slower_lossy_or_unclear() -> None:
    def said(speed: float, lossless: bool = True) -> str:
        scaled = [
            g._replace(decode_seconds=g.decode_seconds / (speed if g.method == "fast" else 1))
            for g in TWO_PROMPTS
        ]
        methods = summarize(scaled, greedy=True)
        return " ".join(notes({name: m | {"lossless": lossless} for name, m in methods.items()}))

    assert "fast was SLOWER than plain decoding (0.20x)" in said(0.1)
    assert "SLOWER" not in said(2.0) and "no clear gain" not in said(2.0)
    assert "the interval includes 1: no clear gain" in said(0.9)
    assert "LOSSY" in said(1.0, lossless=False) and "LOSSY" not in said(1.0)
