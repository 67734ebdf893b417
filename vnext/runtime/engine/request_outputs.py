"""What clients read of their requests, from the outputs of the state and the results of ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vnext.runtime.engine.draft_counts import NO_DRAFTS, DraftCounts
from vnext.runtime.engine.facilities import NO_ERRORS
from vnext.runtime.protocol.messages import PromptResult, RequestOutput, TokenLogprobs
from vnext.state.outputs import Output
from vnext.state.state import State


def prompt_outputs(state: State, results: Sequence[PromptResult]) -> list[RequestOutput]:
    """What the requests that are live get of their prompts. It precedes the outputs of the step that computed it."""
    return [
        RequestOutput(name=state.requests[each.id].name, tokens=b"", number=each.id, prompt=(each,))
        for each in results
        if each.id in state.requests
    ]


def to_clients(
    news: Sequence[Output],
    drafts: DraftCounts,
    logprobs: Sequence[TokenLogprobs | None] | None = None,
    errors: Mapping[int, str] = NO_ERRORS,
) -> list[RequestOutput]:
    """What clients read of these outputs. `drafts` forgets the requests that end; `logprobs` has one entry per sample of the step,
    and `errors` says why requests are aborted."""
    made = []
    for output in news:
        counts = drafts.pop(output.id) if output.finish else NO_DRAFTS
        made.append(to_client(output, logprobs, errors.get(output.id, ""), counts))
    return made


def to_client(
    output: Output, logprobs: Sequence[TokenLogprobs | None] | None, error: str = "", drafts: tuple[int, int] = NO_DRAFTS
) -> RequestOutput:
    """A request's output as its client reads it; `logprobs` has one entry per sample of the step, `error` says why the engine
    aborts the request, and `drafts` are those accepted and rejected."""
    scored = logprobs[output.sample] if logprobs and output.sample >= 0 else None
    return RequestOutput(
        name=output.name,
        tokens=b"" if output.token < 0 else output.token.to_bytes(4, "little"),
        finish=output.finish,
        stop_token=output.stop_token,
        cached_tokens=output.cached_tokens,
        logprobs=() if scored is None else (scored,),
        number=output.id,
        error=error,
        accepted_drafts=drafts[0],
        rejected_drafts=drafts[1],
        retained=output.retained,
    )
