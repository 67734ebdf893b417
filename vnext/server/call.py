"""Call: one admitted request of a client, on its one way through the server.

Owns the one place that admits. The middleware has checked the key and the origin; `admit` reads the body (its type, size, pace,
JSON and the table of fields: http/bodies), names the answer, and finds where a stream goes on. A request class of the API checks
fields and makes parameters, tokens and a grammar of them: the rest of the Call. Its Generation asks the engine, a writer shows
the answers.

    call = await admit(request, "cmpl", decoder)                 raises InvalidRequest, ContentRefused, Overloaded, ...
    asked = CompletionRequest(call)                              raises InvalidRequest
    with call.context.limiter.enter(asked.answer_count, call.client):
        return await CompletionWriter(generation_of(await asked.read())).write()
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from aiohttp import web

from vnext.runtime.protocol.sampling_params import InvalidRequest, UncheckedParams
from vnext.server.context.identity import INPUTS_HEADER, TICKET_HEADER, answer_id, client_of, identify
from vnext.server.context.openai_types import NO_USAGE, GenerationBody, SamplingFields, UsageShown
from vnext.server.context.server_context import SERVER_CONTEXT, ServerContext
from vnext.server.http.bodies import read_body
from vnext.server.http.event_ids import HEADER, LastEvent, last_event
from vnext.state.params import Constraint

PRIORITY_MAX = 2**31 - 1
CACHE_SALT_CHARACTERS_MAX = 256
SHARED_FIELDS = SamplingFields.__struct_fields__
_shared = attrgetter(*SHARED_FIELDS)

Check = Callable[[Any, ServerContext], None]
"""Of a field that a body gives. Raises InvalidRequest."""


class Call(msgspec.Struct, frozen=True):
    """`body`: as its API's struct. `client`: whose share it takes. `started_s`: when the body was here (monotonic). `id`: its
    answer's. `names` begin those of its requests to the engine. `seed`: of a stream, where the body has none. `last`: of a stream
    that the client picks up again. `ticket`: of a prompt that another server has computed, "" for none; `inputs_ticket`: of inputs.

    The rest is what its API makes of the body. `asked`: the body in OpenAI's terms. `packed`: the only prompt as the engine gets
    it (int32 bytes), where that differs from its tokens: it holds images. `negative`: the tokens of the negative
    prompt. `usage`: where a stream shows it.
    `retention`: (tokens, seconds) of the prompts' beginnings that stay in the cache, beside what the body wants.
    `usual_max_tokens`: of an answer without `max_tokens`, where they fit; None for the server's own."""

    request: web.Request
    context: ServerContext
    body: Any
    client: str
    started_s: float
    id: str
    created_s: int
    names: str
    seed: int | None = None
    last: LastEvent | None = None
    ticket: str = ""
    inputs_ticket: str = ""
    asked: GenerationBody = GenerationBody()
    usage: UsageShown = NO_USAGE
    params: UncheckedParams = UncheckedParams()
    prompts: Sequence[list[int]] = ()
    packed: bytes = b""
    negative: Sequence[int] = ()
    constraint: Constraint | None = None
    retention: tuple[tuple[int, int], ...] = ()
    usual_max_tokens: int | None = None


async def admit(request: web.Request, kind: str, decoder: msgspec.json.Decoder[Any]) -> Call:
    """The call of a request, whose answer's id begins with `kind`; a stream that goes on keeps its ids. Raises the errors of
    `read_body` and `last_event`."""
    context, client = request.app[SERVER_CONTEXT], client_of(request)
    if context.traces is not None:
        context.traces.accept(request.headers)
    body = await read_body(request, decoder)
    started_s = time.monotonic()
    if given := getattr(body, "request_id", None):
        identify(request, given)
    takes, role = context.settings.takes_tickets, context.settings.role
    ticket = _ticket(request, TICKET_HEADER) if takes and role != "prefill" else ""
    streams = getattr(body, "stream", None)
    last = last_event(request.headers) if streams and HEADER in request.headers else None
    if last is None:
        id_ = names = answer_id(request, kind)
        created_s, seed = int(time.time()), context.identity.draw_seed() if streams else None
    else:
        id_ = f"{kind}-{last.origin.answer}"
        created_s, seed, names = last.origin.created_s, last.origin.seed, f"{id_}-{secrets.token_hex(4)}"
    return Call(request, context, body, client, started_s, id_, created_s, names, seed, last, ticket, inputs_ticket_of(request))


