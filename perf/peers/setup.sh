#!/usr/bin/env bash
# Makes the virtual environment of one engine that vnext is compared with, under .peers/venvs, which git does not see.
#   perf/peers/setup.sh openvino | llamacpp | transformers
# Nothing of it touches the project's own environment. PYTHON chooses the interpreter, PEERS another place than .peers.
set -euo pipefail
ENGINE="${1:?which engine: openvino, llamacpp or transformers}"
TREE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PEERS="${PEERS:-$TREE/.peers}"
VENV="$PEERS/venvs/$ENGINE"
source "$TREE/scripts/_setup.sh"

# Alone and first, see constraints.txt: any other request for torch may bring gigabytes of CUDA.
install_torch() { pip_install "$(grep '^torch==' "$ROOT/constraints.txt")"; }

install_engine() {
    case "$ENGINE" in
    transformers)
        install_torch
        pip_install -c "$ROOT/constraints.txt" transformers
        ;;
    openvino)
        install_torch
        pip_install "$(grep '^torch==' "$ROOT/constraints.txt")" transformers==5.5.4 \
            openvino-genai==2026.4.1.0 optimum-intel==2.2.0
        # Only images need it, and its build belongs to a CUDA build of torch: with a CPU build it cannot be imported.
        "$VENV/bin/python" -m pip uninstall -qq -y torchvision
        ;;
    llamacpp)
        # Compiled here, for this very processor, without the vision part: some minutes.
        CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" pip_install llama-cpp-python==0.3.36 gguf==0.19.0
        ;;
    esac
}

case "$ENGINE" in
transformers | openvino | llamacpp) ;;
*) fail "there is no engine $ENGINE: openvino, llamacpp and transformers are known" ;;
esac
mkdir -p "$PEERS/venvs"
printf '*\n' >"$PEERS/.gitignore"
python="$(choose_python)" || exit 1
require_room
make_venv "$python"
install_engine
say "$ENGINE is ready in $VENV"
