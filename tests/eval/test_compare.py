"""The comparison: the same draws whatever the batch, an alternating order, one compilation a shape."""

from __future__ import annotations

import pytest

from specjax.drafters import ngram
from specjax.errors import ConfigError
from specjax.eval import compare
from specjax.eval.compare import PLAIN, Settings, make_batches
from specjax.eval.timing import Inputs, Programs, Timed
from specjax.step import Method
from specjax.types import ModelParams, Params, Target
from specjax.verify import rejection

pytestmark = pytest.mark.quick_compile

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 6, 7, 8, 6]]
SETTINGS = Settings(
    max_new_tokens=6, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3, repeats=1, stop_tokens=()
)


@pytest.fixture(scope="module")
def methods(tiny_target: Target, tiny_params: Params) -> compare.Methods:
    """Plain decoding and prompt lookup."""
    drafter = ngram.build(ngram.Config(draft_length=3, max_ngram=2), tiny_target)
    params = ModelParams(tiny_params, {})
    return {
        PLAIN: (Method(tiny_target), params),
        "ngram": (Method(tiny_target, drafter, rejection.verify), params),
    }


def decode(methods: compare.Methods, batch_size: int, settings: Settings = SETTINGS) -> list:
    batches = dict(enumerate(make_batches(PROMPTS, batch_size)))
    return [g for batch in compare.compare(methods, batches, settings) for g in batch]


def test_texts_do_not_depend_on_batches_order_or_repeats(
    methods: compare.Methods, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    run = Programs.run

    def run_and_note(programs: Programs, inputs: Inputs) -> Timed:
        timed = run(programs, inputs)
        order.append(0 if timed.stats.tried_at_depth.size == 0 else 1)
        return timed

    monkeypatch.setattr(Programs, "run", run_and_note)
    alone = decode(methods, 1)
    assert order == [0, 1, 1, 0, 0, 1]
    together = decode(methods, 3, SETTINGS._replace(repeats=2))
    assert order[6:] == [0, 1, 1, 0]
    texts = [{(g.row, g.method): g.tokens for g in found} for found in (alone, together)]
    assert texts[0] == texts[1]
    assert all(len(tokens) == 6 for tokens in texts[0].values())
    # All three prompts have one shape.
    assert [g.compile_seconds > 0 for g in alone] == [True, True, False, False, False, False]


def test_last_batch_may_be_smaller() -> None:
    assert [batch.rows for batch in make_batches(PROMPTS, 2)] == [(0, 1), (2,)]


def test_prompt_that_does_not_fit_is_refused_before_any_compilation(
    methods: compare.Methods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Programs, "compile", lambda *args: pytest.fail("compiled"))
    batches = dict(enumerate(make_batches([[1], [10**6]], 1)))
    with pytest.raises(ConfigError, match="outside the target's vocabulary"):
        next(compare.compare(methods, batches, SETTINGS))
