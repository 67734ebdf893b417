"""The only build file: the packages of vnext, its dependencies and the commands that it installs.

constraints.txt holds exact versions. `cuda/` holds CUDA sources and no Python; it ships as data inside the package, because
the name `cuda` belongs to NVIDIA's namespace package.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
FINGERPRINT = runpy.run_path(str(ROOT / "vnext" / "base" / "compiled.py"))["fingerprint"]
CUDA_SOURCES = "vnext.kernels.cuda.sources"

CORE = ["ml_dtypes>=0.5", "msgspec>=0.20", "numpy>=2.0", "xxhash>=3.5"]
RUNTIME = ["torch>=2.11", "pyzmq>=26", "safetensors>=0.5", "huggingface_hub>=1.0", "gguf>=0.19", "tqdm>=4.66"]
EDGE = [
    "aiohttp>=3.11", "jinja2>=3.1", "llguidance>=1.7", "prometheus_client>=0.21", "pyyaml>=6", "rich>=13", "tokenizers>=0.22",
    "yarl>=1.17",
]  # fmt: skip
CUDA = [
    "cupy-cuda13x>=14",
    "numba-cuda>=0.30",
    "numpy<2.5",  # numba-cuda 0.30 reads a name that NumPy 2.5 no longer has
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
]
# Compiles the sources without a GPU: a download of 163 MB, 410 MB installed; none of it depends on torch.
CUDA_TEST = [
    "cupy-cuda13x>=14",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-crt==13.0.88",
]
TRANSFORMERS = ["transformers>=5.0"]
IMAGES = ["pillow>=11.3"]
# Sounds that are no WAV files.
AUDIO = ["soundfile>=0.13", "av>=14.0"]
VIDEO = ["av>=14.0"]
# vnext-replay export --to parquet
PARQUET = ["pyarrow>=14"]
DEV = [
    "anthropic>=2.12",
    "axe-core-python>=0.1",  # whether the pages keep anybody out
    "hypothesis>=6.100",
    "jsonschema>=4.23",
    "mypy>=2.4",
    "numba>=0.61",  # its simulator runs the CUDA index kernels in tests
    "openai>=2.0",
    "peft>=0.21",  # the oracle of LoRA adapters
    "psutil>=6",
    "pytest>=8.3",
    "pytest-benchmark>=5",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
    "ruff>=0.17",
    "selenium>=4.20",
    *TRANSFORMERS,
    *AUDIO,
    *IMAGES,
    *PARQUET,
    *VIDEO,
]
# Traces of requests: --otlp-traces-endpoint.
OTEL = ["opentelemetry-sdk>=1.40", "opentelemetry-exporter-otlp-proto-http>=1.40"]
# An engine's hosts in a Ray cluster, vnext in Ray Serve and in Ray Data: vnext/ray.
RAY = ["ray[data,serve]>=2.60"]
# Packages that talk to a server, whose sessions are tests. instructor and litellm contradict the versions of "dev":
# scripts/check_clients.sh talks to a server with them.
CLIENTS = ["langchain-openai>=1.7", "pydantic-ai-slim[openai]>=2.60"]
# What judges the files of scripts/deploy: Helm's own code, and the schemas of Kubernetes and of compose files.
DEPLOY = ["compose-spec>=0.2.1", "helm-python-sdk>=0.2.2", "kubernetes-validate>=1.37"]
CUDA += ["nvidia-nvvm==13.0.*"]  # numba-cuda compiles with it
COMMANDS = [
    "vnext = vnext.commands:vnext",
    "vnext-bench = vnext.commands:vnext_bench",
    "vnext-replay = vnext.commands:vnext_replay",
]


STORE = "vnext/state/store"
WRAPS = "-fwrapv"  # integers that overflow wrap, as numpy's do: a damaged log may hold any number
UNFUSED = "-ffp-contract=off"  # a product is rounded before it is added, on machines with fused instructions too
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]  # CPython passes each function a module or a type, which few use


def compiled(name: str, source: str, *headers: str) -> Extension:
    """A C module with the state's store among its headers: the log hashes as it does."""
    return Extension(
        name, [source], depends=["vnext/base/compiled.h", *headers], include_dirs=["vnext/base", STORE, "vnext/runtime/transport"],
        extra_compile_args=["-O3", "-g0", WRAPS, UNFUSED, *WARNINGS], optional=True,
    )  # fmt: skip


