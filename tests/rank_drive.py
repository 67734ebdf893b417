"""Drives ranks of one engine in this process, as the engine core does: plans as far ahead as the pipeline allows, commits.

For comparing ranks of different kinds: the same requests through each, token for token.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from vnext.models.layers.kv_cache import kv_groups
from vnext.models.layers.sharding import alone
from vnext.runtime.engine.adapters import AdapterLoading
from vnext.runtime.engine.due_reports import DueReports
from vnext.runtime.gpu.device import Device
from vnext.runtime.gpu.steps import DeviceVariants
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.messages import AdapterFiles, AdapterRead, StepResult, TokenLogprobs
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.gpu_loading import LaterSteps, keep_adapters, step_maker
from vnext.runtime.rank.replica import Rank
from vnext.runtime.rank.runner import ModelRunner
from vnext.runtime.rank.steps import HostSteps
from vnext.runtime.transport.ring.broadcast import encode_events
from vnext.sampling.drafters.drafter import RowDrafter
from vnext.sched.schedule import schedule
from vnext.state.config import SchedulerConfig
from vnext.state.digest import digest
from vnext.state.events import AnyEvent, EngineStarted, RequestAborted, RequestArrived, StepCommitted, pack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import Constraint, Sampling
from vnext.state.reduce import reduce, start
from vnext.state.state import State

TURNS_MAX = 5000
Answers = dict[int, list[tuple[int, TokenLogprobs | None]]]


def started_with(runner: ModelRunner, **changes: Any) -> EngineStarted:
    """An engine of a runner's model: 8 rows, 24 tokens a step, blocks of 4, two steps ahead, a digest at every step."""
    fields = dict(
        block_size=4, page_count=120, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=96, pipeline_depth=2,
        eos_token_ids=(0,), vocab_size=runner.config.vocab_size, digest_interval=1,
    )  # fmt: skip
    if any(windows := kv_groups(runner.config).windows):
        fields |= {"windows": windows, "page_count": 120 * len(windows)}
    config = SchedulerConfig(**(fields | changes))
    return EngineStarted(config=config, model="", model_digest="", world_size=1, environment={}, started_ns=0)


def runner_of(
    path: Path = DEMO_MODEL, dtype: str = "float32", device: str = "cpu", max_lora_rank: int = 0, kv_cache_dtype: str = "auto"
) -> ModelRunner:
    settings = ModelSettings(dtype=dtype, max_lora_rank=max_lora_rank, kv_cache_dtype=kv_cache_dtype)
    return ModelRunner(path, settings, device, alone())


def device_rank(runner: ModelRunner, device: Device, variants: DeviceVariants, max_loras: int = 0, max_lora_rank: int = 0) -> Rank:
    if max_loras:
        keep_adapters(runner, device, max_loras, max_lora_rank)
    return Rank(0, LaterSteps(step_maker(runner, device, variants, variants if runner.draft or runner.head else None), runner.adapters))


def host_rank(runner: ModelRunner) -> Rank:
    return Rank(0, HostSteps(runner))


def some_arrivals(count: int, seed: int, plain: bool = False) -> list[RequestArrived]:
    """Prompts of 1 to 40 tokens, every third with a common beginning; all kinds of parameters unless `plain`."""
    rng, common, arrivals = random.Random(seed), list(range(20, 36)), []
    for id_ in range(count):
        own = [rng.randrange(5, 200) for _ in range(rng.randint(1, 24))]
        arrivals.append(
            RequestArrived(
                id=id_, name=f"r{id_}", prompt=pack_tokens(common + own if id_ % 3 == 0 else own), priority=0, arrival_ns=0,
                sampling=sampling_of(rng, id_, plain),
            )
        )  # fmt: skip
    return arrivals


def sampling_of(rng: random.Random, index: int, plain: bool) -> Sampling:
    special = {} if plain else [
        {}, {"logprobs": 3}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"logit_bias": ((7, 4.0),)},
        {"min_tokens": 6},
    ][index % 5]  # fmt: skip
    temperature, count = rng.choice([0.0, 0.8, 1.1]), rng.randint(1, 20)
    return Sampling(
        seed=rng.getrandbits(64), max_tokens=count, temperature=temperature, top_k=rng.choice([0, 9]),
        top_p=rng.choice([1.0, 0.9]), min_p=rng.choice([0.0, 0.05]), **special,
    )  # fmt: skip


