"""The advice for a person: tables, reasons in plain words, settings to copy, and a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.advice.candidates import WITHOUT_WEIGHTS, Fields, Question, weights_of
from specjax.advice.check import MOST_ERROR, Checked, median_error
from specjax.advice.measure import Measured
from specjax.advice.predict import MOST_BATCH, Advice, Candidate, Outlook, Prediction
from specjax.advice.serving import Serving
from specjax.analysis import plots
from specjax.errors import ConfigError
from specjax.eval.tables import Report, Table, interval
from specjax.storage import replacing

PICTURE = "speedup.png"


class Answer(NamedTuple):
    """All that the adviser says: method and settings are those of the best, also where it is not advised."""

    question: Question
    advice: Advice
    method: Fields
    predictions: list[Prediction]
    outlook: Outlook
    serving: Serving


def report(answer: Answer, measured: Measured) -> Report:
    """A table of every drafter's best length, and the advice with its reasons."""
    best_of: dict[str, Prediction] = {}
    for p in answer.predictions:
        if p.drafter not in best_of or p.answer_factor > best_of[p.drafter].answer_factor:
            best_of[p.drafter] = p
    rows = [("plain", "", "0", "1.00", "1.00", "1.00x", "", "1.00x")] + [
        (
            name,
            weights_of(measured.methods[name]),
            str(p.draft_length) + (f" ({p.num_nodes} nodes)" if p.num_nodes > p.draft_length + 1 else ""),
            f"{p.tokens_per_pass:.2f}",
            f"{p.pass_cost:.2f}",
            f"{p.factor:.2f}x",
            interval(p.interval),
            f"{p.answer_factor:.2f}x",
        )
        for name, p in best_of.items()
    ]
    q = answer.question
    where = f"a roofline MODEL of {q.device}" if q.device else "measured here"
    title = (
        f"{q.target}: {len(measured.prompts)} prompts, temperature {q.temperature:g}, batch {q.batch_size}, "
        f"predicted from costs {where}"
    )
    columns = (
        *("drafter", "weights", "drafts"),
        *("tokens\nper pass", "cost of\na pass", "speed-up", "95 %\ninterval", "with\nprefill"),
    )
    best_candidate = next(c for c in measured.candidates if c.name == answer.advice.best.drafter)
    return Report([Table(title, columns, rows)], notes(answer, measured, best_candidate))


def notes(answer: Answer, measured: Measured, candidate: Candidate) -> list[str]:
    """The advice, why, what would change it, and how to follow it, a sentence or a setting each."""
    q, advice, best, serving = answer.question, answer.advice, answer.advice.best, answer.serving
    cheaper = weights_of(answer.method)
    shape = "a chain" if candidate.num_nodes is None else f"a tree of {candidate.num_nodes} nodes,"
    what = best.drafter + (f" ({cheaper})" if cheaper else "") + f", {shape} {best.draft_length} deep"
    if advice.speculate:
        said = [
            f"ADVICE: {what}, with the rule {answer.method['verify']}: {advice.reason}.",
            f"Expected: {best.factor:.2f} times plain decoding's speed ({interval(best.interval)}), and "
            f"{best.answer_factor:.2f} for {q.max_new_tokens} new tokens with the drafter's own prefill.",
        ]
    else:
        said = [f"ADVICE: plain decoding: {advice.reason}. The best of the others is {what}."]
    said += [_why(best, candidate), *_changes(answer, candidate)]
    if best.draft_length > (measured_length := candidate.accepted.shape[1]):
        said.append(f"Only {measured_length} drafts were measured, and those beyond are taken as the last.")
    if measured.no_trees:
        said.append(measured.no_trees)
    if q.device:
        said.append(f"The costs are a model's, in which kernels reach {q.device}'s roof: expect less.")
    if not advice.speculate:
        said.append("Settings of the best of the others, if you try it nevertheless:")
    said += [
        f"vLLM: {serving.vllm or 'no counterpart'}",
        f"SGLang: {serving.sglang or 'no counterpart'}",
        f"specjax: {serving.specjax}",
        f"specjax, drafting only while it pays: {serving.adaptive}",
    ]
    return [*said, *serving.notes]


def _why(best: Prediction, candidate: Candidate) -> str:
    """What a pass yields and costs, term by term, and which of it decides."""
    verify = candidate.costs.verify_costs[best.num_nodes - 1] - 1
    drafting = best.draft_length * candidate.costs.draft_cost
    rest = best.pass_cost - 1 - drafting - verify
    terms = {"drafting": drafting, "verifying": verify, "everything else": rest}
    largest = max(terms, key=lambda name: terms[name])
    verdict = "outweighs" if best.tokens_per_pass > best.pass_cost else "does not outweigh"
    return (
        f"Why: a pass yields {best.tokens_per_pass:.2f} tokens and costs {best.pass_cost:.2f} plain steps: "
        f"1, {drafting:.2f} for drafting, {verify:.2f} for verifying {best.num_nodes} nodes instead of one, "
        f"{rest:+.2f} for everything else. The yield {verdict} the cost, of which {largest} "
        "is the largest part."
    )


