#!/usr/bin/env bash
# Speculative decoding on a real model, from nothing: scripts/demo.sh [workdir] [flags of specjax.run]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

workdir=$ROOT/runs/demo
if [[ $# -gt 0 && $1 != -* ]]; then
  workdir=$1
  [[ $workdir == /* ]] || workdir=$PWD/$workdir
  shift
fi

cd "$ROOT"
make_venv
install_specjax
say "running configs/ngram_llama.py; results go to $workdir"
exec "$VENV/bin/python" -m specjax.run --config=configs/ngram_llama.py --workdir="$workdir" "$@"
