#!/bin/sh
# The quality gate: lint, types, import contracts, tests with branch coverage, nothing left running.
# Arguments are handed on to pytest: make test ARGS='tests/unit -k lifecycle'.
set -eu
cd "$(dirname "$0")/.."
bin=.venv/bin

echo '== ruff'
"$bin/python" -m ruff check .
echo '== mypy --strict'
"$bin/python" -m mypy --strict -p posttrain_service -p posttrain_trainer
echo '== import contracts'
"$bin/lint-imports" --no-cache
echo '== pytest'

# Everything that the tests start carries this tag or works below this folder: that is how it is found afterwards.
TESTRUN_TAG=run-$$-$(date +%s)
base=$(mktemp -d "${TMPDIR:-/tmp}/posttrain-test.XXXXXX")
base=$(cd "$base" && pwd -P)
export TESTRUN_TAG
trap 'rm -rf "$base"' EXIT
trap '"$bin/python" scripts/leftovers.py "$TESTRUN_TAG" "$base"; exit 130' INT TERM

code=0
# Two files of tests at a time: most of the time goes into starting processes. WORKERS=0 runs them one by one.
"$bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --basetemp="$base/tmp" --durations=25 \
    --cov --cov-branch --cov-report=term "$@" || code=$?
"$bin/python" scripts/leftovers.py "$TESTRUN_TAG" "$base" || code=1
exit "$code"
