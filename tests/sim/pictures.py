"""Prompts of scenarios with inputs in them."""

from __future__ import annotations

from msgspec.structs import replace

from tests.sim.scenario import Client
from vnext.state.store.fields import DIGEST_WORDS
from vnext.state.store.inputs import DIGEST_SIZE, ROWS_SIZE, input_tokens, with_rows


def pictured(clients: tuple[Client, ...], grids: bool) -> tuple[Client, ...]:
    """The same requests with an input of 4 to 6 tokens, in one or two rows with `grids`, wherever a prompt has a 3 and room. Digests
    differ in their last bits only, and equal beginnings stay equal."""
    return tuple(replace(client, prompt=with_pictures(client.prompt, grids)) for client in clients)


def with_pictures(prompt: tuple[int, ...], grids: bool = False) -> tuple[int, ...]:
    """The prompt with its inputs."""
    found, at = list(prompt), 0
    while at < len(prompt) - 5:
        length = DIGEST_WORDS + prompt[at + 1] % 3
        if prompt[at] == 3 and at + length <= len(prompt):
            digest = prompt[at + 2].to_bytes(DIGEST_SIZE, "big")
            digest = with_rows(digest[ROWS_SIZE:] + digest[:ROWS_SIZE], 2 - length % 2) if grids else digest
            found[at : at + length] = input_tokens(digest, length).tolist()
            at += length - 1
        at += 1
    return tuple(found)
