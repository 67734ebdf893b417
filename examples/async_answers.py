"""Several answers at once in one event loop, as they grow, one of them cut short: python examples/async_answers.py [MODEL]

Prints a line for each question as its answer ends. A server of one's own, an agent or a bot is built the same way.
"""

from __future__ import annotations

import asyncio
import sys

from vnext import AsyncLLM, SamplingParams

QUESTIONS = ("What is Python?", "What is a module?", "What does import do?")
PARAMS = SamplingParams(temperature=0, max_tokens=40)


async def ask(engine: AsyncLLM, question: str) -> None:
    """Print the whole answer."""
    async for output in engine.chat([{"role": "user", "content": question}], PARAMS):
        if output.finished:
            print(f"{question} {output.outputs[0].text}")


async def ask_shortly(engine: AsyncLLM, question: str, words: int) -> None:
    """Print the first words of the answer; leaving the loop ends the request."""
    async for output in engine.chat([{"role": "user", "content": question}], PARAMS):
        if len(output.outputs[0].text.split()) > words:
            break
    print(f"{question} {' '.join(output.outputs[0].text.split()[:words])} ...")


async def main() -> None:
    async with await AsyncLLM.start(*sys.argv[1:], log="off") as engine:
        await asyncio.gather(*(ask(engine, each) for each in QUESTIONS), ask_shortly(engine, "What is a list?", words=3))


if __name__ == "__main__":
    asyncio.run(main())
