"""Expert ids in answers: SGLang's `return_routed_experts`, for engines that report them."""

from __future__ import annotations

import base64
from typing import Any

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.context.openai_types import GenerationBody
from vnext.server.context.server_context import ServerContext
from vnext.text.answer import Answer

FIELD = "return_routed_experts"


def check_experts(body: GenerationBody, context: ServerContext) -> None:
    """Raise InvalidRequest for a request for expert ids that cannot be met."""
    if not body.return_routed_experts:
        return
    if "routed_experts" not in context.client.ready.environment:
        raise InvalidRequest(f"{FIELD}: start the server with --enable-return-routed-experts, or leave it out.", FIELD)
    if body.stream or body.use_beam_search:
        raise InvalidRequest(f"{FIELD} describes whole sampled answers: leave out stream and use_beam_search.", FIELD)


def experts_member(answer: Answer, prompt_length: int, body: GenerationBody) -> dict[str, Any]:
    """The member `routed_experts` of a choice: int32 [prompt + answer - 1, layers, experts of a token] in base64, as SGLang
    sends them; {} where it was not asked for."""
    if not body.return_routed_experts:
        return {}
    from vnext.text.prompt_arrays import routed_experts

    found = routed_experts(answer.prompt, prompt_length + answer.token_count - 1)
    return {"routed_experts": None if found is None else base64.b64encode(found.astype("<i4").tobytes()).decode()}
