"""Models with recurrent layers in the engine: one request's tokens for any batch, chunks, preemptions and snapshots that it goes on
from, while what nobody has written is poisoned; and how little of a long talk is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from engine_here import engines_here
from family_cases import BASE, VOCAB_SIZE
from heads.saved import random_head
from hybrids import load_oracle, save_hybrid

from vnext import LLM, SamplingParams
from vnext.models.config.model_config import load_config
from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.runtime.batch.step_inputs import StepInputs
from vnext.runtime.processes.launch import StartFailed
from vnext.runtime.protocol.settings import ModelSettings, RankSettings, SettingsError
from vnext.runtime.rank.heads import load_head
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import HostSteps
from vnext.runtime.rank.together import require_model
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig, Speculation
from vnext.state.errors import IllegalEvent
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, StepPlanned, pack_tokens
from vnext.state.laws import check
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start

BLOCK_SIZE, TOKEN_COUNT = 4, 12
LENGTHS = (5, 61, 150, 30, 61)
USUAL: dict[str, Any] = dict(
    rank=0, world_size=1, ring="", results_address="", rendezvous="", model_path="", device="cpu", threads=1, block_size=4, kv_cache_bytes=0
)


class Engine:
    """State, scheduler, persistent batch and model in one thread."""

    def __init__(self, path: Path, draft: Path | None = None, head: str | None = None, **changes: object) -> None:
        """`draft`: a model that drafts. `head`: the folder of a head that does, "" for the checkpoint's own layer."""
        self.runner = ModelRunner(path, ModelSettings(dtype="float32"), "cpu", alone())
        if head is not None:
            settings = RankSettings(**USUAL, draft_method="eagle3" if head else "mtp", draft_path=head)
            self.runner.head = load_head(settings, self.runner)
        self.runner.draft = draft and ModelRunner(draft, ModelSettings(dtype="float32"), "cpu", alone())
        windows = kv_groups(self.runner.config).windows
        bounds = dict(
            block_size=BLOCK_SIZE, page_count=400, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=2048,
            vocab_size=VOCAB_SIZE, state_pages=40, snapshot_interval=32, windows=windows if any(windows) else (),
        )  # fmt: skip
        bounds |= changes
        bounds["page_count"] *= len(windows)
        config = SchedulerConfig(**bounds)
        self.state = start(EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0))
        self.steps = HostSteps(self.runner)
        self.steps.start(self.state)
        self.batch = self.steps._batch
        for part in (part for parts in self.runner.cache.states.pools for part in parts):
            part.fill(np.nan)
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def arrive(self, prompt: Sequence[int], count: int = TOKEN_COUNT) -> int:
        arrival = RequestArrived(
            id=self.state.next_id, name="", prompt=pack_tokens(list(prompt)), priority=0, arrival_ns=0,
            sampling=Sampling(seed=0, temperature=0.0, max_tokens=count),
        )  # fmt: skip
        self.state, self.tokens[arrival.id] = reduce(self.state, arrival), []
        return arrival.id

    def run(self, preempted: Sequence[int] = ()) -> list[list[int]]:
        """Until everybody has an answer. At the given steps the last row gives way, where there are two."""
        while self.state.requests:
            while (plan := schedule(self.state)) is not None:
                whim = StepPlanned(step=plan.step, preempted=(len(self.state.rows) - 1,))
                try:
                    self._plan(whim if plan.step in preempted and len(self.state.rows) > 1 else plan)
                except IllegalEvent:  # nobody else has anything to compute
                    self._plan(plan)
            done = self.steps.wait()
            self._commit(StepCommitted(step=self.state.committed, tokens=done.tokens, counts=done.counts, drafted=done.drafted))
        return [self.tokens[id_] for id_ in sorted(self.tokens)]

    def _plan(self, plan: StepPlanned) -> None:
        self.state = reduce(self.state, plan)
        check(self.state)
        step = self.state.in_flight[-1]
        for id_, count in zip(step.ids.tolist(), step.counts.tolist()):
            self.computed[id_] = self.computed.get(id_, 0) + count
        self.steps.launch(self.state)

    def _commit(self, event: StepCommitted) -> None:
        before, self.state = self.state, reduce(self.state, event)
        for news in outputs(before, event, self.state):
            self.tokens[news.id].append(news.token)


SAVED = ("recurrent_gemma", "lfm2", "qwen3_5", "falcon_h1", "nemotron_h", "jamba", "minimax", "kimi_linear", "ling_3", "lfm3", "mamba", "zamba2")


