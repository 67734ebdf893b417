#!/bin/sh
# Holds a session of instructor and litellm with a server of its own that serves the demo model. They need other versions of
# what vnext's environment has, so they get one of their own, about 800 MB. Takes about a minute after that.
#   scripts/check_clients.sh
set -eu
cd "$(dirname "$0")/.."
tools=${TMPDIR:-/tmp}/vnext-clients
[ -f "$tools/complete" ] || {
    python3 -m venv "$tools" && "$tools/bin/python" -m pip install -q instructor==1.17.0 'litellm[proxy]==1.106.2' anthropic==2.12.0
    touch "$tools/complete"
}
exec "$tools/bin/python" scripts/check_clients.py "${VENV:-.venv}/bin/python"
