"""Vary fields of a comparison's config, decode with every setting, and say which is best.

DIR receives trials.csv (every trial), table.md and summary.json (the best, overall and by task), heatmap.png
(two axes), importance.png and config.json. Finished trials are never run again. Several processes of one
config share its trials where they have one DIR or one `storage`; an impossible setting is a pruned trial.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console

from specjax.build import build_target
from specjax.config import Field, Options, check_at_least_1, check_seed
from specjax.data.prompts import Prompt, load_prompts
from specjax.errors import ConfigError, import_extra, nearest
from specjax.eval import results
from specjax.eval.progress import Progress
from specjax.sweeps import space
from specjax.sweeps.bench import OBJECTIVES, Bench, objective_of
from specjax.sweeps.space import SAMPLERS, Axis, Point
from specjax.tasks.compare import digest, encode, load_tokenizer, show, tell

if TYPE_CHECKING:
    from specjax.sweeps.ledger import Ledger, Plan

FIELDS = {
    "task": Field(str, "sweep", "this task"),
    "base": Field(
        ConfigDict, ConfigDict(), "the run to vary: run_config(), or what another config file gives"
    ),
    "space": Field(
        ConfigDict,
        ConfigDict(),
        "fields of it, each with a list of values or {'low': 1, 'high': 8}, step, log",
    ),
    "sampler": Field(str, "grid", f"which points are tried: {', '.join(SAMPLERS)}"),
    "trials": Field(int, None, "how many; a grid has as many as it has points, if not fewer"),
    "objective": Field(str, "speedup", f"what is to be high: {', '.join(OBJECTIVES)}"),
    "storage": Field(str, None, "a journal's path or a database's URL, if not the journal in DIR"),
    "seed": Field(int, 0, "of the sampler"),
    "heat_map": Field(tuple, (), "the two fields of the heat map, if not the first two"),
    "patience": Field(float, 60.0, "seconds without a sign of life after which a process is taken for dead"),
}


def validate(config: ConfigDict) -> None:
    """Check the values of the fields; ConfigError names the field and the remedy."""
    check_at_least_1(config, ("trials",))
    check_seed(config)
    for name, known in (("sampler", SAMPLERS), ("objective", OBJECTIVES)):
        if config[name] not in known:
            raise ConfigError(
                f"{name} is '{config[name]}'{nearest(config[name], known)}: choose one of {', '.join(known)}"
            )
    if config.patience <= 0:
        raise ConfigError(f"patience is {config.patience}: give seconds above 0")
    if config.base.get("task") != "compare":
        raise ConfigError(
            "base is no config of the task 'compare': start it from specjax.config.run_config(), or load it "
            "with specjax.config.load_config(FILE)"
        )
    axes = space.parse(config.space)
    space.check(config.base, axes)
    _pair(config, axes)
    if config.sampler == "grid":
        space.grid(axes)
    elif config.trials is None:
        raise ConfigError(f"trials is not set, and the sampler {config.sampler} has no end: say how many")


def run(options: Options) -> int:
    """Run the trials that are left, write and print what all of them say, and return 0."""
    config, workdir, _ = options
    for module in ("optuna", "matplotlib"):
        import_extra(module, "sweeps need", "sweep")
    from specjax.sweeps.ledger import Ledger, Plan, open_storage
    from specjax.sweeps.report import importances, report, summary, write

    axes = space.parse(config.space)
    plan = Plan(axes, config.sampler, config.trials, config.seed)
    base = config.base
    prompts = load_prompts(base.prompts, base.prompts_path, base.limit, base.per_category)
    identity = _identity(config, prompts)
    _check_possible(base, plan)
    results.claim(workdir, identity, has_results=(workdir / results.CONFIG).exists())
    storage = open_storage(config.storage, workdir)
    # Another config is another study, also in a database that many share.
    name = "specjax-" + hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    ledger = Ledger(storage, name, plan, config.patience)
    with ledger:
        _run_trials(ledger, plan, config, prompts)

    trials = ledger.finished()
    shares = importances(ledger.study, axes)
    write(workdir, trials, axes, _pair(config, axes), config.objective, shares)
    found = report(f"{base.target}: {len(prompts)} prompts", trials, axes, config.objective, shares)
    environment = {"environment": results.environment()}
    # A storage's URL may hold a password.
    fields = {name: value for name, value in config.to_dict().items() if name != "storage"}
    about = {"config": fields, **summary(trials, config.objective), "importance": shares}
    results.finish(workdir, about | environment, found.markdown())
    show(found)
    return 0


def _run_trials(ledger: Ledger, plan: Plan, config: ConfigDict, prompts: Sequence[Prompt]) -> None:
    """Claim one trial after another and measure it; the target is loaded for the first one."""
    console = Console(stderr=True)
    done = len(ledger.finished())
    bench: Bench | None = None
    if done:
        tell(f"{done} of {plan.num_trials} trials were finished before")
    with Progress(plan.num_trials, done, console, "trials") as progress:
        while claim := ledger.claim(progress.status):
            bench = bench or _load(config.base, prompts)
            value, attributes = _measure(bench, config, claim.point, progress.status)
            settings = " ".join(f"{name}={setting}" for name, setting in claim.point.items())
            said = attributes.get("reason") or f"{OBJECTIVES[config.objective]} {value:.3f}"
            if not ledger.finish(claim, value, attributes):
                said = "dropped, for another process has taken it over"
            console.print(f"trial {claim.place}: {settings}: {said}", highlight=False, soft_wrap=True)
            # Other processes finish some too.
            before, done = done, len(ledger.finished())
            if done > before:
                both = [attributes[method] for method in ("metrics", "plain") if method in attributes]
                progress.advance(done - before, sum(metrics["tokens"] for metrics in both))


def _load(base: ConfigDict, prompts: Sequence[Prompt]) -> Bench:
    tell(f"loading {base.target}")
    loaded = build_target(base.target, jnp.dtype(base.dtype), base.stacked_layers)
    encoded = encode(prompts, load_tokenizer(loaded), base.chat)
    return Bench(loaded, encoded, [prompt.task for prompt in prompts])


def _measure(
    bench: Bench, config: ConfigDict, point: Point, status: Callable[[str], None]
) -> tuple[float | None, dict[str, Any]]:
    """A trial's value and what is kept of it; no value and the reason where its setting is impossible."""
    try:
        attributes = bench.measure(space.validated(config.base, point), status)
    except ConfigError as error:
        return None, {"reason": str(error)}
    value = objective_of(attributes["metrics"], config.objective)
    return value, attributes | ({"reason": "nothing was drafted"} if value is None else {})


