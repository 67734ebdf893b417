"""Families with windows, served over contexts of many windows: transformers' tokens, while what windows no longer show is
given back, taken by others and, before that, poisoned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases import VOCAB_SIZE, save_case

from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.runtime.batch.batch import PersistentBatch
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.events import EngineStarted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.feasibility import refusal
from vnext.state.laws import check
from vnext.state.outputs import outputs
from vnext.state.params import Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State, blocks_for
from vnext.state.windows import pages_needed

NAMES = (
    "mistral", "mixtral_window", "phi3", "gemma2", "gemma3", "gemma3_caps", "gemma3n", "gemma4", "gemma4_shared", "qwen2_window", "llama4",
    "mimo_v2", "laguna", "cohere_compass_still", "muse_glimmer",
)  # fmt: skip
BLOCK_SIZE, CHUNK, TOKEN_COUNT = 4, 24, 16
LENGTHS = (400, 90, 231, 12, 90)


class Engine:
    """State, scheduler, persistent batch and model in one thread. Free pages without a name hold no number."""

    def __init__(self, path: Path, page_count: int, *, caching: bool, depth: int = 2) -> None:
        self.runner = ModelRunner(path, ModelSettings(dtype="float32"), "cpu", alone())
        windows = kv_groups(self.runner.config).windows
        config = SchedulerConfig(
            block_size=BLOCK_SIZE, page_count=page_count, max_num_batched_tokens=CHUNK, max_num_seqs=4, max_model_len=512,
            prefix_caching=caching, pipeline_depth=depth, vocab_size=VOCAB_SIZE, windows=windows,
        )  # fmt: skip
        self.state = start(
            EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0)
        )
        self.batch = PersistentBatch(config, VOCAB_SIZE)
        self.runner.make_cache(page_count, BLOCK_SIZE)
        self.tokens: dict[int, list[int]] = {}
        self.held: list[int] = []

    def arrive(self, prompt: list[int]) -> None:
        arrival = RequestArrived(
            id=self.state.next_id, name="", prompt=pack_tokens(prompt), priority=0, arrival_ns=0,
            sampling=Sampling(seed=0, temperature=0.0, max_tokens=TOKEN_COUNT),
        )  # fmt: skip
        assert refusal(self.state.config, arrival) is None
        self.state, self.tokens[arrival.id] = reduce(self.state, arrival), []

    def run(self) -> None:
        """Until everybody has an answer, as many steps in flight as the pipeline takes."""
        results: list[bytes] = []
        while self.state.requests:
            while (plan := schedule(self.state)) is not None:
                self._poison(self.state)
                self.state = reduce(self.state, plan)
                check(self.state)
                self.held.append(self.state.pool.page_count - self.state.pool.free)
                sampled = self.runner.run(self.batch.step_inputs(self.state)).tokens
                self.batch.take_sampled(self.state.in_flight[-1], sampled)
                results.append(pack_tokens(sampled))
            self._commit(StepCommitted(step=self.state.committed, tokens=results.pop(0)))

    def _poison(self, state: State) -> None:
        keys = state.pool.prefix_index.keys()
        pages = [page for page in np.flatnonzero(state.pool.ref == 0).tolist() if keys[page] is None]
        for key, value in self.runner.cache.kv:
            key[pages], value[pages] = torch.nan, torch.nan

    def _commit(self, event: StepCommitted) -> None:
        before, self.state = self.state, reduce(self.state, event)
        check(self.state)
        for news in outputs(before, event, self.state):
            self.tokens[news.id].append(news.token)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


def prompts() -> list[list[int]]:
    """Of several lengths; two are the same, and two begin alike."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    drawn[2][:60] = drawn[0][:60]
    return [*drawn[:4], drawn[1]]


@torch.inference_mode()
def expected_tokens(oracle: torch.nn.Module) -> list[list[int]]:
    answers = []
    for prompt in prompts():
        given = torch.tensor([prompt])
        greedy = oracle.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKEN_COUNT, pad_token_id=0
        )
        answers.append(greedy[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("name", NAMES)
def test_tokens_over_many_windows(saved: Path, name: str) -> None:
    """In a cache in which the longest fits just alone, with and without the prefix cache."""
    expected = expected_tokens(save_case(saved / name, name))
    windows = kv_groups(ModelRunner(saved / name, ModelSettings(dtype="float32"), "cpu", alone()).config).windows
    assert any(windows) and max(windows) * 9 < max(LENGTHS) + TOKEN_COUNT
    for caching in (False, True):
        bounds = SchedulerConfig(
            block_size=BLOCK_SIZE,
            page_count=1,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            max_model_len=512,
            windows=windows,
        )
        longest = max(LENGTHS) + TOKEN_COUNT - 1
        tight = pages_needed(bounds, longest)
        assert tight < len(windows) * blocks_for(longest, BLOCK_SIZE), "windows need less than the whole context"
        for page_count in (tight, 3 * tight):
            engine = Engine(saved / name, page_count, caching=caching)
            for prompt in prompts():
                engine.arrive(prompt)
            engine.run()
            assert list(engine.tokens.values()) == expected, (caching, page_count)
            assert engine.state.pool.free == page_count


@pytest.mark.parametrize("name", NAMES)
def test_a_request_holds_its_windows_and_no_more(saved: Path, name: str) -> None:
    """Ten windows long, alone: at most window / block + 2 blocks in each group with a window, all in the others."""
    save_case(saved / f"{name}-alone", name)
    engine = Engine(saved / f"{name}-alone", 800, caching=True, depth=1)
    windows, length = engine.state.config.windows, LENGTHS[0] + TOKEN_COUNT - 1
    engine.arrive(prompts()[0])
    engine.run()
    most = sum(window // BLOCK_SIZE + 2 if window else blocks_for(length, BLOCK_SIZE) for window in windows)
    assert max(engine.held) <= most < len(windows) * blocks_for(length, BLOCK_SIZE)


@torch.inference_mode()
def test_a_prompt_that_its_window_lets_in(saved: Path) -> None:
    """A cache of 20 blocks of 4 serves 400 tokens with windows of 40, and refuses them where no window gives back."""
    expected = expected_tokens(save_case(saved / "small", "mistral"))
    engine = Engine(saved / "small", 20, caching=True)
    arrival = RequestArrived(
        id=0, name="", prompt=pack_tokens(prompts()[0]), priority=0, arrival_ns=0, sampling=Sampling(seed=0, max_tokens=1)
    )
    whole = SchedulerConfig(
        block_size=BLOCK_SIZE, page_count=20, max_num_batched_tokens=CHUNK, max_num_seqs=4, max_model_len=512
    )
    assert "more than the cache's 80" in refusal(whole, arrival)
    engine.arrive(prompts()[0])
    engine.run()
    assert engine.tokens[0] == expected[0]
