"""Option sources: the values of options in the environment and in a YAML file, and their precedence.

The command line overrides the environment, the environment the file, and the file the defaults. Each value keeps the name
under which it was given, for error sentences. Takes the environment as an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vnext.base.spelling import close_to
from vnext.options.foreign import FOREIGN, OLLAMA
from vnext.options.table import API_KEY_VARIABLE, PREFIX, Option
from vnext.runtime.protocol.settings import SettingsError

VLLM_API_KEY = "VLLM_API_KEY"


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
        found = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"the file {path} cannot be read ({reason}): give --config a YAML file.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise SettingsError(f"{path} is no YAML{where}: write one option a line, as `max-model-len: 4096`.") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise SettingsError(f"{path} holds no options: write one a line, as `max-model-len: 4096`.")
    return found


def takes_several(hint: Any) -> bool:
    """Whether an option of this type takes several values."""
    return Ellipsis in get_args(hint)
