"""Options: the one reader of argv and of the environment.

Owns what `vnext serve | chat | doctor` may be told. Types and defaults are those of EngineSettings and ServerSettings,
bounds those of bounds.py: nothing is written twice, and every engine option is a keyword of `LLM(...)` too.
Starts nothing and opens nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from vnext.bounds import SIZES, checked, engine_settings, size_text
from vnext.hints import unknown_option
from vnext.runtime.settings import EngineSettings, SettingsError
from vnext.server.settings import ServerSettings
from vnext.version import __version__

API_KEY_VARIABLE = "VNEXT_API_KEY"
ENGINE_HELP = {
    "generation_config": "auto takes usual sampling and ending tokens from the model's generation_config.json",
    "device": "where the model is computed; auto is a GPU where torch can use one",
    "dtype": "number type of weights and cache; auto takes the checkpoint's, on a CPU bfloat16 for float16",
    "quantization": "int8 rounds weights as they are loaded, one scale an output: half the memory to hold and to read",
    "deterministic": "a request's tokens do not depend on its batch (default: where that is free, and in float32)",
    "seed": "roots the keys of requests that bring no seed (default: a fresh one)",
    "max_model_len": "tokens of one request, answer included (default: the model's)",
    "max_num_seqs": "requests in the batch",
    "max_num_batched_tokens": "tokens of one step",
    "long_prefill_token_threshold": "tokens that one prompt may take in one step, 0 for no such bound",
    "block_size": "tokens of one cache block",
    "num_blocks_override": "cache blocks, whatever memory says",
    "kv_cache_memory": "memory for one rank's cache; 512M is binary, 512MB decimal (default: by the machine)",
    "enable_prefix_caching": "requests share the blocks of equal beginnings",
    "enable_chunked_prefill": "a long prompt may take several steps",
    "async_scheduling": "plan the next step while this one runs",
    "scheduling_policy": "who goes first: fcfs, priority (lowest number first) or your own package.module:function",
    "tensor_parallel_size": "ranks that share each layer",
    "threads": "threads of each rank (default: by the machine)",
    "gpu_memory_utilization": "share of a GPU's memory that weights, work and cache may take",
    "enforce_eager": "on a GPU: capture no graphs",
    "graph_sizes": "on a GPU: numbers of rows that steps of decodes are captured for (default: up to --max-num-seqs)",
    "compile": "on a GPU: fuse what is captured by torch's compiler; takes minutes at the start",
    "attention": "on a GPU: our kernels' attention, or FlashInfer's where that is installed",
    "executor": "ranks as processes of their own, or one rank inside the engine core",
    "log_dir": "where each start makes its own log folder (default: ~/.local/state/vnext/logs)",
    "log": "what the log keeps: decisions without texts, everything, nothing",
    "log_max_bytes": "size of one start's log, whose oldest parts go then; 512M is binary, 0 for no such bound",
    "log_max_age_s": "seconds after which parts of the log go, 0 for no such bound",
    "log_durable": "each step waits until the disk has its record: a power cut costs no more of the log than a kill",
    "log_compress": "parts of the log that are complete are made smaller, in the background",
    "digest_interval": "steps between two comparisons of all ranks' states",
    "check_laws": "check every law of the state after every event; for debugging, slow",
    "ipc_bytes_max": "largest tensor that ranks on GPUs exchange through mapped memory, NCCL takes larger ones; as 2M",
}
SERVER_HELP = {
    "host": "address to listen on; 0.0.0.0 for every interface",
    "port": "0 lets the system choose",
    "api_key": f"clients must send it as a bearer token; better given as {API_KEY_VARIABLE}, which `ps` does not show",
    "served_model_names": "names that requests may use for the model (default: the folder's name and MODEL as it was given)",
    "chat_template_path": "a Jinja file in place of the checkpoint's chat template",
    "show_log": "viewers may read the log as it grows (vnext-replay ui --live URL): with --api-key, or on this machine",
    "drain_s": "seconds that running requests get when the server stops",
    "log_level": "info adds one line for each HTTP request",
}
FLAGS = {
    "graph_sizes": ("--graph-sizes", "--cuda-graph-sizes"),
    "attention": ("--attention", "--attention-backend"),
    "served_model_names": ("--served-model-name",),
    "chat_template_path": ("--chat-template",),
    "drain_s": ("--drain-timeout",),
    "log_max_age_s": ("--log-max-age",),
    "log_durable": ("--log-durable", "--durable"),
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "num_blocks_override": ("--num-blocks-override", "--num-gpu-blocks-override"),
    "threads": ("--threads", "-t"),
    "kv_cache_memory": ("--kv-cache-memory", "--kv-cache-memory-bytes"),
}


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext serve`: an engine and its HTTP edge."""

    engine: EngineSettings
    server: ServerSettings


class ChatCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext chat`: with the server at `url`, or, where that is "", with an engine of its own."""

    url: str
    api_key: str
    engine: EngineSettings
    system: str
    temperature: float
    max_tokens: int | None
    seed: int | None


class DoctorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext doctor`."""

    json: bool


Command = ServeCommand | ChatCommand | DoctorCommand


def command_line() -> list[str]:
    """What this process was told, without its name."""
    return sys.argv[1:]


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Command:
    """What `argv`, without the program's name, asks for. A bad one ends the program with one sentence and status 2."""
    parser = _parser()
    given = parser.given(argv)
    command = given.pop("command")
    try:
        return _COMMANDS[command](given, environment)
    except SettingsError as error:
        parser.fail(command, str(error))


def api_key(given: str, environment: Mapping[str, str] = os.environ) -> str:
    """The key that was given, else the environment's."""
    return given or environment.get(API_KEY_VARIABLE, "")


def server_url(given: str) -> str:
    """A server's address, however it was written: with the path of its API as OpenAI's clients want it, or without http."""
    url = given.rstrip("/").removesuffix("/v1")
    return url if not url or "://" in url else f"http://{url}"


class Parser(argparse.ArgumentParser):
    """A program of several commands. Says what is wrong in one sentence; the page of usage only when asked for."""

    def add_commands(self, metavar: str) -> argparse._SubParsersAction:
        """Where commands are added."""
        self._commands = self.add_subparsers(dest="command", required=True, metavar=metavar)
        return self._commands

    def given(self, argv: Sequence[str]) -> dict[str, Any]:
        """What was given, `command` too. Ends the program with a hint for what the command does not take."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            known = re.findall(r"--[a-z-]+", self._commands.choices[found.command].format_usage())
            self.fail(found.command, f"{unknown_option(unknown[0], known)}\nSee {self.prog} {found.command} --help.")
        return vars(found)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")

    def fail(self, command: str, message: str) -> NoReturn:
        self.exit(2, f"{self.prog} {command}: {as_flags(message)}\n")


def _parser() -> Parser:
    parser = Parser(prog="vnext", description="An LLM engine built as one replicated state machine.")
    parser.add_argument("--version", action="version", version=f"vnext {__version__}")
    commands = parser.add_commands("serve | chat | doctor")
    _add_serve(commands.add_parser("serve", help="serve a model over HTTP, as OpenAI's API", allow_abbrev=False))
    _add_chat(commands.add_parser("chat", help="talk to a model in the terminal", allow_abbrev=False))
    doctor = commands.add_parser("doctor", help="what this machine has and what vnext makes of it", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    server, engine = parser.add_argument_group("HTTP"), parser.add_argument_group("engine")
    for name, words in SERVER_HELP.items():
        _add_field(server, ServerSettings, name, words)
    add_engine_options(engine)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--url", default="", help="a running server; without it an engine is started for this talk")
    parser.add_argument("--api-key", default="", help=f"the server's key, better given as {API_KEY_VARIABLE}")
    parser.add_argument("--system", default="", help="what the model is told before the talk begins")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="length of an answer (default: what fits)")
    parser.add_argument("--sampling-seed", type=int, help="the same words give the same answer")
    add_engine_options(parser.add_argument_group("the engine, without --url"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    words = "a folder or a hub id (default: the bundled demo model)"
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=words)


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Every engine option. What is not given stays out of the parse."""
    for name, words in ENGINE_HELP.items():
        _add_field(group, EngineSettings, name, words)