COLUMNS = [f"{STORE}/columns.h", f"{STORE}/blake2b.h", f"{STORE}/blake2b_words.h"]
# Without a compiler, the plain implementations run; `vnext doctor` reports which.
COMPILED = [
    compiled(
        "vnext.state.store._columns", "vnext/state/store/_columns.c", "vnext/state/store/drafts.h", "vnext/state/store/turn.h",
        *COLUMNS,
    ),
    compiled("vnext.state.store._prefix_index", "vnext/state/store/_prefix_index.c", "vnext/state/store/prefix_index.h"),
    compiled("vnext.log._log", "vnext/log/_log.c", "vnext/log/crc32.h", "vnext/log/steady_frame.h"),
    compiled(
        "vnext.log._open_blocks", "vnext/log/_open_blocks.c", "vnext/log/blake2b_keyed.h", "vnext/state/store/blake2b_words.h",
        "vnext/log/steady_frame.h",
    ),
    compiled("vnext.sampling.drafters._automaton", "vnext/sampling/drafters/_automaton.c"),
    compiled(
        "vnext.runtime.transport.ring._ring", "vnext/runtime/transport/ring/_ring.c", "vnext/runtime/transport/waiting.h",
    ),  # Linux only
    compiled(
        "vnext.runtime.transport.collectives._exchange", "vnext/runtime/transport/collectives/_exchange.c",
        "vnext/runtime/transport/collectives/rank_sum.h", "vnext/runtime/transport/waiting.h",
    ),  # Linux only
]

