"""Options: what is given arrives in its field, everything else keeps the struct's default, and bad values get one sentence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from vnext.base.spelling import reason
from vnext.commands.chat.talker import sampling_options
from vnext.options.reader import ChatCommand, DoctorCommand, ServeCommand, parse
from vnext.options.settings_check import engine_settings
from vnext.options.spellings import size_bytes
from vnext.options.table import ENGINE_HELP
from vnext.runtime.engine.sizing import require_policy
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.server.settings import ServerSettings


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a bad command line is told on stderr."""
    with pytest.raises(SystemExit) as ended:
        parse(argv, {})
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_nothing_given_is_all_defaults() -> None:
    assert parse(["serve"], {}) == ServeCommand(engine=EngineSettings(), server=ServerSettings())


@pytest.mark.parametrize(("words", "count"), [
    ("", 1), ("-dp 3", 3), ("-dp 3 -asc 1", 1), ("-dp 3 -asc 2", 2), ("-dp 1024", 256), ("-dp 3 --batch-dir b", 3), ("m n -dp 3", 1),
    ("-dp 3 --enable-lora --lora-root r", 3), ("-dp 3 --api-key-file f", 3), ("-dp 3 --key-requests-per-minute 4", 3),
])  # fmt: skip
def test_there_are_as_many_api_servers_as_engines(words: str, count: int) -> None:
    """But for several models, and where another number is given."""
    assert parse(["serve", *words.split()], {}).server.api_server_count == count


def test_the_number_of_api_servers_may_come_from_the_environment() -> None:
    assert parse(["serve", "-dp", "3"], {"VNEXT_API_SERVER_COUNT": "1"}).server.api_server_count == 1


def test_every_option_reaches_its_field() -> None:
    command = parse(
        "serve folder --host 0.0.0.0 --port 9000 --api-key k --served-model-name a b --dtype bfloat16 --quantization int8 --no-deterministic --seed 7 "
        "--max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 64 --long-prefill-token-threshold 32 --input-tokens 16 --block-size 8 "
        "--num-blocks-override 99 --kv-cache-memory 512M --no-enable-prefix-caching --enable-chunked-prefill "
        "--no-async-scheduling --scheduling-policy priority -tp 2 --threads 3 --executor mp --log-dir logs --log full "
        "--log-max-bytes 512M --log-max-age 3600 --durable --log-compress --no-log-index --log-required --step-timeout 60 --max-restarts 3 --standby "
        "--device auto --gpu-memory-utilization 0.5 --enforce-eager --cuda-graph-sizes 1 8 --compile --attention-backend flashinfer --ipc-bytes-max 1M "
        "--digest-interval 1 --check-laws --drain-timeout 2.5 --chat-template t.jinja --show-log --show-events --log-level info "
        "--allowed-origins http://a http://b --allowed-methods POST --allowed-headers x-a x-b --allow-credentials --disable-log-stats --log-stats-interval 5 --batch-dir b --root-path llm --ssl-certfile c --ssl-keyfile k "
        "--ssl-ca-certs a --ssl-cert-reqs 1 --revision v1 --tokenizer other --mmproj t.gguf --hf-overrides {\"a\":1} --override-generation-config {} --load-format dummy --model-impl transformers --family f.py".split(),
        {},
    )
    assert command.engine == EngineSettings(
        model="folder", revision="v1", tokenizer="other", mmproj="t.gguf", hf_overrides='{"a": 1}', load_format="dummy", model_impl="transformers", family="f.py", dtype="bfloat16", quantization="int8", deterministic=False, seed=7, max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32, input_tokens=16, block_size=8, num_blocks_override=99, kv_cache_memory=512 * 2**20,
        enable_prefix_caching=False, async_scheduling=False, scheduling_policy="priority", tensor_parallel_size=2,
        threads=3, device="auto", gpu_memory_utilization=0.5, enforce_eager=True, graph_sizes=(1, 8), compile=True,
        attention="flashinfer", log_dir="logs", log="full", log_max_bytes=512 * 2**20, log_max_age_s=3600.0, log_durable=True,
        log_compress=True, log_index=False, log_required=True, step_timeout_s=60.0, max_restarts=3, standby=True, digest_interval=1, check_laws=True, ipc_bytes_max=2**20,
    )  # fmt: skip
    assert command.server == ServerSettings(
        host="0.0.0.0", port=9000, api_keys=("k",), served_model_names=("a", "b"), drain_s=2.5,
        chat_template_path="t.jinja", show_log=True, show_events=True, log_level="info", allowed_origins=("http://a", "http://b"),
        allowed_methods=("POST",), allowed_headers=("x-a", "x-b"), allow_credentials=True, disable_log_stats=True, log_stats_interval_s=5.0,
        batch_dir="b", root_path="/llm", ssl_certfile="c", ssl_keyfile="k", ssl_ca_certs="a", ssl_cert_reqs=1,
    )  # fmt: skip


