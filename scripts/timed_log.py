"""Write a log with real step times: `python scripts/timed_log.py DIR --seconds 60 [--model FOLDER]`.

A real engine (with rank processes, as under `vnext serve`) answers the same waves of requests repeatedly until the time is
over: 1 to 32 at once, with lengths drawn once and token ids drawn for each pass. So the log contains every kind of step
(prefill, decode, mixed) many times. The differences between equal steps are the machine's noise, which bounds the accuracy of
any model of step times. `vnext-replay what-if LOG` reports both.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vnext.api.llm import LLM  # noqa: E402
from vnext.runtime.protocol.sampling_params import SamplingParams  # noqa: E402

WAVES = (1, 4, 16, 2, 32, 8)
PROMPT_MAX, ANSWER_MIN, ANSWER_MAX = 200, 8, 64
BATCH_TOKENS_MAX = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log_dir", type=Path)
    parser.add_argument("--model", default="", help="a folder (default: the bundled model)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, help="of the rank (default: as vnext serve)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    settings = dict(max_num_batched_tokens=BATCH_TOKENS_MAX, max_model_len=512, threads=options.threads)
    with LLM(options.model, log_dir=str(options.log_dir), **settings) as llm:
        passes = serve(llm, options.seconds, options.seed)
        print(f"{passes} passes; the log: {llm.log_dir}")
    return 0


def serve(llm: LLM, seconds: float, seed: int) -> int:
    """Repeat passes over the same waves until the time is over. Returns the number of passes."""
    shape, content = random.Random(seed), random.Random(seed + 1)
    waves = [[(shape.randint(1, PROMPT_MAX), shape.randint(ANSWER_MIN, ANSWER_MAX)) for _ in range(size)] for size in WAVES]
    began, passes = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for wave in waves:
            prompts = [content.choices(range(3, llm.vocab_size), k=length) for length, _ in wave]
            params = [SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True) for _, answer in wave]
            llm.generate(prompts, params, use_tqdm=False)
        passes += 1
    return passes


if __name__ == "__main__":
    sys.exit(main())
