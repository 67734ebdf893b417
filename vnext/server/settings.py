"""Settings of the HTTP edge: one frozen argument, made by the command line and handed to the API process.

Owns the bounds of everything that queues at the edge. No decision of the engine depends on anything here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.sampling_params import SamplingDefaults

LogLevel = Literal["debug", "info", "warning", "error"]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`port` 0 lets the system choose. `api_key` "" asks for none. `served_model_names` are accepted as a request's
    `model`, the first one is the default; empty: the model folder's name. `chat_template_path` replaces the
    checkpoint's template.

    `body_bytes_max` bounds a request's body, `live_requests_max` the answers that may wait or run at once in this
    process, `drain_s` the time that live requests get when the server stops, `connect_timeout_s` the time the engine
    core gets to become ready (None: as long as it takes, for who watches it otherwise). `sampling_defaults` are the model's
    own, for requests that do not say otherwise. With `show_log` viewers may read the log, whose folder is `log_dir`. Access
    lines are written from log level "info" down.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    served_model_names: tuple[str, ...] = ()
    model_path: str = ""
    engine_address: str = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    chat_template_path: str = ""
    show_log: bool = False
    log_dir: str = ""
    body_bytes_max: int = 32 * 2**20
    live_requests_max: int = 4096
    drain_s: float = 30.0
    connect_timeout_s: float | None = 600.0
    log_level: LogLevel = "warning"
