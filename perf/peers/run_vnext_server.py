"""vnext as a server: `vnext serve` in a process of its own, one HTTP request for each prompt, all at once.

The client here is plain threads of the standard library and is no part of the memory that is counted.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import protocol

REQUEST_TIMEOUT_S = 3600
END_TIMEOUT_S = 30


class VnextServer:
    """The defaults of `vnext serve`, but for the threads, the port and the place of the log."""

    def __init__(self, model: Path, threads: int) -> None:
        self._logs = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "vnext.commands.cli", "serve", str(model), "--port", "0", "--device", "cpu", "--threads", str(threads)]
        command += ["--log-dir", self._logs.name, "--served-model-name", "peer"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._address = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        """host:port. RuntimeError where the server ended instead."""
        said = []
        for line in self._process.stdout:
            said.append(line)
            if line.startswith("vnext: try"):
                return re.search(r"http://([\d.]+:\d+)", "".join(said))[1]
        raise RuntimeError(f"the server did not start: {''.join(said)}")

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(self._complete, prompts, lengths))
        return [[-1] * count for count in counts]  # the API answers with text; how many tokens there were is known

    def _complete(self, prompt: list[int], length: int) -> int:
        """One request; the number of tokens of its answer."""
        body = {"model": "peer", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection(self._address, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {answer}")
        return answer["usage"]["completion_tokens"]

    def about(self) -> dict[str, Any]:
        from vnext.base.version import __version__

        return {"vnext": __version__}

    def roots(self) -> list[int]:
        return [self._process.pid]

    def close(self) -> None:
        self._process.terminate()
        self._process.stdout.read()
        self._process.wait(END_TIMEOUT_S)
        self._logs.cleanup()


if __name__ == "__main__":
    protocol.run(VnextServer)
