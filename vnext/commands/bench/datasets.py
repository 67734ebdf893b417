"""Datasets of `vnext-bench serve`: prompts with the lengths of their answers, from random tokens or from files."""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import msgspec

from vnext.base.spelling import reason
from vnext.commands.bench.workload import plain_ids
from vnext.runtime.protocol.settings import SettingsError
from vnext.text.tokenizer import Tokenizer

ANSWER_TOKENS = 256
"""The length of an answer to a prompt of a file that names none."""
PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX, TOKENS_MAX = 4, 1024, 2048
"""Conversations of ShareGPT outside these bounds are left out, as vLLM does."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.parquet)", re.ASCII)
T = TypeVar("T", bound=msgspec.Struct)
Messages = list[dict[str, object]]


class Sample(msgspec.Struct, frozen=True):
    """One request: a text, token ids or a chat's messages with its tools, the number of tokens, and those of the answer. `due_s` is
    when a recorded one came; an agent's turn `follows` the sample before it, `delay_s` after its answer."""

    prompt: str | list[int] | Messages
    input_tokens: int
    output_tokens: int
    due_s: float = 0.0
    follows: bool = False
    delay_s: float = 0.0
    tools: Messages = []


class RandomLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a random prompt and its answer, each drawn from length * (1 - range_ratio) to length * (1 + range_ratio). The
    first `prefix` tokens come on top, the same in every prompt."""

    input: int = 1024
    output: int = 128
    prefix: int = 0
    range_ratio: float = 0.0

    def draw(self, rng: random.Random, length: int) -> int:
        return max(1, rng.randint(int(length * (1 - self.range_ratio)), int(length * (1 + self.range_ratio))))


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Line(msgspec.Struct):
    prompt: str
    output_tokens: int = 0


class _Session(msgspec.Struct):
    messages: Messages
    tools: Messages = []


def random_samples(count: int, lengths: RandomLengths, tokenizer: Tokenizer, seed: int) -> list[Sample]:
    """Prompts of random token ids that have some text."""
    rng, pool = random.Random(seed), plain_ids(tokenizer)
    prefix = rng.choices(pool, k=lengths.prefix)
    found = []
    for _ in range(count):
        prompt = prefix + rng.choices(pool, k=lengths.draw(rng, lengths.input))
        found.append(Sample(prompt, len(prompt), lengths.draw(rng, lengths.output)))
    return found


def sharegpt_samples(path: Path, count: int, tokenizer: Tokenizer, output_tokens: int, seed: int) -> list[Sample]:
    """First turns of the conversations of a JSON file in the form of ShareGPT, shuffled. `output_tokens` is 0 for the lengths of
    the recorded answers. Raises SettingsError."""
    found = _read(path)
    random.Random(seed).shuffle(found)
    samples: list[Sample] = []
    for each in found:
        if len(samples) < count and len(each.conversations) >= 2:
            prompt, answer = each.conversations[0].value, each.conversations[1].value
            sample = Sample(prompt, _tokens(tokenizer, prompt), output_tokens or _tokens(tokenizer, answer))
            fits = PROMPT_TOKENS_MIN <= sample.input_tokens <= PROMPT_TOKENS_MAX and sample.output_tokens >= PROMPT_TOKENS_MIN
            samples += [sample] * (fits and sample.input_tokens + sample.output_tokens <= TOKENS_MAX)
    return repeated(samples, count, path)


def custom_samples(path: Path, count: int, tokenizer: Tokenizer, output_tokens: int) -> list[Sample]:
    """The lines of a JSONL file, each with a `prompt` and perhaps `output_tokens`, which a number above 0 overrides. Raises
    SettingsError."""
    lines = _lines(path, _Line, "a prompt")
    samples = [
        Sample(each.prompt, _tokens(tokenizer, each.prompt), output_tokens or each.output_tokens or ANSWER_TOKENS)
        for each in lines[:count]
    ]  # fmt: skip
    return repeated(samples, count, path)


TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"step": {"type": "integer"}}}},
}  # fmt: skip


def agent_samples(
    count: int, lengths: RandomLengths, turns: int, result_tokens: int, tokenizer: Tokenizer, seed: int, is_chat: bool
) -> list[Sample]:
    """Agents of random tokens: each asks so many times, with all that was before, its answer, and the result of a tool."""
    rng, pool, samples = random.Random(seed), plain_ids(tokenizer), list[Sample]()
    prefix = rng.choices(pool, k=lengths.prefix)
    while len(samples) < count:
        parts = [prefix + rng.choices(pool, k=lengths.draw(rng, lengths.input))]
        for turn in range(turns):
            output = lengths.draw(rng, lengths.output)
            prompt = _messages(parts, tokenizer) if is_chat else [token for part in parts for token in part]
            tools = [TOOL] if is_chat else []
            samples.append(Sample(prompt, sum(map(len, parts)), output, follows=turn > 0, tools=tools))
            parts += [rng.choices(pool, k=output), rng.choices(pool, k=lengths.draw(rng, result_tokens))]
    return samples[:count]


def _messages(parts: list[list[int]], tokenizer: Tokenizer) -> Messages:
    """A question, then calls of a tool with its results."""
    found: Messages = [{"role": "user", "content": tokenizer.decode(parts[0])}]
    for step, part in enumerate(parts[1:]):
        name = f"call_{step // 2}"
        call = {"id": name, "type": "function", "function": {"name": "run", "arguments": f'{{"step": {step // 2}}}'}}
        own = {"role": "tool", "tool_call_id": name} if step % 2 else {"role": "assistant", "tool_calls": [call]}
        found.append({**own, "content": tokenizer.decode(part)})
    return found


def agent_traces(path: Path, count: int, tokenizer: Tokenizer, output_tokens: int) -> list[Sample]:
    """The sessions of a file of JSON lines or Parquet, each with the `messages` of a chat and perhaps its `tools`: a request for
    each message of the assistant, with all before it. A message's `delay_s` is how long a tool or a person took. Raises
    SettingsError."""
    samples: list[Sample] = []
    for each in _lines(path, _Session, "messages"):
        follows, delay_s, before, read = False, 0.0, Messages(), 0
        for message in each.messages:
            own = {name: value for name, value in message.items() if name != "delay_s" and value is not None}
            tokens = _tokens(tokenizer, "".join(_texts(own)))
            if own.get("role") == "assistant":
                samples.append(Sample([*before], read, output_tokens or max(tokens, 1), 0.0, follows, delay_s, each.tools))
                follows, delay_s = True, 0.0
            if isinstance(took_s := message.get("delay_s"), int | float):
                delay_s += took_s
            before, read = [*before, own], read + tokens
    return repeated(samples, count, path, "message of an assistant, each of which is a request")


def _texts(value: object) -> Iterator[str]:
    """The contents of a message, its calls' arguments among them."""
    for name, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(each, str) and name in ("content", "text", "arguments", "reasoning_content"):
            yield each
        yield from _texts(each)


