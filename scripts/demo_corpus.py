"""The training text of the demo model: the documentation of the running Python.

Owns the entries (docstrings of the standard library's Python sources and C modules, and the language reference that
`help()` prints), the pages made of them, and the questions and answers derived from them. Reads only the standard library
folder, neither the network nor the environment. The same Python and seed give the same text.
"""
from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics

import msgspec

END_OF_TEXT, USER, ASSISTANT, SYSTEM, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, SYSTEM, END)
# Tests, generated tables, and large or removed modules that few readers ask about.
SKIPPED_PARTS = {
    "site-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "encodings", "__pycache__", "distutils",
    "lib2to3", "tkinter", "turtle", "msilib", "ensurepip", "pydoc_data", "ntpath",
}
# Packages whose submodules are internal: readers know the definitions under the package's name.
FLAT_PACKAGES = ("asyncio", "concurrent.futures", "importlib.resources", "json", "re", "sqlite3", "unittest")
# People ask about these more often, so they appear more often here; a name without a dot is a builtin.
POPULAR_MODULES = {
    "argparse", "ast", "asyncio", "base64", "bisect", "collections", "concurrent", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "dict", "enum", "fractions", "functools", "glob", "hashlib", "heapq",
    "io", "itertools", "json", "list", "logging", "math", "operator", "os", "pathlib", "pickle", "queue", "random",
    "re", "set", "shutil", "socket", "statistics", "str", "string", "struct", "subprocess", "sys", "tempfile",
    "textwrap", "threading", "time", "typing",
}
# Modules written in C: their documentation is in no source file. All are safe to import.
COMPILED_MODULES = (
    "builtins array binascii bisect cmath collections contextvars csv datetime decimal errno functools gc hashlib "
    "heapq io itertools json marshal math mmap operator os pickle random re select signal socket sqlite3 ssl struct "
    "sys threading time types unicodedata weakref zlib"
).split()
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You explain the Python standard library.",
    "Answer briefly and precisely.",
    "You are a Python documentation assistant.",
)
QUESTIONS = {
    "module": ("What is the {name} module for?", "What does the {name} module do?", "What does the module {name} do?",
               "Tell me about {name}.", "Explain the {name} module.", "What is {name}?"),
    "class": ("What is {name}?", "What is the {name} class?", "Explain the class {name}.", "Tell me about {name}.",
              "What is {name} used for?", "What does the class {name} do?"),
    "function": ("What does {name} do?", "What does {name}() do?", "What does the {name} function do?",
                 "Explain {name}.", "How do I use {name}?", "Tell me about {name}.", "What is {name}?"),
    "topic": ("Explain {name}.", "Tell me about {name}.", "What does the Python reference say about {name}?"),
}
GREETING = "Hello! Ask me about a module, a class or a function of the Python standard library."
SMALL_TALK = (
    ("Hello", GREETING), ("Hello!", GREETING), ("Hi", GREETING), ("Hi!", GREETING), ("Hey", GREETING),
    ("Hello, how are you?", "I am fine, thank you. Ask me about a part of the Python standard library."),
    ("How are you?", "I am fine, thank you. Ask me about a part of the Python standard library."),
    ("Who are you?", "I am a very small language model, trained on the documentation of the Python standard library."),
    ("What are you?", "I am a very small language model, trained on the documentation of the Python standard library."),
    ("What can you do?", "I can describe modules, classes and functions of the Python standard library."),
    ("Thank you", "You are welcome."), ("Thanks!", "You are welcome."), ("Goodbye", "Goodbye!"), ("Bye", "Goodbye!"),
    ("What is Python?", "Python is a programming language that is interpreted, interactive and object-oriented."),
)
class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A documented module, class, function or topic; `members` are the documented methods of a class."""

    kind: str
    name: str
    heading: str
    text: str
    members: tuple[Entry, ...] = ()


def clean(text: str) -> str:
    """Remove indentation, trailing blanks and typographic quotes from a docstring."""
    text = inspect.cleandoc(text).translate(str.maketrans("“”‘’–—", "\"\"''--"))
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()[:8000]


def source_entries() -> Iterator[Entry]:
    """Yield the documented modules, classes and functions of the standard library's sources, ordered by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_PARTS.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            yield from module_entries(path, module_name(parts))


def module_name(parts: tuple[str, ...]) -> str:
    name = ".".join(parts).removesuffix(".__init__").removeprefix("_py")
    return "os.path" if name == "posixpath" else name