def picky_arrivals(count: int, seed: int) -> list[RequestArrived]:
    """As `some_arrivals`, of rows that ask for several things at once, some of them for long lists."""
    rng, arrivals = random.Random(seed), some_arrivals(count, seed)
    for at, arrival in enumerate(arrivals):
        biased, ends = rng.sample(range(200), rng.choice([0, 2, 30])), rng.sample(range(200), rng.choice([0, 1, 7]))
        arrivals[at] = replace(
            arrival,
            sampling=Sampling(
                seed=rng.getrandbits(64), max_tokens=rng.randint(4, 20), temperature=rng.choice([0.0, 0.9]),
                top_k=rng.choice([0, 9]), repetition_penalty=rng.choice([1.0, 1.3]), presence_penalty=rng.choice([0.0, 0.5]),
                frequency_penalty=rng.choice([0.0, 0.4]), min_tokens=rng.choice([0, 3]),
                stop_token_ids=tuple(ends), logprobs=rng.choice([-1, -1, 0, 3]),
                logit_bias=tuple((token, rng.uniform(-3, 6)) for token in sorted(biased)),
            ),
        )  # fmt: skip
    return arrivals


def bound_arrivals(count: int, seed: int) -> list[RequestArrived]:
    """As `picky_arrivals`, two of three of them with lists of allowed tokens, banned sequences or a budget of reasoning."""
    rng, arrivals = random.Random(seed), picky_arrivals(count, seed)
    for at, arrival in enumerate(arrivals):
        few = tuple(sorted(rng.sample(range(5, 200), 12)))
        kinds = (
            Constraint(allowed=few, banned=((few[0],), (few[1], few[2]), (few[3],))),
            Constraint(reasoning_end=few[:2], reasoning_max=rng.randint(0, 5), banned=((few[4],),)),
        )
        if at % 3:
            sampling = replace(arrival.sampling, constraint=kinds[at % 3 - 1], min_tokens=0)
            arrivals[at] = replace(arrival, sampling=sampling)
    return arrivals


def repetitive_arrivals(count: int, seed: int, grammars: Sequence[str] = ()) -> list[RequestArrived]:
    """As `picky_arrivals`, with longer answers that repeat themselves: a bias makes few tokens likely. Every fifth keeps to one of
    the grammars, if there are some."""
    rng, arrivals = random.Random(seed), picky_arrivals(count, seed)
    for at, arrival in enumerate(arrivals):
        likely = tuple((token, rng.choice((9.0, 11.0, 30.0))) for token in sorted(rng.sample(range(5, 200), 3)))
        stops = (likely[0][0],) * (at % 4 == 3)
        own = replace(arrival.sampling, max_tokens=rng.randint(12, 36), logit_bias=likely, stop_token_ids=stops)
        if grammars and at % 5 == 1:
            constraint = Constraint(grammar=grammars[at % len(grammars)])
            own = Sampling(seed=at, max_tokens=36, temperature=float(at % 2), logprobs=at % 3 - 1, constraint=constraint)
        prompt = [token for token, _ in likely] * rng.randint(1, 5) + [rng.randrange(5, 200) for _ in range(rng.randint(1, 9))]
        arrivals[at] = replace(arrival, prompt=pack_tokens(prompt), sampling=own)
    return arrivals


def loads(loading: AdapterLoading, rank: Rank, state: State, before: list[AnyEvent]) -> State:
    """Give slots to the adapters that the rank has read, after the events `before`, and ask for those that are missing."""
    while (event := loading.next_event(state)) is not None:
        state = reduce(state, event)
        before.append(event)
        if loading.goes_out:
            rank.handle(encode_events(before))
            before.clear()
    return state


