"""Values: bounds how many values a JSON text holds, before it is decoded: everything else waits while the decoder runs."""

from __future__ import annotations

from vnext.runtime.protocol.sampling_params import InvalidRequest

NUMBERS_MAX = 2**18 + 2**16  # 10 to 20 ns each in the decoder; OpenAI's embeddings take 300,000 tokens; a model's length if more
STRINGS_MAX = 2**18  # 30 ns
GROUPS_MAX = 2**15  # lists and objects, 300 ns


def numbers_max(model_length: int) -> int:
    """NUMBERS_MAX, or more where a model reads more tokens."""
    return max(NUMBERS_MAX, model_length + 2**16)


class Values:
    """Counts the values of a JSON text part by part, skipping the contents of strings. Mutable."""

    def __init__(self, numbers_max: int) -> None:
        self._bounds = ((b",", numbers_max, "values"), (b"[", GROUPS_MAX, "lists"), (b"{", GROUPS_MAX, "objects"))
        self._counts = [0] * len(self._bounds)
        self._quotes = 0
        self._escape = b""

    def count(self, part: bytes) -> None:
        """Take in the next part. Raises InvalidRequest."""
        text = self._escape + part
        odd = (len(text) - len(text.rstrip(b"\\"))) % 2
        text, self._escape = text[: len(text) - odd], text[len(text) - odd :]
        pieces = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._quotes % 2 :: 2])
        self._quotes += len(pieces) - 1
        self._check(self._quotes // 2, STRINGS_MAX, "texts")
        for place, (byte, bound, words) in enumerate(self._bounds):
            self._counts[place] += outside.count(byte)
            self._check(self._counts[place], bound, words)

    @staticmethod
    def _check(count: int, bound: int, words: str) -> None:
        if count > bound:
            raise InvalidRequest(f"The body has more than {bound} {words}: send several requests.")
