#!/usr/bin/env bash
# Runs the tests; sets everything up on the first call.
#   scripts/test.sh                         all
#   scripts/test.sh tests/state -k prefix   anything that pytest takes; paths as seen from the repository's root
# One thread a process: on a busy machine torch's threads wait for each other much longer than they work.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
# With the compiler of the CUDA sources, 163 MB more, where its packages exist; no GPU is needed for it.
if [ "$(uname -sm)" = "Linux x86_64" ]; then set_up dev,cuda-test; else set_up dev; fi
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/python" -m pytest "$@"
