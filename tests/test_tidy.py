"""The tree checks itself: import arrows, sizes, headers, style, types, words, errors, environment, test names."""

from __future__ import annotations

import ast
import gc
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import house  # noqa: E402  (needs the path above)
from house import nodes, parsed  # noqa: E402

FOLDERS = ("vnext", "tests", "scripts", "examples", "docs", "perf", "cuda", ".ci", ".github")
TEXT_SUFFIXES = {".py", ".md", ".sh", ".txt", ".in", ".toml", ".cfg", ".ini", ".yml", ".yaml", ".cu", ".cuh", ".cpp", ".h", ""}
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 40
HEADER_LINES_MAX = 12
LINE_LENGTH_MAX = 132  # the house writes 120; the tree holds to a little more

# The rooms of vnext/, each a folder or a folder of runtime/: a room imports those before it only.
ROOMS = (
    "base", "kernels", "models", "state", "media", "log", "routing", "sched", "sampling", "sim", "runtime/protocol", "runtime/processes",
    "runtime/transport", "runtime/hosts", "runtime/batch", "runtime/gpu", "runtime/rank", "runtime/record", "runtime/engine",
    "runtime/client", "text", "server", "gateway", "options", "replay", "api", "commands", "ray",
)  # fmt: skip
# What each folder of vnext/ may import beside itself. "room" is the room with all its folders, "room/*" the files directly in
# it, "room/file" one file.
ARROWS = {
    "base": set(),
    "media": {"state/store/inputs", "base"},
    "runtime": set(),
    "runtime/transport": set(),
    "state": {"state/store", "state/facilities"},
    "state/facilities": {"state/*", "state/store"},
    "state/store": {"base"},
    "log": {"state", "base"},
    "sched": {"state"},
    "sim": {"sim/checks", "sched/*", "log", "state", "sampling/constraint"},  # the product's own fold
    "sim/checks": {"state"},
    "kernels": {"kernels/cpu", "kernels/cuda", "kernels/formats"},  # its table chooses among them
    "kernels/cpu": {"kernels/*", "kernels/formats", "base"},
    "kernels/cuda": {"kernels/*", "kernels/formats", "base"},
    "kernels/formats": {"kernels/*"},
    "models": {"base"},
    "models/gguf": {"models/*", "base"},
    "models/config": {"models/*", "models/gguf", "kernels/calls", "base"},
    "models/layers": {"models/*", "models/config", "kernels"},
    "models/loading": {
        "models/*", "models/config", "models/gguf", "models/layers", "models/loading/sources", "kernels", "base",
    },
    "models/loading/sources": {"base", "models/*", "models/config", "kernels/arrays"},
    "models/hosted": {"models/*", "models/config", "models/layers", "kernels/*", "base"},
    "models/families": {"models/*", "models/config", "models/layers", "kernels"},  # a draft head is no decoder
    "models/families/experts": {"models/config", "models/layers", "kernels/calls"},
    "models/families/hybrids": {"models/*", "models/config", "models/families/experts", "models/layers", "kernels/calls"},
    "models/families/encoders": {"models/config", "models/layers"},
    "models/families/towers": {
        "models/*", "models/config", "models/families/*", "models/families/experts", "models/families/hybrids", "models/layers",
        "kernels/arrays",
    },
    "models/families/latent": {"models/*", "models/config", "models/layers", "kernels/calls"},
    "sampling": {"kernels", "state/params", "base"},  # the table of sampling parameters
    "sampling/drafters": {"state/config", "base"},
    "text/structured": {"text/*", "state/params", "runtime/protocol"},
    "text/dialects": {"text/parts"},
    "text": {"text/dialects", "state/events", "state/params", "runtime/protocol", "base"},
    # the values of --attention; what an adapter's files say
    "runtime/protocol": {"state/*", "kernels/attention_backends", "kernels/format", "routing/policies", "base", "models"},
    "runtime/processes": {"runtime/protocol", "models/*", "models/config", "models/gguf", "models/loading", "base"},
    "runtime/transport/ring": {"runtime/processes", "state/*", "base"},
    "runtime/transport/collectives": {
        "runtime/processes", "models/layers", "kernels/arrays", "kernels/cuda", "kernels/shards", "base",
    },
    "runtime/record": {"log", "state/*", "base"},  # the log's header names the version
    "runtime/batch": {
        "models/layers", "runtime/protocol", "state", "log/pseudonyms", "sampling", "kernels/arrays",
    },
    "runtime/gpu": {
        "runtime/protocol", "runtime/batch", "state", "sampling", "models/registry", "models/config", "models/layers",
        "kernels",
    },
    "runtime/rank": {
        "media", "runtime/protocol", "runtime/processes", "runtime/transport/ring", "runtime/transport/collectives",
        "runtime/hosts", "runtime/batch", "runtime/gpu", "runtime/hosts/handover", "state/*", "state/facilities", "log/snapshot",
        "sampling", "models", "kernels", "base",
    },
    "runtime/engine": {
        "media/store", "media/vectors", "runtime/protocol", "runtime/processes", "runtime/transport/ring", "runtime/record", "runtime/batch",
        "runtime/rank", "runtime/hosts", "runtime/hosts/handover", "state/*", "state/facilities", "sched/*",
        "state/store/columns", "state/store/fields", "state/store/inputs", "log", "models/errors", "models/weight_index", "base",
    },
    "routing": {"base", "state/*", "log"},
    "runtime/client": {"runtime/protocol", "state/*", "state/store/inputs", "routing/*", "base"},
    "runtime/hosts": {
        "runtime/protocol", "runtime/processes", "runtime/transport/ring", "runtime/transport/collectives", "base",
    },
    "runtime/hosts/handover": {"base", "runtime/protocol", "runtime/hosts", "state/*", "state/facilities"},
    # sampling_params is what a client may ask for, shared with `LLM`; answers name the version, and processes end
    "server": {
        "server/batches", "server/messages", "server/ollama", "server/responses", "server/views", "server/http", "server/context",
        "runtime/protocol", "runtime/client", "runtime/processes", "routing/policies", "text", "state/params", "base",
    },
    "server/context": {
        "server/*", "runtime/protocol", "runtime/client", "text", "state/config", "state/params", "media", "base",
    },
    "server/http": {"server/*", "server/context", "runtime/protocol"},
    "server/batches": {"base", "server/context", "server/http/bodies", "runtime/protocol"},
    "server/answers": {"server/call", "server/context", "server/http", "runtime/protocol", "text", "state/events", "state/params"},
    "server/messages": {"server/context", "text", "runtime/protocol"},
    "server/ollama": {"server/context", "runtime/protocol"},
    "server/responses": {"base", "server/context", "text", "runtime/protocol"},
    "server/views": {
        "server/*", "server/batches", "server/messages", "server/ollama", "server/responses", "server/answers", "server/http",
        "server/context", "text", "state/events", "state/params", "state/store/inputs", "log", "runtime/protocol", "runtime/client", "base",
    },
    # `vnext router` is a server's outside once more
    "gateway": {
        "routing/*", "state/events", "server/*", "server/http", "server/context", "server/views/welcome", "runtime/protocol", "base",
    },
    "options": {
        "kernels/attention_backends", "kernels/format", "routing/policies", "gateway/settings", "runtime/protocol",
        "runtime/hosts/handover/source", "server/*", "sched/policies", "base",
    },
    "replay": {"replay/cli"},
    "replay/reading": {"log", "state/*", "state/store", "sched/*", "base"},
    "replay/console": {"replay/reading", "log", "base"},
    "replay/answers": {"base", "replay/console", "replay/reading", "routing/*", "log", "state", "sched/*"},
    "replay/futures": {"replay/console", "replay/reading", "routing/*", "log", "state/*", "state/facilities", "sched", "base", "sim"},
    "replay/causes": {"replay/futures", "replay/console", "replay/reading", "log", "state/*", "sched/explain"},
    "replay/tables": {
        "base", "replay/causes", "replay/execution", "replay/rerun", "replay/answers", "replay/console", "replay/reading", "log",
        "state/traits",
    },
    "replay/rerun": {
        "base", "kernels", "models", "sampling", "media/vectors", "runtime/protocol", "runtime/batch", "runtime/processes",
        "runtime/rank/by_parts", "runtime/rank/images", "runtime/rank/their_images", "state/*", "sched/*",
    },
    "replay/execution": {"replay/rerun", "replay/console", "replay/reading", "log", "state/*", "state/store/inputs"},
    "replay/ui": {
        "base", "replay/answers", "replay/console", "replay/reading", "log", "state/*", "sched/*", "server/http/static_files",
    },  # one static server of pages
    "replay/cli": {
        "replay/ui", "replay/tables", "replay/execution", "replay/rerun", "replay/answers", "replay/console",
        "replay/reading", "log", "base", "runtime/processes/inherited", "kernels/format",
    },
    "api": {
        "media", "runtime/protocol", "state/config", "state/events", "state/params", "text", "kernels", "models", "options",
        "runtime/client", "runtime/processes", "runtime/rank", "sampling",
    },
    # a command starts what it runs
    "commands": {
        "api", "base", "commands/chat", "gateway", "kernels", "models", "options", "runtime/engine", "runtime/gpu",
        "runtime/hosts", "runtime/processes", "runtime/protocol", "runtime/rank", "runtime/transport", "sampling",
        "server", "state", "text",
    },
    # a bench and a talk drive vnext as its users do
    "commands/bench": {
        "api", "commands/*", "commands/bench/load", "models/errors", "options", "text", "runtime/protocol", "runtime/client",
        "runtime/processes", "server/console", "base", "replay/answers/convert", "replay/futures/recording", "replay/reading/folding", "replay/reading/source",
        "replay/tables/plots", "runtime/gpu/cascade", "runtime/transport/collectives", "state/events", "state/state",
    },
    "commands/bench/control": {
        "commands/bench/*", "commands/bench/load", "options", "models/config", "models/errors", "replay/futures",
        "replay/reading/source", "runtime/protocol", "runtime/batch", "runtime/processes/launch", "runtime/transport/ring", "sched",
        "state",
    },
    "commands/bench/load": set(),
    "commands/chat": {"api", "commands/bench/load", "options", "text", "runtime/client", "runtime/processes", "runtime/protocol", "base"},
    # Ray starts hosts, servers and programs of vnext
    "ray": {
        "commands/*", "api", "runtime/protocol", "options/*", "routing/*", "gateway", "runtime/engine/executor",
        "runtime/hosts", "runtime/processes", "server/*", "base",
    },
}  # fmt: skip
FOLDER_FILES_MAX = 25
SOURCES = {".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".js"}
# Ratchets: today's figures, lowered by whoever lowers one, never raised. scripts/house.py counts and names the goals, which
# attributes and parameters keep.
SHORT_FILES_MAX = 35
ANYS_MAX = 966
EVENT_FILES_MAX = 20
# How many imports stand inside functions, with the reason. All others are at the top of their file.
LATE_IMPORTS = {
    # a command imports what it runs, and no other's
    "vnext/commands/cli.py": (10, "one for each command"),
    "vnext/commands/bench/cli.py": (1, "--help needs nothing that measures"),
    "vnext/commands/bench/running.py": (1, "an engine or a server is measured, never both"),
    "vnext/commands/models.py": (2, "the hub's package takes 0.1 s, and without its cache it has no models"),
    "vnext/commands/chat/terminal.py": (1, "a chat with a server needs no engine"),
    "vnext/replay/cli/log.py": (11, "one for each command"),
    "vnext/replay/cli/ui.py": (3, "aiohttp and the page, for one command"),
    "vnext/replay/console/commands.py": (1, "a bar, for those who wait for an index"),
    "vnext/replay/reading/index.py": (1, "reading an index that is there needs no scheduler"),
    "vnext/runtime/batch/masks.py": (1, "llguidance takes 70 ms, and most ranks never need it"),
    "vnext/sampling/constraint.py": (2, "the same"),
    "vnext/kernels/formats/gguf_blocks.py": (1, "gguf takes 300 ms, and only types that have no codes need it"),
    "vnext/server/views/operations.py": (2, "numpy, for a server that encodes"),
    # a start without what few need
    "vnext/base/spelling.py": (1, "difflib, for a name that is misspelt"),
    "vnext/models/loading/named.py": (1, "zipfile, for a wheel that is fetched"),
    "vnext/runtime/processes/replicas.py": (1, "threads, to end several engines"),
    # torch and the model's side come when a log has been found good
    "vnext/replay/rerun/kept_inputs.py": (1, "transformers, for models whose towers it computes"),
    "vnext/replay/execution/bisection.py": (3, "torch"),
    "vnext/replay/execution/execution.py": (5, "torch"),
    "vnext/replay/execution/audit.py": (5, "torch"),
    "vnext/replay/tables/profile.py": (3, "torch"),
    # extras
    "vnext/media/reader.py": (1, "transformers, whose processor some models need"),
    "vnext/media/pictures.py": (2, "Pillow, when the first image comes"),
    "vnext/media/films.py": (1, "PyAV, when the first video comes"),
    "vnext/media/pixels.py": (1, "Pillow"),
    "vnext/server/context/api_keys.py": (1, "yaml's own reader finds the line of a wrong weight, and only then is read"),
    "vnext/server/context/traces.py": (6, "OpenTelemetry, where traces are asked for"),
    # an order of starting
    "vnext/api/async_llm.py": (1, "vectors need numpy"),
    "vnext/api/generated.py": (2, "the engine starts while texts and client are imported"),
    "vnext/api/llm.py": (13, "the engine starts while what finds the model, texts and client are imported"),
    "vnext/api/task_maker.py": (8, "the engine starts while texts and client are imported"),
    "vnext/server/__main__.py": (1, "imported with the garbage collector off"),
    "vnext/runtime/engine/main.py": (2, "ranks are forked, and go on with imports of their own"),
    "vnext/runtime/engine/beginning.py": (1, "the settings are received first"),
    "vnext/runtime/rank/main.py": (1, "imported with the garbage collector off"),
    "vnext/runtime/processes/supervisor.py": (2, "ZMQ, where no engine core follows"),
    "vnext/runtime/processes/launch.py": (3, "`import vnext` starts an engine before it imports ZMQ"),
    "vnext/replay/reading/keep_index.py": (5, "its priority is lowered before anything is imported"),
    # a light profile: who does not compute needs neither torch nor numpy
    "vnext/state/events.py": (1, "numpy, which passing events on does not take"),
    "vnext/runtime/client/engines.py": (1, "a router, for several engines, with numpy"),
    "vnext/runtime/client/weight_update.py": (1, "numpy"),
    "vnext/server/views/embeddings.py": (1, "numpy"),
    "vnext/server/context/server_context.py": (2, "images and sounds, with numpy"),
    "vnext/server/answers/logprobs.py": (1, "numpy"),
    "vnext/server/context/structure.py": (1, "llguidance takes 70 ms, and many servers never need it"),
    "vnext/server/views/log_view.py": (2, "the log's format, with numpy"),
    "vnext/server/tls.py": (5, "ssl, which the launcher needs for a certificate only"),
    "vnext/runtime/engine/executor.py": (1, "a rank in the core's process brings torch"),
    # torch: a rank whose steps single calls compute never imports it
    "vnext/kernels/arrays.py": (2, "its tensors and dtypes, for who has loaded it"),
    "vnext/kernels/mxint8.py": (2, "the plain implementation"),
    "vnext/models/layers/fused.py": (1, "the step of a forward in torch"),
    "vnext/models/layers/heads.py": (3, "norms over all heads together, heads that have turned, and gates"),
    "vnext/models/layers/kv_cache.py": (1, "a GPU's cache"),
    "vnext/models/layers/recurrent.py": (1, "the work on tensors"),
    "vnext/models/layers/layers.py": (2, "the table of operations, and sums over ranks"),
    "vnext/models/layers/whole_step.py": (1, "adapters"),
    "vnext/models/loading/weights.py": (1, "tensors on a device"),
    "vnext/runtime/rank/runner.py": (6, "adapters, a GPU, several hosts, and steps that no single call computes"),
    # a GPU's packages, which a CPU does not have
    "vnext/kernels/batch_index.py": (2, "Numba"),
    "vnext/kernels/batch_numba.py": (1, "CuPy"),
    "vnext/kernels/cuda/backends.py": (1, "CuPy"),
    "vnext/kernels/cuda/compiling.py": (3, "CuPy and NVIDIA's headers"),
    "vnext/runtime/transport/collectives/device_memory.py": (1, "CuPy"),
    "vnext/runtime/transport/collectives/cpu_collectives.py": (1, "gloo, where ranks share no memory"),
    "vnext/runtime/transport/collectives/group.py": (6, "a rank on a CPU starts sooner"),
    "vnext/runtime/transport/collectives/meeting.py": (1, "gloo and GPUs"),
    "vnext/runtime/rank/gpu_loading.py": (1, "a second of torch's compiler"),
    "vnext/runtime/hosts/host_links.py": (1, "torch's store, for stages of several hosts"),
    "vnext/runtime/rank/loading.py": (10, "a rank on a CPU starts sooner"),
    "vnext/runtime/rank/together.py": (2, "a rank on a CPU starts sooner"),
    "vnext/runtime/rank/load_progress.py": (1, "tqdm, for checkpoints that take a while"),
    # seldom needed
    "vnext/base/installed.py": (1, "packages' metadata take 11 ms, and a family of ours needs none"),
    "vnext/models/gguf/folder.py": (3, "what describes a file is written once"),
    "vnext/models/loading/hub.py": (2, "a model in a folder needs no hub"),
    "vnext/options/parser.py": (1, "YAML, where a file of options is given"),
    "vnext/base/repeated.py": (1, "YAML, where a file of options or of keys is given"),
}
# Files that may read the environment, with the reason.
ENVIRONMENT_READERS = {
    "vnext/options/reader.py",  # the one reader of argv and environment
    "vnext/runtime/processes/run_dir.py",  # where a user's data lie, as HOME
    "vnext/commands/cli.py",  # its entry point
    "vnext/replay/cli/main.py",  # its entry point: multiprocessing knows no other way to keep a child from the working directory
    "vnext/replay/cli/ui.py",  # a server's key, which `ps` would show among the arguments
    "vnext/server/context/text_work.py",  # writes one, for `tokenizers`: it reads its number of threads nowhere else
    "vnext/runtime/processes/determinism.py",  # a rank's start-up: MKL and OpenMP read these when torch is imported, and only then
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}
# Written apart, so that this file may be read by itself.
FORBIDDEN_WORDS = ["TO" + "DO", "FIX" + "ME", "not " + "implemented", "NotImplemented" + "Error", "/" + "work/", "/" + "root/"]
WORD_EXCEPTIONS: dict[str, set[str]] = {}
# Identifiers that gave way to the field's words (docs/glossary.md), and the words.
RETIRED = {
    "DeviceForms": "DeviceVariants", "Wish": "RankRequest", "choose_form": "choose_variant", "forms_run": "variants_run",
    "Books": "Accounting", "CHAIN_0": "BLOCK_HASH_0", "Chance": "Rng", "Claim": "Allocation",
    "EPOCH": "PREEMPTION_COUNT", "Edge": "ServerContext", "EdgeMetrics": "ServerMetrics", "FedBatch": "DeviceBatch",
    "Felt": "ClientLatency", "Flight": "StepInFlight", "Flying": "PendingStep", "Gate": "RequestLimiter",
    "Keyframe": "Snapshot", "Lives": "Liveness", "Note": "SamplingUpdate", "Packer": "Compressor", "Past": "History",
    "PieceGraphs": "PiecewiseGraphs", "RowNotes": "SamplingUpdates", "SEALED": "HASHED_BLOCKS",
    "Settled": "MatchedSamples", "Shaper": "Redactor", "SpreadGroup": "TorchGroup", "StampFile": "TimestampFile",
    "Stamps": "Timestamps", "Standing": "CachedInputs", "SteadyStep": "DecodeStep", "Strode": "FastForwarded",
    "Tails": "OpenBlocks", "Tally": "StepCounts", "Told": "Reported", "Wishes": "FutureOptions", "_told": "_reported",
    "adjuster": "logits_processor_for", "batch_tokens_max": "max_num_batched_tokens", "block_count": "page_count",
    "chain_keys": "block_hashes", "chance": "rng", "chooser": "sampler_for", "claimed": "allocation",
    "column_forms": "columns", "donated": "take_store", "doors": "views", "epoch": "preemption_count",
    "epochs": "preemption_counts", "felt": "latency", "flight": "StepInFlight", "flights": "in_flight",
    "floors": "weight_thresholds", "fresh_pages": "new_page_count", "group_key": "group_hash",
    "heaviest": "top_weights", "keyframe": "snapshot", "keyframes": "snapshots", "log_forms": "log_bytes",
    "mixed_one": "place_hash", "model_len_max": "max_model_len", "named_blocks": "prefix_index.blocks",
    "no_names": "empty_prefix_index", "offered": "insert", "own_copy": "private_copy", "pack_block": "compress_block",
    "patience_ms": "timeout_ms", "patience_s": "poll_timeout_s", "prefill_threshold": "long_prefill_token_threshold",
    "retold": "redecided", "root_key": "root_hash", "running_max": "max_num_seqs", "said": "reported", "sealed": "hashed_blocks",
    "settled": "matched", "shaper": "redactor", "speaks": "reports_tokens", "stamped": "timestamped",
    "stamps": "timestamps", "table_sum": "table_hash", "tally": "step_counts", "told": "reported",
    "waiting_sum": "waiting_hash", "weigh": "fixed_point_weights",
}  # fmt: skip

# Words that comments and docstrings of the product do without, beside the identifiers above that are no words of English.
RETIRED_IN_PROSE = {
    "Stamps": "Timestamps", "door": "route, check", "doors": "routes, checks", "keyframe": "snapshot", "told": "reported, sent",
    "twin": "plain implementation", "twins": "plain implementations", "whoever": "the process that",
} | {word: said for word, said in RETIRED.items() if "_" in word.strip("_") or re.search("[a-z][A-Z]", word)}  # fmt: skip

# Words that comments, names and texts of C, C++ and CUDA do without.
RETIRED_IN_C = {
    "door": "interface", "Door": "Entry", "said": "reported", "stride over": "skip", "tell": "report", "told": "reported",
    "twin": "plain implementation", "twins": "plain implementations", "whoever": "the process that",
}  # fmt: skip

# Words that pages do without; the names that logs keep stand in the glossary.
RETIRED_IN_PAGES = {
    "anybody": "a request, a client, a process", "door": "route", "doors": "routes", "nobody": "no client, no request",
    "said": "reported", "told": "reported", "twin": "plain implementation", "whoever": "the client that",
}  # fmt: skip
KEEPS_OLD_NAMES = {"docs/glossary.md"}


@pytest.fixture(scope="module", autouse=True)
def keeps_syntax_trees() -> Iterator[None]:
    """Millions of nodes that all stay: to search them for garbage takes twice as long as to parse them, here and in whatever this
    process tests next."""
    gc.disable()
    yield
    for cached in (parsed, nodes, imported_files):
        cached.cache_clear()
    gc.enable()


def files(*suffixes: str) -> list[Path]:
    """Files of the tree by suffix: the known folders and the top level, without caches and build outputs."""
    return [path for path in tree() if path.suffix in suffixes]


@cache
def tree() -> tuple[Path, ...]:
    inside = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    found = [path for path in [*sorted(ROOT.glob("*")), *inside] if path.is_file() and path.name != ".git"]  # a worktree's
    return tuple(path for path in found if "__pycache__" not in path.parts and not path.name.endswith(".so"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def product_files() -> list[Path]:
    return [path for path in files(".py") if name_of(path).startswith("vnext/")]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions; `from vnext import x` is vnext.x."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"vnext.{n.name}") for n in node.names) if module == "vnext" else [(node.lineno, module)]


# ---- arrows ------------------------------------------------------------------------------------------------------


def folder_of(path: Path) -> str:
    """The folder of a product file, "" for the files beside the rooms."""
    return path.parent.relative_to(ROOT / "vnext").as_posix().removeprefix(".")


def is_allowed(path: Path, allowed: str) -> bool:
    place = path.relative_to(ROOT / "vnext").with_suffix("").as_posix()
    if allowed.endswith("/*"):
        return folder_of(path) == allowed.removesuffix("/*")
    return place == allowed or place.startswith(f"{allowed}/")


def arrows_from(folder: str) -> Iterator[tuple[Path, Path]]:
    """(file, what it imports of ours in another folder) for the files directly in a folder."""
    for path in sorted((ROOT / "vnext" / folder).glob("*.py")):
        for found in sorted(imported_files(path)):
            if folder_of(found) != folder and found.name != "__init__.py":
                yield path, found


@pytest.mark.parametrize("folder", ARROWS)
def test_import_arrows(folder: str) -> None:
    wrong = [
        f"{name_of(path)} imports {name_of(found)}"
        for path, found in arrows_from(folder)
        if not any(is_allowed(found, allowed) for allowed in ARROWS[folder])
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ARROWS)
def test_every_arrow_is_used(folder: str) -> None:
    found = {found for _, found in arrows_from(folder)}
    assert [allowed for allowed in ARROWS[folder] if not any(is_allowed(path, allowed) for path in found)] == []


def test_rooms_import_only_rooms_before_them() -> None:
    assert upward_arrows() == []


def upward_arrows() -> list[str]:
    return [
        f"{name_of(path)} imports {name_of(found)}"
        for path in product_files()
        for found in imported_files(path)
        if folder_of(path) and folder_of(found) and floor_of(path) < floor_of(found)
    ]


def floor_of(path: Path) -> int:
    """The number of a file's room; runtime/ itself, which holds no code, has its first room's."""
    first, *rest = folder_of(path).split("/")
    return ROOMS.index(first if first != "runtime" else f"{first}/{rest[0]}" if rest else "runtime/protocol")


def test_folders_point_one_way() -> None:
    """The folders in a room stand in no circle; a file beside its room's folders is a place of its own."""
    graph: dict[str, set[str]] = {}
    for path in product_files():
        for found in imported_files(path):
            graph.setdefault(place_of(path), set()).add(place_of(found))
    try:
        TopologicalSorter({place: to - {place} for place, to in graph.items()}).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def place_of(path: Path) -> str:
    folder = folder_of(path)
    return folder if "/" in folder else path.relative_to(ROOT / "vnext").as_posix()


def test_every_folder_is_known_and_says_what_lives_there() -> None:
    """What lives in it, what may not, and which machine it has met, with the command."""
    found = {folder_of(path) for path in product_files()} - {""}
    assert found == set(ARROWS)
    texts = {folder: ast.get_docstring(parsed(ROOT / "vnext" / folder / "__init__.py")) or "" for folder in found}
    wrong = [folder for folder, text in texts.items() if len(text.splitlines()) < 3 or not re.search(r"Has (not )?met .*`", text)]
    assert wrong == []


def test_folders_are_small() -> None:
    counts = Counter(name_of(path.parent) for path in tree() if path.suffix in SOURCES and not path.parent.samefile(ROOT))
    large = {folder: count for folder, count in counts.items() if count > FOLDER_FILES_MAX}
    assert {folder: count for folder, count in large.items() if folder.split("/")[0] in ("vnext", "tests", "cuda")} == {}


def file_of(module: str) -> Path | None:
    """Where a module of ours stands."""
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def imported_files(path: Path) -> set[Path]:
    """What a file imports of ours, anywhere in it: also for its types alone, also when it is first needed."""
    named = {module for _, module in imports(path)}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {f"{node.module}.{name.name}" for name in node.names}
    return {found for module in named if module.startswith("vnext.") and (found := file_of(module))} - {path}


def test_no_circle_of_imports() -> None:
    try:
        TopologicalSorter({path: imported_files(path) for path in product_files()}).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(name_of(path) for path in reversed(circle.args[1])))


def test_imports_are_at_the_top() -> None:
    """But for those of LATE_IMPORTS, each of which has a reason."""
    late = {name_of(path): count for path in product_files() if (count := late_import_count(path))}
    assert late == {name: count for name, (count, _) in LATE_IMPORTS.items()}


def late_import_count(path: Path) -> int:
    functions = (node for node in nodes(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return len({node for each in functions for node in ast.walk(each) if isinstance(node, (ast.Import, ast.ImportFrom))})


def test_imports_are_absolute() -> None:
    wrong = [f"{name_of(path)}:{line} {module}" for path in files(".py") for line, module in imports(path) if module[0] == "."]
    assert wrong == []


def test_product_code_imports_no_tests_and_nothing_unsafe() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in files(".py")
        for line, module in imports(path)
        if module.split(".")[0] in FORBIDDEN_MODULES or (module.startswith("tests") and name_of(path).startswith("vnext/"))
    ]
    assert wrong == []


def test_no_python_among_the_cuda_sources() -> None:
    """`cuda` is also NVIDIA's namespace package: a Python file there would hide theirs."""
    assert [name_of(path) for path in files(".py", ".pyi", ".pyc") if name_of(path).startswith("cuda/")] == []


# ---- files and functions -----------------------------------------------------------------------------------------


def test_every_file_opens_with_what_it_owns() -> None:
    wrong = []
    for path in files(".py"):
        header = ast.get_docstring(parsed(path), clean=False)
        if header is None or len(header.splitlines()) > HEADER_LINES_MAX:
            wrong.append(f"{name_of(path)} has {'no header' if header is None else 'a long header'}")
    assert wrong == []


def test_files_are_small() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in product_files()}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES_MAX} == {}


def test_functions_are_small() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in product_files()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert wrong == []


def test_classes_have_few_attributes() -> None:
    counts = house.attribute_counts()
    assert {name: count for name, count in counts.items() if count > house.ATTRIBUTES} == {}


def test_functions_have_few_parameters() -> None:
    counts = house.parameter_counts()
    assert {name: count for name, count in counts.items() if count > house.PARAMETERS} == {}


def test_few_files_are_fragments() -> None:
    """A helper that is only the name of a cut goes back to its caller."""
    short = house.short_files()
    assert len(short) <= SHORT_FILES_MAX, short


def test_types_of_every_file_are_judged() -> None:
    """By mypy, which leaves nothing out."""
    assert house.unjudged_files() == []


def test_few_types_are_any() -> None:
    assert house.any_count() <= ANYS_MAX


def test_few_files_name_a_plan_as_an_event() -> None:
    """Others ask `plan_of`, or read the traits of events (vnext/state/traits.py)."""
    named = [name_of(path) for path in product_files() if house.EVENT in path.read_text()]
    assert len(named) <= EVENT_FILES_MAX


def test_calls_take_no_slice_of_a_struct() -> None:
    """`f(*batch[:7])`: a field that moves would silently become another argument. Pass fields by their names."""
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        for given in node.args
        if isinstance(given, ast.Starred) and isinstance(given.value, ast.Subscript) and isinstance(given.value.slice, ast.Slice)
    ]
    assert wrong == []


