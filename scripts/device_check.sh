#!/usr/bin/env bash
# Tree attention on the accelerator at hand, in under 5 minutes after installing: scripts/device_check.sh [result.json]
# Correctness, then a table of times. Without an accelerator the kernels are interpreted, and nothing is timed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

out=()
if [[ $# -gt 0 ]]; then
  [[ $1 == /* ]] || set -- "$PWD/$1"
  out=(--out "$1")
fi

cd "$ROOT"
make_venv
install_specjax dev
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
  extra=cuda12
elif compgen -G '/dev/accel*' >/dev/null || compgen -G '/dev/vfio/[0-9]*' >/dev/null; then
  extra=tpu
else
  extra=
fi
# Empty means that jax chooses; the tests choose the CPU where nothing is said.
export JAX_PLATFORMS=${JAX_PLATFORMS-} SPECJAX_PALLAS=1
backend() { "$VENV/bin/python" -c 'import jax; print(jax.default_backend())' 2>/dev/null || echo cpu; }
device=$(backend)
if [[ -n $extra && $device == cpu && -z $JAX_PLATFORMS ]]; then
  say "installing jax[$extra]"
  version=$("$VENV/bin/python" -c 'import jax; print(jax.__version__)')
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "jax[$extra]==$version"
  device=$(backend)
fi

tests=tests/kernels
case $device in
  cpu) say "no accelerator: the kernels are interpreted, slowly, and nothing is timed" ;;
  tpu | gpu) say "accelerator: $device" ; tests=tests/kernels/test_tree_attention_$device.py ;;
  *) die "no kernel for the backend '$device'" ;;
esac

say "correctness"
if [[ $device == cpu ]]; then
  exec timeout 280 "$VENV/bin/python" -m pytest -q "$tests"
fi
timeout 150 "$VENV/bin/python" -m pytest -q -m "" "$tests"
say "times"
exec timeout 140 "$VENV/bin/python" experiments/kernels/device_times.py --seconds 100 "${out[@]}"
