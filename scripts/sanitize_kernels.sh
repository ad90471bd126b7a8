#!/usr/bin/env bash
# The tests of the C++ kernels under AddressSanitizer and UBSan: scripts/sanitize_kernels.sh [pytest arguments]
# PYTHON is an interpreter with specjax[dev] (default: the one that scripts/test.sh made).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cd "$ROOT"
python=${PYTHON:-$VENV/bin/python}
[[ -x $python ]] || die "there is no '$python': run scripts/test.sh once, or set PYTHON"
compiler=${CXX:-c++}
libraries=
for name in libasan.so libubsan.so; do
  path=$("$compiler" -print-file-name=$name)
  [[ $path == /* ]] || die "'$compiler' has no $name: install your system's package for it"
  libraries+="$path "
done
export CXX=$compiler
export SPECJAX_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
# Python and XLA keep memory until the end; only what the kernels do is asked about.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
say "testing the kernels under AddressSanitizer and UBSan"
# The library alone is instrumented, so the interpreter needs the sanitizers' runtime first.
LD_PRELOAD=$libraries exec "$python" -m pytest -x tests/kernels/test_misuse.py \
  tests/kernels/test_small_matmul_weights.py tests/kernels/test_cpu_kernels.py "$@"
