"""The one build file: what vnext consists of, what it needs and which commands it installs.

Exact versions are not here but in constraints.txt. `cuda/` holds CUDA sources and no Python; it is shipped as data inside
the package, because its own name belongs to NVIDIA's namespace package.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent
CUDA_SOURCES = "vnext.kernels.cuda"

CORE = ["msgspec>=0.20", "numpy>=2.0", "xxhash>=3.5"]
RUNTIME = ["torch>=2.11", "pyzmq>=26", "safetensors>=0.5", "huggingface_hub>=1.0", "tqdm>=4.66"]
EDGE = ["aiohttp>=3.11", "jinja2>=3.1", "prometheus_client>=0.21", "rich>=13", "tokenizers>=0.22"]
CUDA = ["cupy-cuda13x>=14", "numba-cuda>=0.30", "nvidia-cuda-nvrtc==13.0.*", "nvidia-cuda-runtime==13.0.*"]
DEV = [
    "hypothesis>=6.100",
    "openai>=2.0",
    "psutil>=6",
    "pytest>=8.3",
    "pytest-benchmark>=5",
    "pytest-timeout>=2.3",
    "transformers>=5.0",
]
COMMANDS = [
    "vnext = vnext.cli:main",
    "vnext-bench = vnext.bench.cli:main",
    "vnext-replay = vnext.replay.cli:main",
]


# Where there is no compiler the plain numpy form serves; `vnext doctor` says which.
def compiled(name: str, *headers: str) -> Extension:
    """One C file of vnext/state, and the headers it reads."""
    folder = "vnext/state"
    return Extension(
        f"vnext.state.{name}",
        [f"{folder}/{name}.c"],
        depends=[f"{folder}/{header}" for header in headers],
        extra_compile_args=["-O3"],
        optional=True,
    )


COMPILED = [
    compiled("_columns", "blake2b.h"),
    compiled("_log", "crc32.h", "steady_frame.h"),
    compiled("_tails", "blake2b.h", "blake2b_keyed.h", "steady_frame.h"),
]


def version() -> str:
    """The version as vnext/version.py has it, without importing what may not be installed yet."""
    scope: dict[str, str] = {}
    exec((ROOT / "vnext" / "version.py").read_text(), scope)
    return scope["__version__"]


def has_cuda_sources() -> bool:
    return (ROOT / "cuda").is_dir()


setup(
    name="vnext",
    version=version(),
    description="An LLM inference and serving engine built as one replicated state machine",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["vnext", "vnext.*"]) + ([CUDA_SOURCES] if has_cuda_sources() else []),
    package_dir={CUDA_SOURCES: "cuda"} if has_cuda_sources() else {},
    package_data={"vnext": ["demo_model/*"], CUDA_SOURCES: ["*.cu", "*.cuh", "*.cpp", "*.h"]},
    ext_modules=COMPILED,
    install_requires=CORE + RUNTIME + EDGE,
    extras_require={"cuda": CUDA, "ray": ["ray>=2.50"], "dev": DEV},
    entry_points={"console_scripts": COMMANDS},
    zip_safe=False,
)
