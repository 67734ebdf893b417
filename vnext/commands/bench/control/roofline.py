"""Roofline: how long a step takes at least on a named device, by the bytes that it reads and the products that it computes.

The method of Williams, Waterman and Patterson (2009) for the steps of a decoder: weights are read once a step, keys and values
once for each request, and the longer one of both times counts, each at the share of the peak that good kernels reach. Ranks share
weights, cache and products, and pay two all-reduces a layer. Devices are their makers' figures, dense bfloat16.
"""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from vnext.models.config.folder import is_dummy, weight_files
from vnext.models.config.model_config import ModelConfig, load_config
from vnext.models.errors import ModelError
from vnext.replay.futures.step_times import features_of
from vnext.runtime.processes.launch import model_folder
from vnext.runtime.protocol.settings import SettingsError
from vnext.state.state import StepInFlight

MEMORY_SHARE, COMPUTE_SHARE = 0.8, 0.6
STEP_S, ALL_REDUCE_S = 100e-6, 10e-6
"""What a step and an all-reduce take beside their work."""
FREE_SHARE = 0.9
"""The part of a device's memory that weights and cache may take."""
CACHE_BYTES = 2
"""Of one number in the cache."""


class Device(msgspec.Struct, frozen=True):
    """Bytes of memory, bytes a second that it reads, operations a second, and bytes a second to another device."""

    memory: float
    read: float
    compute: float
    link: float


DEVICES = MappingProxyType(
    {
        "a100": Device(80e9, 2.04e12, 312e12, 300e9), "h100": Device(80e9, 3.35e12, 989e12, 450e9),
        "h200": Device(141e9, 4.8e12, 989e12, 450e9), "b200": Device(180e9, 7.7e12, 2250e12, 900e9),
        "l40s": Device(48e9, 864e9, 362e12, 32e9), "l4": Device(24e9, 300e9, 121e12, 32e9),
        "rtx4090": Device(24e9, 1.008e12, 165e12, 32e9),
    }
)  # fmt: skip


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides how long a step takes: parameters, those that a token meets, bytes of the weights, layers, width, and
    key-value numbers and query numbers of a token in one layer."""

    parameters: float
    active: float
    weight_bytes: float
    layers: int
    hidden: int
    kv: int
    query: int

    @property
    def token_bytes(self) -> int:
        """Of the cache."""
        return 2 * self.kv * self.layers * CACHE_BYTES


def llama(layers: int, hidden: int, inner: int, vocabulary: int, heads: int, kv_heads: int, head_dim: int = 128) -> Form:
    """A dense decoder in bfloat16 by its sizes."""
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    count = layers * (attention + 3 * hidden * inner) + 2 * vocabulary * hidden
    return Form(parameters=count, active=count - vocabulary * hidden, weight_bytes=2 * count, layers=layers, hidden=hidden,
                kv=kv_heads * head_dim, query=heads * head_dim)  # fmt: skip


SHAPES = MappingProxyType(
    {"8b": llama(32, 4096, 14336, 128256, 32, 8), "70b": llama(80, 8192, 28672, 128256, 64, 8),
     "32b": llama(64, 5120, 25600, 151936, 64, 8), "405b": llama(126, 16384, 53248, 128256, 128, 8)}
)  # fmt: skip
"""Llama 3.1's, and Qwen3's 32 B."""


def form_of(name: str) -> Form:
    """A shape of SHAPES, or that of a folder or hub model. Raises SettingsError or ModelError."""
    if name.lower() in SHAPES:
        return SHAPES[name.lower()]
    if not name:
        raise SettingsError(f"name a model: a folder, a hub id, or a shape: {', '.join(SHAPES)}.")
    path = model_folder(name)
    config = load_config(path)
    if config.recurrent or config.latent or config.has_unlike_layers:
        raise ModelError(f"{name} has layers that the roofline does not know: give a model whose layers all attend alike")
    found = counted(config)
    sizes = 0 if is_dummy(path) else sum(file.stat().st_size for file in weight_files(path))
    return msgspec.structs.replace(found, weight_bytes=sizes or found.weight_bytes)


def counted(config: ModelConfig) -> Form:
    """The parameters of a configuration, norms and biases left out."""
    hidden, kv, query = config.hidden_size, config.kv_head_count * config.head_dim, config.head_count * config.head_dim
    table = config.vocab_size * hidden
    every, active, experts = table * (1 if config.tie_embeddings else 2), table, config.experts
    for layer in range(config.layer_count):
        always, chosen, count = 2 * hidden * (query + kv), 3 * hidden * config.intermediate_size, 1
        per_token = 1
        if experts is not None and layer not in experts.dense_layers:
            always += 3 * hidden * experts.shared_size
            chosen, count, per_token = 3 * hidden * experts.intermediate_size, experts.count, experts.per_token
        every, active = every + always + count * chosen, active + always + per_token * chosen
    return Form(
        parameters=every, active=active, weight_bytes=2 * every, layers=config.layer_count, hidden=hidden, kv=kv, query=query
    )


def device_named(name: str) -> Device:
    """Raises SettingsError."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise SettingsError(f"--device is {name!r}: known are {', '.join(DEVICES)}.")
    return found


class Roofline:
    """The times of a model's steps on so many equal devices."""

    def __init__(self, form: Form, device: Device, ranks: int) -> None:
        """`ranks`: devices that share the model, by tensor parallelism."""
        self._form, self._device, self.ranks = form, device, ranks

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights; 0 where the weights do not fit."""
        free = FREE_SHARE * self._device.memory * self.ranks - self._form.weight_bytes
        return max(int(free // self._form.token_bytes), 0)

    def step_s(self, scheduled: StepInFlight) -> float:
        _, _, context, attended = features_of(scheduled).tolist()
        return self.seconds(scheduled.tokens, context, attended)

    def seconds(self, tokens: int, context: float, attended: float) -> float:
        """Of a step of `tokens`, which reads the cache of `context` tokens and attends `attended` pairs of tokens."""
        form, device = self._form, self._device
        dense = form.active / form.parameters
        touched = 1 - (1 - dense) ** max(tokens, 1)  # of the experts, as if each token chose its own
        read = form.weight_bytes * max(dense, touched) + form.token_bytes * context
        products = 2 * form.active * tokens + 4 * form.layers * form.query * attended
        work = max(read / (device.read * MEMORY_SHARE), products / (device.compute * COMPUTE_SHARE)) / self.ranks
        return work + STEP_S + self._all_reduces_s(tokens)

    def _all_reduces_s(self, tokens: int) -> float:
        if self.ranks == 1:
            return 0.0
        sent = 2 * (self.ranks - 1) / self.ranks * tokens * self._form.hidden * CACHE_BYTES
        return 2 * self._form.layers * (ALL_REDUCE_S + sent / self._device.link)
