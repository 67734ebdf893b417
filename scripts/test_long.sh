#!/usr/bin/env bash
# Runs every case of every test, including those that scripts/test.sh samples: about twice as long. Takes arguments of pytest.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/test.sh" --long "$@"
