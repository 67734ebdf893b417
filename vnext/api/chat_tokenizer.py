"""ChatTokenizer: a model's tokenizer under the names, and with the defaults, that programs know from transformers.

Owns no text work: encoding is the engine's own (vnext/text/tokenizer.py), and so are templates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the text code imports slowly: the engine starts meanwhile
    from vnext.api.program_input import Message
    from vnext.text.tokenizer import Tokenizer


class ChatTokenizer:
    """What `LLM.get_tokenizer()` returns. Any thread may use it. `render` makes the text of a conversation."""

    def __init__(self, tokenizer: Tokenizer, render: Callable[..., str]) -> None:
        self._tokenizer, self._render = tokenizer, render
        self.chat_template = tokenizer.chat_template
        self.all_special_ids = sorted(tokenizer.special_ids.values())
        self.vocab_size = tokenizer.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """{"input_ids": ..., "attention_mask": ...} of one text."""
        tokens = self.encode(text, add_special_tokens)
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds a beginning-of-text token where the model needs one."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of one token, or of several."""
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids), skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """A conversation as the model's template writes it: token ids, for `generate`, or, without `tokenize`, a text.
        `add_generation_prompt` begins the model's turn. `variables` are the template's. Raises InvalidRequest."""
        text = self._render(conversation, tools, variables, add_generation_prompt)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.special_ids.get(token)
