"""Settings of the API server: one frozen argument, which the command line makes and passes to the API process.

Owns the bounds of every queue in the API server. No decision of the engine depends on them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vnext.routing.policies import DEFAULT_POLICY
from vnext.runtime.protocol.sampling_params import SamplingDefaults
from vnext.runtime.protocol.settings import NO_ROLES, LogFormat, Role, Roles

API_KEY_VARIABLE = "VNEXT_API_KEY"
LogLevel = Literal["debug", "info", "warning", "error"]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`port` 0 lets the system choose. Without `api_keys` and `api_key_file` no key is required; requests with a key may
    be limited to `key_requests_per_minute`, `key_tokens_per_minute` and `key_answers_max` at once (0: no limit), which the file
    can set for each key. Several keys share no blocks of the prefix cache unless `shared_prefix_cache`.
    A request's `model` may be any of `served_model_names`,
    and the first is the default; where they are empty, the name is the model folder's. `chat_template_path` replaces the
    checkpoint's template. `tool_call_parser` and `reasoning_parser` are vLLM's names; "" finds both in the template.

    Besides the server's own pages, web pages of `allowed_origins` may use the server from a browser, with `allowed_methods`,
    `allowed_headers` and, with `allow_credentials`, cookies; "*" is any. Images and videos come as data URLs, from files below
    `allowed_local_media_path` ("" for none) and from `allowed_media_domains` of the web.

    `body_bytes_max` bounds a request's body, and eight times that all bodies that are read at once. `characters_max` bounds
    the texts in tokenization or in its queue, `template_limit_s` the computing time of a chat template. `live_requests_max`
    bounds the answers that wait or run in this process, `request_answers_max` those of one request and `client_answers_max`
    those of one client (0: a sixteenth at a time, and three quarters of all). `waiting_tokens_max` bounds the prompt tokens of
    answers that have not begun (0: no bound). A request ends with an error `request_timeout_s` after its body came (0: never).

    At most `connections_max` are open, three quarters of them from one address. A connection closes if its request's head does
    not arrive within `head_timeout_s`, if no new request comes for `keepalive_timeout_s`, or if the client hardly reads its
    answer for `write_timeout_s`. A stream shows a sign of life after `sse_ping_interval_s` of silence (0: never).

    `engine_address` is the first engine's, `other_engines` are those of the others, among which `data_parallel_policy` chooses
    by their `roles`. With `role` "prefill" routers may have prompts computed for other servers, with "encode" their inputs encoded;
    with `takes_tickets` they may send requests for which another server has done so.

    `listener` is the descriptor of the socket to accept from, -1 for one of this process. `number` is that of this API server
    among all that its server has had: those of one place have the same remainder by `api_server_count`. `shared_dir` is the folder
    in which they keep what /metrics sums, stored responses and the sockets at which they ask each other, "" for none.
    `client_secret` (hexadecimal) keys the numbers by which the engine knows clients; "" draws one.

    `drain_s` is the time that live requests get when the server stops, `connect_timeout_s` the time that the engine core gets
    to become ready (None: no limit, for callers that watch it otherwise). `sampling_defaults` are the model's, for requests
    that leave a parameter unset. With `show_log`, viewers may read the log in the folder `log_dir`; with
    `show_events`, routers may follow the engine's events, with all tokens. Access lines are logged at
    the level "info" and below; a load line comes every `log_stats_interval_s` unless `disable_log_stats` is set or the level is
    "error".

    With `enable_rl_routes` clients may change the weights, pause the engine and put it to sleep.

    `lora_modules` are LoRA adapters (name=path) that requests may name as their model; others may be loaded from folders under
    `lora_root`, "" for none.

    `batch_dir` is the folder of /v1/files and /v1/batches, "" for none. `responses_bytes_max` bounds the memory for stored
    responses; with 0 none is stored.

    `other_models` make it a server with several models, of which `max_loaded_models` are loaded at a time, each until it has not
    been used for `keep_alive_s` (below 0: for ever).

    `otlp_traces_endpoint` is the URL of an OpenTelemetry collector, "" for no traces.

    All paths also exist behind `root_path`, for a proxy that keeps a prefix. With `ssl_certfile` (and `ssl_keyfile`, if the key
    is in a file of its own) the server speaks HTTPS; `ssl_ca_certs` and `ssl_cert_reqs` (0 none, 1 optional, 2 required, as in
    Python's ssl module) ask clients for certificates.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    key_requests_per_minute: int = 0
    key_tokens_per_minute: int = 0
    key_answers_max: int = 0
    shared_prefix_cache: bool = False
    served_model_names: tuple[str, ...] = ()
    model_path: str = ""
    engine_address: str = ""
    other_engines: tuple[str, ...] = ()
    data_parallel_policy: str = DEFAULT_POLICY
    roles: Roles = NO_ROLES
    role: Role = "both"
    takes_tickets: bool = False
    api_server_count: int = 1
    listener: int = -1
    number: int = 0
    client_secret: str = ""
    shared_dir: str = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    chat_template_path: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    show_log: bool = False
    show_events: bool = False
    enable_rl_routes: bool = False
    log_dir: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    allowed_local_media_path: str = ""
    allowed_media_domains: tuple[str, ...] = ()
    body_bytes_max: int = 32 * 2**20
    characters_max: int = 64 * 2**20
    template_limit_s: float = 0.3
    other_models: tuple[str, ...] = ()
    keep_alive_s: float = 300.0
    max_loaded_models: int = 3
    live_requests_max: int = 4096
    request_answers_max: int = 0
    client_answers_max: int = 0
    waiting_tokens_max: int = 0
    request_timeout_s: float = 0.0
    connections_max: int = 8192
    head_timeout_s: float = 10.0
    keepalive_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    sse_ping_interval_s: float = 10.0
    drain_s: float = 30.0
    connect_timeout_s: float | None = 600.0
    batch_dir: str = ""
    lora_modules: tuple[str, ...] = ()
    lora_root: str = ""
    max_lora_rank: int = 16
    responses_bytes_max: int = 64 * 2**20
    root_path: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ssl_ca_certs: str = ""
    ssl_cert_reqs: int = 0
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    otlp_traces_endpoint: str = ""
    disable_log_stats: bool = False
    log_stats_interval_s: float = 10.0

    @property
    def needs_key(self) -> bool:
        return bool(self.api_keys or self.api_key_file)
