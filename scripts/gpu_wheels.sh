#!/usr/bin/env bash
# Downloads wheels for a machine with a GPU that cannot reach a package index and whose Python lacks packages vnext needs.
#   scripts/gpu_wheels.sh                       into .wheels, where scripts/gpu_check.sh looks, for Python 3.12
#   scripts/gpu_wheels.sh FOLDER 3.13           elsewhere, for another Python
# Takes the versions of constraints.txt, without torch, CuPy and Numba, which that machine must have. A package that the
# machine already has is used instead of its wheel.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
FOLDER="${1:-$ROOT/.wheels}"
VERSION="${2:-3.12}"
NAMES="llguidance|ml_dtypes|msgspec|pyzmq|xxhash|pytest|pytest-xdist|pytest-timeout|execnet|iniconfig|pluggy"
platforms=()
for number in 2_31 2_28 2_27 2_26 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${number}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64)
mkdir -p "$FOLDER"
grep -E "^($NAMES)==" "$ROOT/constraints.txt" | xargs "${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps \
    --only-binary=:all: --implementation cp --python-version "$VERSION" "${platforms[@]}" -d "$FOLDER"
printf 'gpu_wheels: %s wheels, %s, in %s\n' "$(find "$FOLDER" -name '*.whl' | wc -l)" "$(du -sh "$FOLDER" | cut -f1)" "$FOLDER"