def _changes(answer: Answer, candidate: Candidate) -> list[str]:
    """What would change the advice: acceptance, batch, temperature, the length of answers."""
    view, drafter = answer.outlook, answer.method["drafter"]
    needed, batch = view.break_even_acceptance, view.break_even_batch
    is_certain = drafter["name"] in WITHOUT_WEIGHTS or "num_nodes" in drafter
    said = [
        f"Acceptance: {view.acceptance:.2f} (one number for all depths); "
        + ("none is enough at these costs." if needed is None else f"it breaks even at {needed:.2f}."),
        f"Batch: a gain is expected up to {MOST_BATCH} rows."
        if batch is None
        else f"Batch: no gain is expected from {batch} rows on, which leave less time to verify drafts in.",
        "Temperature: "
        + ("certain drafts are accepted less" if is_certain else "drawn drafts need not be accepted less")
        + " where it is higher; measure at yours with --temperature.",
    ]
    if answer.question.device:
        return said
    if view.repays_prefill is None or view.repays_compilation is None:
        return [*said, "Length: no answer is long enough, for no token of it is gained."]
    return [
        *said,
        f"Length: the drafter's prefill is repaid after {view.repays_prefill:.0f} new tokens of an "
        f"answer, its compilation in this run ({candidate.compile_seconds:.1f} s) after "
        f"{view.repays_compilation:.0f}.",
    ]


def checked(found: Sequence[Checked], left_out: Sequence[str]) -> Report:
    """Predicted beside measured, setting by setting."""
    rows = [
        (
            c.setting.where,
            c.prediction.drafter,
            str(c.prediction.draft_length),
            f"{c.prediction.factor:.2f}x",
            interval(c.prediction.interval),
            f"{c.setting.speedup:.2f}x",
            f"{c.error:.0%}",
        )
        for c in found
    ]
    columns = ("setting", "drafter", "drafts", "predicted", "95 %\ninterval", "measured", "error")
    error = median_error(found)
    verdict = "within" if error <= MOST_ERROR else "BEYOND"
    said = [f"Median error {error:.1%}, {verdict} the {MOST_ERROR:.0%} allowed."]
    said += [f"Left out: {reason}." for reason in left_out]
    return Report([Table("Predicted from other prompts, and measured", columns, rows)], said)


def as_json(answer: Answer, measured: Measured) -> dict[str, Any]:
    """Everything as it goes into advice.json."""
    best = answer.advice.best
    return {
        "question": answer.question._asdict(),
        "advice": {
            "method": best.drafter if answer.advice.speculate else "plain",
            "draft_length": best.draft_length if answer.advice.speculate else 0,
            "rule": answer.method["verify"] if answer.advice.speculate else None,
            "reason": answer.advice.reason,
        },
        "best": best._asdict(),
        "outlook": answer.outlook._asdict(),
        "serving": answer.serving._asdict(),
        "costs_are": "a model" if answer.question.device else "measured",
        "plain_step_seconds": measured.plain_seconds,
        "drafters": {
            c.name: {
                "fields": dict(measured.methods[c.name]),
                "num_steps": int(c.num_steps.sum()),
                "accepted_at_depth": c.accepted.sum(0).tolist(),
                "costs": c.costs._asdict(),
            }
            for c in measured.candidates
        },
        "predictions": [p._asdict() for p in answer.predictions],
    }


def draw(answer: Answer, folder: Path) -> str | None:
    """Write the predicted speed-up against the number of drafts; why not, where matplotlib is missing."""
    series = {}
    for name in dict.fromkeys(p.drafter for p in answer.predictions):
        own = [p for p in answer.predictions if p.drafter == name]
        factors = [p.factor for p in own]
        errors = None
        if all(p.interval for p in own):
            low, high = np.array([p.interval for p in own]).T
            errors = np.maximum(np.stack((factors - low, high - factors)), 0)
        series[name] = plots.Series([p.draft_length for p in own], factors, errors)
    lengths = sorted({p.draft_length for p in answer.predictions} | {1})
    series["plain"] = plots.Series(lengths, [1.0] * len(lengths))
    title = f"model of {answer.question.device}" if answer.question.device else ""
    try:
        figure = plots.lines(series, x_label="drafts a pass", y_label="predicted speed-up", title=title)
    except ConfigError as error:
        return f"No picture: {error}"
    with replacing(folder / PICTURE) as draft:
        # The format is that of the name.
        picture = draft.with_suffix(".png")
        plots.save(figure, picture)
        os.replace(picture, draft)
    return None
