"""What `vnext serve` prints when it is ready, and the URL at which it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vnext.kernels.format import NO_FORMAT
from vnext.options.settings_check import gpu_settings_given
from vnext.options.table import flags_of
from vnext.runtime.processes.replicas import RunningEngines
from vnext.runtime.protocol.settings import EngineSettings
from vnext.server.console import curl_line, write_line
from vnext.server.settings import ServerSettings
from vnext.server.tls import url_at
from vnext.state.config import SchedulerConfig
from vnext.text.files import CheckpointUnreadable, chat_template

EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to listen on -> one to call


def print_ready(engine: RunningEngines, settings: ServerSettings, is_behind: bool = False) -> None:
    """`is_behind`: another server stands in front, which says where to ask."""
    config, environment = engine.ready.config, engine.ready.environment
    end = "" if is_behind else f"vnext: try      {_try(engine, settings)}\nvnext: Ctrl-C stops\n"
    lines = (
        f"vnext: model    {engine.ready.model}: {environment['dtype']} on {_device(environment)}, "
        f"{config.max_model_len} tokens a request, {config.page_count} cache blocks of {config.block_size} tokens"
        f"{_states(config, environment)}{_each(engine)}\n"
        f"vnext: batch    {invariance_line(environment)}\n"
        f"{_drafts_line(config)}{_adapters_line(config, settings)}"
        f"{''.join(_log_lines(engine))}"
        f"{_live_line(settings)}{end}"
    )
    write_line(lines.removesuffix("\n"))


def _try(engine: RunningEngines, settings: ServerSettings) -> str:
    return curl_line(url_of(settings), chat=_has_template(engine, settings), has_key=settings.needs_key)


def _states(config: SchedulerConfig, environment: Mapping[str, str]) -> str:
    """What a rank keeps of recurrent layers."""
    if not config.state_pages:
        return ""
    size = f"{int(environment['state_bytes']) / 1e6:,.2f} MB"
    kept = f"kept every {config.snapshot_interval} tokens" if config.takes_snapshots else "none kept, no prefix hits"
    return f" and {config.state_pages} recurrent states of {size} a rank ({kept})"


def _device(environment: Mapping[str, str]) -> str:
    name = environment.get("device", "cpu")
    if name != "cpu":
        return name
    return (
        f"the CPU ({environment['kernels'].lower()}, threads: {environment['threads']} on {environment['cores']}; "
        f"{int(environment['token_bytes']) / 1e6:,.1f} MB of weights a token{_scheme(environment)})"
    )


def _scheme(environment: Mapping[str, str]) -> str:
    """In what form weights are multiplied by, where these are no floats, and by what where that is not int8."""
    found = environment.get("codes", environment["quantization"])
    activations = environment.get("activations")
    by = f", activations in {activations}" if activations else ""
    return "" if found == NO_FORMAT else f" in {found}{by}"


def _each(engine: RunningEngines) -> str:
    return f" in each of {len(engine.engines)} engines" if len(engine.engines) > 1 else ""


def _log_lines(engine: RunningEngines) -> Iterator[str]:
    first, *others = engine.log_dirs or ("off",)
    yield f"vnext: log      {first}\n"
    yield from (f"vnext:          {folder}\n" for folder in others)


def say_unused(engine: EngineSettings, environment: Mapping[str, str]) -> None:
    """Print a line for each GPU option where --device auto chose the CPU."""
    if environment.get("device") == "cpu":
        for name in gpu_settings_given(engine):
            write_line(f"vnext: ignored: {flags_of(name)[0]} (the model is computed on the CPU, see --device)")


def invariance_line(environment: Mapping[str, str]) -> str:
    """A line on whether tokens depend on the batch, as the first rank reported."""
    holds, _, why = environment.get("batch_invariant", "no: unknown").partition(": ")
    return f"a request's tokens {'do not' if holds == 'yes' else 'may'} depend on its batch ({why})"


def _drafts_line(config: SchedulerConfig) -> str:
    drafts = config.speculation
    if drafts is None:
        return ""
    return f"vnext: drafts   {drafts.method}, up to {drafts.num_speculative_tokens} tokens of a request in a step\n"


def _adapters_line(config: SchedulerConfig, settings: ServerSettings) -> str:
    if not config.max_loras:
        return ""
    return f"vnext: adapters {len(settings.lora_modules)} named, {config.max_loras} in memory at a time\n"


def _live_line(settings: ServerSettings) -> str:
    """A line on how to watch the engine live, where the settings allow it."""
    return f"vnext: live     vnext-replay ui --live {url_of(settings)}\n" if settings.show_log else ""


def _has_template(engine: RunningEngines, settings: ServerSettings) -> bool:
    try:
        return bool(settings.chat_template_path) or chat_template(engine.model_path) is not None
    except CheckpointUnreadable:
        return False


def url_of(settings: ServerSettings) -> str:
    """Where programs on this machine reach the server."""
    return url_at(EVERYWHERE.get(settings.host, settings.host), settings.port, settings)
