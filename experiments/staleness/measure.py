"""A drafter grows stale when its target is fine-tuned: how far does acceptance fall, and what brings it back?

    python -m experiments.staleness.measure --text tinyshakespeare.txt --other nltk_inaugural.zip

The tiny target of experiments/tiny_medusa, its shrunken copy and its Medusa heads (trained there if --workdir
lacks them). The target is fine-tuned on another kind of text while the drafters stay as they are; then the
drafters are distilled again, and new ones beside them, the target frozen. At every mark held-out prompts are
decoded. Curves are kept in --workdir: the same command goes on with the one that is missing.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tiny_medusa import tiny
from specjax.analysis import plots
from specjax.drafters import medusa
from specjax.errors import ConfigError
from specjax.eval import results
from specjax.models.functional import LAST_HIDDEN, init_params
from specjax.modules import find_module
from specjax.prefill import read_prompt
from specjax.step import Method
from specjax.storage import cache_folder
from specjax.training.train_loop import TARGET
from specjax.types import Drafter, ModelParams, Params, Trainable, TrainingBatch

HERE = Path(__file__).parent
MARKS = (0, 5, 10, 20, 40, 80)
TUNING_RATE, RENEWAL_RATE = 1e-3, 1e-3
COPY, HEADS = "copy", "Medusa"
OLD_TEXT, NEW_TEXT = "old text", "new text"

Point = dict[str, Any]


class Kind(NamedTuple):
    """A kind of drafter: chains of a length, how it learns, and what it is before its first step."""

    build: Callable[[int], Drafter]
    trainable: Trainable
    new: Callable[[], Params]


KINDS = {
    COPY: Kind(tiny.copy_drafter, tiny.distillation(), lambda: init_params(tiny.COPY_SIZES, 1)),
    HEADS: Kind(
        lambda length: medusa.build(medusa.Config(draft_length=length, num_heads=tiny.NUM_HEADS), tiny.MODEL),
        tiny.heads(),
        tiny.new_heads,
    ),
}


class Texts(NamedTuple):
    """What a target writes by itself after some prompts: at temperature 0, and at 1 with the prompts."""

    prompts: list[list[int]]
    greedy: list[list[int]]
    drawn: np.ndarray


class Measure:
    """The worth of a kind of drafter beside any target; every program is compiled once."""

    def __init__(self, kind: Kind) -> None:
        def method(draft_length: int, rule: str) -> Method:
            return Method(tiny.MODEL, kind.build(draft_length), find_module("verify", rule).verify)

        self._one, self._chain = method(1, "rejection"), method(tiny.NUM_HEADS, "greedy")

        @jax.jit
        def overlap(params: ModelParams, tokens: jax.Array) -> jax.Array:
            empty = tiny.MODEL.init_cache(*tokens.shape)
            _, features = read_prompt(tiny.MODEL.forward, params.target, tokens, empty, (LAST_HIDDEN,))
            written = jnp.broadcast_to(jnp.arange(tokens.shape[1]) >= tiny.PROMPT, tokens.shape)
            batch = TrainingBatch(tokens, written, jnp.full(len(tokens), tokens.shape[1]), features)
            return kind.trainable.loss(params, batch, jax.random.key(0))[1]["overlap_1"]

        self._overlap = overlap

    def __call__(self, params: ModelParams, own: Texts) -> Point:
        """Acceptance at temperature 1, expected along the target's text and measured with one draft a pass.

        Besides, tokens a pass of a chain at temperature 0, and the texts identical to the target's.
        """
        _, _, one = tiny.write(self._one, params, own.prompts, temperature=1.0)
        _, greedy, chain = tiny.write(self._chain, params, own.prompts, temperature=0.0)
        return {
            "expected": float(self._overlap(params, jnp.asarray(own.drawn))),
            "measured": tiny.interval(one.accepted_at_depth[:, 0], one.tried_at_depth[:, 0]),
            "tokens_per_step": tiny.interval(chain.num_emitted, chain.num_steps),
            "identical": sum(a == b for a, b in zip(greedy, own.greedy, strict=True)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    tiny.add_arguments(parser)
    parser.add_argument("--other", type=Path, required=True, help="a zip of texts to fine-tune the target on")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of what is written")
    parser.add_argument("--prompts", type=int, default=32)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))

    other = read_zip(args.other)
    corpus, tokenizer, weights = tiny.open_workdir(args)
    new = tiny.corpus_of(other, tokenizer)
    prompts = {OLD_TEXT: corpus.prompts(args.prompts), NEW_TEXT: new.prompts(args.prompts)}
    folder = claim_folder(args.workdir / "staleness", other, args.prompts)
    old = {COPY: weights.copy, HEADS: weights.heads}
    measures = {name: Measure(kind) for name, kind in KINDS.items()}

    def curve(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        file = folder / f"{name}.json"
        if not file.exists():
            results.write_whole(file, json.dumps(make()))
            print(f"{name}: measured", flush=True)
        return json.loads(file.read_text())

    tuned_file = folder / "tuned.safetensors"

    def fine_tune() -> dict[str, list[Point]]:
        points: dict[str, list[Point]] = {name: [] for name in KINDS}
        rates = tiny.settings(max(MARKS), TUNING_RATE)
        for steps, params, _ in tiny.learn(
            tiny.language_model(), {}, weights.target, new.pieces(), rates, MARKS
        ):
            own = texts_of(params.target, prompts[NEW_TEXT])
            loss = float(tiny.text_loss(params.target, new.held_out).mean())
            for name, measure in measures.items():
                point = measure(ModelParams(params.target, old[name]), own)
                points[name].append({"steps": steps, "target_loss": loss, **point})
            print(f"fine-tuning: step {steps}, held-out loss {loss:.3f}", flush=True)
        tiny.save(tuned_file, {TARGET: params.target})
        return points

    def renew(name: str, drafter: Params, rate: float) -> dict[str, Any]:
        rates, points = tiny.settings(max(MARKS), rate), []
        for steps, params, _ in tiny.learn(KINDS[name].trainable, drafter, tuned, new.pieces(), rates, MARKS):
            points.append({"steps": steps, **measures[name](params, own_tuned)})
        last = measures[name](params, texts_of(tuned, prompts[OLD_TEXT]))
        return {"points": points, OLD_TEXT: last}

    found: dict[str, Any] = {"stale": curve("stale", fine_tune)}
    tuned = tiny.load(tuned_file)[TARGET]
    own_tuned = texts_of(tuned, prompts[NEW_TEXT])
    for name, kind in KINDS.items():
        begins = {"renewed": (old[name], RENEWAL_RATE), "new": (kind.new(), args.learning_rate)}
        for how, begin in begins.items():
            make = functools.partial(renew, name, *begin)
            found[f"{how} {name}"] = curve(f"{how}_{name}", make)
    found[OLD_TEXT] = curve("old_text", lambda: on_old_text(measures, weights, tuned, prompts[OLD_TEXT]))
    found["prompts"] = args.prompts

    args.out.mkdir(parents=True, exist_ok=True)
    results.write_whole(args.out / "results.json", json.dumps(found, indent=1) + "\n")
    text = tables(found)
    results.write_whole(args.out / "tables.md", text)
    print(text)
    draw(found, args.out)


def read_zip(path: Path) -> str:
    """All texts of a zip in the order of their names; ConfigError where there is none."""
    try:
        with zipfile.ZipFile(path) as file:
            names = sorted(name for name in file.namelist() if name.endswith(".txt"))
            texts = [file.read(name).decode("utf-8", errors="replace") for name in names]
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no readable zip ({error}): name one of texts") from error
    if not texts:
        raise ConfigError(f"{path} holds no .txt: name a zip of texts")
    return "\n".join(texts)


def claim_folder(folder: Path, other: str, prompts: int) -> Path:
    """The folder of the curves; ConfigError where it has those of another text or number of prompts."""
    results.check_writable(folder)
    record = {"other_sha256": hashlib.sha256(other.encode()).hexdigest(), "prompts": prompts}
    results.claim(folder, record, has_results=(folder / results.CONFIG).exists())
    return folder


def texts_of(target: Params, prompts: list[list[int]]) -> Texts:
    """What the target writes after the prompts."""
    method, params = Method(tiny.MODEL), ModelParams(target, {})
    _, greedy, _ = tiny.write(method, params, prompts, temperature=0.0)
    drawn, _, _ = tiny.write(method, params, prompts, temperature=1.0)
    return Texts(prompts, greedy, drawn)


def on_old_text(
    measures: dict[str, Measure], weights: tiny.Weights, tuned: Params, prompts: list[list[int]]
) -> dict[str, dict[str, Point]]:
    """The old drafters on the text that they learned, with the old target and the fine-tuned one."""
    found = {}
    for name, target in {"before": weights.target, "stale": tuned}.items():
        own = texts_of(target, prompts)
        found[name] = {
            COPY: measures[COPY](ModelParams(target, weights.copy), own),
            HEADS: measures[HEADS](ModelParams(target, weights.heads), own),
        }
    return found


def tables(found: dict[str, Any]) -> str:
    """All tables as Markdown."""
    head = "| steps | {}drafter | expected | measured (95 %) | tokens a pass, T = 0 (95 %) | identical |"
    lines = ["Fine-tuning the target, the drafters as they were; on the new text", ""]
    lines += [head.format("target's loss | "), "|---" * 7 + "|"]
    for by_name in zip(*found["stale"].values(), strict=True):
        for name, point in zip(KINDS, by_name, strict=True):
            loss = f"{point['target_loss']:.3f} | "
            lines.append(f"| {point['steps']} | {loss}{name} | {_cells(point, found['prompts'])} |")
    lines += ["", "Distilling again, the target as it is now; on the new text", ""]
    lines += [head.format(""), "|---" * 6 + "|"]
    for name in (f"{how} {kind}" for kind in KINDS for how in ("renewed", "new")):
        for point in found[name]["points"]:
            lines.append(f"| {point['steps']} | {name} | {_cells(point, found['prompts'])} |")
    lines += ["", "On the old text", "", "| target | drafter |" + head.split("drafter |")[1]]
    lines += ["|---" * 6 + "|"]
    for when, by_kind in found[OLD_TEXT].items():
        for name, point in by_kind.items():
            target = "old" if when == "before" else "fine-tuned"
            lines.append(f"| {target} | old {name} | {_cells(point, found['prompts'])} |")
    for name in KINDS:
        point = found[f"renewed {name}"][OLD_TEXT]
        lines.append(f"| fine-tuned | renewed {name} | {_cells(point, found['prompts'])} |")
    return "\n".join(lines) + "\n"


def _cells(point: Point, prompts: int) -> str:
    measured, tokens = tiny.shown(point["measured"], 3), tiny.shown(point["tokens_per_step"], 2)
    return f"{point['expected']:.3f} | {measured} | {tokens} | {point['identical']} of {prompts}"


def draw(found: dict[str, Any], folder: Path) -> None:
    """Acceptance over steps: falling while the target learns, rising while the drafter does."""
    falling = {name: points for name, points in found["stale"].items()}
    rising = {
        f"{how} {name}": found[f"{how} {name}"]["points"] for name in KINDS for how in ("renewed", "new")
    }
    for file, curves, what in (
        ("stale.png", falling, "fine-tuning steps of the target"),
        ("renewed.png", rising, "distillation steps of the drafter"),
    ):
        series = {}
        for name, points in curves.items():
            steps = [point["steps"] for point in points]
            series[f"{name}, measured"] = tiny.series(steps, [point["measured"] for point in points])
            if curves is falling:
                expected = [point["expected"] for point in points]
                series[f"{name}, expected"] = plots.Series(steps, expected)
        figure = plots.lines(series, x_label=what, y_label="acceptance of a draft, T = 1")
        figure.axes[0].set_xscale("symlog", linthresh=MARKS[1])
        figure.axes[0].set_xticks(MARKS, [str(mark) for mark in MARKS])
        plots.save(figure, folder / file)


if __name__ == "__main__":
    main()