def sampling_params(body: GenerationBody, **defaults: Any) -> UncheckedParams:
    """The shared sampling fields that are set, over `defaults`, over those of SamplingParams."""
    given = {name: value for name, value in zip(SHARED_FIELDS, _shared(body)) if value is not None}
    return UncheckedParams(**(defaults | given))


def inputs_ticket_of(request: web.Request) -> str:
    """Of what another server has encoded for a request, "" for nothing."""
    return _ticket(request, INPUTS_HEADER) if request.app[SERVER_CONTEXT].settings.takes_tickets else ""


def _ticket(request: web.Request, name: str) -> str:
    """A ticket is ASCII; other bytes cannot be sent to the engine."""
    return found if (found := request.headers.get(name, "")).isascii() else ""


class Checks:
    """The checks of fields that a body may give, in order. Those of fields that it leaves out take no time."""

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._given, self._checks = attrgetter(*checks), tuple(checks.values())

    def check(self, body: Any, context: ServerContext) -> None:
        """Raise InvalidRequest for the first field that is wrong."""
        for check, value in zip(self._checks, self._given(body)):
            if value is not None:
                check(body, context)


def _check_scored_stream(body: GenerationBody, _: ServerContext) -> None:
    if body.stream:
        raise InvalidRequest("prompt_logprobs cannot be combined with stream: leave one out.", "prompt_logprobs")


def _check_stream_options(body: GenerationBody, _: ServerContext) -> None:
    if not body.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")


def _check_experts(body: GenerationBody, context: ServerContext) -> None:
    name = "return_routed_experts"
    if not body.return_routed_experts:
        return
    if "routed_experts" not in context.client.ready.environment:
        raise InvalidRequest(f"{name}: start the server with --enable-return-routed-experts, or leave it out.", name)
    if body.stream or body.use_beam_search:
        raise InvalidRequest(f"{name} describes whole sampled answers: leave out stream and use_beam_search.", name)


def _check_beams(body: GenerationBody, _: ServerContext) -> None:
    for name in ("beam_width", "length_penalty"):
        if not body.use_beam_search and getattr(body, name) not in (None, 1):
            raise InvalidRequest(f"{name} is only allowed when use_beam_search is true.", name)


def _check_guidance(body: GenerationBody, context: ServerContext) -> None:
    if body.guidance_scale == 1:
        return
    if not context.client.ready.config.guidance:
        raise InvalidRequest("guidance_scale: start the server with --enable-guidance, or leave it out.", "guidance_scale")
    if body.use_beam_search:
        raise InvalidRequest("guidance_scale does not go with use_beam_search: leave one of the two out.", "guidance_scale")


def _check_priority(body: GenerationBody, _: ServerContext) -> None:
    if body.priority is not None and not -PRIORITY_MAX <= body.priority <= PRIORITY_MAX:
        raise InvalidRequest(
            f"priority is {body.priority}: it must lie between {-PRIORITY_MAX} and {PRIORITY_MAX}.", "priority"
        )


def _check_cache_salt(body: GenerationBody, _: ServerContext) -> None:
    if (count := len(body.cache_salt or "")) > CACHE_SALT_CHARACTERS_MAX:
        sentence = f"cache_salt has {count} characters: at most {CACHE_SALT_CHARACTERS_MAX} are allowed."
        raise InvalidRequest(sentence, "cache_salt")


SHARED: dict[str, Check] = {
    "prompt_logprobs": _check_scored_stream,
    "stream_options": _check_stream_options,
    "return_routed_experts": _check_experts,
    "guidance_scale": _check_guidance,
    "beam_width": _check_beams,
    "length_penalty": _check_beams,
    "priority": _check_priority,
    "cache_salt": _check_cache_salt,
}
"""The checks of the fields of GenerationBody."""
