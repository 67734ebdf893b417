"""The one build file: what vnext consists of, what it needs and which commands it installs.

Exact versions are not here but in constraints.txt. `cuda/` holds CUDA sources and no Python; it is shipped as data inside
the package, because its own name belongs to NVIDIA's namespace package.
"""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CUDA_SOURCES = "vnext.kernels.cuda.sources"

CORE = ["msgspec>=0.20", "numpy>=2.0", "xxhash>=3.5"]
RUNTIME = ["torch>=2.11", "pyzmq>=26", "safetensors>=0.5", "huggingface_hub>=1.0", "tqdm>=4.66"]
EDGE = ["aiohttp>=3.11", "jinja2>=3.1", "prometheus_client>=0.21", "rich>=13", "tokenizers>=0.22"]
CUDA = [
    "cupy-cuda13x>=14",
    "numba-cuda>=0.30",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
]
# Compiles the sources without a GPU: 163 MB to load, 410 MB installed; nothing of it asks for torch.
CUDA_TEST = [
    "cupy-cuda13x>=14",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-crt==13.0.88",
]
DEV = [
    "hypothesis>=6.100",
    "numba>=0.61",  # its simulator runs the CUDA index kernels in tests
    "openai>=2.0",
    "psutil>=6",
    "pytest>=8.3",
    "pytest-benchmark>=5",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "selenium>=4.20",
    "transformers>=5.0",
]
CUDA += ["nvidia-nvvm==13.0.*"]  # numba-cuda compiles with it
COMMANDS = [
    "vnext = vnext.cli:main",
    "vnext-bench = vnext.bench.cli:main",
    "vnext-replay = vnext.replay.cli:process",
]


def compiled(name: str, source: str, *headers: str) -> Extension:
    return Extension(name, [source], depends=list(headers), extra_compile_args=["-O3"], optional=True)


COLUMNS = ["vnext/state/columns.h", "vnext/state/blake2b.h", "vnext/state/blake2b_words.h"]
# Where there is no compiler the plain forms serve; `vnext doctor` says which.
COMPILED = [
    compiled("vnext.state._columns", "vnext/state/_columns.c", *COLUMNS),
    compiled("vnext.state._names", "vnext/state/_names.c", "vnext/state/names.h"),
    compiled("vnext.sched._stride", "vnext/sched/_stride.c", "vnext/state/names.h", *COLUMNS),
    compiled("vnext.state._log", "vnext/state/_log.c", "vnext/state/crc32.h", "vnext/state/steady_frame.h"),
    compiled(
        "vnext.state._tails", "vnext/state/_tails.c", "vnext/state/blake2b_keyed.h", "vnext/state/blake2b_words.h",
        "vnext/state/steady_frame.h",
    ),
    compiled("vnext.runtime._ring", "vnext/runtime/_ring.c"),  # Linux only
    compiled("vnext.runtime._exchange", "vnext/runtime/_exchange.c", "vnext/runtime/rank_sum.h"),  # Linux only
]

# One instruction set a file, chosen when the program runs; a machine of another kind has the portable one.
CPU_FOLDER = Path("vnext") / "kernels" / "cpu"
CPU_WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # intrinsics begin undefined
CPU_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", *CPU_WARNINGS]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
BF16_FLAGS = [*AVX512_FLAGS, "-mavx512bf16", "-mavx512vbmi"]
LEVEL_FLAGS = {
    "level_avx2.cpp": AVX2_FLAGS,
    "level_avx512.cpp": AVX512_FLAGS,
    "level_avx512_bf16.cpp": BF16_FLAGS,
    "level_amx.cpp": [*BF16_FLAGS, "-mamx-tile", "-mamx-bf16"],
}


def cpu_kernels() -> Extension:
    """The CPU's kernels. Where there is no compiler the plain torch forms serve; `vnext doctor` says which."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    names = sorted(path.name for path in (ROOT / CPU_FOLDER).glob("*.cpp"))
    sources = [(CPU_FOLDER / name).as_posix() for name in names if is_x86 or name not in LEVEL_FLAGS]
    headers = [path.relative_to(ROOT).as_posix() for path in (ROOT / CPU_FOLDER).glob("*.h")]
    return Extension(
        "vnext.kernels.cpu._native",
        sources,
        depends=headers,
        extra_compile_args=CPU_FLAGS,
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


# Against torch's stable interface of 2.11: what is built with a later torch serves 2.11 as well. Where torch is not there (pip
# builds in isolation unless told otherwise) the form in Python serves; `vnext doctor` says so.
LAUNCH_FOLDER = Path("vnext") / "kernels" / "cuda"
LAUNCH_FLAGS = ["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"]


def launches() -> list[Extension]:
    """Launches of the GPU's kernels, if torch is installed where this is built. It is looked for, not imported."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return []
    folder = Path(torch.submodule_search_locations[0])
    if not (folder / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
        return []
    return [
        Extension(
            "vnext.kernels.cuda._native",
            [(LAUNCH_FOLDER / name).as_posix() for name in ("launch.cpp", "operations.cpp")],
            depends=[(LAUNCH_FOLDER / name).as_posix() for name in ("launch.h", "tensors.h")],
            include_dirs=[str(folder / "include")],
            library_dirs=[str(folder / "lib")],
            libraries=["torch_cpu"],
            extra_compile_args=LAUNCH_FLAGS,
            language="c++",
            optional=True,
        )
    ]


class BuildEachFile(build_ext):
    """Compiles a file of the CPU's kernels with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler._compile

        def with_flags(object_path, source, suffix, flags, extra, options):
            more = LEVEL_FLAGS.get(Path(source).name, [])
            return compile_one(object_path, source, suffix, flags, [*extra, *more], options)

        self.compiler._compile = with_flags
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


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
    package_data={"vnext": ["demo_model/*"], "vnext.replay.ui": ["page/*"], CUDA_SOURCES: ["*.cu", "*.cuh", "*.cpp", "*.h"]},
    ext_modules=[*COMPILED, cpu_kernels(), *launches()],
    cmdclass={"build_ext": BuildEachFile},
    install_requires=CORE + RUNTIME + EDGE,
    extras_require={"cuda": CUDA, "cuda-test": CUDA_TEST, "ray": ["ray>=2.50"], "dev": DEV},
    entry_points={"console_scripts": COMMANDS},
    zip_safe=False,
)
