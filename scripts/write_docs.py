"""Write the generated parts of docs/ from the code and the records: `python scripts/write_docs.py`.

A generated part stands between the lines `<!-- generated: NAME -->` and `<!-- end -->` of a page. tests/test_docs.py fails when a
page differs from what this script would write. The parts of the replay guide that commands print are written by
`pytest tests/replay/test_guide.py --rewrite`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from docs_features import features  # noqa: E402  (needs the path above)
from docs_records import benchmarks, control_plane, determinism, gpus, scale, table  # noqa: E402  (needs the path above)

from vnext.commands.chat.conversation import COMMANDS  # noqa: E402
from vnext.gateway.context import RouterMetrics  # noqa: E402
from vnext.log.codec import FrameBody, RankDetail, RankDigest, SegmentHeader  # noqa: E402
from vnext.models.registry import FAMILIES  # noqa: E402
from vnext.options.foreign import LLAMA_CPP, OLLAMA, SGLANG, VLLM  # noqa: E402
from vnext.options.parser import _form as form_of, groups  # noqa: E402  (needs the path above)
from vnext.options.reader import _parser as vnext_parser  # noqa: E402
from vnext.options.table import (  # noqa: E402
    BATCH,
    CHAT,
    CONFIG,
    MODEL,
    RESTART_PORT,
    ROUTER,
    ROUTER_HTTP,
    Option,
    flags_of,
    options_of,
)
from vnext.replay.cli import main as replay  # noqa: E402
from vnext.runtime.protocol.settings import EngineSettings  # noqa: E402
from vnext.runtime.protocol.stats import ExpertStats  # noqa: E402
from vnext.server.context.metrics import ServerMetrics  # noqa: E402
from vnext.server.routes import ROUTES  # noqa: E402
from vnext.server.settings import ServerSettings  # noqa: E402
from vnext.state import laws as state_laws  # noqa: E402
from vnext.state.events import AnyEvent  # noqa: E402
from vnext.text.dialects.table import DETECTED, NAMES  # noqa: E402

PART = re.compile(r"(?<=^<!-- generated: )([\w-]+)( -->\n)(.*?)(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


# ---- options -----------------------------------------------------------------------------------------------------


def options(struct: type[msgspec.Struct]) -> str:
    """The options that fill a struct, in the groups of `--help`."""
    found: dict[str, list[Option]] = {}
    for option in options_of(struct):
        found.setdefault(groups()[option.name], []).append(option)
    return "\n".join(f"**{group}**\n\n{_options(of_group)}" for group, of_group in found.items())


def _options(found: Iterable[Option]) -> str:
    return "".join(f"- {', '.join(f'`{flag}`' for flag in option.flags)}{_choices(option)}: {_words(option)}\n" for option in found)


def _words(option: Option) -> str:
    return str(form_of(option)["help"]).replace("%%", "%").removesuffix(" (default: off)")


def _choices(option: Option) -> str:
    return f" {', '.join(map(str, found))}" if (found := form_of(option).get("choices")) else ""


def other_options() -> str:
    """The options that commands beside `vnext serve` have."""
    parts = {
        "every command with an engine": (MODEL, CONFIG), "vnext chat": CHAT, "vnext batch": BATCH, "vnext router": ROUTER,
        "vnext restart": (RESTART_PORT,),
    }  # fmt: skip
    text = "\n".join(f"**{name}**\n\n{_options(found)}" for name, found in parts.items())
    shared = ", ".join(f"`{flags_of(name)[0]}`" for name in ROUTER_HTTP)
    return f"{text}\n`vnext router` also has these options of the server: {shared}.\n"


OURS = re.compile(r"see (--[a-z-]+(?: [a-z]+)?(?: and --[a-z-]+)?)")


def migration() -> str:
    """What other servers' options are called here, by server: those whose place options of ours take alone."""
    found = ""
    for server, options_here in {"vLLM": VLLM, "SGLang": SGLANG, "llama.cpp": LLAMA_CPP}.items():
        names: dict[str, list[str]] = {}
        for name, foreign in options_here.items():
            if (ours := OURS.fullmatch(foreign.remedy)) and not foreign.fine:
                names.setdefault(ours[1], []).append(f"`{name}`")
        found += _renamed(server, ((", ".join(theirs), ours) for ours, theirs in names.items()))
    return found + _renamed("Ollama", ((f"`{theirs}`", ours) for theirs, ours in OLLAMA.items()))


