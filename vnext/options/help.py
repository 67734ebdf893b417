"""Help: the groups in which `--help` lists options, and what `--help WORD` shows. Knows words only."""

from __future__ import annotations

import argparse
from functools import cache

from vnext.options.table import ENGINE_HELP, SERVER_HELP

FIRST = {
    "revision": "model", "device": "numbers", "max_model_len": "scheduling", "block_size": "cache",
    "enable_chunked_prefill": "scheduling", "tensor_parallel_size": "ranks", "role": "handover", "nnodes": "hosts",
    "threads": "ranks", "gpu_memory_utilization": "gpu", "executor": "ranks", "log_dir": "log", "digest_interval": "recovery",
    "enable_lora": "adapters", "enable_return_routed_experts": "model", "ipc_bytes_max": "gpu",
    "host": "server", "api_keys": "keys", "served_model_names": "chat", "show_log": "routes", "allowed_origins": "browsers",
    "body_bytes_max": "limits", "lora_modules": "adapters", "batch_dir": "files", "root_path": "tls", "log_level": "observing",
}  # fmt: skip
"""The group of a field and of those after it in table.py, up to the next one here."""


@cache
def groups() -> dict[str, str]:
    """The group of each field, in the table's order."""
    found, group = {}, ""
    for name in (*SERVER_HELP, *ENGINE_HELP):
        found[name] = group = FIRST.get(name, group)
    return found


def about(parser: argparse.ArgumentParser, word: str) -> str:
    """What `--help word` shows: the group of this name, else the options whose name or help has the word; "" for none."""
    groups = [group for group in parser._action_groups if group.title == word]
    found = groups or [_matching(group, word.lower().strip("-").replace("_", "-")) for group in parser._action_groups]
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    for group in found:
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    return formatter.format_help() if any(group._group_actions for group in found) else ""


def _matching(group: argparse._ArgumentGroup, word: str) -> argparse._ArgumentGroup:
    """The group with those of its options that match."""
    found = argparse._ArgumentGroup(argparse.ArgumentParser(), group.title)
    found._group_actions = [
        action for action in group._group_actions
        if action.help is not argparse.SUPPRESS and word in " ".join((*action.option_strings, action.help or "")).lower()
    ]  # fmt: skip
    return found
