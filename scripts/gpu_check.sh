#!/usr/bin/env bash
# One command on a machine with a GPU: builds, checks every kernel, the engine and the ranks' exchange, then measures.
#   scripts/gpu_check.sh                        everything, within nine minutes
#   scripts/gpu_check.sh --only kernels bench   some parts: build kernels numba engine ipc sanitize bench
#   scripts/gpu_check.sh --dry-run              the same calls on the CPU, at toy sizes, without a GPU and without times
# Installs nothing and loads nothing down: PYTHON names a Python that has torch and CuPy (default: the first python3 or
# python that has torch). WHEELS may name a folder of wheels for what that Python lacks; they are unpacked beside it.
# OUT is where the record and the logs go (default: perf/records). Ends with a table; see perf/gpu/__main__.py for exit codes.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT

fail() {
    printf 'gpu_check: %s\n' "$*" >&2
    exit 2
}

choose_python() {
    local candidate candidates=(python3 python)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python with torch was found (${candidates[*]}): name one with PYTHON=/path/to/python3 $0"
}

# A tree that cannot be written is copied: extensions are built in place.
place_tree() {
    [ ! -w "$ROOT/vnext" ] || return 0
    [ -n "${OUT:-}" ] || fail "$ROOT cannot be written: say where the record goes with OUT=/folder $0"
    mkdir "$SCRATCH/tree"
    tar -C "$ROOT" --exclude=.git --exclude=.venv --exclude=build -cf - . | tar -C "$SCRATCH/tree" -xf -
    ROOT="$SCRATCH/tree"
}

# Neither an index nor a build is asked for anything.
place_wheels() {
    [ -n "${WHEELS:-}" ] || return 0
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SCRATCH/site" "$WHEELS"/*.whl ||
        fail "the wheels in $WHEELS could not be unpacked, see above"
    export PYTHONPATH="$SCRATCH/site${PYTHONPATH:+:$PYTHONPATH}"
}

# numba-cuda compiles with libnvvm: a package of its own, or the toolkit's, which is found by this name alone.
name_toolkit() {
    [ -z "${CUDA_HOME:-}${CUDA_PATH:-}" ] || return 0
    local nvcc candidate
    nvcc="$(command -v nvcc || true)"
    for candidate in "${nvcc%/bin/nvcc}" /usr/local/cuda; do
        if [ -n "$candidate" ] && [ -d "$candidate/nvvm" ]; then
            export CUDA_HOME="$candidate"
            return
        fi
    done
}

[ -z "${OUT:-}" ] || OUT="$(mkdir -p "$OUT" && cd "$OUT" && pwd)"
PYTHON="$(choose_python)"
place_tree
place_wheels
name_toolkit
cd "$ROOT"
"$PYTHON" -m perf.gpu --out "${OUT:-$ROOT/perf/records}" "$@"