@pytest.fixture(scope="module", params=SAVED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("hybrid") / request.param
    save_hybrid(path, request.param)
    return path


def prompts() -> list[list[int]]:
    """Of several lengths; two are the same, and two begin alike."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    drawn[2][:44] = drawn[1][:44]
    return [*drawn[:4], drawn[1]]


def served(path: Path, preempted: Sequence[int] = (), **changes: object) -> list[list[int]]:
    engine = Engine(path, **changes)
    for prompt in prompts():
        engine.arrive(prompt)
    return engine.run(preempted)


@pytest.fixture(scope="module")
def plain(saved: Path) -> list[list[int]]:
    """What an engine with room for everything answers to the prompts."""
    return served(saved)


def test_a_hybrid_answers_as_in_transformers(saved: Path, plain: list[list[int]]) -> None:
    oracle = load_oracle(saved, torch.float32)
    expected = []
    for prompt in prompts():
        given = torch.tensor([prompt])
        options = dict(do_sample=False, max_new_tokens=TOKEN_COUNT, pad_token_id=0, attention_mask=torch.ones_like(given))
        expected.append(oracle.generate(given, **options)[0, len(prompt) :].tolist())
    assert plain == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"prefix_caching": False},
        {"snapshot_interval": 0},
        {"snapshot_interval": 4, "state_pages": 13},
        {"pipeline_depth": 1},
        {"page_count": 48},
        {"preempted": range(3, 40, 3)},
        {"preempted": range(3, 40, 2), "max_num_batched_tokens": 7},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_computed(saved: Path, plain: list[list[int]], changes: dict[str, object]) -> None:
    assert served(saved, **changes) == plain


def test_a_talk_computes_what_is_new_and_little_else(saved: Path) -> None:
    """Ten turns, each of which sends all that was said before. A turn computes its new tokens and those behind the last full
    block of what was said; a state that begins anew gives the same answers."""
    talk, alone_, generator = Engine(saved), [], torch.Generator().manual_seed(1)
    history: list[int] = []
    for turn in range(10):
        new = torch.randint(0, VOCAB_SIZE, (23 + turn,), generator=generator).tolist()
        history += new
        id_ = talk.arrive(history)
        talk.run()
        again = talk.computed[id_] - TOKEN_COUNT + 1 - len(new)
        assert again <= BLOCK_SIZE + 1, f"turn {turn} computes {again} tokens of {len(history) - len(new)} again"
        alone_.append((list(history), talk.tokens[id_]))
        history += talk.tokens[id_]
    fresh = Engine(saved, prefix_caching=False)
    last = fresh.arrive(alone_[-1][0])
    fresh.run()
    assert fresh.tokens[last] == alone_[-1][1]


def test_a_batch_has_the_arrays_that_the_state_says(saved: Path) -> None:
    engine = Engine(saved, pipeline_depth=1)
    for prompt in prompts()[:2]:
        engine.arrive(prompt)
    engine.state = reduce(engine.state, schedule(engine.state))
    inputs = engine.batch.step_inputs(engine.state)
    assert inputs.forward.recurrent.pages.dtype == np.int32
    assert inputs.forward.recurrent.pages.tolist() == engine.state.rows.recurrent[0].tolist()
    assert inputs.forward.recurrent.fresh.all() and inputs.copies is engine.state.in_flight[-1].copies


def test_a_steady_decode_advances_the_same_arrays(saved: Path) -> None:
    """Between the edges of blocks, with the copies of its own step; a prompt of one token begins with empty states once."""
    engine, given = Engine(saved, block_size=16, pipeline_depth=1), []
    run = engine.runner.run

    def keep(inputs: StepInputs) -> object:
        given.append((inputs.forward, inputs.copies, bool(inputs.forward.recurrent.fresh.any()), engine.state.in_flight[-1].copies))
        return run(inputs)

    engine.runner.run = keep
    engine.arrive([7])
    tokens = engine.run()
    again = [ours[0] is before[0] for before, ours in pairwise(given)]
    assert again == [False] + [len(engine.state.config.windows) < 2] * (TOKEN_COUNT - 2)
    assert [fresh for _, _, fresh, _ in given] == [True] + [False] * (TOKEN_COUNT - 1)
    assert all(copies is own for _, copies, _, own in given)
    expected = Engine(saved, block_size=16, pipeline_depth=1)
    expected.batch._may_stay = lambda inputs: False
    expected.arrive([7])
    assert expected.run() == tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_s_engine_serves_one_on_any_number_of_ranks(saved: Path, plain: list[list[int]], ranks: int) -> None:
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(saved / "tokenizer.json"))
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    params = SamplingParams(temperature=0.0, max_tokens=TOKEN_COUNT)
    options = {"dtype": "float32", "threads": 1, "log": "off", "max_num_seqs": 4, "block_size": 4}
    alone_ = {"executor": "inproc"} if ranks == 1 else {"tensor_parallel_size": ranks}
    with engines_here() if ranks == 1 else nullcontext(), LLM(str(saved), **options, **alone_) as llm:
        found = [answer.outputs[0].token_ids for answer in llm.generate(asked * 2, params, use_tqdm=False)]
    assert found == plain * 2


def test_what_does_not_go_with_recurrent_layers_is_said_at_the_start(saved: Path) -> None:
    config, said = load_config(saved), "--pipeline-parallel-size does not serve models with recurrent layers so far"
    with pytest.raises(SettingsError, match=said):
        require_model(RankSettings(**USUAL, pipeline_parallel_size=2), config, "cpu")
    require_model(RankSettings(**USUAL), config, "cpu")


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("--pipeline-parallel-size does not serve models with recurrent layers so far", {"pipeline_parallel_size": 2}),
        ("has no layers for multi-token prediction", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    ],
)
def test_an_engine_says_so(tmp_path: Path, said: str, option: dict[str, object]) -> None:
    save_hybrid(tmp_path, "lfm2")
    with pytest.raises(StartFailed, match=said):
        LLM(str(tmp_path), threads=1, log="off", **option)


REPEATING = [([1, 2, 3, 4, 5, 6, 7] * 20)[: 40 + 11 * which] + [which] for which in range(5)]
ANSWER = 60


class Talks(NamedTuple):
    """The answers to prompts that repeat, to the same again and to talks that go on behind them, and what was drafted for them."""

    answers: list[list[int]]
    drafted: int
    kept: int


def talks(path: Path, method: str = "", preempted: Sequence[int] = (), **changes: object) -> Talks:
    speculation = Speculation(method=method, num_speculative_tokens=5) if method else None
    engine = Engine(path, speculation=speculation, **{"block_size": 8} | changes)
    prompts_ = REPEATING * 2
    for _ in range(2):
        for prompt in prompts_:
            engine.arrive(prompt, ANSWER)
        answers = engine.run(preempted)
        prompts_ = [[*prompt, *answer, 3] for prompt, answer in zip(REPEATING, answers)]
    counters, states = engine.state.counters, engine.state.pool.states
    assert states.free == engine.state.config.state_pages, "a page is lost"
    return Talks(answers, counters.draft_tokens, counters.accepted_tokens)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("dense")
    torch.manual_seed(4)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def undrafted(saved: Path) -> list[list[int]]:
    return talks(saved).answers


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "suffix", "pipeline_depth": 1},
        {"method": "suffix", "max_num_batched_tokens": 7},
        {"method": "suffix", "preempted": range(3, 300, 3)},
        {"method": "ngram", "preempted": range(3, 300, 2), "max_num_batched_tokens": 7},
        {"method": "ngram", "snapshot_interval": 0},
        {"method": "ngram", "state_pages": 13, "snapshot_interval": 8},
        {"method": "suffix", "prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_drafts(saved: Path, undrafted: list[list[int]], changes: dict[str, object]) -> None:
    """Drafts that are kept and drafts that are not, and states that were kept before each of them."""
    found = talks(saved, **changes)
    assert found.answers == undrafted
    assert found.drafted > found.kept > 0


def test_a_draft_model_drafts_for_one(saved: Path, dense: Path, undrafted: list[list[int]]) -> None:
    found = talks(saved, "draft_model", draft=dense)
    assert found.answers == undrafted
    assert found.drafted > found.kept


def test_an_eagle_head_drafts_for_one(saved: Path, undrafted: list[list[int]], tmp_path: Path) -> None:
    """It reads what recurrent layers get, too. None drafts for a model with windows."""
    config = load_config(saved)
    head = random_head(tmp_path / "head", vocab=config.vocab_size, known=config.vocab_size - 9, layers=(0, 2, 3))
    if any(kv_groups(config).windows):
        with pytest.raises(SettingsError, match="the model has attention windows: take another method"):
            talks(saved, "eagle3", head=str(head))
        return
    found = talks(saved, "eagle3", head=str(head))
    assert found.answers == undrafted
    assert found.drafted > found.kept