def test_a_program_begins_when_its_file_is_read() -> None:
    """`if __name__ == "__main__"` comes last: what stands below it is not defined yet when the program runs."""
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in files(".py")
        for node in parsed(path).body[:-1]
        if isinstance(node, ast.If) and "__name__" in named(node.test)
    ]
    assert wrong == []


def test_lines_are_short() -> None:
    wrong = [
        f"{name_of(path)}:{number}"
        for path in product_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > LINE_LENGTH_MAX
    ]
    assert wrong == []


# ---- words, errors, environment ----------------------------------------------------------------------------------


def test_ruff_finds_nothing() -> None:
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", str(ROOT)]
    found = subprocess.run(ruff, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.timeout(1800)
def test_types_hold() -> None:
    """The rooms and the strictness are in mypy.ini. Seconds with its cache, half a minute without, and much more on a busy machine."""
    found = subprocess.run([sys.executable, "-m", "mypy", "--no-error-summary"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_forbidden_words() -> None:
    wrong = []
    for path in files(*TEXT_SUFFIXES):
        name, text = name_of(path), path.read_text()
        for word in FORBIDDEN_WORDS:
            if word.lower() in text.lower() and word not in WORD_EXCEPTIONS.get(name, set()):
                line = text.lower()[: text.lower().index(word.lower())].count("\n") + 1
                wrong.append(f"{name}:{line} contains {word!r}")
    assert wrong == []


def test_retired_words_stay_away() -> None:
    """As identifiers of the product; a word that means another thing elsewhere is not in the list."""
    wrong = {
        f"{name_of(path)}:{token.start[0]} says {token.string}: say {RETIRED[token.string]}"
        for path in product_files()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NAME and token.string in RETIRED
    }
    assert sorted(wrong) == []


def test_retired_words_stay_away_from_prose() -> None:
    """Of comments, docstrings and pages. In backquotes a word may be an identifier that lives on in old logs."""
    words = re.compile(rf"(?<![\w`])({'|'.join(map(re.escape, RETIRED_IN_PROSE))})(?![\w`])")
    wrong = {
        f"{name_of(path)}:{token.start[0] + token.string[: found.start()].count(chr(10))} says {found[0]}: {RETIRED_IN_PROSE[found[0]]}"
        for path in product_files()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
        for found in words.finditer(token.string)
    } | {
        f"{name_of(path)} says {found[0]}: {RETIRED_IN_PROSE[found[0]]}"
        for path in files(".md")
        if path.parent in (ROOT, ROOT / "docs") and path.name != "CHANGELOG.md"
        for found in words.finditer(path.read_text())
    }
    assert sorted(wrong) == []


def test_retired_words_stay_away_from_c() -> None:
    words = re.compile(rf"\b({'|'.join(RETIRED_IN_C)})\b")
    wrong = [
        f"{name_of(path)}:{number} says {found[0]}: say {RETIRED_IN_C[found[0]]}"
        for path in files(".c", ".cpp", ".h", ".cu", ".cuh")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (found := words.search(line))
    ]
    assert wrong == []


def test_retired_words_stay_away_from_pages() -> None:
    """Retired identifiers as code of docs/ and README.md, the words above in their prose. What commands print is left out."""
    words = re.compile(rf"\b({'|'.join(RETIRED_IN_PAGES)})\b", re.IGNORECASE)
    wrong = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = house.by_hand(page)
        wrong += [f"{name_of(page)} says {found}: say {RETIRED_IN_PAGES[found.lower()]}" for found in words.findall(text)]
        if name_of(page) not in KEEPS_OLD_NAMES:
            code = {name for part in re.findall(r"`[^`\n]+`", text) for name in re.findall(r"(?<![-\w])\w+(?![-\w])", part)}
            wrong += [f"{name_of(page)} says {name}: say {RETIRED[name]}" for name in sorted(code & set(RETIRED))]
    assert wrong == []


def test_no_bare_except_and_broad_ones_say_why() -> None:
    """A broad `except` stands only at an effect boundary: its line has the reason, or its last word is `raise`."""
    wrong = []
    for path in files(".py"):
        lines = path.read_text().splitlines()
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or "Exception" in named(node.type) or "BaseException" in named(node.type)
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if node.type is None or (broad and not raises_again and "#" not in lines[node.lineno - 1]):
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert wrong == []


def named(node: ast.expr) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def test_only_the_edge_reads_the_environment() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        if name_of(path) not in ENVIRONMENT_READERS
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {n.name for n in node.names} & {"environ", "getenv"})
    ]
    assert wrong == []


def test_exceptions_to_the_rules_are_still_needed() -> None:
    for name in ENVIRONMENT_READERS - {"vnext/commands/cli.py"}:
        assert "environ" in (ROOT / name).read_text(), f"{name} reads no environment any more: take it from the list"


# ---- tests -------------------------------------------------------------------------------------------------------


def test_test_files_have_names_of_their_own() -> None:
    """Test folders are no packages, so two files of one name would hide each other."""
    names = Counter(path.name for path in files(".py") if name_of(path).startswith("tests/") and path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
    assert [name_of(path) for path in files(".py") if name_of(path).startswith("tests/") and path.name == "__init__.py"] == []


def test_test_folders_mirror_the_rooms() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders <= set(ARROWS) | {".", "sim", "sim/planted", "golden", "e2e", "recovery", "rollouts", "cuda", "cuda/shim", "cuda/steps", "gpu", "arm", "stages", "hosts", "run"}


# ---- pages -------------------------------------------------------------------------------------------------------


def test_pages_are_listed_and_their_links_lead_somewhere() -> None:
    pages = [path for path in files(".md") if "[" in path.read_text()]
    targets = {path: re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()) for path in pages}
    assert [
        f"{name_of(path)}: {link}"
        for path, links in targets.items()
        for link in links
        if not (path.parent / link).exists()
    ] == []
    index = ROOT / "docs" / "README.md"
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {index.name} == {
        link for link in targets[index] if "/" not in link
    }


def test_bytes_that_are_no_text_or_nested_too_deep_are_caught_as_damage_is() -> None:
    """msgspec raises UnicodeDecodeError and RecursionError of Python's own, beside DecodeError."""
    wrong = []
    for path in product_files():
        for node in ast.walk(parsed(path)):
            caught = set(re.findall(r"\w+", ast.unparse(node.type))) if isinstance(node, ast.ExceptHandler) and node.type else set()
            if caught & {"DecodeError", "MsgspecError"} and not (
                caught & {"UnicodeError", "UnicodeDecodeError", "ValueError", "BAD_FORM"} and caught & {"RecursionError", "BAD_FORM"}
            ):
                wrong.append(f"{name_of(path)}:{node.lineno} catches {sorted(caught)}")
    assert wrong == []


def test_errors_of_the_system_lose_their_number() -> None:
    """People read what vnext.base.spelling.reason says of an OSError: Python's own words begin with [Errno 2]."""
    wrong = []
    for path in product_files():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ExceptHandler) or node.type is None or "OSError" not in ast.unparse(node.type):
                continue
            bare = re.compile(rf"\{{{node.name}\}}|\bstr\({node.name}\)|\b{node.name}\.strerror or |\.warning\(.*, {node.name}[,)]")
            if any(bare.search(ast.unparse(line)) for line in node.body):
                wrong.append(f"{name_of(path)}:{node.lineno}")
    assert wrong == []
