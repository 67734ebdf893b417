#!/bin/sh
# Holds sessions of instructor, litellm, OpenAI's Agents SDK, pydantic-ai and, where node is, npm's clients with a server of its own
# that serves the demo model. The Python ones need other versions of what vnext's environment has, and of each other's, so they get
# two of their own, about 1 GB. Takes three minutes after that.
#   scripts/check_clients.sh
set -eu
cd "$(dirname "$0")/.."
tools=${TMPDIR:-/tmp}/vnext-clients
[ -f "$tools/complete" ] || {
    python3 -m venv "$tools" && "$tools/bin/python" -m pip install -q instructor==1.17.0 'litellm[proxy]==1.106.2' anthropic==2.12.0
    touch "$tools/complete"
}
agents=${TMPDIR:-/tmp}/vnext-agents
[ -f "$agents/complete" ] || {
    python3 -m venv "$agents" && "$agents/bin/python" -m pip install -q openai-agents==0.24.0 'pydantic-ai-slim[openai]==2.68.0'
    touch "$agents/complete"
}
npm=${TMPDIR:-/tmp}/vnext-npm-clients
packages="openai@7.59.0 @anthropic-ai/sdk@1.14.0 @openai/agents@0.20.0 ai@6.0.326 @ai-sdk/openai@3.0.141"
packages="$packages @ai-sdk/openai-compatible@2.0.92 @ai-sdk/anthropic@3.0.140 zod@4.6.7"
if command -v node >/dev/null && command -v npm >/dev/null; then
    [ -f "$npm/complete" ] || {
        mkdir -p "$npm"
        npm install --silent --prefix "$npm" $packages
        touch "$npm/complete"
    }
else
    echo "left out: npm's clients, because node or npm is not installed" >&2
    npm=
fi
exec "$tools/bin/python" scripts/check_clients.py "${VENV:-.venv}/bin/python" "$agents/bin/python" $npm