def _renamed(server: str, rows: Iterable[tuple[str, str]]) -> str:
    marked = ((theirs, re.sub(r"(--[a-z-]+( (?:info|debug|full))?)", r"`\1`", ours)) for theirs, ours in rows)
    return table((server, "vnext"), marked) + "\n"


def commands() -> str:
    """The commands of `vnext`, as its help lists them."""
    listed = next(action for action in vnext_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return table(("command", "what it does"), ((f"`vnext {choice.dest}`", choice.help or "") for choice in listed._choices_actions))


def chat_commands() -> str:
    """What a user types in a chat."""
    return table(
        ("command", "what it does"),
        (("`" + " ".join([", ".join(command.names), command.argument]).strip() + "`", command.help) for command in COMMANDS),
    )


# ---- routes and metrics ------------------------------------------------------------------------------------------


def routes() -> str:
    """Every path with its method; one that has no sentence of its own belongs to the one before it."""
    rows: list[tuple[list[str], str]] = []
    for route in ROUTES:
        name = f"`{route.method} {route.plain_path}`"
        if route.is_listed:
            rows.append(([name], route.what.partition("; also ")[0]))  # the first column names them
        else:
            rows[-1][0].append(name)
    return table(("path", "what it does"), ((", ".join(names), words) for names, words in rows))


def metrics() -> str:
    """The metrics of a server with every feature."""
    return _metrics(ServerMetrics("model", 4096, (_Engine(),)).collect())


def router_metrics() -> str:
    metrics = RouterMetrics(())
    metrics.follow(lambda: {"a": "loaded"})
    return _metrics(text_string_to_metric_families(metrics.text().decode()))


def _metrics(families: Iterable[Metric]) -> str:
    found = {family.name: family for family in families}
    return table(
        ("metric", "what it is"),
        ((f"`{name}{'_total' * (family.type == 'counter')}`", family.documentation) for name, family in found.items()),
    )


class _Figures:
    """Figures of a part of the engine, all 0."""

    running, waiting = (), ()

    def __getattr__(self, name: str) -> Any:
        return 0


class _Stats(_Figures):
    running, waiting = 0, 0
    adapters, tier, pins, lost, states = _Figures(), _Figures(), _Figures(), _Figures(), _Figures()
    experts = ExpertStats(0, 0, ())


class _Engine:
    death = trouble = None
    recoveries = 0
    recovery_seconds = 0.0
    stats = _Stats()


def dialects() -> str:
    """The dialects of tool calls in the order in which they are looked for, with their names as parsers and their marks."""
    rows: dict[str, list[str]] = {}
    for dialect, marks in DETECTED:
        rows.setdefault(dialect.name, []).append(" and ".join(f"`{mark}`" for mark in marks).replace("````json`", "a block `json`"))
    others = {name: ", ".join(f"`{other}`" for other in NAMES if NAMES[other].name == name != other) for name in rows}
    return table(
        ("dialect", "also named", "found by"),
        ((f"`{name}`", others[name], ", or ".join(marks) or "any other template that knows tools") for name, marks in rows.items()),
    )


def families() -> str:
    """The files of families with their architectures, and what the files say of themselves."""
    names: dict[str, list[str]] = {}
    for architecture, file in FAMILIES.items():
        name = architecture.removesuffix("ForCausalLM").replace("ForConditionalGeneration", "*")
        names.setdefault(file.replace(".", "/"), []).append(name)
    folder = ROOT / "vnext" / "models" / "families"
    texts = {file: (ast.get_docstring(ast.parse((folder / f"{file}.py").read_text())) or "").partition("\n\n")[0] for file in names}
    rows = [(f"`{file}`", f"`{' '.join(found)}`", re.sub(r"\s+", " ", texts[file])) for file, found in names.items()]
    cases = (ROOT / "tests/models/hosted/their_cases.py").read_text()
    foreign = re.findall(r'^    "\w+": (?:Sound)?Case\(\s+"(\w+)"', cases, re.MULTILINE)
    theirs = f"`{' '.join(f'{name}*' for name in foreign)}`"
    rows.append(("`hosted/seeing`", theirs, "Towers by [`transformers`](#models-without-a-file)."))
    return table(("file", "architectures", "what it is"), rows)


def family_example() -> str:
    """A family from outside, as a test serves it."""
    return f"```python\n{(ROOT / 'examples' / 'family.py').read_text()}```\n"


# ---- laws --------------------------------------------------------------------------------------------------------


LAW = re.compile(r"([A-Z]\d(?:, [A-Z]\d)*): ")


def laws_of_a_state() -> str:
    """The laws that `vnext.state.laws.check` checks."""
    return _laws((law.__doc__ or "", law in state_laws.CHEAP) for law in state_laws.ALL)


def laws_of_a_run() -> str:
    """The functions of the simulator that check a law which their docstrings name."""
    paths = sorted([*(ROOT / "vnext" / "sim").rglob("*.py"), *(ROOT / "tests" / "sim").glob("*.py")], key=lambda path: path.name)
    return _laws((text, False) for path in paths for text in _docstrings(path))


def _docstrings(path: Path) -> Iterator[str]:
    """Those of a file's functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def _laws(laws: Iterable[tuple[str, bool]]) -> str:
    rows = {}
    for text, is_cheap in laws:
        text = re.sub(r"\s+", " ", text.partition("\n\n")[0]).removesuffix(" Raises LawBroken.").strip()
        if names := LAW.match(text):
            sentence = text[names.end() :]
            rows[text] = (names[1], sentence[0].upper() + sentence[1:] + " (*cheap*)" * is_cheap)
    return table(("name", "law"), rows.values())


# ---- the log -----------------------------------------------------------------------------------------------------


def log_records() -> str:
    """The structs of a log in the order of their fields, as their docstrings explain them."""
    return "".join(_struct(kind, kind.__name__) for kind in (SegmentHeader, FrameBody, RankDigest, RankDetail))


def log_events() -> str:
    """The events in the order of their tags."""
    events = sorted(get_args(AnyEvent), key=lambda kind: kind.__struct_config__.tag)
    return "".join(_struct(kind, f"{kind.__struct_config__.tag} {kind.__name__}") for kind in events)


def _struct(kind: type[msgspec.Struct], title: str) -> str:
    text = re.sub(r"\s+", " ", kind.__doc__ or "").strip()
    fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
    return f"- **{title}**{f' ({fields})' if fields else ''}: {text}\n"


# ---- commands of the log tool --------------------------------------------------------------------------------------


def replay_commands() -> str:
    """Every command of `vnext-replay` with its arguments and options, from the parsers of its help; what several commands have
    alike stands once, at the end."""
    commands = next(action for action in replay.parser("")._actions if isinstance(action, argparse._SubParsersAction))
    names = list(replay_names())
    lines = {name: [_option(action, commands.choices[name]) for action in _own(commands.choices[name])] for name in names}
    counts = Counter(line for own in lines.values() for line in own)
    shared = {line: ", ".join(f"`{name}`" for name in names if line in lines[name]) for line in counts if counts[line] > 2}
    own = (_command(name, commands.choices[name], [line for line in lines[name] if line not in shared]) for name in names)
    alike = {of: "".join(f"{line}\n" for line in shared if shared[line] == of) for of in shared.values()}
    last = (f"\n**{of}**\n\n{lines}" for of, lines in alike.items())
    return f"{''.join(own)}{''.join(last)}"


def replay_names() -> Iterator[str]:
    for names in replay.MODULES.values():
        yield from (name for name in names if name != "state")


def _own(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.dest not in ("help", "json")]


def _command(name: str, parser: argparse.ArgumentParser, lines: Iterable[str]) -> str:
    given = [str(action.metavar or action.dest) for action in parser._actions if not action.option_strings]
    options = "".join(f"\n{line}" for line in lines) + "\n" * bool(lines)
    return f"\n**`{' '.join([name, *given])}`**: {parser.description}\n{options}"


def _option(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return f"- `{_form(action)}`: {(action.help or '') % {**vars(action), 'prog': parser.prog}}"


def _form(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


# ---- pages -------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], str]] = {
    "engine-options": lambda: options(EngineSettings),
    "server-options": lambda: options(ServerSettings),
    "features": features,
    "other-options": other_options,
    "commands": commands,
    "migration": migration,
    "chat-commands": chat_commands,
    "routes": routes,
    "metrics": metrics,
    "router-metrics": router_metrics,
    "dialects": dialects,
    "families": families,
    "family-example": family_example,
    "laws-of-a-state": laws_of_a_state,
    "laws-of-a-run": laws_of_a_run,
    "log-records": log_records,
    "log-events": log_events,
    "replay-commands": replay_commands,
    "benchmarks": benchmarks,
    "gpus": gpus,
    "determinism": determinism,
    "control-plane": control_plane,
    "scale": scale,
}


def written(text: str) -> str:
    """A page with its generated parts as they should be. Raises KeyError for a part without a generator."""
    return PART.sub(lambda part: f"{part[1]}{part[2]}{PARTS[part[1]]()}", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    for page in pages():
        if (new := written(before := page.read_text())) != before:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} is written anew")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