def repeated(samples: list[Sample], count: int, path: Path, lacks: str = "prompt of a usable length") -> list[Sample]:
    """So many: those of a shorter file come again. Raises SettingsError for none."""
    if not samples:
        raise SettingsError(f"--dataset-path {path} has no {lacks}.")
    return [samples[place % len(samples)] for place in range(count)]


def texts(samples: list[Sample], tokenizer: Tokenizer) -> Iterator[Sample]:
    """The same with messages, for a chat."""
    for each in samples:
        if isinstance(each.prompt, list) and isinstance(each.prompt[0], dict):
            yield each
        else:
            yield msgspec.structs.replace(each, prompt=[{"role": "user", "content": text_of(each, tokenizer)}])


def text_of(sample: Sample, tokenizer: Tokenizer) -> str:
    """A prompt that has no messages."""
    return sample.prompt if isinstance(sample.prompt, str) else tokenizer.decode(sample.prompt)  # type: ignore[arg-type]


def _tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _read(path: Path) -> list[_Conversation]:
    if _is_parquet(path):
        return _rows(path, _Conversation)
    try:
        return msgspec.json.decode(_data(path), type=list[_Conversation])
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"--dataset-path {path} cannot be read as ShareGPT's JSON ({reason(error)}).") from error


def _lines(path: Path, kind: type[T], member: str) -> list[T]:
    """The lines of a JSONL file, or the rows of Parquet."""
    if _is_parquet(path):
        return _rows(path, kind)
    try:
        lines = _data(path).split(b"\n")
        return [_line(line, number, kind) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"--dataset-path {path} cannot be read as JSON lines with {member} each ({reason(error)}).") from error


def _line(line: bytes, number: int, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: {error}") from error


def _data(path: Path) -> bytes:
    """Without the mark that Windows puts before UTF-8. Raises OSError."""
    return path.read_bytes().removeprefix(codecs.BOM_UTF8)


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet" or path.is_dir()


def _rows(path: Path, kind: type[T]) -> list[T]:
    """The rows of a Parquet file, or of all in a folder by their names, whose columns are the members of the JSON forms; others are
    left aside."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise SettingsError(f"--dataset-path {path} is a folder without Parquet: name a file.")
    try:
        parquet, names, known = import_module("pyarrow.parquet"), set(kind.__struct_fields__), []
        for file in files:
            columns = [name for name in parquet.read_schema(file).names if name in names]
            rows = parquet.read_table(file, columns=columns).to_pylist()
            known += [{name: value for name, value in row.items() if value is not None} for row in rows]
        return msgspec.convert(known, list[kind])  # type: ignore[valid-type]
    except ImportError as error:
        raise SettingsError("--dataset-path: Parquet needs pyarrow: pip install 'vnext[parquet]', or give JSON.") from error
    except (OSError, ValueError, msgspec.ValidationError) as error:
        members = ", ".join(sorted(names))
        raise SettingsError(f"--dataset-path {path} cannot be read as Parquet of {members} ({reason(error)}).") from error


def dataset_path(asked: str) -> Path:
    """The file or folder that is meant, or that of the Parquet files of a data set of the hub, which are fetched once. Raises
    SettingsError."""
    path = Path(asked).expanduser()
    if path.exists() or not _HUB_ID.fullmatch(asked):
        return path
    try:
        hub = import_module("huggingface_hub")  # most of a second, and no file needs it
        return Path(hub.snapshot_download(asked, repo_type="dataset", allow_patterns="*.parquet"))
    except (OSError, ValueError, RuntimeError) as error:
        raise SettingsError(f"--dataset-path {asked} is no file, nor a data set that the hub gives ({reason(error)}).") from error
