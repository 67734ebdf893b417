"""A rank at work: it loads, reports, and answers one ring message after another until the ring is closed.

Imports everything a rank computes with; `main.py` imports it while the engine core gets ready.
"""

from __future__ import annotations

import gc
from pathlib import Path

from vnext.runtime.processes.thread_plan import ring_spin_us
from vnext.runtime.protocol.messages import encoder
from vnext.runtime.protocol.settings import RankSettings
from vnext.runtime.rank.loading import load_rank, ready_message
from vnext.runtime.transport.collectives.group import leave_group
from vnext.runtime.transport.ring.common import RingClosed
from vnext.runtime.transport.ring.reader import RingReader
from vnext.runtime.transport.ring.results import ResultsSender


def serve(settings: RankSettings, results: ResultsSender) -> None:
    """Serve until the ring is closed. Raises ModelError, SettingsError, MemoryError, RankLost."""
    ring = RingReader.attach(settings.ring, settings.local_rank, spin_us=ring_spin_us(settings.place_count))
    rank, runner = load_rank(settings, Path(settings.rendezvous))
    gc.freeze()
    gc.enable()
    results.send(encoder.encode(ready_message(settings, runner, rank)))
    while True:
        try:
            message = ring.read(rank.poll_timeout_s)
        except RingClosed:
            break
        if message is not None:
            rank.handle(message)
        for result in rank.collect():
            results.send(encoder.encode(result))
    ring.close()
    rank.close()
    if runner.stage is not None:
        runner.stage.close()
    leave_group()