def test_lists_may_be_written_as_vllm_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["serve", "--allowed-origins", '["*"]'], {}).server.allowed_origins == ("*",)
    assert parse(["serve"], {"VNEXT_ALLOWED_ORIGINS": '["http://a", "http://b"]'}).server.allowed_origins == ("http://a", "http://b")
    assert "is no JSON: write a list as a b c" in refusal(capsys, "serve", "--allowed-origins", "[*]")


def test_every_engine_setting_is_an_option() -> None:
    assert set(ENGINE_HELP) | {"model"} == set(EngineSettings.__struct_fields__)


def test_names_that_other_engines_taught() -> None:
    argv = ["serve", "--num-gpu-blocks-override", "5", "--kv-cache-memory-bytes", "64", "--tensor-parallel-size", "4"]
    engine = parse(argv, {}).engine
    assert (engine.num_blocks_override, engine.kv_cache_memory, engine.tensor_parallel_size) == (5, 64, 4)
    assert parse(["serve", "-t", "4"], {}).engine == EngineSettings(threads=4), "no abbreviation of -tp"


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/", "host:1"])
def test_a_server_is_named_in_many_ways(url: str) -> None:
    assert parse(["chat", "--url", url], {}).url == "http://host:1"


def test_a_policy_of_one_s_own_is_named_and_found_by_the_engine_core() -> None:
    engine = parse(["serve", "--scheduling-policy", "no_such_package.module:function"], {}).engine
    assert engine.scheduling_policy == "no_such_package.module:function"
    with pytest.raises(SettingsError, match="no_such_package.module:function cannot be imported"):
        require_policy(engine)
    require_policy(EngineSettings())


def test_the_key_may_come_from_the_environment() -> None:
    environment = {"VNEXT_API_KEY": "hidden"}
    assert parse(["serve"], environment).server.api_keys == ("hidden",)
    assert parse(["serve", "--api-key", "given"], environment).server.api_keys == ("given",)
    several = parse(["serve", "--api-key", "one", "a model", "--api-key=two"], environment)
    assert several.server.api_keys == ("one", "two") and several.engine.model == "a model"
    assert parse(["chat", "--url", "http://host:1/"], environment).api_key == "hidden"


def test_chat_and_doctor() -> None:
    argv = "chat --url http://host:1/ --temperature 0 --max-tokens 9 --sampling-seed 3 --system hello".split()
    chat = parse(argv, {"XDG_STATE_HOME": "/state"})
    assert chat == ChatCommand(
        word="chat",
        url="http://host:1", api_key="", engine=EngineSettings(), system="hello", temperature=0.0, max_tokens=9, seed=3,
        history="/state/vnext/chat_history",
    )  # fmt: skip
    assert parse(["chat", "--history", "none"], {}).history == ""
    assert sampling_options(parse(["chat"], {})) == {}, "the model's own sampling, where none is asked for"
    assert parse(["doctor", "--json"], {}) == DoctorCommand(json=True)


