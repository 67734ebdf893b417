#!/usr/bin/env bash
# Cross-compiles vnext's compiled modules for aarch64 and runs Python programs with them, emulated, on Debian for x86-64.
#   scripts/arm.sh install                    the cross compiler and qemu, by apt-get, as root
#   scripts/arm.sh build                      the modules, with setup.py and its flags, in a copy of this folder (build/arm/tree)
#   scripts/arm.sh python -m pytest tests/log runs the aarch64 Python in that copy
#   scripts/arm.sh                            builds, then runs tests/arm and the tests of each module: half an hour
# ARM_CPU names the processor for qemu: max (default: with bf16 and i8mm) or cortex-a72 (plain NEON). Python and its libraries
# for aarch64 come from Debian and from wheels, unpacked into build/arm; the system's own packages stay as they are. There is no
# torch. Emulation shows that instructions are right. It shows no speed, and memory keeps the order of x86.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOST="${VENV:-$ROOT/.venv}/bin/python"
ARM="$ROOT/build/arm" TREE="$ROOT/build/arm/tree" SYSTEM="$ROOT/build/arm/system"
QEMU=qemu-aarch64-static
PACKAGES="python-minimal libpython-minimal libpython-stdlib libpython-dev libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1"
WHEELS="numpy ml-dtypes msgspec xxhash hypothesis pyzmq psutil safetensors tokenizers"
TESTS="tests/state/store tests/log tests/golden tests/sampling/test_drafters.py tests/runtime/transport tests/runtime/processes/test_futex.py"
BEYOND_QEMU="killed_at_any_change_of_the_memory" # they follow a process step by step
LACKING=3 # the exit status of a machine that cannot do it

lacking() {
    printf 'arm.sh: %s\n' "$*" >&2
    exit "$LACKING"
}

has_tools() { command -v aarch64-linux-gnu-g++ >/dev/null && command -v "$QEMU" >/dev/null; }

install_tools() {
    ! has_tools || return 0
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null || lacking "only root on Debian can install the cross compiler"
    local options=(-qq -o Acquire::http::Timeout=10 -o Acquire::Retries=1)
    { apt-get "${options[@]}" update && DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install -y \
        --no-install-recommends g++-aarch64-linux-gnu qemu-user-static; } >/dev/null || lacking "apt-get could not install it"
}

# apt-get for arm64 with folders of its own.
apt_arm() {
    local tool="$1" sources=/etc/apt/sources.list.d/debian.sources
    shift
    [ -e "$sources" ] || sources=/etc/apt/sources.list
    "$tool" -qq -o Dir::State="$ARM/apt" -o Dir::State::status=/dev/null -o Dir::Cache="$ARM/apt" -o APT::Architecture=arm64 \
        -o APT::Architectures=arm64 -o Dir::Etc::sourcelist="$sources" -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root \
        -o Acquire::Languages=none -o Acquire::http::Timeout=10 -o Acquire::Retries=1 "$@"
}

fetch_python() {
    local python package names=() site
    rm -rf "$ARM"
    site="$SYSTEM/usr/lib/python3/dist-packages"
    mkdir -p "$ARM/apt/lists/partial" "$ARM/apt/archives/partial" "$ARM/debs" "$ARM/wheels" "$ARM/cross" "$site"
    apt_arm apt-get update
    python="$(apt_arm apt-cache policy python3-minimal | sed -n 's/ *Candidate: \(3\.[0-9]*\).*/\1/p')"
    for package in $PACKAGES; do names+=("${package/python/python$python}"); done
    (cd "$ARM/debs" && apt_arm apt-get download "${names[@]}")
    for package in "$ARM"/debs/*.deb; do dpkg -x "$package" "$SYSTEM"; done
    "$HOST" -m pip download -qq --disable-pip-version-check --timeout 10 --retries 1 --no-deps -d "$ARM/wheels" --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_17_aarch64 --python-version "$python" --only-binary=:all: -c "$ROOT/constraints.txt" $WHEELS
    for package in "$ARM"/wheels/*.whl; do "$HOST" -m zipfile -e "$package" "$site"; done
    # Of the build's own Python, only what is Python alone: pytest and its like. Our folder comes first, so numpy is the right one.
    "$HOST" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/host.pth"
    cat >"$ARM/python" <<EOF
#!/bin/sh
export PYTHONHOME="$SYSTEM/usr"
exec $QEMU -cpu "\${ARM_CPU:-max}" -L "$SYSTEM" -0 "\$0" "$SYSTEM/usr/bin/python$python" "\$@"
EOF
    chmod +x "$ARM/python"
    # What a build for aarch64 must know of that Python; an empty `torch` keeps the GPU's launches out.
    sed "s|/usr/include|$SYSTEM/usr/include|g" "$SYSTEM/usr/lib/python$python/_sysconfigdata__aarch64-linux-gnu.py" \
        >"$ARM/cross/_sysconfigdata__aarch64-linux-gnu.py"
    : >"$ARM/cross/torch.py"
    fetched_from >"$ARM/fetched"
}

fetched_from() { cat "$ROOT/constraints.txt" "${BASH_SOURCE[0]}" <(echo "$HOST") | cksum; }

# The files that git knows or would take, without those that are gone.
copy_tree() {
    mkdir -p "$TREE"
    find "$TREE" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
    (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | tar cf - --null --ignore-failed-read -T - 2>/dev/null) | tar xf - -C "$TREE"
}

build() {
    has_tools || lacking "no cross compiler for aarch64, or no $QEMU: scripts/arm.sh install"
    [ "$(cat "$ARM/fetched" 2>/dev/null)" = "$(fetched_from)" ] || "$0" fetch || lacking "Python for aarch64 cannot be fetched: is there a network?"
    copy_tree
    cd "$TREE"
    _PYTHON_HOST_PLATFORM=linux-aarch64 _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu PYTHONPATH="$ARM/cross" \
        CPATH="$SYSTEM/usr/include" "$HOST" setup.py -q build_ext --inplace >"$ARM/build.log" 2>&1 || { cat "$ARM/build.log"; exit 1; }
    ! grep -E "warning:|error:" "$ARM/build.log" || exit 1
}

run_python() {
    cd "$TREE"
    PYTHONPATH="$TREE" OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec "$ARM/python" "$@"
}

case "${1:-all}" in
    install) install_tools ;;
    fetch) fetch_python ;;
    build) build ;;
    python) run_python "${@:2}" ;;
    all)
        build
        (cd "$ROOT" && "$HOST" -m pytest -q -p no:cacheprovider -p no:xdist tests/arm)
        run_python -m pytest -q -p no:cacheprovider -p pytest_timeout --timeout=1200 $TESTS -k "not $BEYOND_QEMU"
        ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