def _add_field(group: argparse._ArgumentGroup, struct: type[msgspec.Struct], name: str, words: str) -> None:
    """One option for one field. Its default stays out of the parse: what was not given is the struct's business."""
    hint, default = _hints(struct)[name], _defaults(struct)[name]
    if default not in (None, "", ()) and hint is not bool:
        words += f" (default: {default if name not in SIZES else size_text(default)})"
    form: dict[str, Any] = {"type": str}
    if hint is bool or bool in get_args(hint):
        usual = "" if default is None else f" (default: {'on' if default else 'off'})"
        form, words = {"action": argparse.BooleanOptionalAction}, words + usual
    elif get_origin(hint) is Literal:
        form = {"metavar": "|".join(get_args(hint))}
    elif get_origin(hint) is tuple:
        form = {"nargs": "+", "metavar": "N", "type": int} if int in get_args(hint) else {"nargs": "+", "metavar": "NAME"}
    elif name not in SIZES and (hint in (int, float) or int in get_args(hint)):
        form = {"type": float if hint is float else int, "metavar": "N"}
    group.add_argument(*_flags_of(name), dest=name, default=argparse.SUPPRESS, help=words, **form)


def _flags_of(name: str) -> tuple[str, ...]:
    return FLAGS.get(name, ("--" + name.replace("_", "-"),))


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct)


@cache
def _defaults(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(struct)}


def as_flags(message: str) -> str:
    """The sentence with options in place of field names: any at its beginning, those with an underscore anywhere."""
    names = (*ENGINE_HELP, *SERVER_HELP)
    pattern = rf"^(?:{'|'.join(names)})\b|\b(?:{'|'.join(name for name in names if '_' in name)})\b"
    return re.sub(pattern, lambda match: _flags_of(match[0])[0], message)


def engine_of(given: Mapping[str, Any]) -> EngineSettings:
    """The engine's part of a parse. Raises SettingsError."""
    return engine_settings(**{name: value for name, value in given.items() if name == "model" or name in ENGINE_HELP})


def _serve_command(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServeCommand:
    hints = _hints(ServerSettings)
    values = {name: checked(name, value, hints) for name, value in given.items() if name in SERVER_HELP}
    values["api_key"] = api_key(values.get("api_key", ""), environment)
    engine, server = engine_of(given), ServerSettings(**values)
    if len(server.served_model_names) > 1 and "model" not in given:
        raise SettingsError(
            f"served_model_names takes {' and '.join(server.served_model_names)}, and no model is left: name the model first, as "
            "in `vnext serve MODEL --served-model-name NAME`."
        )
    if server.show_log and engine.log == "off":
        raise SettingsError("show_log is on and log is off: there is nothing to show, so leave one of the two out.")
    return ServeCommand(engine=engine, server=server)


def _chat_command(given: Mapping[str, Any], environment: Mapping[str, str]) -> ChatCommand:
    if given["url"] and (useless := [name for name in given if name in ENGINE_HELP]):
        raise SettingsError(f"{useless[0]} is for an engine, and with --url none is started: leave one of the two out.")
    return ChatCommand(
        url=server_url(given["url"]),
        api_key=api_key(given["api_key"], environment),
        engine=engine_of(given),
        system=given["system"],
        temperature=given["temperature"],
        max_tokens=given["max_tokens"],
        seed=given["sampling_seed"],
    )


def _doctor_command(given: Mapping[str, Any], environment: Mapping[str, str]) -> DoctorCommand:
    return DoctorCommand(json=given["json"])


_COMMANDS = {"serve": _serve_command, "chat": _chat_command, "doctor": _doctor_command}
