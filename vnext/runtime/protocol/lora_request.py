"""LoRARequest: a LoRA adapter by name and folder, in vLLM's words. What reads its files is imported apart (adapter_files.py): an
`LLM` starts its engine first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vnext.base.spelling import Suggesting


class LoRARequest(msgspec.Struct, frozen=True, metaclass=Suggesting):
    """The adapter in the folder `lora_path`, which PEFT wrote. `lora_int_id` has no meaning: its files' digest identifies it."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, a list with one or None for each, or none at all."""
