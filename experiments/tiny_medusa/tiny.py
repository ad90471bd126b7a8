"""The tiny setting of two experiments: a byte-level BPE, a small Llama, its drafters, and how they learn."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file

from specjax import decode
from specjax.analysis.plots import Series
from specjax.checkpoints.names import flatten, unflatten
from specjax.data import batches as data
from specjax.drafters import draft_model, medusa
from specjax.errors import ConfigError
from specjax.eval.results import check_writable, claim, write_whole
from specjax.models.functional import LAST_HIDDEN, init_params, make_target
from specjax.models.llama import LlamaConfig
from specjax.prefill import read_prompt
from specjax.sampling import make_warp
from specjax.step import Method
from specjax.storage import replacing
from specjax.training import train_loop
from specjax.training.foresight import CROSS_ENTROPY, foresight
from specjax.training.losses import cross_entropy
from specjax.training.train_loop import DRAFTER, TARGET
from specjax.types import ModelParams, Params, Target, Trainable, TrainingBatch

CONTEXT = 256
LEARNED_SHARE = 0.9  # of a text; what comes after it is held out
BATCH_SIZE = 8
NUM_HEADS = 3
PROMPT, NEW_TOKENS = 64, 96

TARGET_SIZES = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=384,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    max_positions=CONTEXT,
    tie_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
)
COPY_SIZES = dataclasses.replace(
    TARGET_SIZES, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=192
)
MODEL = make_target(TARGET_SIZES)
COPY = make_target(COPY_SIZES)
HEADS = medusa.Config(draft_length=NUM_HEADS)


class Corpus(NamedTuple):
    """Tokens to learn from and tokens held out."""

    learned: np.ndarray
    held_out: np.ndarray

    def pieces(self) -> list[data.Text]:
        """What is learned, cut to the context; all but a piece's first token is to be foreseen."""
        count = len(self.learned) // CONTEXT
        seen = np.arange(CONTEXT) > 0
        return [
            data.Text(piece.astype(np.int32), seen, 0, Path(), 0)
            for piece in self.learned[: count * CONTEXT].reshape(count, CONTEXT)
        ]

    def prompts(self, count: int, offset: float = 0.0) -> list[list[int]]:
        """`count` held-out prompts at even distances, the first one `offset` distances from the beginning."""
        distance = len(self.held_out) // count
        if distance < PROMPT:
            raise ConfigError(
                f"{count} prompts do not fit {len(self.held_out)} held-out tokens: ask for fewer"
            )
        begins = (offset * distance + np.arange(count) * distance).astype(int)
        begins = np.minimum(begins, len(self.held_out) - PROMPT)
        return [self.held_out[begin : begin + PROMPT].tolist() for begin in begins]


def read_text(path: Path) -> str:
    """A text; ConfigError where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name a text file") from error


def cut(text: str) -> tuple[str, str]:
    """What is learned of a text, and what is held out."""
    end = int(len(text) * LEARNED_SHARE)
    return text[:end], text[end:]


def tokenizer_of(text: str, file: Path) -> tokenizers.Tokenizer:
    """A byte-level BPE of the text's learned part, which can write any other text; kept in `file`."""
    if not file.exists():
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=TARGET_SIZES.vocab_size,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(cut(text)[0].splitlines(keepends=True), trainer)
        write_whole(file, tokenizer.to_str())
    return tokenizers.Tokenizer.from_file(str(file))


def corpus_of(text: str, tokenizer: tokenizers.Tokenizer) -> Corpus:
    """The tokens of both parts of a text."""
    return Corpus(*(np.array(tokenizer.encode(part).ids) for part in cut(text)))


def language_model() -> Trainable:
    """How the target learns alone: cross-entropy on the text."""

    def loss(params: ModelParams, batch: TrainingBatch, key: Any):
        del key
        logits = logits_of(MODEL, params.target, batch.tokens)
        text, _ = foresight(logits, logits, batch, 0, CROSS_ENTROPY)
        return text, {"text": text}

    return Trainable(lambda *_: ({}, {}), loss, (), trains_target=True)


def distillation() -> Trainable:
    """How the copy learns the target's law, the target frozen: forward KL."""

    def loss(params: ModelParams, batch: TrainingBatch, key: Any):
        del key
        of_target = MODEL.unembed(params.target, batch.features[LAST_HIDDEN])
        logits = logits_of(COPY, params.drafter, batch.tokens)
        law, overlap = foresight(logits, jax.lax.stop_gradient(of_target), batch, 0, "forward_kl")
        return law, {"law_1": law, "overlap_1": overlap}

    return Trainable(lambda *_: (init_params(COPY_SIZES, 1), {}), loss, (LAST_HIDDEN,))