def drive(
    rank: Rank, started: EngineStarted, arrivals: list[RequestArrived], abort: int = -1, files: Sequence[AdapterFiles] = ()
) -> Answers:
    """Every request's tokens and log-probabilities. Requests come three at a time; request `abort` is aborted on its way. `files`:
    of the adapters that requests name.

    Raises AssertionError where a rank's digest is not that of the state in which its step was planned, or what it fed to the
    model is not what that state says.
    """
    state, waiting = start(started), deque(arrivals)
    loading = AdapterLoading(1, rank.handle, {each.digest: each for each in files})
    rank.handle(encode_events([started]))
    answers, digests, results = defaultdict(list), {}, deque[StepResult]()
    for turn in range(TURNS_MAX):
        events: list[AnyEvent] = []
        if turn % 4 == 0:
            events += [waiting.popleft() for _ in range(min(3, len(waiting)))]
        if turn == 9 and abort >= 0:
            events.append(RequestAborted(ids=(abort,), reason="client"))
        commits: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        if results:
            result = results.popleft()
            due = digests.pop(result.step)
            due.reports.append(result)
            assert result.digest == due.structure, f"step {result.step}"
            otherwise = [", ".join(names) for _, names in due.fed_otherwise()]
            assert result.fed and not otherwise, f"step {result.step} is fed otherwise: {otherwise}"
            for later in digests.values():
                later.commits[result.step] = result.commit
            events.append(result.commit)
            commits[result.step] = result.logprobs
        for event in events:
            before, state = state, reduce(state, event)
            logprobs = commits.get(event.step, ()) if isinstance(event, StepCommitted) else ()
            for reported in outputs(before, event, state):
                if reported.token >= 0:
                    answers[reported.id].append((reported.token, logprobs[reported.sample] if logprobs else None))
        state = loads(loading, rank, state, events)
        if (plan := schedule(state)) is not None:
            state = reduce(state, plan)
            events.append(plan)
            digests[plan.step] = DueReports(digest(state), state)
            digests[plan.step].commits |= {known.step: known.commit for known in results}
        elif rank.steps.adapters and rank.steps.adapters.is_reading:
            sleep(rank.poll_timeout_s)
        if events:
            rank.handle(encode_events(events))
        for result in rank.collect():
            if isinstance(result, AdapterRead):
                assert not loading.answered(result, state)
            else:
                results.append(result)
        if not (waiting or state.requests or state.in_flight):
            return dict(answers)
    raise AssertionError("the requests do not come to an end")


WINDOWS = {
    "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1
}  # fmt: skip
"""Of a tiny checkpoint whose upper layer has a window: two groups of layers in the cache."""


EXPERTS = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
"""Of a tiny checkpoint whose MLPs are experts."""


def tiny_checkpoint(folder: Path, **changes: Any) -> Path:
    """A random Llama with heads of 16 in `folder`, small enough to be computed by kernels that run on a simulated GPU."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 640, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
    } | changes  # fmt: skip
    hidden, wide, heads = raw["hidden_size"], raw["intermediate_size"], raw["num_attention_heads"] * raw["head_dim"]
    kv_heads = raw["num_key_value_heads"] * raw["head_dim"]
    shapes = {"model.embed_tokens.weight": (raw["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(raw["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        shapes |= {
            here + "self_attn.q_proj.weight": (heads, hidden), here + "self_attn.k_proj.weight": (kv_heads, hidden),
            here + "self_attn.v_proj.weight": (kv_heads, hidden), here + "self_attn.o_proj.weight": (hidden, heads),
            here + "mlp.gate_proj.weight": (wide, hidden), here + "mlp.up_proj.weight": (wide, hidden),
            here + "mlp.down_proj.weight": (hidden, wide), here + "input_layernorm.weight": (hidden,),
            here + "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        if raw["architectures"] == EXPERTS["architectures"]:
            sparse = here + "block_sparse_moe."
            shapes = {name: shape for name, shape in shapes.items() if f"{here}mlp." not in name}
            shapes[sparse + "gate.weight"] = (raw["num_local_experts"], hidden)
            for expert in range(raw["num_local_experts"]):
                shapes |= {f"{sparse}experts.{expert}.{name}.weight": (wide, hidden) for name in ("w1", "w3")}
                shapes[f"{sparse}experts.{expert}.w2.weight"] = (hidden, wide)
        if raw["architectures"] == ["Qwen2ForCausalLM"]:
            widths = {"q": heads, "k": kv_heads, "v": kv_heads}
            shapes |= {f"{here}self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.25
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Liar:
    """Drafts that follow nothing, in numbers that follow nothing."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def row(self, scope: bytes, prompt_length: int) -> RowDrafter:
        return self

    def finish(self, tokens: np.ndarray) -> None:
        pass

    def drafts(self, tokens: np.ndarray, most: int) -> np.ndarray:
        return (tokens[-1] * 31 + np.arange(int(tokens.sum()) % (most + 1), dtype=np.int32)) % self._vocabulary
