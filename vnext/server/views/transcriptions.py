"""POST /v1/audio/transcriptions and /v1/audio/translations: what a sound says, in OpenAI's API.

A sound is heard in windows, each a request to the engine, whose prompt says the language, the task and what was said before; where
a window's last text ends, the next one begins. At temperature 0, a window whose answer is unlikely or repeats itself is heard again
at higher ones, and one that is probably silent has no text (answers/transcripts). Texts are those of tokens; times come of tokens
that stand for them. A stream has the text of a sound without times token by token, for which it is heard once, and that of others
window by window. A model that chats about sounds is asked in a chat, once (answers/spoken).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import BeamSearchParams, InvalidRequest, UncheckedParams
from vnext.server.answers.beams import generation_of
from vnext.server.answers.chat_request import ChatRequest
from vnext.server.answers.generation import Choice
from vnext.server.answers.logprobs import logprob_entry, speller
from vnext.server.answers.spoken import MARK, Spoken, asked_of
from vnext.server.answers.transcripts import (
    BEST_OF,
    FORGETFUL,
    TEMPERATURES,
    Said,
    Sent,
    Trial,
    chosen_of,
    compression_ratio,
    segments_of,
    subtitles,
    verbose,
    without_times,
)
from vnext.server.answers.writing import Json
from vnext.server.call import Call, inputs_ticket_of
from vnext.server.context.errors import in_names
from vnext.server.context.identity import answer_id, client_of
from vnext.server.context.openai_types import ChatBody, GenerationBody
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
SILENCE = ("<|nospeech|>", "<|nocaptions|>")
"""What the model calls it, in newer and in older tokenizers."""
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
LATEST_FIRST = 50
"""The time that a transcript begins with at the latest, in steps of 20 ms, as in Whisper's own decoding.py."""
STEPS_MAX = 30
"""Windows that begin within the length of one, and as small a part of it is not heard alone at the end."""
IGNORED = {"chunking_strategy", "user", "known_speaker_names", "known_speaker_references"}
"""With what stands in brackets behind a name, as OpenAI's client spells lists and objects."""
LISTS = {"timestamp_granularities": ("segment", ": there are no times of words"), "include": ("logprobs", "")}
"""Lists with [] behind their names or without, the only value of each, and why."""
NAMES = ((r"messages\[\d\]\.content\[0\]\.input_audio", "file"),)
"""Of what is asked in a chat -> of the form."""
FIELDS = {"file", "model", "language", "prompt", "response_format", "temperature", "stream", "seed", "beam_width"}


class TranscriptionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields beside the file. `language`: of two or three letters, None to be heard."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = False
    beam_width: int = 1
    has_logprobs: bool = False