# One file per instruction set, chosen at run time; the portable one is for every machine.
CPU_KERNELS = "vnext.kernels.cpu._native"
CPU_FOLDER = Path("vnext") / "kernels" / "cpu" / "src"
CPU_WARNINGS = [*WARNINGS, "-Wshadow", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # intrinsics start from undefined values
CPU_WARNINGS += ["-Wno-psabi"]  # vectors are arguments of inlined functions only
CPU_FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", UNFUSED, *CPU_WARNINGS]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
BF16_FLAGS = [*AVX512_FLAGS, "-mavx512bf16", "-mavx512vbmi"]
X86_FLAGS = {
    "level_avx2.cpp": AVX2_FLAGS,
    "codes_avx2.cpp": AVX2_FLAGS,
    "codes_avx_vnni.cpp": [*AVX2_FLAGS, "-mavxvnni"],
    "codes_avx512_vnni.cpp": [*AVX512_FLAGS, "-mavx512vnni"],
    "level_avx512.cpp": AVX512_FLAGS,
    "level_avx512_bf16.cpp": BF16_FLAGS,
    "level_amx.cpp": [*BF16_FLAGS, "-mamx-tile", "-mamx-bf16"],
}
ARM_FLAGS = {"level_neon.cpp": [], "level_neon_bf16.cpp": ["-march=armv8.2-a+bf16"]}
ARM_FLAGS |= {"codes_neon.cpp": [], "codes_neon_dot.cpp": ["-march=armv8.2-a+dotprod"]}
LEVEL_FLAGS = X86_FLAGS | ARM_FLAGS
OWN, ALL = "own", "all"  # BUILD_LEVELS: the instructions that this processor has, the default where one builds in place; or all
PROCESSORS = {"x86_64": X86_FLAGS, "amd64": X86_FLAGS, "aarch64": ARM_FLAGS, "arm64": ARM_FLAGS}


def cpu_kernels() -> Extension:
    """The CPU kernels. Without a compiler, the plain torch implementations run; `vnext doctor` reports which."""
    processor = sysconfig.get_platform().rpartition("-")[2]  # what is compiled for, which a cross compiler's user names
    others = LEVEL_FLAGS.keys() - PROCESSORS.get(processor, {}).keys()
    found = sorted((ROOT / CPU_FOLDER).rglob("*.cpp"))
    sources = [path.relative_to(ROOT).as_posix() for path in found if path.name not in others]
    headers = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / CPU_FOLDER).rglob("*.h"))
    return Extension(
        CPU_KERNELS,
        sources,
        depends=["vnext/base/compiled.h", *headers],
        include_dirs=["vnext/base", CPU_FOLDER.as_posix()],
        extra_compile_args=CPU_FLAGS,
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


def runs_here(flags: list[str]) -> bool:
    """Whether this processor has the instructions that these flags let a compiler use; True where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return True
    known = next((line.replace("_", "").split() for line in lines if line.startswith("flags")), None)
    asked = (flag.removeprefix("-m").replace("-", "") for flag in flags if not flag.startswith("-march="))
    return known is None or all(name in known for name in asked)


def built_sources(sources: list[str], in_place: bool) -> list[str]:
    """Without the levels that BUILD_LEVELS leaves out."""
    levels = os.environ.get("BUILD_LEVELS") or (OWN if in_place else ALL)
    if levels not in (OWN, ALL):
        raise SystemExit(f"BUILD_LEVELS is {levels!r}: it must be {OWN} or {ALL}")
    return [source for source in sources if levels == ALL or runs_here(LEVEL_FLAGS.get(Path(source).name, []))]


# Built against torch's stable interface of 2.11: a module built with a later torch works with 2.11 too. Without torch (pip
# builds in isolation by default) the Python implementation runs; `vnext doctor` reports it.
LAUNCH_FOLDER = Path("vnext") / "kernels" / "cuda"
LAUNCH_FLAGS = ["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"]


def launches() -> list[Extension]:
    """The launches of the GPU kernels, if torch is installed in the build environment. Finds torch without importing it."""
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
            depends=["vnext/base/compiled.h", *((LAUNCH_FOLDER / name).as_posix() for name in ("launch.h", "tensors.h"))],
            include_dirs=["vnext/base", str(folder / "include")],
            library_dirs=[str(folder / "lib")],
            libraries=["torch_cpu"],
            extra_compile_args=LAUNCH_FLAGS,
            language="c++",
            optional=True,
        )
    ]


class Build(build_ext):
    """Embeds in each module the hash of its sources; compiles files with special flags separately.

    Skips unchanged files, comparing contents and not times, so that `vnext/base/compiled.py` never refuses a module that this build
    skipped. Keeps objects in build/, even under `pip install -e .`, which deletes its own build folder.
    """

    objects = f"build/objects-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        for ext in self.extensions:
            ext.sources = built_sources(ext.sources, bool(self.inplace))

    def run(self) -> None:
        super().run()
        if missing := [ext.name for ext in self.extensions if not Path(self.get_ext_fullpath(ext.name)).is_file()]:
            words = "they need a compiler of C and C++ (gcc, g++); without them plain code serves, many times slower"
            sys.stderr.write(f"warning: vnext is built without its compiled modules {', '.join(missing)}: {words}\n")

    def build_extension(self, ext: Extension) -> None:
        made, sources, path = copy(ext), [*ext.sources, *ext.depends], Path(self.get_ext_fullpath(ext.name))
        said = FINGERPRINT(ROOT, sources)
        if path.is_file() and said.encode() not in path.read_bytes():
            path.unlink()
        elif path.is_file():
            path.touch()  # sources that a checkout has only touched make no new build
        made.define_macros = [*ext.define_macros, ("VNEXT_BUILT_FROM", json.dumps(" ".join([said, *sources])))]
        if ext.name == CPU_KERNELS and not path.is_file():
            longest_first = sorted(ext.sources, key=lambda source: Path(source).parent.name != "isa")
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made.extra_objects = [*pool.map(lambda source: self.compiled_object(made, source), longest_first)]
            made.sources = []
        super().build_extension(made)

    def compiled_object(self, ext: Extension, source: str) -> str:
        """The object of one source. Compiles it unless an object of the same files and flags exists."""
        (path,) = self.compiler.object_filenames([source], output_dir=self.objects)
        listed, noted = Path(path).with_suffix(".d"), Path(path).with_suffix(".made-from")
        flags = [*ext.extra_compile_args, *LEVEL_FLAGS.get(Path(source).name, []), "-MMD", "-MF", str(listed)]
        macros = ext.define_macros if source.endswith("module.cpp") else []
        if self.force or not noted.is_file() or noted.read_text() != made_from(listed, flags, macros):
            self.compiler.compile(
                [source], output_dir=self.objects, macros=macros, include_dirs=ext.include_dirs, extra_postargs=flags
            )
            noted.write_text(made_from(listed, flags, macros))
        return path


def made_from(listed: Path, *settings: list) -> str:
    """The settings and file contents that an object depends on; `listed` is the compiler's list of the files it has read."""
    files = listed.read_text().replace("\\\n", " ").split()[1:]
    return f"{settings} {FINGERPRINT(ROOT, files)}"


def version() -> str:
    """The version in vnext/base/version.py, without an import, because the dependencies may not be installed yet."""
    scope: dict[str, str] = {}
    exec((ROOT / "vnext" / "base" / "version.py").read_text(), scope)
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
    package_data={
        "vnext": ["py.typed", "demo_model/*"],
        "vnext.replay.ui": ["page/*"],
        "vnext.server": ["page/*"],
        CUDA_SOURCES: ["*.cu", "*.cuh", "*.cpp", "*.h"],
    },
    ext_modules=[*COMPILED, cpu_kernels(), *launches()],
    cmdclass={"build_ext": Build},
    install_requires=CORE + RUNTIME + EDGE,
    extras_require={"audio": AUDIO, "clients": CLIENTS, "cuda": CUDA, "cuda-test": CUDA_TEST, "deploy": DEPLOY, "dev": DEV,
                    "images": IMAGES, "otel": OTEL, "parquet": PARQUET, "ray": RAY, "transformers": TRANSFORMERS, "video": VIDEO},
    entry_points={"console_scripts": COMMANDS},
    zip_safe=False,
)
