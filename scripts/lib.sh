# Shared by the scripts beside it: the repository root, and the virtual environment in it.
#
#   PYTHON  the interpreter to make the environment with (default: python3)
#   VENV    the environment's folder, from the root      (default: .venv)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-.venv}
[[ $VENV == /* ]] || VENV=$ROOT/$VENV

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Where the environment exists it is used as it is, unless PYTHON asks for another version.
make_venv() {
  local python=${PYTHON:-python3} version present
  if [[ -x $VENV/bin/pip ]]; then
    present=$(version_of "$VENV/bin/python") || die "$VENV is broken; remove it and run this again"
    version=$(version_of "${PYTHON:-$VENV/bin/python}") || die "cannot run '$PYTHON'"
    [[ $version == "$present" ]] ||
      die "$VENV has Python $present and PYTHON is $version; remove it, or set VENV to another folder"
    say "using the environment in $VENV (Python $present)"
    return
  fi
  version=$(version_of "$python") || die "cannot run '$python'; set PYTHON to a Python 3.11 or later"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "specjax needs Python 3.11 or later and '$python' is $version; set PYTHON to a later one"
  say "making a virtual environment in $VENV (Python $version)"
  "$python" -m venv "$VENV" >/dev/null 2>&1 && return
  # Some distributions ship venv without ensurepip: let the pip outside put one inside.
  "$python" -m venv --without-pip "$VENV" &&
    "$python" -m pip --python "$VENV/bin/python" install --quiet pip ||
    die "'$python -m venv' failed; install your system's venv package for Python"
}

# install_specjax [extra]: editable, and only when something that decides the outcome has changed.
install_specjax() {
  local extra=${1:+[$1]} stamp=$VENV/specjax-installed${1:+-$1} wanted
  # The root is part of it because an editable install points at a folder.
  wanted=$(echo "$ROOT"; cksum "$ROOT/setup.py" "$ROOT/pyproject.toml")
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "specjax$extra is installed and up to date"
    return
  fi
  say "installing specjax$extra and what it needs (minutes the first time)"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$ROOT$extra"
  printf '%s\n' "$wanted" >"$stamp"
}