def heads(lm_weight: float | None = None) -> Trainable:
    """How Medusa's heads learn: with the target where its own loss has a weight."""
    return medusa.trainable(HEADS, medusa.Training(lm_weight=lm_weight), MODEL)


def new_heads() -> Params:
    """Heads before their first step."""
    counts = np.ones(TARGET_SIZES.vocab_size, np.int64)
    return heads().init(jax.random.key(1), {}, counts)[0]


def logits_of(model: Target, params: Params, tokens: jax.Array) -> jax.Array:
    """A model's logits [B, T, V] after every token of some texts."""
    _, read = read_prompt(model.forward, params, tokens, model.init_cache(*tokens.shape), (LAST_HIDDEN,))
    return model.unembed(params, read[LAST_HIDDEN])


def settings(steps: int, learning_rate: float, clip: float = 1.0) -> train_loop.Settings:
    """The same for everything that learns here; a weighted loss is clipped by its weight."""
    return train_loop.Settings(
        optimizer="adamw",
        steps=steps,
        learning_rate=learning_rate,
        target_learning_rate=learning_rate,
        warmup=min(30, steps // 10),
        weight_decay=0.01,
        clip=clip,
        ema=0.0,
        seed=0,
    )


def learn(
    trainable: Trainable,
    drafter: Params,
    target: Params,
    texts: Sequence[data.Text],
    settings: train_loop.Settings,
    marks: Sequence[int],
) -> Iterator[tuple[int, ModelParams, dict[str, float]]]:
    """The weights after each number of steps in `marks`, and the metrics of the last one.

    The next step uses the weights up.
    """
    learning = {DRAFTER: drafter} | ({TARGET: target} if trainable.trains_target else {})
    frozen = {} if trainable.trains_target else {TARGET: target}
    batches = data.make_batches(
        texts, (), num_rows=BATCH_SIZE, max_length=CONTEXT, seed=settings.seed, process=0, num_processes=1
    )
    step = train_loop.make_step(trainable, MODEL, settings)
    state, metrics = train_loop.init_state(learning, settings), {}
    for number in range(max(marks) + 1):
        if number:
            state, metrics = step(state, frozen, next(batches))
        if number in marks:
            params = train_loop.model_params(train_loop.learned(state), frozen, MODEL.dtype)
            yield number, params, {name: float(value) for name, value in metrics.items()}


class Weights(NamedTuple):
    """Jointly trained target and heads, the target trained alone, and the shrunken copy of the first."""

    target: Params
    heads: Params
    alone: Params
    copy: Params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both experiments ask for."""
    parser.add_argument("--text", type=Path, required=True, help="what is learned, such as tiny Shakespeare")
    parser.add_argument(
        "--workdir", type=Path, default=Path("runs/tiny_medusa"), help="the folder of weights and generations"
    )
    parser.add_argument(
        "--steps", type=int, default=400, help=f"of each part, {BATCH_SIZE * CONTEXT} tokens each"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="its peak")
    parser.add_argument(
        "--lm_weight",
        type=float,
        default=5.0,
        help="of the target's own loss beside the heads' (5: the paper's 0.2 for the heads)",
    )


def open_workdir(args: argparse.Namespace) -> tuple[Corpus, tokenizers.Tokenizer, Weights]:
    """The corpus, its tokenizer and the weights, trained where the folder lacks them.

    Raises ConfigError where the text cannot be read or the folder belongs to another run.
    """
    if args.steps < 1:
        raise ConfigError(f"steps is {args.steps}: take at least 1")
    if not args.lm_weight > 0:
        raise ConfigError(
            f"lm_weight is {args.lm_weight}: the target learns from its own loss, so give more than 0"
        )
    text = read_text(args.text)
    check_writable(args.workdir)
    digest = hashlib.sha256(text.encode()).hexdigest()
    asked = {name: getattr(args, name) for name in ("steps", "learning_rate", "lm_weight")}
    record = {"text_sha256": digest, **asked}
    claim(args.workdir, record, has_results=any(args.workdir.glob("*.safetensors")))
    tokenizer = tokenizer_of(text, args.workdir / "tokenizer.json")
    corpus = corpus_of(text, tokenizer)
    return corpus, tokenizer, prepare(corpus, args.workdir, **asked)


def prepare(corpus: Corpus, workdir: Path, steps: int, learning_rate: float, lm_weight: float) -> Weights:
    """Train what `workdir` lacks; a part that was interrupted begins again."""
    texts = corpus.pieces()
    begin = init_params(TARGET_SIZES, 0)

    def part(
        name: str, trainable: Trainable, drafter: Params, target: Params, clip: float = 1.0
    ) -> ModelParams:
        file = workdir / f"{name}.safetensors"
        if not file.exists():
            marks = [*range(0, steps, 50), steps]
            rates = settings(steps, learning_rate, clip)
            for number, now, metrics in learn(trainable, drafter, target, texts, rates, marks):
                shown = " ".join(f"{key} {value:.3f}" for key, value in metrics.items() if key != "tokens")
                print(f"{name}: step {number} of {steps} {shown}", flush=True)
                params = now
            save(
                file, {DRAFTER: params.drafter} | ({TARGET: params.target} if trainable.trains_target else {})
            )
        found = load(file)
        return ModelParams(found.get(TARGET, target), found.get(DRAFTER, {}))

    joint = part("joint", heads(lm_weight), new_heads(), begin, clip=lm_weight)
    alone = part("alone", language_model(), {}, begin)
    copy = part("copy", distillation(), init_params(COPY_SIZES, 1), joint.target)
    return Weights(joint.target, joint.drafter, alone.target, copy.drafter)


def save(file: Path, weights: Params) -> None:
    """Write weights as they are, whole or not at all."""
    with replacing(file) as draft:
        save_file({name: np.asarray(leaf) for name, leaf in flatten(weights).items()}, draft)


def load(file: Path) -> Params:
    """What `save` wrote."""
    return jax.tree.map(jnp.asarray, unflatten(load_file(file)))


def copy_drafter(draft_length: int) -> Any:
    """Chains of the shrunken copy."""
    return draft_model.build(
        draft_model.Config("the shrunken copy", draft_length=draft_length), MODEL, COPY_SIZES
    )


def write(
    method: Method, params: ModelParams, prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[np.ndarray, list[list[int]], decode.DecodeStats]:
    """Texts [B, T], prompts first, their new tokens, and the sums of each row's passes; all together."""
    size = len(prompts)
    request, state = decode.start(
        method,
        params,
        prompts,
        max_new_tokens=NEW_TOKENS,
        warp=make_warp(size, temperature),
        keys=decode.row_keys(0, range(size)),
        stop_tokens=(),
    )
    state, stats = decode.generate(method, params, request, state)
    texts = np.asarray(state.tokens)[:, : PROMPT + NEW_TOKENS]
    return texts, decode.new_tokens(state, prompts), jax.device_get(stats)


def text_loss(params: Params, tokens: np.ndarray) -> np.ndarray:
    """The target's loss on each piece of a text, in nats a token."""
    count = len(tokens) // CONTEXT
    return np.asarray(_losses(params, tokens[: count * CONTEXT].reshape(count, CONTEXT)))


@jax.jit
def _losses(params: Params, pieces: jax.Array) -> jax.Array:
    def loss(piece: jax.Array) -> jax.Array:
        return cross_entropy(piece[1:], logits_of(MODEL, params, piece[None])[0, :-1]).mean()

    return jax.lax.map(loss, pieces)


def interval(numerators: ArrayLike, denominators: ArrayLike) -> dict[str, float]:
    """A ratio of sums over prompts and its 95 % interval, by bootstrap over them."""
    pairs = np.stack([np.asarray(part, float) for part in (numerators, denominators)], axis=1)
    chosen = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    sums = pairs[chosen].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    total = pairs.sum(0)
    return {"value": float(total[0] / total[1]), "low": float(low), "high": float(high)}


def shown(found: dict[str, float], digits: int) -> str:
    """A value and its interval, for a table."""
    value, low, high = (f"{found[name]:.{digits}f}" for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})" if found["low"] < 0 else f"{value} ({low}-{high})"


def series(x: Sequence[float], found: Sequence[dict[str, float]]) -> Series:
    """Values with their intervals, for a plot."""
    value, low, high = (np.array([point[name] for point in found]) for name in ("value", "low", "high"))
    return Series(x, value, (high - low) / 2)
