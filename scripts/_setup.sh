# Creates .venv for serve.sh and test.sh, which source this file. Owns the virtual environment and its stamps.
#
#   set_up EXTRA     EXTRA is "" or "dev"; afterwards $VENV/bin is complete. Takes under a second when nothing changed.
#
# A stamp is a hash of setup.py, constraints.txt, every compiled source, their location and the Python in use. It is written
# last, so an interrupted set-up is repeated. The caller may set PYTHON (the interpreter; default: the first that fits) and
# VENV (the folder; default: .venv here).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
FREE_KIB_MIN=$((3 * 1024 * 1024)) # 1.4 GiB installed with a CPU build of torch, and twice that while pip unpacks it

say() { printf 'vnext: %s\n' "$*" >&2; }

fail() {
    say "$@"
    exit 1
}

# Prints "fits", or why the interpreter $1 does not fit.
judge_python() {
    "$1" -c '
import sys
if sys.version_info < (3, 11):
    print("is Python %d.%d" % sys.version_info[:2])
    sys.exit()
try:
    import ensurepip, venv
except ImportError:
    print("has no venv and pip (on Debian and Ubuntu: the package python3-venv)")
    sys.exit()
print("fits")
' 2>/dev/null || echo "does not run"
}

choose_python() {
    local candidate verdict verdicts="" candidates=(python3.11 python3 python3.12 python3.13 python3.14)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        command -v "$candidate" >/dev/null || continue
        verdict="$(judge_python "$candidate")"
        if [ "$verdict" = fits ]; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        verdicts="$verdicts${verdicts:+; }$candidate $verdict"
    done
    fail "Python 3.11 or newer with venv and pip was not found (${verdicts:-no ${candidates[0]} here}):" \
        "install it, or name one with PYTHON=/path/to/python3.11 $0"
}

# Prints one hash of everything an installation depends on: setup.py, constraints.txt and every compiled source.
fingerprint() {
    "$1" -c '
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
sources = sorted(path for path in (root / "vnext").rglob("*.*") if path.suffix in (".c", ".cpp", ".h"))
parts = [sys.version.encode()]
for path in [root / "setup.py", root / "constraints.txt", *sources]:
    parts += [str(path).encode(), path.read_bytes()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
' "$ROOT"
}

is_stamped() { [ "$(cat "$VENV/.vnext-$1" 2>/dev/null)" = "$2" ]; }

require_room() {
    local free_kib
    free_kib="$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print $4 }')"
    [ "$free_kib" -ge "$FREE_KIB_MIN" ] ||
        fail "only $((free_kib / 1024)) MiB are free where $VENV goes and $((FREE_KIB_MIN / 1024)) MiB are needed: make room, or set VENV=/elsewhere"
}

# Says what the compiled modules lack for the interpreter $1.
note_compiler() {
    [ -e "$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
        say "$1 has no headers (on Debian and Ubuntu: the package python3-dev): vnext runs, many times slower (see: vnext doctor)"
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v gcc >/dev/null ||
        say "no C compiler found: vnext runs, with its plain numpy and torch forms only (see: vnext doctor)"
}

# Keeps the environment if its Python is the chosen one and its pip works; creates it anew otherwise.
make_venv() {
    local python="$1" wanted
    wanted="$("$python" -c 'import sys; print(sys.version)')"
    if [ "$("$VENV/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null)" = "$wanted" ] &&
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ]; then
        fail "$VENV exists and is no virtual environment: move it away, or set VENV=/elsewhere"
    fi
    say "making $VENV with $python"
    "$python" -m venv --clear "$VENV" || fail "$python could not make a virtual environment in $VENV, see above"
}

# Compiles nothing to bytecode, as most of the packages' files are never imported: 10 s of a core, a minute with "dev". Python compiles
# what it imports.
pip_install() {
    "$VENV/bin/python" -m pip install --no-compile -qq --disable-pip-version-check --no-input "$@" ||
        fail "pip could not install $*: see its message above; is the network or the package index reachable?"
}

install_packages() {
    local extra="$1" torch building
    torch="$(grep '^torch==' "$ROOT/constraints.txt")"
    say "installing $torch"
    pip_install -c "$ROOT/constraints.txt" setuptools wheel
    # The CPU kernels' objects, which take a minute of one core and no torch, while pip unpacks; the installation below links them.
    (cd "$ROOT" && "$VENV/bin/python" setup.py -q build_ext --inplace >/dev/null 2>&1) &
    building=$!
    pip_install "$torch" # alone and first, see constraints.txt
    wait "$building" || say "the compiled modules did not build: what pip says below tells why"
    say "installing vnext and what it needs${extra:+, with \"$extra\"}"
    pip_install -c "$ROOT/constraints.txt" --use-pep517 --no-build-isolation -e "$ROOT${extra:+[$extra]}"
}

# Concurrent set-ups would corrupt each other: the second waits, and then finds everything done.
lock_setup() {
    exec 9<"$ROOT/setup.py"
    ! command -v flock >/dev/null || flock 9
}

set_up() {
    local extra="$1" stamp="${1:-base}" python print
    python="$(choose_python)" || exit 1
    print="$(fingerprint "$python")"
    is_stamped "$stamp" "$print" && return
    lock_setup
    if ! is_stamped "$stamp" "$print"; then
        require_room
        note_compiler "$python"
        rm -f "$VENV/.vnext-$stamp"
        make_venv "$python"
        install_packages "$extra"
        printf '%s\n' "$print" | tee "$VENV/.vnext-base" >"$VENV/.vnext-$stamp"
    fi
    exec 9<&-
}
