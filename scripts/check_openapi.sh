#!/bin/sh
# Asks every route of a running server what its own OpenAPI document allows and forbids: no fault of the server, no status,
# type or shape that the document does not name. Takes about two minutes; schemathesis gets an environment of its own.
#   scripts/check_openapi.sh http://127.0.0.1:8000 [KEY]
set -eu
url=${1:?name a server, as http://127.0.0.1:8000}
tools=${TMPDIR:-/tmp}/vnext-schemathesis
[ -x "$tools/bin/schemathesis" ] || { python3 -m venv "$tools" && "$tools/bin/python" -m pip install -q schemathesis==4.32.5; }
# Not every body that fits a schema can be answered: a schema names no lengths of a model and no ranges of a parameter.
exec "$tools/bin/schemathesis" run "$url/openapi.json" --phases examples,coverage,fuzzing --seed 1 --max-time 100 \
    --max-examples 40 --continue-on-failure --exclude-checks positive_data_acceptance ${2:+-H "Authorization: Bearer $2"}
