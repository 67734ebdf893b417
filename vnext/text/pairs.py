"""Pairs: two texts as one prompt, for a model that reads them together and scores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.text.prompt_results import shortened
from vnext.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from vnext.text.template import ChatTemplate

NO_TEMPLATE = "This model's chat template writes the pairs that it scores, and its folder has none: add chat_template.jinja to it."


def pair_prompt(
    tokenizer: Tokenizer, template: ChatTemplate | None, pair: tuple[str, str], model_length: int, asked: int | None = None
) -> list[int]:
    """The tokens of a query and a document. `template` writes them, as messages of these roles; where it is None the tokenizer
    joins them, and the pair is `shortened` to `asked` tokens, at the document's end. Raises InvalidRequest."""
    if template is not None:
        if asked is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens would cut off what the chat template writes behind the document: shorten the document.",
                "truncate_prompt_tokens",
            )
        written = template.render([{"role": role, "content": text} for role, text in zip(("query", "document"), pair)], {})
        return tokenizer.encode(written, add_special_tokens=False)
    tokens = tokenizer.encode_pair(*pair)
    return tokens if asked is None else shortened(tokens, asked, tokenizer.encode(""), model_length)
