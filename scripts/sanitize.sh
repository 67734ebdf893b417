#!/usr/bin/env bash
# Runs tests with the compiled modules under AddressSanitizer and UndefinedBehaviorSanitizer.
#   scripts/sanitize.sh                         log, state, sched, ring, kernels, collectives, drafters: about ten minutes
#   scripts/sanitize.sh tests/kernels -k rows   any arguments of pytest
# Builds in a copy of the tracked files (build/sanitized). Reports go to build/sanitized/report.*, because pytest captures the
# output of a process that a sanitizer ends. Needs gcc and the environment of scripts/test.sh (VENV; default: .venv here).
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${VENV:-$ROOT/.venv}/bin/python"
COPY="$ROOT/build/sanitized"
CHECKS="-fsanitize=address,undefined"
[ "$#" -gt 0 ] || set -- tests/log tests/state tests/sched tests/runtime/transport tests/replay/reading tests/kernels tests/runtime/transport tests/sampling/test_drafters.py
mkdir -p "$COPY"
(cd "$ROOT" && git ls-files -z | tar cf - --null --ignore-failed-read -T -) | tar xf - -C "$COPY"
cd "$COPY"
rm -f report.*
sed -i 's/"-g0"/"-g1"/g' setup.py  # reports then name lines
CFLAGS="$CHECKS -fno-omit-frame-pointer" LDFLAGS="$CHECKS" "$PYTHON" setup.py -q build_ext --inplace
export ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:log_path=$COPY/report" # Python itself leaks at its end
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$COPY/report" PYTHONPATH="$COPY" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
status=0
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)" \
    "$PYTHON" -m pytest -p no:cacheprovider --timeout=900 "$@" || status=$?
if compgen -G "report.*" >/dev/null; then
    head -n 12 report.*
    exit 1
fi
exit "$status"