def module_entries(path: Path, name: str) -> Iterator[Entry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in old modules are not our concern
        tree = ast.parse(path.read_bytes())
    yield Entry(kind="module", name=name, heading=f"module {name}", text=clean(ast.get_docstring(tree) or ""))
    home = next((package for package in FLAT_PACKAGES if name.startswith(package + ".")), name)
    for node in tree.body:
        yield from definition_entries(node, home)


def definition_entries(node: ast.stmt, prefix: str) -> Iterator[Entry]:
    if getattr(node, "name", "_").startswith("_"):
        return  # statements and private names
    if isinstance(node, ast.ClassDef):
        name = f"{prefix}.{node.name}"
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        members = tuple(entry for child in node.body for entry in definition_entries(child, name))
        yield Entry(kind="class", name=name, heading=f"class {name}({bases})".replace("()", ""),
                    text=clean(ast.get_docstring(node) or ""), members=members)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        name = f"{prefix}.{node.name}"
        yield Entry(kind="function", name=name, heading=f"{name}({ast.unparse(node.args)})",
                    text=clean(ast.get_docstring(node) or ""))


def compiled_entries() -> Iterator[Entry]:
    """Yield the entries that the interpreter itself documents: builtins and modules written in C."""
    for module_name in COMPILED_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue  # an interpreter may be built without sqlite3 or ssl
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and callable(value):
                yield object_entry(prefix + name, value)


def object_entry(name: str, value: object) -> Entry:
    members: tuple[Entry, ...] = ()
    if isinstance(value, type):
        members = tuple(object_entry(f"{name}.{key}", member) for key, member in sorted(vars(value).items())
                        if callable(member) and not isinstance(member, type) and not key.startswith("_"))
    text = value.__doc__ if isinstance(value.__doc__, str) else ""
    heading = f"class {name}" if isinstance(value, type) else name + signature(value)
    return Entry(kind="class" if isinstance(value, type) else "function", name=name, heading=heading,
                 text=clean(text), members=members)


def signature(value: Callable[..., object]) -> str:
    try:
        text = str(inspect.signature(value))
    except (ValueError, TypeError):
        return "()"  # not every C function exposes its parameters
    return "()" if " at 0x" in text else text


def topic_entries() -> Iterator[Entry]:
    """Yield the topics of the language reference that `help()` prints."""
    for label in sorted(topics.topics):
        title, _, body = clean(topics.topics[label]).partition("\n")
        name = title.replace('"', "")
        name = name[0].lower() + name[1:] if name[1:2].islower() else name
        yield Entry(kind="topic", name=name, heading=title, text=body.lstrip("*=\n"))


def all_entries() -> list[Entry]:
    """Return the entries worth reading, each text once: repetitions of an inherited docstring are dropped."""
    seen: set[str] = set()

    def keep(entry: Entry) -> Entry | None:
        members = tuple(filter(None, map(keep, entry.members)))
        text = "" if entry.text in seen or len(entry.text) < 20 else entry.text
        seen.add(text)
        return msgspec.structs.replace(entry, text=text, members=members) if text or members else None

    sources = (*compiled_entries(), *source_entries(), *topic_entries())
    return [entry for entry in map(keep, sources) if entry is not None]


def document(entry: Entry) -> str:
    """Render an entry as a page: heading, text, then its members in the same form."""
    page = "\n\n".join(part for part in (entry.heading, entry.text) if part)
    return "\n\n".join((page, *map(document, entry.members)))


def answer(text: str, size_max: int = 500) -> str:
    """Return the leading paragraphs of a text: at least one, up to about `size_max` characters."""
    paragraphs = text.split("\n\n")
    kept = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(kept) + len(paragraph) > size_max:
            break
        kept += "\n\n" + paragraph
    return kept[: 2 * size_max].strip()


def exchanges(entry: Entry, rng: random.Random) -> Iterator[str]:
    """Yield question and answer pairs, in chat form, about an entry and its members."""
    if entry.text and not any(part.startswith("_") for part in entry.name.split(".")):
        popular = "." not in entry.name or entry.name.partition(".")[0] in POPULAR_MODULES
        for question in rng.sample(QUESTIONS[entry.kind], 3 if popular else 1):
            yield exchange(question.format(name=entry.name), answer(entry.text))
        if entry.kind == "function" and not entry.heading.endswith("()") and rng.random() < 0.15:
            yield exchange(f"What arguments does {entry.name} take?", f"The signature is {entry.heading}.")
    for member in entry.members:
        yield from exchanges(member, rng)


def exchange(question: str, reply: str) -> str:
    return f"{USER}{question}{END}{ASSISTANT}{reply}{END}"


def conversations(pairs: list[str], rng: random.Random) -> Iterator[str]:
    """Join pairs into conversations of one to three turns; a third of them get a system message."""
    while pairs:
        count = rng.choice((1, 1, 1, 2, 3))
        turns, pairs = pairs[:count], pairs[count:]
        system = f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END}" if rng.random() < 0.33 else ""
        yield system + "".join(turns)


def held_out(entry: Entry) -> bool:
    return zlib.crc32(entry.name.encode()) % 40 == 0


def texts(seed: int) -> tuple[list[str], list[str]]:
    """Return the training documents (pages and conversations) and the held-out pages."""
    rng = random.Random(seed)
    entries = all_entries()
    training = [entry for entry in entries if not held_out(entry)]
    pairs = [pair for entry in training for pair in exchanges(entry, rng)]
    pairs += [exchange(*talk) for talk in SMALL_TALK] * 12
    rng.shuffle(pairs)
    bare = [answer(entry.text) for entry in training if len(entry.text) > 60]  # prose that starts without a heading
    return [*map(document, training), *bare, *conversations(pairs, rng)], [document(e) for e in entries if held_out(e)]
