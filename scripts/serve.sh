#!/usr/bin/env bash
# Serves a model, the bundled demo model by default, on 127.0.0.1:8000. Sets up the environment on the first call.
#   scripts/serve.sh                        the demo model
#   scripts/serve.sh MODEL --port 8001      anything that `vnext serve` takes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
set_up ""
exec "$VENV/bin/vnext" serve "$@"