HANDS_OVER = "--role prefill --cluster-secret-file s --handover-address "


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--max-num-seqs 0", "--max-num-seqs is 0: it must lie between 1 and"),
        ("--data-parallel-size 0", "--data-parallel-size is 0: it must lie between 1 and"),
        ("--data-parallel-policy best", "--data-parallel-policy: there is no routing policy 'best': choose prefix, least_loaded"),
        ("-dp two", "--data-parallel-size is 'two': it must be a whole number"),
        ("--data-parallel-rank 1", "see --data-parallel-size, or start several servers"),
        ("--api-server-count 0", "--api-server-count is 0: it must lie between 1 and 256"),
        ("--port 70000", "--port is 70000: it must lie between 0 and 65535"),
        ("--allowed-local-media-path /none", "--allowed-local-media-path is /none, which is no folder: name that of the images"),
        ("--allowed-media-domains http://a.b", "--allowed-media-domains has 'http://a.b': name a host alone"),
        ("--allowed-media-domains a.b:80", "--allowed-media-domains has 'a.b:80': name a host alone"),
        ("--served-model-name name folder/model", "--served-model-name takes name and folder/model, and no model is left: name"),
        ("-c 4096", "there is no option -c: see --max-model-len"),
        ("-ngl 99", "there is no option -ngl: a model is computed in one place; see --device"),
        ("--dtype fp8", "--dtype is 'fp8': it must be one of 'auto', 'float32'"),
        ("--kv-cache-memory 12Q", "'12Q' is no amount of memory"),
        ("--max-model-len x", "--max-model-len"),
        ("--executor inproc -tp 2", "--tensor-parallel-size is 2 and the executor inproc has one rank: use mp"),
        ("--executor inproc -pp 2", "--pipeline-parallel-size is 2 and the executor inproc has one rank: use mp"),
        ("--nnodes 2 -tp 2", "--nnodes is 2, and --cluster-secret-file is missing: give all hosts the same file"),
        ("--nnodes 2 -tp 3", "--nnodes is 2, and --tensor-parallel-size 3: each host has as many ranks, so take a multiple of 2"),
        ("--nnodes 2 -pp 3", "--nnodes is 2, and --pipeline-parallel-size 3: each host has as many whole stages, so take a multiple of 2"),
        ("--node-rank 1", "--node-rank is 1, and nnodes 1: hosts are numbered from 0"),
        ("--nnodes 2 -dp 2", "--nnodes is 2, and all engines of --data-parallel-size are on one host: for engines on several, use vnext."),
        ("--executor ray -dp 2", "--executor is ray, and all engines of --data-parallel-size are on one host: for engines on several"),
        ("--executor ray --nnodes 2 -tp 2 -dp 3", "use vnext.ray.app(replicas=3) in Ray Serve, or start `vnext serve` on each host and"),
        ("--executor ray -tp 2", "--executor is ray, nnodes 1 and --node-rank 0: Ray starts all hosts but this one, so give nnodes from"),
        ("--executor ray --nnodes 2 --node-rank 1", "--executor is ray, nnodes 2 and --node-rank 1: Ray starts all hosts but this"),
        ("--executor ray --nnodes 2 -tp 3", "--nnodes is 2, and --tensor-parallel-size 3: each host has as many ranks"),
        ("--pipeline-microbatches 2", "--pipeline-microbatches is 2, and --pipeline-parallel-size 1: one stage computes one step at a time"),
        ("-pp 2 --enable-lora", "--pipeline-parallel-size is 2, and --enable-lora needs ranks that have all layers: leave one"),
        ("-pp 2 --enable-return-routed-experts", "and --enable-return-routed-experts needs ranks that have all layers"),
        ("-pp 2 --speculative-config {\"method\":\"mtp\"}", "and drafts by mtp need ranks that have all layers: take another"),
        ("-dp 2 --prefill-engines 2", "--prefill-engines is 2 of --data-parallel-size 2: leave at least one to decode"),
        ("--prefill-engines 1", "--prefill-engines is 1 of --data-parallel-size 1: leave at least one to decode"),
        ("-dp 2 --prefill-engines 1 --role decode", "--role is decode, and --prefill-engines gives each engine its own: leave one"),
        ("--role half", "--role is 'half': it must be one of 'both', 'prefill', 'decode'"),
        ("--disaggregation-mode decode", "--role is decode, and --cluster-secret-file is missing: give the servers of all roles"),
        ("--role prefill --no-enable-prefix-caching", "--role is prefill, and blocks come by the prefix cache, which is off: leave"),
        ("--role prefill -pp 2", "--pipeline-parallel-size is 2, and a hand-over needs ranks on one host that have all layers: leave role"),
        ("-dp 2 --prefill-engines 1 --handover-transport nixl", "--handover-transport is nixl, which moves blocks between GPUs, and"),
        ("-dp 2 --prefill-engines 1 --handover-transport tcp", "--handover-address is missing: name an address to serve blocks at"),
        ("--handover-transport shm", "--handover-transport is shm, and no engine here hands blocks over: add --role prefill or"),
        ("--handover-bytes 2G", "--handover-bytes is 2147483648, and no engine here hands blocks over: add --role prefill or"),
        ("--role decode --cluster-secret-file s --handover-address h:1", "--handover-address is h:1, and no engine here hands blocks"),
        ("-dp 2 --prefill-engines 1 --handover-address h:1", "--handover-address is h:1, and --cluster-secret-file is missing: give both"),
        (HANDS_OVER + "h:1 --handover-transport shm", "--handover-address is h:1, and --handover-transport is shm: leave one of the two"),
        (HANDS_OVER + "h", "--handover-address: 'h' is no address: write it as host:port"),
        (HANDS_OVER + "h:65535 -tp 2", "--handover-address is h:65535, and 2 ranks have a port each: take a smaller one"),
        ("--kv-transfer-config {}", "prefill and decode are apart by role; see --role and --prefill-engines"),
        ("--disaggregation-transfer-backend nixl", "blocks go through shared memory or TCP, not between GPUs; see --handover-transport"),
        ("--no-enable-chunked-prefill --max-model-len 3000 --device cpu", "--max-num-batched-tokens, which is 2048"),
        ("--no-enable-chunked-prefill --max-model-len 9000", "--max-num-batched-tokens, which is 8192"),
        ("--no-enable-chunked-prefill --long-prefill-token-threshold 5", "leave one of the two out"),
        ("--no-enable-chunked-prefill --input-tokens 5", "--input-tokens is 5 and chunked prefill is off: a prompt"),
        ("--scheduling-policy fifo", "--scheduling-policy: there is no policy 'fifo': choose fcfs, priority, fair, deadline:MS, or name your own"),
        ("--quantization int8 --dtype float16", "--quantization is int8, which computes in bfloat16, and dtype is float16"),
        ("--quantization none --activations int8", "--quantization is none, which keeps no weights of few bits, and activations is int8"),
        ("--activations fp8", "--activations is 'fp8': it must be one of 'auto', 'int8', 'bf16'; auto is int8."),
        ("--device cpu --gpu-memory-utilization 0.8", "--gpu-memory-utilization is for a GPU, and device is cpu: use --device cuda"),
        ("--graph-sizes many", "graph-sizes is ['many']: it must be a list, each a whole number."),
        ("--device cuda --graph-sizes 4 0", "--graph-sizes is 0: it must lie between 1 and"),
        ("--cpu-offload-gb 4", "vnext serve: --cpu-offload-gb is '4': weights stay on the device that computes with them; see --quant"),
        ("--num-gpu-blocks 4", "there is no option --num-gpu-blocks: did you mean --num-gpu-blocks-override?\nSee vnext serve --help."),
        ("--max-model-length 4", "there is no option --max-model-length: did you mean --max-model-len?\nSee vnext serve --help."),
        ("a --port 1 b", "nothing takes 'b': models stand side by side"),
        ("--log off --durable", "--log-durable is on and the log is off: leave one of the two out"),
        ("--log off --log-compress", "--log-compress is on and the log is off: leave one of the two out"),
    ],
)
def test_a_bad_value_gets_one_sentence(capsys: pytest.CaptureFixture[str], argv: str, words: str) -> None:
    said = refusal(capsys, "serve", *argv.split())
    assert words in said
    assert "usage:" not in said


