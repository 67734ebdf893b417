"""Rollouts with updates between them, undisturbed and under kills: the digests are equal.

    python scripts/rollouts_under_kills.py --rounds 20 --answers 50 --seed 1 --json RECORD

A loop like a trainer's: answers to seeded prompts, then new weights that follow from every token and every log-probability of the
round, so that one wrong bit changes all rounds after it. The second time the engine core, a rank, all ranks or all of these are
killed, at random instants while answers are computed and while the weights change. The digest covers prompt, version of the
weights, tokens and log-probabilities of each answer; `vnext-replay rollouts` gives another one of the logs. The exit status is 1
if one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vnext import LLM, SamplingParams  # noqa: E402
from vnext.base.version import __version__  # noqa: E402
from vnext.commands.machine import machine  # noqa: E402
from vnext.replay.answers.rollouts import write_rollouts  # noqa: E402
from vnext.replay.reading.source import open_log  # noqa: E402
from vnext.replay.reading.verify import verify  # noqa: E402
from vnext.runtime.processes.launch import DEMO_MODEL  # noqa: E402

CORE, RANK = "vnext.runtime.engine.main", "vnext.runtime.rank.main"
KINDS = {"core": (CORE,), "rank": (RANK,), "ranks": (RANK, RANK), "all": (CORE, RANK, RANK)}
GROUP, TOKENS, STEP = 5, 48, 1e-3
FLOW_S = 20.0
SETTINGS: dict[str, Any] = {
    "executor": "mp", "tensor_parallel_size": 2, "threads": 1, "dtype": "float32", "log": "full", "log_durable": True,
    "max_restarts": 30, "digest_interval": 4, "num_blocks_override": 400,
}  # fmt: skip


class Outcome(msgspec.Struct, kw_only=True):
    """Of one run. `digest` is of what the engine answered, `log_digest` of what its logs hold; `kills` by moment and kind."""

    digest: str = ""
    log_digest: str = ""
    answers: int = 0
    tokens: int = 0
    versions: list[int] = []
    logs: int = 0
    kills: dict[str, int] = {}
    seconds: float = 0.0
    wrong: list[str] = []


class Killer:
    """Kills processes of this process's engine at instants drawn from `rng`. `kills` counts what was hit, by moment and kind."""

    def __init__(self, rng: random.Random, llm: LLM, per_round: int) -> None:
        self._rng, self._llm, self._per_round = rng, llm, per_round
        self._over = threading.Event()
        self.kills: Counter[str] = Counter()

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Kill while the block runs, which is "answers" or "update"."""
        self._over.clear()
        thread = threading.Thread(target=self._answers if moment == "answers" else self._update)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _answers(self) -> None:
        """Requests that die twice without a token between are blamed, so the engine gets on between two kills."""
        for _ in range(self._per_round):
            if not self._has_flown() or self._over.wait(self._rng.uniform(0.0, 0.1)):
                return
            self._kill("answers")

    def _update(self) -> None:
        """Once or twice: the second kill hits a recovery, or the update that is asked for again."""
        for longest_s in (0.3, 2.5)[: self._rng.randint(1, 2)]:
            if self._over.wait(self._rng.uniform(0.0, longest_s)):
                return
            self._kill("update")

    def _has_flown(self) -> bool:
        """Wait until tokens have come from the processes that there are; False when the block ends before."""
        before, client, deadline_s = -1, self._llm._client._client, time.monotonic() + FLOW_S
        while not self._over.wait(0.005) and time.monotonic() < deadline_s:
            live = list(client._live.values())
            tokens = sum(len(each.tokens) for each in live)
            if client.recovering or not live or before < 0:
                before = -1 if client.recovering or not live else tokens
            elif tokens > before + 3 * len(live):
                return True
        return False

    def _kill(self, moment: str) -> None:
        kind = self._rng.choice(tuple(KINDS))
        wanted, found = list(KINDS[kind]), []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # one that ends just now
                module = next((each for each in wanted if each in process.cmdline()), None)
                if module is not None:
                    wanted.remove(module)
                    found.append(process.pid)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kills[f"{moment}: {kind}"] += bool(found)


def run(log_dir: Path, rounds: int, answers: int, seed: int, kills_per_round: int = 0) -> Outcome:
    """`rounds` of `answers`, each followed by an update; killed now and then if `kills_per_round` is not 0."""
    began_s, outcome, digest = time.monotonic(), Outcome(versions=[]), hashlib.blake2b(digest_size=32)
    weights = {name: each.float().numpy().copy() for name, each in load_file(DEMO_MODEL / "model.safetensors").items()}
    with LLM(log_dir=str(log_dir), **SETTINGS) as llm:
        killer = Killer(random.Random(f"kills {seed}"), llm, kills_per_round) if kills_per_round else None
        for number in range(rounds):
            with killer.during("answers") if killer else nullcontext():
                found = round_of(llm, number, answers, seed)
            for each in found:
                digest.update(msgspec.msgpack.encode((outcome.answers, llm.residence.version, *each)))
                outcome.answers, outcome.tokens = outcome.answers + 1, outcome.tokens + len(each[1])
                outcome.wrong += [f"round {number}: an answer of {len(each[1])} tokens"] * (len(each[1]) != TOKENS)
            step(weights, found, number)
            with killer.during("update") if killer else nullcontext():
                outcome.versions.append(llm.update_weights(weights)["version"])
        outcome.kills = dict(sorted(killer.kills.items())) if killer else {}
    outcome.digest, outcome.seconds = digest.hexdigest(), round(time.monotonic() - began_s, 1)
    judge_logs(log_dir, outcome)
    return outcome


def round_of(llm: LLM, number: int, answers: int, seed: int) -> list[tuple[list[int], list[int], list[str]]]:
    """(prompt, tokens, exact log-probabilities) of a round's answers, in groups of one prompt."""
    rng = random.Random(f"prompts {seed} {number}")
    prompts = [[rng.randrange(5, 2000) for _ in range(rng.randint(3, 60))] for _ in range(answers // GROUP)]
    how = [SamplingParams(n=GROUP, seed=rng.getrandbits(31), max_tokens=TOKENS, logprobs=0, ignore_eos=True) for _ in prompts]
    found = []
    for group in llm.generate(prompts, how, use_tqdm=False):
        for answer in group.outputs:
            logprobs = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs)]
            found.append((list(group.prompt_token_ids), list(answer.token_ids), [float(each).hex() for each in logprobs]))
    return found


