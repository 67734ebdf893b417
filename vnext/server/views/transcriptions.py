"""POST /v1/audio/transcriptions and /v1/audio/translations: what a sound says, in OpenAI's API.

A sound is heard in windows, each a request to the engine, whose prompt says the language and the task; where a window's last text
ends, the next one begins. Texts are those of tokens; times come of tokens that stand for them (answers/transcripts). A stream has
the text of a sound without times token by token, and that of others window by window.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest, UncheckedParams
from vnext.server.answers.generation import Choice, Generation
from vnext.server.answers.transcripts import Segment, segments_of, subtitles, verbose
from vnext.server.answers.writing import Json
from vnext.server.call import Call
from vnext.server.context.identity import answer_id, client_of
from vnext.server.context.openai_types import GenerationBody
from vnext.server.context.server_context import SERVER_CONTEXT
from vnext.server.http.forms import read_form
from vnext.server.http.streaming import Events, frame_of, respond
from vnext.state.params import Constraint
from vnext.text.answer import Delta
from vnext.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    import numpy as np

    from vnext.server.context.sounds import PromptSounds

STREAMED = ("json", "text")
FORMATS = (*STREAMED, "verbose_json", "srt", "vtt")
BEGIN, NO_TIMES, EARLIER = "<|startoftranscript|>", "<|notimestamps|>", "<|startofprev|>"
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
LATEST_FIRST = 50
"""The time that a transcript begins with at the latest, in steps of 20 ms, as in Whisper's own decoding.py."""
STEPS_MAX = 30
"""Windows that begin within the length of one, and as small a part of it is not heard alone at the end."""
IGNORED = {"include", "chunking_strategy", "user", "known_speaker_names", "known_speaker_references", "timestamp_granularities"}
"""With what stands in brackets behind a name, as OpenAI's client spells lists and objects."""
FIELDS = {"file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities[]", "stream", "seed"}


class TranscriptionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields beside the file. `language`: of two or three letters, None to be heard."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = False


