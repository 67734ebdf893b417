"""Option parser: turns argv, the environment and a file into checked values by field, and shows the help.

Owns the notations of an argument (underscores for dashes, --x=1, --no-x), the one-sentence error for each misuse, the groups in
which `--help` lists options, and what `--help WORD` shows. argparse splits the words and prints the help; its own messages are not
shown. Ends the program with status 2 for unusable input, and prints on stderr which options it ignores and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from vnext.base.repeated import repeated_key
from vnext.base.spelling import close_to, reason
from vnext.options.foreign import FOREIGN, OLLAMA, ON, Foreign, unknown_option
from vnext.options.settings_check import checked
from vnext.options.spellings import SIZES, size_text
from vnext.options.table import (
    API_KEY_VARIABLE,
    CONFIG,
    ENGINE_HELP,
    MODEL,
    PREFIX,
    SERVER_HELP,
    Option,
    as_flags,
    every_option,
)
from vnext.runtime.protocol.log_lines import line
from vnext.runtime.protocol.settings import SettingsError

EPILOG = (
    "You can also set each option in the YAML file of --config, as `max-model-len: 4096`, or in the environment, as "
    "VNEXT_MAX_MODEL_LEN=4096. The command line overrides the environment, and the environment overrides the file. vLLM "
    "options that ask for what vnext does anyway are ignored, with a line that says why."
)

REPEATED = {"api_keys": "KEY", "backends": "URL", "other_models": "MODEL"}
"""Options that are written once for each value, of this kind: a word behind a value may be the model."""


class Given(NamedTuple):
    """The arguments of a command: checked values by field. Omits fields without a value, unless the option has no struct.

    `labels`: the name of each field in error sentences. `typed`: the fields that the command line sets.
    """

    command: str
    values: dict[str, Any]
    labels: dict[str, str]
    typed: frozenset[str]


class Parser(argparse.ArgumentParser):
    """A program of several commands, or one of these commands."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "exit_on_error": False} | keywords)
        self._options: dict[str, Option] = {}
        self._is_started: set[str] = set()
        self._foreign: Mapping[str, Foreign] = {}
        self._commands: dict[str, Parser] = {}

    def add_commands(self, metavar: str) -> argparse._SubParsersAction[Parser]:
        added: argparse._SubParsersAction[Parser] = self.add_subparsers(dest="command", metavar=metavar)
        self._commands = added.choices
        return added

    def command(self, name: str) -> Parser:
        return self._commands[name]

    def add_groups(self, options: Iterable[Option]) -> None:
        for option in options:
            title = groups()[option.name]
            group = next((each for each in self._action_groups if each.title == title), None)
            self.add_option(group or self.add_argument_group(title), option)
        shown = self._get_positional_actions()
        words = (f"[{each.metavar} ...]" if each.nargs == "*" else f"[{each.dest.upper()}]" for each in shown)
        self.usage = " ".join((self.prog, *words, "[options]"))
        names = ", ".join(each.title or "" for each in self._action_groups[2:])
        self.description = f"`{self.prog} --help WORD` shows the options about a word, or one of these groups: {names}."

    def show_help(self, word: str) -> NoReturn:
        """Print the help about a word, "" for all of it, and end the program."""
        if not word:
            self.print_help()
        elif shown := about(self, word):
            print(shown, end="")
        else:
            self.exit(2, f"{self.prog}: no option is about {word!r}; `{self.prog} --help` lists all options.\n")
        self.exit()

    def add_option(
        self, group: argparse._ArgumentGroup | argparse.ArgumentParser, option: Option, *, stays_out: bool = True
    ) -> None:
        """Add an option. `stays_out`: without a value, the field is omitted, because its struct has the default."""
        self._options[option.name] = option
        if not stays_out:
            self._is_started.add(option.name)
        group.add_argument(*option.flags, dest=option.name, default=argparse.SUPPRESS, **_form(option))

    def add_model(self, several: bool = False) -> None:
        """Add MODEL, with or without its flag; further ones behind it where there may be `several`."""
        self._options[MODEL.name] = MODEL
        self.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=MODEL.words)
        if several:
            self.add_argument("other_models", nargs="*", default=argparse.SUPPRESS, metavar="MODEL", help="further models")
        self.add_argument(*MODEL.flags, dest="named_model", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def add_file_and_foreign(self) -> None:
        """Add --config, and take other engines' options. Call it after all of vnext's options."""
        self.add_option(self, CONFIG)
        self.epilog, self._foreign = EPILOG, FOREIGN

    def _add_foreign(self, argv: Sequence[str]) -> None:
        """Add those of other engines' options that `argv` may name. argparse takes 0.1 ms for each."""
        for name, foreign in self._foreign.items():
            names = [name, "--no-" + name[2:]] if foreign.takes == 0 and name.startswith("--") else [name]
            if name not in self._option_string_actions and any(word.startswith(tuple(names)) for word in argv):
                nargs = None if foreign.takes == 1 else foreign.takes
                self.add_argument(
                    *names, action=_Collect, nargs=nargs, dest="foreign", default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )

    def given(self, argv: Sequence[str], environment: Mapping[str, str]) -> Given:
        """Parse `argv`, which begins with a command; help and version end the program."""
        if not argv or argv[0] not in self._commands:
            if argv and argv[0] in self._option_string_actions:
                self.parse_known_args(argv[:1])
            self.error(self._no_command(argv[0] if argv else ""))
        return self.command(argv[0]).values_of(argv[0], argv[1:], environment)

    def values_of(self, command: str, argv: Sequence[str], environment: Mapping[str, str]) -> Given:
        """Parse the arguments of one command into its values."""
        if (word := help_word(argv)) is not None:
            self.show_help(word)
        environment = known_environment(environment)
        labels = {name: option.flags[0] for name, option in self._options.items()}
        try:
            raw, unknown = self._typed(argv)
            foreign = raw.pop("foreign", [])
            sourced = from_environment(environment, [option for option in every_option() if option.name in self._options])
            if path := raw.pop("config", None) or sourced.pop("config", SourcedValue("", "")).value:
                in_file = from_file(path, [option for option in self._known() if option is not CONFIG])
                sourced = in_file.options | sourced
                foreign = in_file.foreign + foreign
            sourced |= {name: SourcedValue(value, "") for name, value in raw.items()}
            labels |= {name: each.label for name, each in sourced.items() if each.label}
        except SettingsError as error:
            self.fail(str(error), labels)
        values, wrong = self._checked(sourced)
        ignored, refused = _ignored(foreign)
        if wrong := [*unknown, *wrong, *refused]:
            self.fail("\n".join(wrong), labels, f"See {self.prog} --help.\n" if unknown and "--help" not in unknown[-1] else "")
        for sentence in (*ignored, *unknown_variables(environment, every_option())):
            print(line(f"{self.prog}: {sentence}", "WARNING", values.get("log_format")), file=sys.stderr)
        usual = {name: self._options[name].default for name in self._is_started}
        return Given(command, usual | values, labels, frozenset(raw))

    def fail(self, message: str, labels: Mapping[str, str] | None = None, more: str = "") -> NoReturn:
        """End the program with a sentence, or one on each line where several things are wrong, and with `more`."""
        self.exit(2, "".join(f"{self.prog}: {as_flags(sentence, labels)}\n" for sentence in message.split("\n")) + more)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")

    def _no_command(self, word: str) -> str:
        names = ", ".join(self._commands)
        if not word or word.startswith("-"):
            return f"name a command first: {names}."
        meant = close_to(word, self._commands)
        return f"there is no command {word}: " + (f"did you mean {meant}?" if meant else f"choose from {names}.")

    def _known(self) -> Iterable[Option]:
        return self._options.values()

    def _typed(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The values on the command line, unchecked, and a sentence about each option that there is not. Raises SettingsError."""
        argv = [_dashed(word) for word in argv]
        self._add_foreign(argv)
        try:
            found, unknown = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise SettingsError(self._misused(error)) from error
        sentences = self._unknown(unknown, argv) if unknown else []
        raw = vars(found)
        if (named := raw.pop("named_model", None)) is not None and raw.setdefault("model", named) != named:
            raise SettingsError(f"the model is named twice, as {raw['model']} and as {named}: name it once.")
        if empty := [name for name in self._options.keys() & raw.keys() - EMPTY if raw[name] in ("", [""])]:
            raise SettingsError("\n".join(f"{name} is empty: give it a value, or leave it out." for name in sorted(empty)))
        return raw, sentences

    def _unknown(self, words: Sequence[str], argv: Sequence[str]) -> list[str]:
        """A sentence about each option among `words`, which nothing takes; about the first word where none is an option. Raises
        SettingsError for a value behind an option that takes none."""
        known = [name for name in (*self._option_string_actions, *self._foreign) if name.startswith("--")]
        before = {after: self._option_string_actions.get(word) for word, after in zip(argv, argv[1:])}.get(words[0])
        if not words[0].startswith("-") and before is not None and before.nargs == 0:
            raise SettingsError(_takes_no_value(before))
        options = [word for word in words if word.startswith("-") and word.strip("-")] or words[:1]
        return list(dict.fromkeys(unknown_option(word, known, self.prog) for word in options))

    def _misused(self, error: argparse.ArgumentError) -> str:
        """The sentence about a known argument that argparse cannot take."""
        named = next(action for action in self._actions if "/".join(action.option_strings) == error.argument_name)
        if named.nargs == 0:
            return _takes_no_value(named)
        flag = named.option_strings[0]
        return f"{flag} needs a value after it; one that begins with a dash is written {flag}=VALUE."

    def _checked(self, sourced: Mapping[str, SourcedValue]) -> tuple[dict[str, Any], list[str]]:
        """The values that can be used, and a sentence about each other."""
        values, wrong = {}, []
        for name, each in sourced.items():
            option = self._options.get(name)
            try:
                values[name] = each.value if option is None else checked(name, each.value, option.hint, option.default)
            except SettingsError as error:
                wrong.append(str(error))
        return values, wrong


class _Collect(argparse.Action):
    """Keeps (name, value) of foreign options."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        words = values if isinstance(values, list) else [values]
        value = " ".join(str(word) for word in words if word is not None)
        namespace.foreign = [*getattr(namespace, "foreign", ()), (option_string, value)]


def _ignored(foreign: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """A line for each ignored option, and a sentence for each that must be refused."""
    lines, refused = [], []
    for name, value in foreign:
        is_off = name not in FOREIGN
        known: Foreign = FOREIGN["--" + name.removeprefix("--no-")] if is_off else FOREIGN[name]
        if is_off or known.is_fine(value or ON):
            lines.append(f"ignored: {f'{name} {value}'.strip()} ({known.reason})")
        else:
            refused.append(known.sentence(name, value))
    return lines, refused


def help_word(argv: Sequence[str]) -> str | None:
    """The word behind --help in a command's arguments, "" for none; None where nothing asks for help."""
    for at, given in enumerate(argv):
        name, _, word = given.partition("=")
        if name in ("-h", "--help"):
            behind = argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("-") else ""
            return word or behind
    return None


def _takes_no_value(action: argparse.Action) -> str:
    flags = [flag for flag in action.option_strings if flag.startswith("--")] or action.option_strings
    return f"{flags[0]} takes no value: write {' or '.join(flags)}."


def _dashed(word: str) -> str:
    """--max_model_len=4 as --max-model-len=4."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _form(option: Option) -> dict[str, Any]:
    """argparse's arguments for an option: it takes every value as text, for `checked` to read."""
    hint, default, words = option.hint, option.default, option.words
    if default not in (None, "", ()) and hint is not bool and "(default: " not in words:
        usual = " ".join(map(str, default)) if isinstance(default, tuple) else default
        words += f" (default: {usual if option.name not in SIZES else size_text(default)})"
    if hint is bool or bool in get_args(hint):
        usual = "" if default is None else f" (default: {'on' if default else 'off'})"
        return {"action": argparse.BooleanOptionalAction, "help": words + usual}
    kinds = {hint, *get_args(hint)}
    if get_origin(hint) is Literal:
        metavar: str | None = "|".join(get_args(hint))
    elif option.name in REPEATED:
        return {"action": "append", "metavar": REPEATED[option.name], "help": words}
    elif Ellipsis in get_args(hint):
        return {"nargs": "+", "metavar": "N" if int in kinds else "NAME", "help": words}
    else:
        metavar = "N" if kinds & {int, float} and option.name not in SIZES else None
    return {"metavar": metavar, "help": words}


# ---- what --help shows -------------------------------------------------------------------------------------------


FIRST = {
    "models_dir": "model", "device": "numbers", "max_model_len": "scheduling", "block_size": "cache",
    "enable_chunked_prefill": "scheduling", "tensor_parallel_size": "ranks", "role": "handover", "nnodes": "hosts",
    "threads": "ranks", "gpu_memory_utilization": "gpu", "executor": "ranks", "log_dir": "log", "digest_interval": "recovery",
    "enable_lora": "adapters", "enable_return_routed_experts": "model", "ipc_bytes_max": "gpu",
    "host": "server", "api_keys": "keys", "served_model_names": "chat", "show_log": "routes", "allowed_origins": "browsers",
    "body_bytes_max": "limits", "lora_modules": "adapters", "batch_dir": "files", "root_path": "tls", "log_level": "observing",
}  # fmt: skip
"""The group of a field and of those after it in table.py, up to the next one here."""


@cache
def groups() -> dict[str, str]:
    """The group of each field, in the table's order."""
    found, group = {}, ""
    for name in (*SERVER_HELP, *ENGINE_HELP):
        found[name] = group = FIRST.get(name, group)
    return found


def about(parser: argparse.ArgumentParser, word: str) -> str:
    """What `--help word` shows: the group of this name, else the options whose name or help has the word; "" for none."""
    groups = [group for group in parser._action_groups if group.title == word]
    found = groups or [_matching(group, word.lower().strip("-").replace("_", "-")) for group in parser._action_groups]
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    for group in found:
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    return formatter.format_help() if any(group._group_actions for group in found) else ""


def _matching(group: argparse._ArgumentGroup, word: str) -> argparse._ArgumentGroup:
    """The group with those of its options that match."""
    found = argparse._ArgumentGroup(argparse.ArgumentParser(), group.title)
    found._group_actions = [
        action for action in group._group_actions
        if action.help is not argparse.SUPPRESS and word in " ".join((*action.option_strings, action.help or "")).lower()
    ]  # fmt: skip
    return found


# ---- values in the environment and in a file ---------------------------------------------------------------------
# The command line overrides the environment, the environment the file, and the file the defaults. Each value keeps the name
# under which it was given, for error sentences.

VLLM_API_KEY = "VLLM_API_KEY"


EMPTY = {"root_path", "api_keys"}
"""What may be an empty text on the command line, or is refused in a sentence of its own. Elsewhere it is most often a variable that
the shell does not have, and a server without --api-key-file, say, would be open."""


class SourcedValue(NamedTuple):
    """A value as it was given, and the name under which it was given."""

    value: Any
    label: str


class FileSays(NamedTuple):
    """The contents of a file: options by field, and (name, value) of other engines' options."""

    options: dict[str, SourcedValue]
    foreign: list[tuple[str, str]]


def known_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment as options are read from it: vLLM's variable for the key counts where vnext's has none, since a server that
    seems to have a key must not be open."""
    found, key = _without_service(environment), environment.get(VLLM_API_KEY)
    return {**found, API_KEY_VARIABLE: key} if key and not found.get(API_KEY_VARIABLE) else found


def _without_service(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without the variables that Kubernetes adds for a service named vnext: VNEXT_PORT=tcp://..., and more."""
    if not environment.get("VNEXT_PORT", "").startswith("tcp://"):
        return environment
    return {name: value for name, value in environment.items() if not name.startswith(("VNEXT_PORT", "VNEXT_SERVICE_"))}


def from_environment(environment: Mapping[str, str], options: Iterable[Option]) -> dict[str, SourcedValue]:
    """The values of `options` in variables. An empty variable counts as unset."""
    return {
        option.name: SourcedValue(environment[variable], variable)
        for option in options
        for variable in option.variables
        if environment.get(variable)
    }


def unknown_variables(environment: Mapping[str, str], options: Iterable[Option]) -> list[str]:
    """One sentence for each variable that looks like an option but is none of `options`."""
    known = {variable for option in options for variable in option.variables}
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    sentences = [f"{name} is no option's variable{_meant(close_to(name, known))}" for name in unknown]
    if of_vllm := sorted(name for name in environment if name.startswith("VLLM_") and name != VLLM_API_KEY):
        sentences.append(f"{', '.join(of_vllm)}: vLLM's variables are not read, see vnext serve --help.")
    if of_ollama := sorted(environment.keys() & OLLAMA.keys()):
        ours = ", ".join(OLLAMA[name] for name in of_ollama)
        sentences.append(f"{', '.join(of_ollama)}: Ollama's variables are not read; see {ours}.")
    return sentences


def _meant(close: str) -> str:
    return f": did you mean {close}?" if close else ", and is not read."


def from_file(path: str, options: Iterable[Option]) -> FileSays:
    """The values in a YAML file, whose keys are the flags of `options` without dashes. Raises SettingsError."""
    by_key = {flag[2:]: option for option in options for flag in option.flags if flag.startswith("--")}
    found = FileSays({}, [])
    for given, value in _mapping(path).items():
        key = str(given).replace("_", "-").removeprefix("--")
        label = f"{given} in {path}"
        if isinstance(value, dict):
            raise SettingsError(f"{label} holds keys of its own: write each option as one key at the beginning of a line.")
        if key.startswith("no-") and isinstance(value, bool):
            key, value = key[3:], not value
        if value is None:
            continue
        if (option := by_key.get(key)) is not None:
            if option.name in found.options:
                raise SettingsError(f"{path} says {key} twice, in two spellings: leave one of them out.")
            found.options[option.name] = SourcedValue(value, label)
        elif "--" + key not in FOREIGN:
            raise SettingsError(f"{path} has {given}, which is not an option{_remedy(close_to(key, by_key))}")
        elif value is not False:
            found.foreign.append(("--" + key, "" if value is True else str(value)))
    return found


def _remedy(close: str) -> str:
    return f": did you mean {close}?" if close else ": take it out; `vnext serve --help` lists all options."


def _mapping(path: str) -> dict[Any, Any]:
    import yaml  # takes a tenth of a second, and only a start with a file needs it

    try:
        text = Path(path).expanduser().read_text()
        found = yaml.safe_load(text)
        if twice := repeated_key(text):
            raise SettingsError(f"{path} says {twice.key} twice, in {twice.where()}: leave one of them out.")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise SettingsError(f"the file {path} cannot be read ({reason(error)}): give --config a YAML file.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise SettingsError(f"{path} is no YAML{where}: write one option a line, as `max-model-len: 4096`.") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"{path} holds no options: write one a line, as `max-model-len: 4096`.")
    return found
