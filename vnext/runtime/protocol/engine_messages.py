"""The decoder of what engine cores send, for launchers and clients: one, made by whichever thread imports it first, since msgspec
may not gather what it knows of a type in two threads at once."""

from __future__ import annotations

import msgspec

from vnext.runtime.protocol.messages import EngineMessage

engine_decoder = msgspec.msgpack.Decoder(EngineMessage)
