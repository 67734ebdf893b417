#!/usr/bin/env bash
# Runs the tests; sets everything up on the first call.
#   scripts/test.sh                         all, one process a core, eight at most
#   scripts/test.sh tests/state -k prefix   anything that pytest takes, in one process; paths as seen from the repository's root
# One thread a process: on a busy machine torch's threads wait for each other much longer than they work.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
# With the compiler of the CUDA sources, 163 MB more, where its packages exist; no GPU is needed for it.
if [ "$(uname -sm)" = "Linux x86_64" ]; then set_up dev,cuda-test; else set_up dev; fi
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
processes="$(getconf _NPROCESSORS_ONLN)"
[ "$processes" -le 8 ] || processes=8
for argument in "$@"; do
    case "$argument" in -s | --pdb | [!-]*) processes=1 ;; esac
done
[ "$processes" -eq 1 ] || set -- -n "$processes" "$@"
exec "$VENV/bin/python" -m pytest "$@"
