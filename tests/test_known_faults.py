"""Faults that this field's software is known for: each is put in, and the check that guards against it fails.

A mutant changes one line of one module. Checks are small; the suite proper tests the same things at length.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from specjax import cache, decode, sampling
from specjax.drafters import draft_model
from specjax.eval.exactness import sampling as exactness
from specjax.eval.exactness import subjects
from specjax.proposals import Shape
from specjax.sampling import make_warp
from specjax.testing import tabulated_target
from specjax.trees import static
from specjax.types import NO_TOKEN, Draft, ModelParams, ProposalLaw, Warp
from specjax.verify import rejection, target_only

step = importlib.import_module("specjax.step")  # the package offers a function of that name
pytestmark = [pytest.mark.slow, pytest.mark.quick_compile]

TARGET_TABLE, DRAFT_TABLE = subjects.random_tables()
VOCAB = subjects.VOCAB
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 0, 2], [6]]
END = 3  # of the texts
CHAIN = Shape(ProposalLaw.CHAIN, static.chain(3))


def drafting(temperature: float, with_drafter: bool = True):
    """A method with a tabulated draft model and a cache of its own, and the start of four ragged rows."""
    target, model = (tabulated_target(jnp.asarray(t, jnp.float32)) for t in (TARGET_TABLE, DRAFT_TABLE))
    drafter = draft_model.model_drafter(model, lambda params: params.drafter, CHAIN)
    method = step.Method(target, drafter, rejection.verify) if with_drafter else step.Method(target)
    params = ModelParams({}, {})
    request, state = decode.start(
        method,
        params,
        PROMPTS,
        max_new_tokens=24,
        warp=make_warp(len(PROMPTS), temperature),
        keys=decode.row_keys(0, range(len(PROMPTS))),
        stop_tokens=[END],
        capacity=40,
    )
    return method, params, request, state


def check_law_of_the_bonus() -> None:
    toy = subjects.toys()["chain"]
    group = exactness.Group(0.5, 0, 1.0, 0.0, (1, 2), 10_000)
    method = step.Method(toy.target, toy.drafter, rejection.verify)
    (tokens,) = exactness.Sampler(method, toy.params, [group]).draw(0)
    assert exactness.fit(tokens, toy.law_of(group)).p_value > 1e-5


def check_greedy_text() -> None:
    texts = []
    for with_drafter in (False, True):
        method, params, request, state = drafting(0.0, with_drafter)
        state, stats = decode.generate(method, params, request, state)
        texts.append(decode.new_tokens(state, PROMPTS))
        assert texts[-1] == [text[: text.index(END) + 1] if END in text else text for text in texts[-1]]
        assert stats.num_emitted.tolist() == [len(text) for text in texts[-1]]
    assert texts[0] == texts[1]
    assert texts[1][1] == texts[1][3]  # two copies of one request


def check_laws_of_drafts() -> None:
    """After any number of rounds a draft's law is what the draft model's table says."""
    method, params, request, state = drafting(1.0)
    advance = jax.jit(step.speculative_round, static_argnums=(0, 1, 2))
    laws, accepted = special.softmax(DRAFT_TABLE, axis=-1), set()
    for _ in range(5):
        tokens, lengths = np.array(state.tokens), state.length.tolist()
        done = advance(*method, params, request, state)
        draft, state = jax.device_get(done.draft), done.state
        for row, length in enumerate(lengths):
            text = [VOCAB, *tokens[row, :length].tolist(), *draft.tokens[row, 1:].tolist()]
            for node in range(3):
                law = laws[text[length - 1 + node], text[length + node]]
                np.testing.assert_allclose(draft.probs[row, node], law, atol=1e-5)
        accepted |= set(done.info.num_accepted.tolist())
    assert {0, 3} <= accepted


def check_positions_of_the_pass() -> None:
    """Nodes stand where plain decoding would put them: one after the other behind the cached prefix."""
    method, params, request, state = drafting(0.0)
    seen = []

    def spying(params, tokens, positions, *rest):
        jax.debug.callback(lambda places: seen.append(np.asarray(places)), positions)
        return method.target.forward(params, tokens, positions, *rest)

    spied = method._replace(target=method.target._replace(forward=spying))
    jax.block_until_ready(jax.jit(step.step, static_argnums=0)(spied, params, request, state))
    jax.effects_barrier()
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    np.testing.assert_array_equal(seen[0], lengths[:, None] - 1 + np.arange(4))


def check_mixed_warps() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)), jnp.float32)
    warp = Warp(
        jnp.asarray([0.0, 0.7, 2.0]), jnp.asarray([0, 3, 4]), jnp.asarray([1.0, 0.6, 0.8]), jnp.zeros(3)
    )
    found = np.asarray(sampling.warp_probs(logits, warp))
    for row, (temperature, top_k, top_p) in enumerate([(0.0, 0, 1.0), (0.7, 3, 0.6), (2.0, 4, 0.8)]):
        for node in range(2):
            wanted = exactness.warped(
                np.asarray(logits[row, node]), exactness.Group(temperature, top_k, top_p, 0.0, ())
            )
            np.testing.assert_allclose(found[row, node], wanted, atol=1e-6)


def check_seeds() -> None:
    law = jnp.full((8, 1000), 1e-3)
    first, again, other = (sampling.sample(decode.row_keys(seed, range(8)), law) for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert len(set(first.tolist())) > 1


def check_padding_is_never_accepted() -> None:
    for certain in (0, 4):  # what an index of -1 or its clipping would read
        laws = jnp.broadcast_to(jax.nn.one_hot(certain, 5), (4, 3, 5))
        tokens = jnp.broadcast_to(jnp.asarray([[0, NO_TOKEN, NO_TOKEN]]), (4, 3))
        parents = jnp.broadcast_to(jnp.asarray([[-1, 0, 1]]), (4, 3))
        for rule in (rejection, target_only):
            verdict = rule.verify(
                decode.row_keys(0, range(4)), Draft(tokens, parents, laws), laws, max_depth=2
            )
            assert not verdict.num_accepted.any()


# The fault, the check that finds it, the module, and the line with what the fault makes of it.
MUTANTS: dict[str, tuple[Callable[[], None], ModuleType, str, str]] = {
    "the bonus ignores the temperature": (
        check_law_of_the_bonus,
        step,
        "    law = jnp.take_along_axis(target_probs, verdict.path[..., None], axis=1)\n",
        "    raw = sample(keys, jax.nn.softmax(out.logits[:, -1]))\n"
        "    is_full = verdict.num_accepted == drafter.max_depth\n"
        "    verdict = verdict._replace(next_token=jnp.where(is_full, raw, verdict.next_token))\n"
        "    law = target_probs\n",
    ),
    "tokens after the end are kept": (
        check_greedy_text,
        step,
        "before_stop = jnp.cumsum(stops, axis=1) - stops == 0",
        "before_stop = jnp.ones_like(stops)",
    ),
    "the draft's positions are off by one": (
        check_laws_of_drafts,
        draft_model,
        "jnp.broadcast_to(cache.length[:, None] + depth - 1, tokens.shape)",
        "jnp.broadcast_to(cache.length[:, None] + depth, tokens.shape)",
    ),
    "the pass's positions are off by one": (
        check_positions_of_the_pass,
        step,
        "positions = cache.length[:, None] + depths(mask)",
        "positions = cache.length[:, None] + depths(mask) + 1",
    ),
    "greedy rows are divided by a sentinel": (
        check_mixed_warps,
        sampling,
        "lambda: jnp.where(per_row(is_greedy), greedy(), sampled()),",
        "sampled,",
    ),
    "top-p comes before top-k": (
        check_mixed_warps,
        sampling,
        "total = jnp.where(has_top_k, left.sum(-1, keepdims=True), probs.sum(-1, keepdims=True))",
        "total = probs.sum(-1, keepdims=True)",
    ),
    "the seed has no effect": (check_seeds, decode, "jax.random.key(seed)", "jax.random.key(0)"),
    "copies of a request disagree": (
        check_greedy_text,
        sampling,
        "        return jax.nn.one_hot(argmax(logits), vocab_size, dtype=jnp.float32)",
        "        best = (argmax(logits) + jnp.arange(logits.shape[0])[:, None] // 3) % vocab_size\n"
        "        return jax.nn.one_hot(best, vocab_size, dtype=jnp.float32)",
    ),
    "padding can be accepted": (
        check_padding_is_never_accepted,
        sampling,
        "return jnp.where(tokens == NO_TOKEN, 0.0, found)",
        "return found",
    ),
    "all rows advance alike": (
        check_greedy_text,
        cache,
        "return cache._replace(length=cache.length + num_kept)",
        "return cache._replace(length=cache.length + num_kept.max())",
    ),
    "the cache keeps what was refused": (
        check_laws_of_drafts,
        cache,
        "return cache._replace(length=jnp.minimum(cache.length, length))",
        "return cache",
    ),
}
CHECKS = dict.fromkeys(check for check, *_ in MUTANTS.values())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sound_code_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("fault", MUTANTS)
def test_the_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, module, line, mutant = MUTANTS[fault]
    put_in(monkeypatch, module, line, mutant)
    # Each check makes a method of its own, so that no program of the sound code is taken for the mutant's.
    with pytest.raises(AssertionError):
        check()


def put_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, line: str, mutant: str) -> None:
    """Run the module's source with one line changed, and let everything use its functions instead."""
    source = inspect.getsource(module)
    assert source.count(line) == 1, f"{module.__name__} no longer has the line: {line}"
    changed = dict(vars(module))
    exec(compile(source.replace(line, mutant), inspect.getfile(module), "exec"), changed)
    for name, original in list(vars(module).items()):
        if isinstance(original, FunctionType) and original.__module__ == module.__name__:
            for user in [m for n, m in sys.modules.items() if n.startswith("specjax")]:
                for alias, value in list(vars(user).items()):
                    if value is original:
                        monkeypatch.setattr(user, alias, changed[name])