async def transcribe(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/transcriptions."""
    return await _written(request, "transcribe")


async def translate(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/translations: in English."""
    return await _written(request, "translate")


async def _written(request: web.Request, task: str) -> web.StreamResponse:
    started_s, context = time.monotonic(), request.app[SERVER_CONTEXT]
    sounds = context.sounds
    if sounds is None:
        raise InvalidRequest("The model here does not listen: serve one that does, such as Whisper.", "model")
    form = await read_form(request, "file")
    body, client = body_of(form), client_of(request)
    call = Call(
        request, context, body, client, started_s, answer_id(request, "transcript"), int(time.time()), "",
        params=UncheckedParams(temperature=body.temperature, seed=body.seed, max_tokens=None),
        asked=GenerationBody(model=body.model),
    )  # fmt: skip
    context.model_name(body.model, client)
    with context.limiter.enter(1, client):
        transcript = Transcript(call, sounds, task, await sounds.read(form["file"][0], client))
        if not body.stream:
            return shown(await transcript.heard(Sent()), body.response_format)
        return await respond(request, partial(_streamed, transcript))


async def _streamed(transcript: Transcript, events: Events) -> None:
    """Send a transcript as events of OpenAI's API."""

    def say(text: str) -> bool:
        return events.send(frame_of({"type": "transcript.text.delta", "delta": text}))

    found = await transcript.heard(Sent(say, events.room))
    events.send(frame_of({"type": "transcript.text.done", "text": found["text"], "usage": found["usage"]}))


def body_of(form: dict[str, list[bytes]]) -> TranscriptionBody:
    """The fields of a form. Raises InvalidRequest."""
    if wrong := [name for name in form if name not in FIELDS and name.partition("[")[0] not in IGNORED]:
        raise InvalidRequest(f"{wrong[0][:80]} is no field of a transcription: leave it out.", wrong[0][:80])
    if not form.get("file", [b""])[0]:
        raise InvalidRequest("file is missing: it is required.", "file")
    given = {name: values[0].decode(errors="replace") for name, values in form.items() if name != "file"}
    if (kinds := form.get("timestamp_granularities[]")) and set(kinds) != {b"segment"}:
        raise InvalidRequest("timestamp_granularities[] must be segment: there are no times of words.", "timestamp_granularities[]")
    try:
        body = msgspec.convert({name: value for name, value in given.items() if value}, TranscriptionBody, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        raise InvalidRequest(f"{name} has a wrong type: {str(error).partition(' - at')[0]}.", name) from error
    if body.response_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise InvalidRequest(f"response_format is {body.response_format[:80]!r}: it must be one of {known}.", "response_format")
    if body.stream and body.response_format not in STREAMED:
        raise InvalidRequest(f"response_format is {body.response_format}: a stream has json or text.", "response_format")
    if not 0 <= body.temperature <= 1:
        raise InvalidRequest(f"temperature is {body.temperature}: it must lie between 0 and 1.", "temperature")
    return body


def shown(found: Json, form: str) -> web.Response:
    """The transcript as verbose_json in the form that is asked for."""
    if form == "json":
        return web.json_response(body=msgspec.json.encode({"text": found["text"], "usage": found["usage"]}))
    if form == "verbose_json":
        return web.json_response(body=msgspec.json.encode(found))
    lines = [(each["start"], each["end"], each["text"]) for each in found["segments"]]
    return web.Response(text=found["text"] + "\n" if form == "text" else subtitles(lines, form == "vtt"))


async def always() -> None:
    """There is always room."""


class Sent:
    """What a client was sent of a transcript, if it wants it as it comes: no space stands around all of it."""

    def __init__(self, say: Callable[[str], bool] | None = None, room: Callable[[], Awaitable[None]] = always) -> None:
        """Has sent nothing. `say`: sends a text, and returns whether more can be sent before there is `room`."""
        self.room = room
        self._say, self._space, self._has_begun = say, "", False

    def text(self, text: str) -> bool:
        """The transcript goes on with it; returns as `say`."""
        words = (whole := self._space + text).rstrip()
        self._space = whole[len(words) :]
        words = words if self._has_begun else words.lstrip()
        self._has_begun = self._has_begun or bool(words)
        return not words or self._say is None or self._say(words)


class Heard:
    """A generation.Reader that keeps the tokens, and sends the texts among them, those below `first`."""

    def __init__(self, sent: Sent, spelled: Detokenizer, first: int) -> None:
        """Has met no token."""
        self.tokens: list[int] = []
        self._sent, self._spelled, self._first = sent, spelled, first

    def delta(self, choice: Choice, delta: Delta) -> bool:
        self.tokens += delta.token_ids
        text = "".join(self._spelled.push(token) for token in delta.token_ids if token < self._first)
        return self._sent.text(text + (self._spelled.finish() if delta.finish else ""))

    def text(self, choice: Choice, text: str) -> bool:
        raise AssertionError("no choice is plain")

    async def room(self) -> None:
        await self._sent.room()


class Transcript:
    """One sound's transcript. `samples` float32 [N]."""

    def __init__(self, call: Call, sounds: PromptSounds, task: str, samples: np.ndarray) -> None:
        """Has heard nothing. Raises InvalidRequest."""
        self._call, self._sounds, self._samples = call, sounds, samples
        self._known = call.context.tokenizer.added_tokens
        self._task, self._asked = task, 0
        self._languages = {match[1]: id_ for text, id_ in self._known.items() if (match := LANGUAGE.fullmatch(text))}
        self._first = self._token(NO_TIMES) + 1
        language = call.body.language and call.body.language.lower()
        if language and language not in self._languages:
            known = ", ".join(sorted(self._languages)) or "none, since the model knows English alone"
            raise InvalidRequest(f"language is {language[:80]!r}: it must be one of {known}.", "language")
        self._language = language

    async def heard(self, sent: Sent) -> Json:
        """All of it as verbose_json, which `sent` gets as it comes. Raises as Generation."""
        size, rate = self._sounds.samples, self._sounds.rate
        at, found, earlier = 0, [], await self._earlier()
        timed = len(self._samples) > size or self._call.body.response_format in ("verbose_json", "srt", "vtt")
        while at == 0 or len(self._samples) - at > size // STEPS_MAX:
            window = self._samples[at : at + size]
            prompt = [*earlier, *await self._prompt(window, timed)]
            tokens = await self._written(window, prompt, self._call.params, self._rules(timed), Sent() if timed else sent)
            length_s = len(window) / rate
            heard = tokens if timed else [token for token in tokens if token < self._first]
            segments, on_s = segments_of(heard, self._first, length_s)
            texts = await self._call.context.decode([each.tokens for each in segments], self._call.client)
            moved = [Segment(at / rate + each.start_s, at / rate + each.end_s, each.tokens) for each in segments]
            found += zip(moved, texts)
            if timed:
                sent.text("".join(texts))
                await sent.room()
            at, earlier = at + max(round(on_s * rate), size // STEPS_MAX), []
        seconds = len(self._samples) / rate
        usage = {"usage": {"type": "duration", "seconds": round(seconds)}}
        return verbose(self._task, self._language or "en", seconds, found) | usage

    async def _earlier(self) -> list[int]:
        """What the prompt says went before, its last part where it is long."""
        if not (text := self._call.body.prompt.strip()):
            return []
        context = self._call.context
        [tokens] = await context.encode([" " + text], False, self._call.client, ["prompt"])
        room = (context.model_length - self._sounds.span) // 2 - 1
        return [self._token(EARLIER), *tokens[-room:]]

    async def _prompt(self, window: np.ndarray, timed: bool) -> list[int]:
        """The tokens that say the language, the task and whether there are times."""
        if self._languages and self._language is None:
            self._language = await self._language_of(window)
        task = [self._languages[self._language], self._token(f"<|{self._task}|>")] if self._language else []
        return [self._token(BEGIN), *task, *([] if timed else [self._first - 1])]

    async def _language_of(self, window: np.ndarray) -> str:
        """The likeliest language of a sound."""
        names = {id_: name for name, id_ in self._languages.items()}
        params = UncheckedParams(temperature=0.0, max_tokens=1)
        [token] = await self._written(window, [self._token(BEGIN)], params, Constraint(allowed=tuple(sorted(names))), Sent())
        return names[token]

    def _rules(self, timed: bool) -> Constraint:
        """What no transcript has, tokens that steer and those that the model's generation_config.json suppresses, and the rules for
        times."""
        context = self._call.context
        ends, size, defaults = context.client.ready.config.eos_token_ids, context.vocab_size, context.settings.sampling_defaults
        latest = (*defaults.latest_first, LATEST_FIRST)[0]
        never = {*context.tokenizer.special_ids.values(), *defaults.suppressed} - {*ends}
        return Constraint(
            banned=tuple((id_,) for id_ in sorted(never) if id_ < size), times=(self._first, self._first + latest) if timed else (),
            not_first=tuple(id_ for id_ in defaults.suppressed_first if id_ < size),
        )  # fmt: skip

    async def _written(
        self, window: np.ndarray, tokens: list[int], params: UncheckedParams, constraint: Constraint, sent: Sent
    ) -> list[int]:
        """What the model writes behind a sound and these tokens; `sent` gets the texts as they come."""
        call = self._call
        self._asked += 1
        generation = Generation(
            msgspec.structs.replace(
                call, prompts=[[0] * self._sounds.span + tokens], packed=self._sounds.packed(window, tokens),
                params=params, names=f"{call.id}-{self._asked}",
                constraint=constraint,
            )
        )  # fmt: skip
        reader = Heard(sent, call.context.tokenizer.detokenizer([], True), self._first)
        await generation.answer(reader)
        ends = call.context.end_tokens(generation.call.params)
        return [token for token in reader.tokens if token not in ends]

    def _token(self, text: str) -> int:
        if (found := self._known.get(text)) is None:
            raise InvalidRequest(f"The model's tokenizer has no {text}: save it with transformers once more.", "model")
        return found

