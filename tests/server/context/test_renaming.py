"""Errors name what the client sent, and nothing of the server's."""

from __future__ import annotations

import pytest

from vnext.runtime.protocol.messages import AdapterFiles
from vnext.runtime.protocol.sampling_params import InvalidRequest, context_exceeded
from vnext.server.context.adapters import failed
from vnext.server.context.errors import in_names, renamed

NAMES = [(r"tools\[0\]\.function", "tools[2]"), ("stop", "stop_sequences")]


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("stop has 20 entries.", "stop", ("stop_sequences has 20 entries.", "stop_sequences")),
        ("tools[0].function.name is 'stop'.", "tools[0].function.name", ("tools[2].name is 'stop'.", "tools[2].name")),
        ("stop_token_ids is wrong.", "stop_token_ids", ("stop_token_ids is wrong.", "stop_token_ids")),
        ("a.stop is wrong.", None, ("a.stop is wrong.", None)),
    ],
)
def test_whole_names_change(message: str, param: str | None, expected: tuple[str, str | None]) -> None:
    with pytest.raises(InvalidRequest) as caught, in_names(NAMES):
        raise InvalidRequest(message, param, "code")
    assert (caught.value.message, caught.value.param) == expected and caught.value.code == "code"


def test_an_error_keeps_its_kind() -> None:
    error = renamed(context_exceeded(9, "too many", "prompt", "prompt", 20), [("prompt", "input")])
    assert (error.count, error.most, error.param, str(error)) == (20, 8, "input", str(error))


def test_a_failed_adapter_is_known_by_its_name() -> None:
    adapter = AdapterFiles(name="sql", digest="0" * 32, path="/secret/adapters/a")
    error = failed("the adapter in /secret/adapters/a has changed since it was named: name it again", adapter)
    assert error.message == "the adapter in sql has changed since it was named: name it again"
    assert (error.param, error.code) == ("model", "adapter_failed")
    assert failed("no", None).code == "constraint_failed"
