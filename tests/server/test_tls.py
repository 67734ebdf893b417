"""HTTPS, a path prefix for proxies, and the interval of load lines."""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from edge_server import EdgeServer, echo_answer
from fake_engine import FakeEngine, wait_until
from test_process import checkpoint, start_by_hand

from tests.run.ports import held_port
from vnext.options.reader import ServeCommand, parse
from vnext.runtime.processes.subprocesses import start_child
from vnext.server.settings import ServerSettings
from vnext.server.tls import TlsUnusable, tls_context

PEM = str(Path(__file__).with_name("localhost.pem"))
"""A certificate of its own authority, for localhost, with its key; valid for a hundred years."""


def answered(port: int, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection("localhost", port, timeout=60, context=context)
    try:
        connection.request("POST", "/v1/completions", '{"prompt": "say:hi"}', {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def listens(port: int, context: ssl.SSLContext) -> bool:
    try:
        answered(port, context)
    except ssl.SSLError:
        return True
    except OSError:
        return False
    return True


IMPORT = """
import ssl
from vnext.server.tls import without_certificates
with without_certificates():
    from aiohttp import connector
made = connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED, ssl.create_default_context()
print([len(each.get_ca_certs()) for each in made])
"""


def test_an_import_of_aiohttp_reads_no_certificates_of_the_machine() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], env=os.environ | {"SSL_CERT_FILE": PEM}, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[0, 0, 1]\n", "")


@pytest.mark.parametrize("required", [False, True])
def test_a_server_speaks_https_and_asks_for_certificates(tmp_path: Path, required: bool) -> None:
    trusting = ssl.create_default_context(cafile=PEM)
    certain = ssl.create_default_context(cafile=PEM)
    certain.load_cert_chain(PEM)
    asks = {"ssl_ca_certs": PEM, "ssl_cert_reqs": 2} if required else {}
    with FakeEngine(echo_answer) as engine:
        settings = ServerSettings(
            port=held_port(), model_path=checkpoint(tmp_path), engine_address=engine.address, ssl_certfile=PEM, **asks
        )
        child = start_child("API server", "vnext.server")
        child.send_config(msgspec.json.encode(settings))
        try:
            wait_until(lambda: listens(settings.port, certain))
            assert answered(settings.port, certain) == 200
            if required:
                with pytest.raises(OSError):
                    answered(settings.port, trusting)
            else:
                assert answered(settings.port, trusting) == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                answered(settings.port, ssl.create_default_context())
        finally:
            child.terminate(grace_s=5)


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing.pem")
    for settings in (ServerSettings(ssl_keyfile=PEM), ServerSettings(ssl_certfile=nothing), ServerSettings(ssl_certfile=__file__)):
        with pytest.raises(TlsUnusable, match="give"):
            tls_context(settings)
    assert tls_context(ServerSettings()) is None
    assert start_by_hand(ServerSettings(ssl_certfile=nothing, model_path="x"))[0] != 0


def test_all_paths_exist_behind_the_prefix_and_are_guarded_there() -> None:
    with EdgeServer(root_path="/llm", api_keys=("secret",)) as server:
        for path in ("/llm/v1/models", "/v1/models", "/llm/server_info"):
            assert server.get(path)[0] == 401, path
            assert server.get(path, Authorization="Bearer secret")[0] == 200
        assert server.get("/llm/health")[0] == 200 and server.get("/llm/llm/health")[0] == 404


@pytest.mark.parametrize(("given", "meant"), [("/llm", "/llm"), ("llm/", "/llm"), ("a/b", "/a/b"), ("/", ""), ("", "")])
def test_a_prefix_may_be_written_in_several_ways(given: str, meant: str) -> None:
    command = parse(["serve", f"--root-path={given}"], {})
    assert isinstance(command, ServeCommand) and command.server.root_path == meant


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--root-path /{x}", "write a path such as /llm"), ("--ssl-cert-reqs 3", "must lie between 0 and 2"),
        ("--log-stats-interval 0", "--log-stats-interval is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], argv: str, words: str) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", *argv.split()], {})
    assert words in capsys.readouterr().err
