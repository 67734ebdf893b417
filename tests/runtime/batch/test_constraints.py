"""Constrained requests in batches: the same tokens alone and among others, whatever the schedule; a grammar that fails ends
its request and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_here import engines_here
from llguidance import LLMatcher
from msgspec.structs import replace
from rank_drive import drive, host_rank, runner_of, some_arrivals, started_with
from tokenizers import Tokenizer

from vnext import LLM
from vnext.replay.cli.main import main as replay
from vnext.runtime.batch.masks import RowMasks
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.messages import RequestOutput, SubmitRequest
from vnext.runtime.rank.runner import ModelRunner
from vnext.sampling.constraint import Matcher, Vocabulary
from vnext.state.events import RequestArrived, pack_tokens, unpack_tokens
from vnext.state.params import Constraint, Sampling

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["north", "south"]}, "far": {"type": "boolean"}},
    "required": ["to", "far"],
    "additionalProperties": False,
}
GRAMMARS = (
    LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}),
    LLMatcher.grammar_from_regex("(yes|no|perhaps)( indeed){0,3}"),
)
ROOM = 60
SCHEDULES: tuple[dict[str, Any], ...] = (
    {}, {"pipeline_depth": 1}, {"max_num_batched_tokens": 9, "max_num_seqs": 8}, {"page_count": 40}, {"max_num_seqs": 3},
)  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_of()


def arrivals() -> list[RequestArrived]:
    """Every second request is constrained, of those every second at a high temperature."""
    made = some_arrivals(12, seed=4)
    for at in range(0, len(made), 2):
        constraint = Constraint(grammar=GRAMMARS[at // 2 % 2])
        own = Sampling(seed=at, max_tokens=ROOM, temperature=1.5 if at % 4 else 0.0, constraint=constraint)
        made[at] = replace(made[at], sampling=own, prompt=made[at].prompt[: 4 * 30])
    return made


def tokens_of(runner: ModelRunner, given: list[RequestArrived], **changes: Any) -> dict[int, list[int]]:
    found = drive(host_rank(runner), started_with(runner, eos_token_ids=(0, 4), **changes), given)
    return {id_: [token for token, _ in pairs] for id_, pairs in found.items()}


def test_answers_keep_their_grammar_and_do_not_depend_on_the_schedule(runner: ModelRunner) -> None:
    expected = tokens_of(runner, arrivals())
    for at in range(0, 12, 4):
        value = json.loads(TOKENIZER.decode(expected[at][:-1]))
        assert set(value) == {"to", "far"} and expected[at][-1] in (0, 4)
    for at in range(2, 12, 4):
        assert TOKENIZER.decode(expected[at][:-1]).split()[0] in ("yes", "no", "perhaps")
    for changes in SCHEDULES:
        assert tokens_of(runner, arrivals(), **changes) == expected, changes


def test_a_constrained_request_answers_alone_as_among_others(runner: ModelRunner) -> None:
    together = tokens_of(runner, arrivals())
    for arrival in arrivals():
        [alone] = tokens_of(runner, [replace(arrival, id=0)]).values()
        assert alone == together[arrival.id]


def test_a_grammar_that_fails_ends_its_request_with_a_sentence_and_no_other() -> None:
    prompt = pack_tokens(TOKENIZER.encode("The module").ids)
    good = Sampling(seed=1, max_tokens=20, ignore_eos=True)
    bad = replace(good, constraint=Constraint(grammar="{"), ignore_eos=False)
    with engines_here(), LLM(executor="inproc", log="off") as llm:
        outputs: dict[str, list[RequestOutput]] = {"good": [], "bad": []}
        requests = [SubmitRequest(name=name, prompt=prompt, sampling=each) for name, each in (("good", good), ("bad", bad))]
        for output in llm._client.run(requests):
            outputs[output.name].append(output)
    assert [outputs["bad"][-1].finish, outputs["good"][-1].finish] == ["abort", "length"]
    assert "cannot keep to its constraint" in outputs["bad"][-1].error and not outputs["good"][-1].error
    assert sum(len(unpack_tokens(output.tokens)) for output in outputs["good"]) == 20


@pytest.mark.parametrize("banned", ["", " so", " and"])
def test_a_constraint_that_fails_behind_a_draft_ends_its_answer_as_without(banned: str) -> None:
    """What the grammar forces is banned, at the end of the drafts or among them. The draft before it is not kept."""
    prompt, pieces = pack_tokens(TOKENIZER.encode("The module").ids), {banned, banned[:2], " "} if banned else set()
    forbidden = tuple((token,) for token in range(TOKENIZER.get_vocab_size()) if TOKENIZER.decode([token]) in pieces)
    constraint = Constraint(grammar=LLMatcher.grammar_from_regex("(yes|no) indeed and so on and on"), banned=forbidden)
    sampling, found = Sampling(seed=1, max_tokens=60, constraint=constraint), []
    for drafts in (0, 2, 8):
        config = {"num_speculative_tokens": drafts, "row_cost": 0} if drafts else ""
        with engines_here(), LLM(executor="inproc", log="off", speculative_config=config) as llm:
            [*_, last] = outputs = list(llm._client.run([SubmitRequest(name="", prompt=prompt, sampling=sampling)]))
        tokens = [token for output in outputs for token in unpack_tokens(output.tokens).tolist()]
        found.append((TOKENIZER.decode(tokens), last.finish, last.error))
        assert (last.accepted_drafts > 0) == (drafts > 0)
    error = "The answer cannot keep to its constraint: no token is left that may come next." if banned else ""
    assert set(found) == {(found[0][0], "abort" if banned else "stop", error)}
    assert found[0][0].endswith({"": "on and on", " so": "and", " and": "indeed"}[banned])


def test_each_draft_has_the_mask_behind_it_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(DEMO_MODEL, TOKENIZER.get_vocab_size(), (0,))
    constraint = Constraint(grammar=LLMatcher.grammar_from_regex("yes indeed and so on"))
    masks, matcher = RowMasks(3, vocabulary, drafts_max=2), Matcher(constraint, vocabulary)
    masks.join(2, constraint, ())
    assert masks.forced(2, 9) == []
    masks.take(masks.of(np.array([0, 2])), np.array([7, first := matcher.forced()[0]]))
    matcher.take(first)
    drafts = masks.forced(2, 2)
    assert drafts == matcher.forced()[:2] and len(drafts) == 2
    masks.follow(2, drafts)
    allowed = masks.allowed(masks.of(np.array([2, 0, 2, 2])))
    allowed.wait()
    assert allowed.rows.tolist() == [0, 2, 3]
    for place, draft in zip(allowed.places.tolist(), [*drafts, 0]):
        assert (np.unpackbits(allowed.masks[place].view(np.uint8), bitorder="little")[: vocabulary.size] == matcher.allowed()).all()
        matcher.take(draft)
    assert masks.followed(2) == 2
    monkeypatch.setattr(masks, "_follow", lambda *_: 1 // 0)
    masks.follow(2, drafts)
    with pytest.raises(ZeroDivisionError):
        masks.wait()


@pytest.mark.parametrize("drafts_max", [0, 2])
def test_a_rows_next_owner_has_nothing_of_the_last_one(drafts_max: int) -> None:
    """Neither a sample of a step that was computed for the last one, nor the tokens that its grammar forces."""
    vocabulary = Vocabulary(DEMO_MODEL, TOKENIZER.get_vocab_size(), (0,))
    last, following = (Constraint(grammar=LLMatcher.grammar_from_regex(each)) for each in ("yes indeed and so on", "no, never"))
    masks, matcher = RowMasks(2, vocabulary, drafts_max), Matcher(following, vocabulary)
    masks.join(1, last, ())
    sampled = np.array([Matcher(last, vocabulary).forced()[0]])
    masks.take(masks.of(np.array([1])), sampled)
    assert bool(masks.forced(1, 9)) == bool(drafts_max)
    late = masks.of(np.array([1]))
    masks.leave(1)
    masks.join(1, following, ())
    assert masks.forced(1, 9) == []
    masks.take(late, sampled)
    assert masks.forced(1, 9) == []
    rows = masks.of(np.array([1]))
    allowed = masks.allowed(rows)
    allowed.wait()
    mask = np.unpackbits(allowed.masks[int(allowed.places[0])].view(np.uint8), bitorder="little")[: vocabulary.size]
    assert (mask == matcher.allowed()).all() and masks.failed(rows) == []


@pytest.mark.parametrize("count", [1, 5])
def test_a_budget_is_kept_in_steady_steps(runner: ModelRunner, count: int) -> None:
    """Until the budget is used up nothing is forbidden, and the tensors of a step may serve the next one."""
    end = (700, 701)
    own = Sampling(seed=3, max_tokens=30, temperature=0.9, ignore_eos=True)
    bound = replace(own, constraint=Constraint(reasoning_end=end, reasoning_max=9))
    given = [replace(each, sampling=own) for each in some_arrivals(count, seed=2)]
    free = tokens_of(runner, given)
    found = tokens_of(runner, [replace(given[0], sampling=bound), *given[1:]])
    assert found[0][:9] == free[0][:9] and tuple(found[0][9:11]) == end and len(found[0]) == 30
    assert {id_: found[id_] for id_ in range(1, count)} == {id_: free[id_] for id_ in range(1, count)}


def answers_of(llm: LLM) -> list[tuple[str, tuple[int, ...]]]:
    """End and tokens of eight requests, every second of them constrained."""
    prompts = [pack_tokens(TOKENIZER.encode(text).ids) for text in ("The module", "import", "A list", "def") * 2]
    requests = []
    for at, prompt in enumerate(prompts):
        constraint = None if at % 2 else Constraint(grammar=GRAMMARS[at // 2 % 2])
        own = Sampling(seed=at, max_tokens=ROOM, temperature=0.0 if at < 4 else 1.2, constraint=constraint)
        requests.append(SubmitRequest(name=f"r{at}", prompt=prompt, sampling=own))
    tokens, ends = {request.name: () for request in requests}, {}
    for output in llm._client.run(requests):
        tokens[output.name] += tuple(unpack_tokens(output.tokens).tolist())
        ends[output.name] = output.finish
    return [(ends[name], tokens[name]) for name in tokens]


def test_two_ranks_in_processes_of_their_own_give_the_same_constrained_tokens(tmp_path: Path) -> None:
    """Each rank matches for itself, and the engine stops if their masks differ. A tight schedule changes no token."""
    ranks: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2, "digest_interval": 1}
    with LLM(**ranks, log="off") as llm:
        expected = answers_of(llm)
    with LLM(**ranks, max_num_seqs=3, max_num_batched_tokens=8, log="full", log_dir=str(tmp_path)) as llm:
        assert answers_of(llm) == expected
    assert all(end == "stop" for end, _ in expected[::2])
    assert replay(["verify", "--grammar", str(llm.log_dir)]) == 0