async def transcribe(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/transcriptions."""
    return await _written(request, "transcribe")


async def translate(request: web.Request) -> web.StreamResponse:
    """POST /v1/audio/translations: in English."""
    return await _written(request, "translate")


async def _written(request: web.Request, task: str) -> web.StreamResponse:
    started_s, context = time.monotonic(), request.app[SERVER_CONTEXT]
    sounds = context.sounds
    if sounds is None and "audio" not in context.shown:
        raise InvalidRequest("The model here writes no transcripts: serve one that does, such as Whisper.", "model")
    form = await read_form(request, "file")
    body, client = body_of(form), client_of(request)
    call = Call(
        request, context, body, client, started_s, answer_id(request, "transcript"), int(time.time()), "",
        params=UncheckedParams(temperature=body.temperature, seed=body.seed, max_tokens=None),
        asked=GenerationBody(model=body.model), inputs_ticket=inputs_ticket_of(request),
    )  # fmt: skip
    context.model_name(body.model, client)
    with context.limiter.enter(1, client):
        if sounds is None:
            return await _chatted(call, task, form["file"][0])
        transcript = Transcript(call, sounds, task, await sounds.read(form["file"][0], client))
        if not body.stream or context.settings.role == "encode":
            return shown(await transcript.heard(Sent()), body.response_format)
        return await respond(request, partial(_streamed, transcript.heard))


async def _chatted(call: Call, task: str, file: bytes) -> web.StreamResponse:
    """The transcript of a model that chats about what it hears."""
    context, body = call.context, call.body
    if body.response_format not in STREAMED:
        name = "response_format"
        raise InvalidRequest(f"{name} is {body.response_format}: the model here tells no times, take json or text.", name)
    is_marked = MARK in context.tokenizer.added_tokens
    with in_names(NAMES):
        messages = asked_of(file, task, body.language, body.prompt.strip(), is_marked)
        has_begun = messages[-1].role == "assistant"
        asked = ChatBody(
            messages=messages, model=body.model, temperature=body.temperature, seed=body.seed, logprobs=body.has_logprobs,
            stream=body.stream, continue_final_message=has_begun, use_beam_search=body.beam_width > 1 or None,
            beam_width=body.beam_width if body.beam_width > 1 else None,
        )  # fmt: skip
        chat = ChatRequest(msgspec.structs.replace(call, body=asked), asked)
        generation = await chat.start()

    async def heard(sent: Sent) -> Json:
        reader = Spoken(chat.parts(), is_marked and not has_begun, sent)
        await generation.answer(reader)
        return spoken(reader, chat.usage(generation), call)

    if not body.stream:
        return shown(await heard(Sent()), body.response_format)
    return await respond(call.request, partial(_streamed, heard))


def spoken(reader: Spoken, usage: Json, call: Call) -> Json:
    """What a model has said of a sound, in OpenAI's shape."""
    context, counts = call.context, ("prompt_tokens", "completion_tokens", "total_tokens")
    counted = dict(zip(("input_tokens", "output_tokens", "total_tokens"), (usage[name] for name in counts)))
    found: Json = {"text": reader.words.strip(), "usage": {"type": "tokens"} | counted}
    if call.body.has_logprobs:
        ends, mark = context.client.ready.config.eos_token_ids, context.tokenizer.added_tokens.get(MARK)
        begin = next((at for at, (token, _) in enumerate(reader.tokens, 1) if token == mark), 0)
        entry = partial(logprob_entry, context.tokenizer, speller(context.tokenizer, None))
        found["logprobs"] = [entry(*pair) for pair in reader.tokens[begin:] if pair[0] not in ends]
    return found


async def _streamed(heard: Callable[[Sent], Awaitable[Json]], events: Events) -> None:
    """Send a transcript as events of OpenAI's API."""

    def say(text: str) -> bool:
        return events.send(frame_of({"type": "transcript.text.delta", "delta": text}))

    found = await heard(Sent(say, events.room))
    events.send(frame_of({"type": "transcript.text.done"} | briefly(found)))


def body_of(form: dict[str, list[bytes]]) -> TranscriptionBody:
    """The fields of a form. Raises InvalidRequest."""
    fields = FIELDS | {f"{name}{end}" for name in LISTS for end in ("", "[]")}
    if wrong := [name for name in form if name not in fields and name.partition("[")[0] not in IGNORED]:
        raise InvalidRequest(f"{wrong[0][:80]} is no field of a transcription: leave it out.", wrong[0][:80])
    if not form.get("file", [b""])[0]:
        raise InvalidRequest("file is missing: it is required.", "file")
    for name, found in form.items():
        only, why = LISTS.get(name.removesuffix("[]"), ("", ""))
        if only and {*found} != {only.encode()}:
            raise InvalidRequest(f"{name} must be {only}{why}.", name)
    given = {name: values[0].decode(errors="replace") for name, values in form.items() if name in FIELDS - {"file"} and values[0]}
    given |= {"has_logprobs": "true"} if "include" in form or "include[]" in form else {}
    try:
        body = msgspec.convert(given, TranscriptionBody, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        raise InvalidRequest(f"{name} has a wrong type: {str(error).partition(' - at')[0]}.", name) from error
    if body.response_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise InvalidRequest(f"response_format is {body.response_format[:80]!r}: it must be one of {known}.", "response_format")
    if body.stream and body.response_format not in STREAMED:
        raise InvalidRequest(f"response_format is {body.response_format}: a stream has json or text.", "response_format")
    if body.has_logprobs and body.response_format != "json":
        raise InvalidRequest(f"response_format is {body.response_format}: include[] is only allowed with json.", "include[]")
    BeamSearchParams(beam_width=body.beam_width)
    if body.beam_width > 1 and body.temperature:
        raise InvalidRequest("beam_width is only allowed at temperature 0.", "beam_width")
    if not 0 <= body.temperature <= 1:
        raise InvalidRequest(f"temperature is {body.temperature}: it must lie between 0 and 1.", "temperature")
    return body


def shown(found: Json, form: str) -> web.Response:
    """The transcript as verbose_json in the form that is asked for."""
    if form == "json":
        return web.json_response(body=msgspec.json.encode(briefly(found)))
    if form == "verbose_json":
        return web.json_response(body=msgspec.json.encode(found))
    if form == "text":
        return web.Response(text=found["text"] + "\n")
    lines = [(each["start"], each["end"], each["text"]) for each in found["segments"]]
    return web.Response(text=subtitles(lines, form == "vtt"))


def briefly(found: Json) -> Json:
    """What json and a stream's end have of a transcript."""
    return {name: found[name] for name in ("text", "logprobs", "usage") if name in found}


class Heard:
    """A generation.Reader that keeps the tokens of each answer and their log-probabilities, and sends the texts among those of the
    first, which are below `first`."""

    def __init__(self, sent: Sent, spelled: Detokenizer, first: int) -> None:
        """Has met no token."""
        self.answers: dict[int, tuple[list[int], list[float]]] = {}
        self._sent, self._spelled, self._first = sent, spelled, first

    def delta(self, choice: Choice, delta: Delta) -> bool:
        tokens, logprobs = self.answers.setdefault(choice.index, ([], []))
        tokens += delta.token_ids
        logprobs += (each.logprob for each in delta.logprobs)
        if choice.index:
            return True
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
        tokenizer = call.context.tokenizer
        self._entry = partial(logprob_entry, tokenizer, speller(tokenizer, None))

    async def heard(self, sent: Sent) -> Json:
        """All of it as verbose_json, which `sent` gets as it comes. Raises as Generation."""
        size, rate, body = self._sounds.samples, self._sounds.rate, self._call.body
        at, found, earlier = 0, list[Said](), await self._earlier()
        timed = len(self._samples) > size or body.response_format in ("verbose_json", "srt", "vtt")
        logprobs, is_whole = list[Json](), timed or body.beam_width > 1
        while at == 0 or len(self._samples) - at > size // STEPS_MAX:
            window = self._samples[at : at + size]
            before = [self._known[EARLIER], *earlier[-self._room :]] if earlier else []
            trial = await self._best(window, [*before, *await self._prompt(window, timed)], timed, Sent() if is_whole else sent)
            length_s = len(window) / rate
            segments, on_s = ([], length_s) if trial.is_silent else segments_of(trial.tokens, self._first, length_s)
            texts = await self._texts([each.tokens for each in segments])
            for segment, text in zip(segments, texts):
                start_s, end_s, tokens, place = segment
                moved = segment._replace(start_s=at / rate + start_s, end_s=at / rate + end_s)
                found.append(Said(moved, text, trial, at * 100 // rate))
                logprobs += map(self._entry, tokens, trial.logprobs[place:]) if body.has_logprobs else ()
                earlier += trial.tokens[max(0, place - 1) : place + len(tokens) + 1]
            if is_whole:
                sent.text("".join(texts))
                await sent.room()
            at += max(round(on_s * rate), size // STEPS_MAX)
            earlier = [] if trial.temperature > FORGETFUL or EARLIER not in self._known else earlier
        seconds = len(self._samples) / rate
        more = {"usage": {"type": "duration", "seconds": round(seconds)}} | ({"logprobs": logprobs} if body.has_logprobs else {})
        return verbose(self._task, self._language or "en", seconds, found) | more

    async def _best(self, window: np.ndarray, prompt: list[int], timed: bool, sent: Sent) -> Trial:
        """The transcript of a window, at the temperature that is asked for; 0 means the lowest one at which it is good, unless it
        was sent already. Without a seed, nothing is left to chance then."""
        body, trials, silence = self._call.body, list[Trial](), None
        if body.response_format == "verbose_json":
            silence = await self._silence(window, prompt)
        for temperature in (body.temperature,) if body.temperature or sent.is_live else TEMPERATURES:
            params = msgspec.structs.replace(self._call.params, temperature=temperature, logprobs=0)
            if temperature > body.temperature:
                params = msgspec.structs.replace(params, n=BEST_OF, seed=body.seed or 0)
            beams = 1 if temperature else body.beam_width
            answers = await self._written(window, prompt, params, self._rules(timed), sent, beams)
            if not timed:
                answers = [without_times(*answer, self._first) for answer in answers]
            texts = await self._texts([[token for token in tokens if token < self._first] for tokens, _ in answers])
            tried = [Trial(temperature, *answer, compression_ratio(text)) for answer, text in zip(answers, texts)]
            best = max(tried, key=attrgetter("avg_logprob"))
            if best.is_unlikely and silence is None and not sent.is_live:
                silence = await self._silence(window, prompt)
            trials.append(best._replace(silence=silence))
            if trials[-1].is_good or trials[-1].is_silent:
                break
        return chosen_of(trials)

    async def _silence(self, window: np.ndarray, prompt: Sequence[int]) -> float:
        """How likely nothing is said in a window: what the model gives the token for it behind the prompt's beginning, or 0.0."""
        token = next((self._known[name] for name in SILENCE if name in self._known), None)
        if token is None:
            return 0.0
        params, begin = UncheckedParams(temperature=0.0, max_tokens=1, logprobs=0), prompt.index(self._token(BEGIN)) + 1
        [(_, logprobs)] = await self._written(window, prompt[:begin], params, Constraint(allowed=(token,)), Sent())
        return math.exp(logprobs[0])

    async def _texts(self, tokens: Sequence[list[int]]) -> list[str]:
        return await self._call.context.decode(tokens, self._call.client)

    @property
    def _room(self) -> int:
        """The tokens of what was said before that a prompt may have, as Whisper's own."""
        return (self._call.context.bounds.model_length - self._sounds.span) // 2 - 1

    async def _earlier(self) -> list[int]:
        """What the body says went before."""
        if not (text := self._call.body.prompt.strip()):
            return []
        self._token(EARLIER)
        [tokens] = await self._call.context.encode([" " + text], False, self._call.client, ["prompt"])
        return tokens

    async def _prompt(self, window: np.ndarray, timed: bool) -> list[int]:
        """The tokens that say the language, the task and whether there are times."""
        if self._languages and self._language is None:
            self._language = await self._language_of(window)
        task = [self._languages[self._language], self._token(f"<|{self._task}|>")] if self._language else []
        return [self._token(BEGIN), *task, *([] if timed else [self._first - 1])]

    async def _language_of(self, window: np.ndarray) -> str:
        names = {id_: name for name, id_ in self._languages.items()}
        params = UncheckedParams(temperature=0.0, max_tokens=1)
        [([token], _)] = await self._written(window, [self._token(BEGIN)], params, Constraint(allowed=tuple(sorted(names))), Sent())
        return names[token]

    def _rules(self, timed: bool) -> Constraint:
        """What no transcript has, tokens that steer and those that the model's generation_config.json suppresses, and the rules for
        times."""
        context = self._call.context
        ends, defaults = context.client.ready.config.eos_token_ids, context.settings.sampling_defaults
        latest, size = (*defaults.latest_first, LATEST_FIRST)[0], context.bounds.vocab_size
        never = {*context.tokenizer.special_ids.values(), *defaults.suppressed} - {*ends}
        return Constraint(
            banned=tuple((id_,) for id_ in sorted(never) if id_ < size), times=(self._first, self._first + latest) if timed else (),
            not_first=tuple(id_ for id_ in defaults.suppressed_first if id_ < size), judged=True,
        )  # fmt: skip

    async def _written(
        self, window: np.ndarray, prompt: Sequence[int], params: UncheckedParams, constraint: Constraint, sent: Sent, beams: int = 1
    ) -> list[tuple[list[int], list[float]]]:
        """The answers to a sound and these tokens behind it: their tokens without the end, and log-probabilities with the end's.
        `sent` gets the first one's texts as they come."""
        call = self._call
        self._asked += 1
        generation = generation_of(
            msgspec.structs.replace(
                call, prompts=[[0] * self._sounds.span + list(prompt)], packed=self._sounds.packed(window, prompt),
                params=params, names=f"{call.id}-{self._asked}", constraint=constraint,
                asked=GenerationBody(model=call.body.model, use_beam_search=beams > 1, beam_width=beams if beams > 1 else None),
            )
        )  # fmt: skip
        reader = Heard(sent, call.context.tokenizer.detokenizer([], True), self._first)
        await generation.answer(reader)
        ends = call.context.end_tokens(generation.call.params)
        return [
            ([token for token in tokens if token not in ends], logprobs) for _, (tokens, logprobs) in sorted(reader.answers.items())
        ]

    def _token(self, text: str) -> int:
        if (found := self._known.get(text)) is None:
            raise InvalidRequest(f"The model's tokenizer has no {text}: save it with transformers once more.", "model")
        return found