def step(weights: dict[str, np.ndarray], found: list[tuple[list[int], list[int], list[str]]], number: int) -> None:
    """A small change in place, in a direction and of a size that follow from every bit of the round."""
    bits = hashlib.blake2b(msgspec.msgpack.encode((number, found)), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(bits, "little"))
    for name in sorted(weights):
        weights[name] += np.float32(STEP) * rng.standard_normal(weights[name].shape, dtype=np.float32)


def judge_logs(log_dir: Path, outcome: Outcome) -> None:
    """The digest of the logs, each of which must verify."""
    logs = sorted({path.parent for path in log_dir.glob("**/*.vnextlog")})
    for log in logs:
        if (difference := verify(open_log(log)).difference) is not None:
            outcome.wrong.append(f"{log.name}: {difference.message}")
    with tempfile.TemporaryDirectory() as folder:
        answer = write_rollouts(logs, Path(folder) / "rollouts.jsonl")
    outcome.logs, outcome.log_digest = len(logs), answer.digest
    if (answer.rollouts, answer.unfinished) != (outcome.answers, 0):
        outcome.wrong.append(f"the logs hold {answer.rollouts} answers and {answer.unfinished} unfinished ones")


def compared(calm: Outcome, killed: Outcome, rounds: int) -> list[str]:
    """What is not as it should be."""
    wrong = [*calm.wrong, *killed.wrong]
    wrong += ["the digests differ"] * (calm.digest != killed.digest)
    wrong += ["the digests of the logs differ"] * (calm.log_digest != killed.log_digest)
    wrong += [f"versions {each.versions}" for each in (calm, killed) if each.versions != list(range(1, rounds + 1))]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 20), ("answers", 50), ("seed", 1), ("kills-per-round", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    with tempfile.TemporaryDirectory(prefix="vnext-rollouts-") as folder:
        calm = run(Path(folder) / "calm", options.rounds, options.answers, options.seed)
        killed = run(Path(folder) / "killed", options.rounds, options.answers, options.seed, options.kills_per_round)
    wrong = compared(calm, killed, options.rounds)
    record = {
        "command": f"python scripts/rollouts_under_kills.py --rounds {options.rounds} --answers {options.answers} "
        f"--seed {options.seed} --kills-per-round {options.kills_per_round}",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "vnext": __version__,
        "machine": msgspec.to_builtins(before),
        "undisturbed": msgspec.to_builtins(calm),
        "killed": msgspec.to_builtins(killed),
        "wrong": wrong,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["killed"], indent=1))
    print("\n".join(wrong) or f"equal: {calm.answers} answers, {sum(killed.kills.values())} kills, digest {calm.digest}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
