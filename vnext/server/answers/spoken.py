"""Spoken: transcripts by models that chat about what they hear: what such a chat asks, and what of an answer is the transcript.

Models of Qwen3-ASR's line write the language and MARK before it; one that is asked for a language gets that as the beginning of
its answer (transformers, models/qwen3_asr/processing_qwen3_asr.py). Others are asked in words.
"""

from __future__ import annotations

from base64 import b64encode
from types import MappingProxyType

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.answers.generation import Choice
from vnext.server.answers.parts import AnswerParts
from vnext.server.answers.transcripts import Sent
from vnext.server.context.openai_types import ChatMessage, ContentPart, InputAudio
from vnext.text.answer import Delta
from vnext.text.parts import Words

MARK, HEAD = "<asr_text>", "language "
"""Before a transcript, and before its language."""
HELD_MAX = 64
"""Characters in which a mark comes."""
ASKED = MappingProxyType({"transcribe": "Transcribe the input speech.", "translate": "Translate the input speech into English."})
LANGUAGES = MappingProxyType(
    dict(
        each.split(":")
        for each in """
            ar:Arabic cs:Czech da:Danish de:German el:Greek en:English es:Spanish fa:Persian fi:Finnish fil:Filipino fr:French
            hi:Hindi hu:Hungarian id:Indonesian it:Italian ja:Japanese ko:Korean mk:Macedonian ms:Malay nl:Dutch pl:Polish
            pt:Portuguese ro:Romanian ru:Russian sv:Swedish th:Thai tr:Turkish vi:Vietnamese yue:Cantonese zh:Chinese""".split()
    )
)
"""Codes of languages -> the names that these models write."""


def asked_of(sound: bytes, task: str, language: str | None, prompt: str, is_marked: bool) -> list[ChatMessage]:
    """The messages that ask for a transcript of a sound's file. `prompt`: words that may be said in it; `is_marked`: of a model
    that writes MARK. The last message is the assistant's where the language is given to such a one. Raises InvalidRequest."""
    heard = ContentPart(type="input_audio", input_audio=InputAudio(data=b64encode(sound).decode()))
    name = LANGUAGES.get((language or "").lower(), language)
    if not is_marked:
        words = (ASKED[task], f"It is in {name}." if name else "", prompt)
        return [ChatMessage(role="user", content=[heard, ContentPart(type="text", text=" ".join(filter(None, words)))])]
    if task == "translate":
        raise InvalidRequest("The model here writes what it hears and translates nothing: take /v1/audio/transcriptions.", "model")
    if name and name not in LANGUAGES.values():
        raise InvalidRequest(f"language is {name[:80]!r}: it must be one of {', '.join(LANGUAGES)}.", "language")
    before = [ChatMessage(role="system", content=prompt)] if prompt else []
    behind = [ChatMessage(role="assistant", content=f"{HEAD}{name}{MARK}")] if name else []
    return [*before, ChatMessage(role="user", content=[heard]), *behind]


class Spoken:
    """A generation.Reader of one answer, which sends the transcript in it, and keeps it as `words`. `tokens`: of the answer, with
    their log-probabilities, where these are asked for."""

    def __init__(self, parts: AnswerParts, is_marked: bool, sent: Sent) -> None:
        """Has met no token. `is_marked`: the answer begins with its language and MARK."""
        self.words, self.tokens = "", list[tuple[int, float]]()
        self._parts, self._held, self._is_open, self._sent = parts, "", not is_marked, sent

    def delta(self, choice: Choice, delta: Delta) -> bool:
        words = "".join(part.text for part in self._parts.push(delta) if isinstance(part, Words))
        words = words if self._is_open else self._behind_mark(words, bool(delta.finish))
        self.words += words
        self.tokens += ((token, each.logprob) for token, each in zip(delta.token_ids, delta.logprobs))
        return self._sent.text(words)

    def _behind_mark(self, words: str, is_last: bool) -> str:
        """What of the answer so far is the transcript: all of it where it does not begin as one with a mark does."""
        self._held += words
        _, mark, text = self._held.partition(MARK)
        if not mark and not is_last and len(self._held) < HELD_MAX and self._held.startswith(HEAD[: len(self._held)]):
            return ""
        self._is_open = True
        return text if mark else self._held

    def text(self, choice: Choice, text: str) -> bool:
        raise AssertionError("no choice is plain")

    async def room(self) -> None:
        await self._sent.room()