def test_a_router_that_is_given_a_server_alone_is_told_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing takes 'http://host:1': name each server with --backend URL." in refusal(capsys, "router", "http://host:1")


def test_engine_options_make_no_sense_with_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--block-size configures an engine" in refusal(capsys, "chat", "--url", "http://host", "--block-size", "3")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_seq": 3}, "There is no setting max_num_seq: did you mean max_num_seqs?"),
        ({"no_such_thing": 1}, "see vnext serve --help"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1: it must be True or False"),
        ({"seed": True}, "seed is True: it must be a whole number or auto"),
        ({"max_model_len": "3x"}, "max_model_len is '3x': it must be a whole number or auto"),
        ({"kv_cache_memory": "much"}, "'much' is no amount of memory"),
        ({"log": "some"}, "one of 'shape', 'full', 'off'"),
    ],
)
def test_a_bad_keyword_gets_the_same_sentence(values: dict, words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("?", r"\?")):
        engine_settings(**values)


def test_keywords_take_paths_and_sizes(tmp_path) -> None:
    settings = engine_settings(model=tmp_path, kv_cache_memory="1.5GiB")
    assert (settings.model, settings.kv_cache_memory) == (str(tmp_path), 3 * 2**29)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("512M", 2**29), ("512 MiB", 2**29), ("512MB", 512_000_000), ("4gib", 2**32), ("0.5k", 512)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "1e9", "5 apples", "1.2.3G"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(SettingsError):
        size_bytes(text)


def test_commands_are_values() -> None:
    """A parsed command can cross a border, as everything that holds settings."""
    command = parse(["serve", "--seed", "1"], {})
    assert msgspec.json.decode(msgspec.json.encode(command), type=ServeCommand) == command


def test_bytes_that_are_no_text_are_refused_by_the_option_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in [
        (["serve", "m\udcff"], "--model is 'm\\udcff', which is no UTF-8"),
        (["serve", "--log-dir", "/tmp/\udcc3"], "--log-dir is '/tmp/\\udcc3', which is no UTF-8"),
        (["serve", "--served-model-name", "a", "\udcc3"], "--served-model-name is '\\udcc3', which is no UTF-8"),
        (["chat", "--system", "\udcc3"], "--system is '\\udcc3', which is no UTF-8"),
    ]:
        with pytest.raises(SystemExit):
            parse(argv, {})
        assert words in capsys.readouterr().err
    with pytest.raises(SettingsError, match="tokenizer is '.udce9', which is no UTF-8: rename it, or start with a locale of UTF-8"):
        engine_settings(tokenizer="\udce9")


def test_what_an_error_says_has_no_number(tmp_path: Path) -> None:
    with pytest.raises(OSError) as found:
        (tmp_path / "none").read_bytes()
    assert reason(found.value) == "No such file or directory"
    assert reason(found.value, with_file=True) == f"{tmp_path / 'none'}: No such file or directory"
    assert reason(OSError("only 3 of 5 bytes")) == "only 3 of 5 bytes" and reason(MemoryError()) == "MemoryError"
