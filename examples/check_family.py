"""Check a family of your own by the greedy tokens of transformers: `python examples/check_family.py FOLDER FAMILY.py`."""

from __future__ import annotations

import sys

import torch
import transformers

from vnext import LLM, SamplingParams

TOKENS, LENGTHS = 64, (5, 300)


def main(folder: str, family: str) -> int:
    """0 where both write the same tokens behind a short prompt and behind a long one."""
    greedy, model = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), transformers.AutoModelForCausalLM
    oracle = model.from_pretrained(folder, dtype=torch.float32)
    prompts = [[3 + 7 * place % (oracle.config.vocab_size - 3) for place in range(length)] for length in LENGTHS]
    with LLM(folder, family=family, dtype="float32", log="off") as llm:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
    for prompt, answer in zip(prompts, answers):
        given = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        theirs = oracle.generate(torch.tensor([prompt]), **given)[0, len(prompt) :].tolist()
        same = next((at for at, pair in enumerate(zip(theirs, answer.outputs[0].token_ids)) if pair[0] != pair[1]), TOKENS)
        print(f"behind {len(prompt)} tokens the first {same} of {TOKENS} are those of transformers")
        if same < TOKENS:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
