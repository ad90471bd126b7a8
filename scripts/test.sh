#!/usr/bin/env bash
# Everything CI checks, slow tests included: scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cd "$ROOT"
make_venv
install_specjax dev
export PATH=$VENV/bin:$PATH
say "ruff check";          ruff check
say "ruff format --check"; ruff format --check
say "mypy";                mypy
if CHROMIUM=$(bash scripts/chromium.sh); then export CHROMIUM
else say "without a Chromium, the report page's browser tests will skip"; fi
say "pytest, slow tests included"
# Two workers: compilation, most of the time, uses one core. A file stays in one worker for its fixtures, and the
# longest begin first (tests/conftest.py), not those of most tests.
exec pytest -m "" -n 2 --dist loadfile --no-loadscope-reorder "$@"
