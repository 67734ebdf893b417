"""Forms: parts are the same however their bytes come, and no header of a client takes long to read."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import httpx
import pytest
from edge_server import EdgeServer

from vnext.runtime.protocol.sampling_params import InvalidRequest
from vnext.server.http.forms import FIELD_BYTES_MAX, HEAD_BYTES_MAX, Begun, FormReader, parameter_of

NAMES = ("file", "model", "a b", 'quo"te', "back\\slash", "semi;colon", "x[]", "käse")
BITS = (b"\r\n", b"--", b"x", b"\r\n--", b"\r\n--x-", b"\r", b"\n", b"-", b"abc", b"\0", b'name="y"')


def reader(boundary: str) -> FormReader:
    return FormReader(SimpleNamespace(headers={"Content-Type": f"Multipart/Form-Data; charset=utf-8; boundary={boundary}"}), "parts")


def parts_of(data: bytes, boundary: str, rng: random.Random) -> list[tuple[str, str, bytes]]:
    """Each part's name, file and bytes, of a body that comes in pieces of any size."""
    read, found, at = reader(boundary), [], 0
    while at < len(data):
        size = rng.choice((1, 2, 3, 7, 100, 2**16))
        for each in read.read(data[at : at + size]):
            if isinstance(each, Begun):
                found.append((*each, b""))
            else:
                found[-1] = (*found[-1][:2], found[-1][2] + each)
        at += size
    read.end()
    return found


def encoded(part: tuple[str, str, bytes]) -> bytes:
    name, filename, value = part
    quoted = [each.replace("\\", "\\\\").replace('"', '\\"') for each in (name, filename)]
    file = f'; filename="{quoted[1]}"' if filename else ""
    return f'Content-Type: text/plain\r\ncontent-disposition: form-data; name="{quoted[0]}"{file}\r\n\r\n'.encode() + value


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_what_was_sent_in_pieces_of_any_size(seed: int) -> None:
    rng = random.Random(seed)
    sent = [
        (name, rng.choice(("", "a.wav", 'a".wav')), b"".join(rng.choices(BITS, k=rng.randrange(30))).replace(b"\r\n--xy", b""))
        for name in rng.sample(NAMES, rng.randrange(1, 5))
    ]
    body = b"--xyz" + b"".join(rng.choice((b"", b" ", b"\t")) + b"\r\n" + encoded(each) + b"\r\n--xyz" for each in sent) + b"--"
    before, behind = rng.choice((b"", b"before\r\n", b"\r\n")), rng.choice((b"", b"\r\n", b"\r\nbehind\r\n--xyz\r\n"))
    assert parts_of(before + body + behind, rng.choice(("xyz", '"xyz"')), rng) == sent


def test_the_official_clients_bodies_are_read() -> None:
    request = httpx.Request("POST", "http://a", files=[("file", ("ä;.wav", b"\r\n--\r\n"))], data={"language": ["de"], "x[]": ["1", "2"]})
    found = parts_of(request.read(), request.headers["Content-Type"].partition("boundary=")[2], random.Random(1))
    assert [(name, value) for name, _, value in found] == [("language", b"de"), ("x[]", b"1"), ("x[]", b"2"), ("file", b"\r\n--\r\n")]
    assert parameter_of("attachment; filename*=utf-8''%e2%82%ac.txt", "filename*") == "utf-8''%e2%82%ac.txt"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\nb", "does not end with its boundary"),
        (b"--x\r\nA: b\r\n\r\nb\r\n--x--", "a part has no name"),
        (b"--x\r\nContent-Disposition: form-data; name=a\0b\r\n\r\nb\r\n--x--", "a part has a header that is none"),
        (b"--x\r\nContent-Disposition: form-data; name=" + b"a" * HEAD_BYTES_MAX, "headers have more than 8192 bytes"),
        (b"\r\n--x".join([b"--x", *[b"\r\nContent-Disposition: form-data; name=a[]\r\n\r\n"] * 65, b"--"]), "more than 64 parts"),
    ],
)
def test_what_is_no_form_gets_a_sentence(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        parts_of(body, "x", random.Random(2))


ODD = ['"' + ";" * 7_000, ";a=b" * 1_800, "".join(f";a*{at}*=b" for at in range(800)), "(" * 7_000, '\\";' * 2_000, "\\" * 7_000, ' ;a="' * 1_400]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_no_header_takes_long_to_read(odd: str, server: EdgeServer, caplog: pytest.LogCaptureFixture) -> None:
    began_s, head = time.process_time(), f"--x\r\nContent-Disposition: form-data; name=a[]; b={odd}\r\n\r\n\r\n".encode()
    for read in [reader("x") for _ in range(20)]:
        assert len([*read.read(head * 64 + b"--x--")]) == 64
    assert time.process_time() - began_s < 60, "of 1,280 headers"
    status, answer, _ = server.post("/v1/completions", {"prompt": "say:hi"}, **{"Content-Type": f"application/json;a={odd}"})
    assert status == 200 and answer["choices"][0]["text"] == "hi" and not caplog.records


def test_a_field_beside_the_file_is_short() -> None:
    assert FIELD_BYTES_MAX == 2**16
