"""The repository itself: what packaging, README and scripts promise one another."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|tmp|work|Users|mnt)/\w")


def repository_files() -> list[Path]:
    """List the files that are tracked or would be, as `git add` sees them."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_holds_a_machine_path() -> None:
    found = []
    for file in repository_files():
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # weights and pictures
        found += [
            f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(lines, start=1)
            if MACHINE_PATH.search(line)
        ]
    assert not found, "\n" + "\n".join(found)


def test_machine_paths_are_recognised() -> None:
    assert MACHINE_PATH.search('open("' + "/".join(["", "home", "ada", "x"]) + '")')
    assert not MACHINE_PATH.search("$ROOT/tmp/x, docs/work/x, https://example.org/home/x")


def test_setup_declares_the_extras_that_scripts_and_readme_install() -> None:
    setuptools = mock.Mock()  # the real one need not be installed
    with mock.patch.dict(sys.modules, setuptools=setuptools):
        runpy.run_path(str(ROOT / "setup.py"))
    declared = set(setuptools.setup.call_args.kwargs["extras_require"])
    assert declared == {"cuda", "tpu", "aot", "hub", "plots", "sweep", "train", "test", "dev"}

    scripts = "".join(file.read_text() for file in (ROOT / "scripts").glob("*.sh"))
    installed = set(re.findall(r"install_specjax (\w+)$", scripts, re.MULTILINE))
    readme = set(re.findall(r"pip install .*\.\[(\w+)\]", (ROOT / "README.md").read_text()))
    assert installed and readme
    assert installed | readme <= declared


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for file in (ROOT / "specjax").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_readme_names_only_what_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\b(?:scripts|configs|experiments)/[\w/]+\.(?:sh|py|md)", readme))
    modules = set(re.findall(r"python -m (specjax[\w.]*)", readme))
    named |= {module.replace(".", "/") + ".py" for module in modules}
    assert {"scripts/demo.sh", "scripts/test.sh"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
