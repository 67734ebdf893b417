"""The rank process: `python -m vnext.runtime.rank_main`, started by the engine core's process.

Owns start-up and end of one rank: what it imports before anybody tells it anything, the ring it reads, the socket it answers
on. Its environment is there already (rank_children.py). A failure is told to the engine core in one sentence, and so is
another rank's end, without which this one cannot go on; a closed ring is the orderly end.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import msgspec

from vnext.runtime.children import enter_child
from vnext.runtime.settings import RankSettings, SettingsError

FAREWELL_MS = 1000


def main() -> int:
    gc.disable()  # what is imported and loaded stays: looking for garbage in it took a quarter of torch's import
    import zmq

    from vnext.runtime import loading  # noqa: F401  torch comes with it, while the engine core gets ready
    from vnext.runtime.messages import RankFailed, encoder

    settings = msgspec.msgpack.decode(enter_child(), type=RankSettings)
    with zmq.Context() as context, context.socket(zmq.PUSH) as results:
        results.set(zmq.LINGER, FAREWELL_MS)
        results.connect(settings.results_address)
        try:
            serve(settings, results)
        except start_errors() as error:
            results.send(encoder.encode(RankFailed(rank=settings.rank, message=str(error))))
            return 2
        except rank_lost() as error:  # the engine core, if it lives, is about to notice by itself
            print(f"rank {settings.rank} stops: {error}", file=sys.stderr)
            results.send(encoder.encode(RankFailed(rank=settings.rank, message=str(error))))
            return 3
    return 0


def rank_lost() -> type[Exception]:
    """Another rank has ended in the middle of a step."""
    from vnext.runtime.shared_group import RankLost

    return RankLost


def start_errors() -> tuple[type[Exception], ...]:
    """What a user can mend: a broken checkpoint, an option that cannot work here, too little memory."""
    from vnext.models.errors import ModelError

    return ModelError, SettingsError, MemoryError


def serve(settings: RankSettings, results) -> None:
    """Load, report, then one message of the ring after the other until it is closed."""
    from vnext.runtime.loading import load_rank, ready_message
    from vnext.runtime.messages import encoder
    from vnext.runtime.ring import RingClosed, RingReader

    ring = RingReader.attach(settings.ring, settings.rank)
    rank, runner = load_rank(settings, Path(settings.rendezvous))
    gc.freeze()
    gc.enable()
    results.send(encoder.encode(ready_message(settings, runner)))
    while True:
        try:
            message = ring.read(rank.patience_s)
        except RingClosed:
            break
        if message is not None and (result := rank.handle(message)) is not None:
            results.send(encoder.encode(result))
        for result in rank.collect():
            results.send(encoder.encode(result))
    ring.close()
    from vnext.runtime.group import leave_group

    leave_group()


if __name__ == "__main__":
    sys.exit(main())
