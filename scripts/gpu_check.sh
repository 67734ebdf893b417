#!/usr/bin/env bash
# The check on a machine with a GPU: builds, tests every kernel, the engine and the ranks' exchange, then measures.
#   scripts/gpu_check.sh                        everything, within nine minutes
#   scripts/gpu_check.sh --only kernels bench   some parts: build kernels bench step numba ipc engine serving sanitize
#   scripts/gpu_check.sh --dry-run              the same calls on the CPU at toy sizes; no GPU, no times
# Installs and downloads nothing. PYTHON names a Python that has torch and CuPy (default: the first python3 or python that has
# torch). WHEELS names a folder of wheels for packages that Python lacks (default: .wheels, where scripts/gpu_wheels.sh puts
# them). OUT is the folder for the record, the log and the findings, which are written as they occur (default: perf/records).
# Ends with a table. perf/gpu/__main__.py lists the exit codes.
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

# Copies a read-only tree, because extensions are built in place.
place_tree() {
    [ ! -w "$ROOT/vnext" ] || return 0
    [ -n "${OUT:-}" ] || fail "$ROOT cannot be written: say where the record goes with OUT=/folder $0"
    mkdir "$SCRATCH/tree"
    tar -C "$ROOT" --exclude=.git --exclude=.venv --exclude=build -cf - . | tar -C "$SCRATCH/tree" -xf -
    ROOT="$SCRATCH/tree"
}

# Unpacks the wheels of packages that the Python lacks, without a package index and without a build.
place_wheels() {
    local lacking
    [ -n "${WHEELS:-}" ] || WHEELS="$ROOT/.wheels"
    compgen -G "$WHEELS/*.whl" >/dev/null || return 0
    lacking="$("$PYTHON" -c '
import importlib.metadata, pathlib, sys
for path in sys.argv[1:]:
    try:
        importlib.metadata.version(pathlib.Path(path).name.partition("-")[0])
    except importlib.metadata.PackageNotFoundError:
        print(path)' "$WHEELS"/*.whl)"
    [ -n "$lacking" ] || return 0
    printf '%s\n' "$lacking" | xargs -d '\n' "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --target "$SCRATCH/site" || fail "the wheels in $WHEELS could not be unpacked, see above"
    export PYTHONPATH="$SCRATCH/site${PYTHONPATH:+:$PYTHONPATH}"
}

# Check the imports here: a part that fails to import would waste a start of the machine.
name_missing() {
    local missing
    missing="$("$PYTHON" -c '
from importlib.util import find_spec
names = ("ml_dtypes", "msgspec", "zmq", "xxhash", "safetensors", "tokenizers", "huggingface_hub", "cupy", "numba", "pytest")
print(*(name for name in names if find_spec(name) is None))')"
    [ -z "$missing" ] || printf 'gpu_check: this Python lacks %s; what needs it will fail. scripts/gpu_wheels.sh gathers wheels\n' "$missing" >&2
}

# numba-cuda compiles with libnvvm, from its own package or from the toolkit, which it finds only by this variable.
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
name_missing
name_toolkit
cd "$ROOT"
"$PYTHON" -m perf.gpu --out "${OUT:-$ROOT/perf/records}" "$@"
