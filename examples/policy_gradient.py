"""A policy-gradient step whose trainer finds the engine's log-probabilities, bit for bit: python examples/policy_gradient.py

Samples groups of answers, rewards those that repeat few words, and follows the gradient of their log-probabilities (REINFORCE with
the group's mean as baseline). The trainer's forward runs on the engine's kernels, its backward is torch's. The engine then loads
the new weights. Prints how many log-probabilities differ between engine and trainer, of how many: 0.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from vnext import LLM, SamplingParams
from vnext.api.training import Trainer
from vnext.runtime.processes.launch import DEMO_MODEL

PROMPTS = ("The module", "Return a list of", "def main(", "An exception is raised when")


def reward(text: str) -> float:
    """The share of different words among an answer's words."""
    words = text.split()
    return len(set(words)) / max(len(words), 1)


def rollouts(model: str, options: argparse.Namespace, seed: int) -> list[tuple[list[int], list[int], np.ndarray, float]]:
    """(prompt, answer, its log-probabilities, its advantage in its group) of every answer."""
    how = SamplingParams(n=options.group, temperature=1.0, seed=seed, max_tokens=options.tokens, logprobs=0, ignore_eos=True)
    with LLM(model, dtype=options.dtype, log="off") as llm:
        groups = llm.generate(list(PROMPTS), how, use_tqdm=False)
    found = []
    for group in groups:
        rewards = [reward(answer.text) for answer in group.outputs]
        for answer, own in zip(group.outputs, rewards):
            logprobs = [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs)]
            found.append((group.prompt_token_ids, answer.token_ids, np.float32(logprobs), own - sum(rewards) / len(rewards)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 2), ("group", 4), ("tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    options, model, unequal, count = parser.parse_args(), DEMO_MODEL, 0, 0
    trainer = Trainer(model, options.dtype)
    optimizer = torch.optim.SGD(trainer.weights.values(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(options.steps):
            prompts, answers, theirs, advantages = zip(*rollouts(str(model), options, seed=step))
            ours = trainer.logprobs(prompts, answers)
            count += sum(map(len, ours))
            unequal += sum(int((own.detach().numpy() != other).sum()) for own, other in zip(ours, theirs))
            loss = -sum(advantage * own.sum() for advantage, own in zip(advantages, ours)) / len(ours)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model = trainer.save(Path(folder) / f"step-{step}")
            print(f"step {step}: loss {loss.item():.4f}, {unequal} of {count} log-probabilities differ")
    return int(unequal > 0)


if __name__ == "__main__":
    raise SystemExit(main())