def _check_possible(base: ConfigDict, plan: Plan) -> None:
    """Raise ConfigError where no point of a plan that is known beforehand can be run."""
    first: ConfigError | None = None
    for place in range(plan.num_trials if plan.is_fixed else 0):
        try:
            space.validated(base, plan.point(place))
            return
        except ConfigError as error:
            first = first or error
    if first is not None:
        raise ConfigError(
            f"none of the {plan.num_trials} settings is possible; the first: {first}"
        ) from first


def _pair(config: ConfigDict, axes: Sequence[Axis]) -> list[Axis]:
    """The axes of the heat map; ConfigError on a name that is none of space's."""
    by_name = {axis.name: axis for axis in axes}
    names = config.heat_map or tuple(by_name)[:2]
    for name in names:
        if name not in by_name:
            raise ConfigError(f"heat_map names '{name}'{nearest(name, by_name)}: give two fields of space")
    if config.heat_map and len(set(names)) != 2:
        raise ConfigError(f"heat_map names {len(set(names))} fields: give two fields of space")
    return [by_name[name] for name in names]


def _identity(config: ConfigDict, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All that decides what trials measure, so that only processes that agree in it share them."""
    fields = {name: config[name] for name in ("sampler", "objective", "seed")}
    environment = results.environment()
    return {
        "base": config.base.to_dict(),
        "space": config.space.to_dict(),
        **fields,
        "prompts_sha256": digest(prompts),
        "environment": {name: environment[name] for name in ("platform", "device_kind")},
    }
