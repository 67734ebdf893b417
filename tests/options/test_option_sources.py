"""Where options come from and how they may be written: spellings, other engines' options, a YAML file, the environment."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vnext.base.spelling import close_to
from vnext.commands.bench import cli as bench
from vnext.commands.bench.cli import make_parser
from vnext.options.foreign import FOREIGN, OLLAMA
from vnext.options.parser import FIRST, groups
from vnext.options.reader import ProgramCommand, ServeCommand, parse
from vnext.options.settings_check import REMEDIES, engine_settings
from vnext.options.table import as_flags, every_option, options_of
from vnext.runtime.protocol.settings import EngineSettings, SettingsError
from vnext.server.settings import ServerSettings


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environment: str) -> str:
    """What a bad command line is told on stderr."""
    with pytest.raises(SystemExit) as ended:
        parse(argv, environment)
    assert ended.value.code == 2
    return capsys.readouterr().err


def engine(*argv: str, **environment: str) -> EngineSettings:
    return parse(["serve", *argv], environment).engine


def test_an_empty_text_on_the_command_line_is_no_value(capsys):
    """It is most often a shell's variable that is not set; in the environment it counts as unset."""
    told = refusal(capsys, "serve", "--api-key-file", "", "--served-model-name=", "--batch-dir", "")
    flags = "--api-key-file", "--batch-dir", "--served-model-name"
    assert told == "".join(f"vnext serve: {flag} is empty: give it a value, or leave it out.\n" for flag in flags)
    assert "--config is empty" in refusal(capsys, "serve", "--config", "")
    assert "--model is empty" in refusal(capsys, "serve", "")
    assert parse(["serve", "--root-path", ""], {"VNEXT_BATCH_DIR": ""}).server == ServerSettings()


# ---- spellings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "4k", 4000),
        ("max_model_len", "32K", 32768),
        ("max_model_len", "1M", 2**20),
        ("max_model_len", "25.6k", 25600),
        ("max_model_len", "auto", None),
        ("max_model_len", "-1", None),
        ("max_num_batched_tokens", "8K", 8192),
        ("max_num_seqs", "auto", 256),
        ("kv_cache_memory", "auto", None),
        ("threads", "auto", None),
        ("graph_sizes", "auto", ()),
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "BFLOAT16", "bfloat16"),
        ("dtype", "torch.float16", "float16"),
        ("generation_config", "vllm", "none"),
        ("device", "gpu", "cuda"),
        ("attention", "FLASHINFER", "flashinfer"),
        ("gpu_memory_utilization", "0.85", 0.85),
    ],
)
def test_a_value_is_spelled_as_people_write_it_on_the_command_line_and_in_python(name: str, text: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    assert getattr(engine(flag, text), name) == value
    assert getattr(engine_settings(**{name: text}), name) == value


def test_keywords_of_vllm_that_ask_for_nothing_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = engine_settings(trust_remote_code=True, swap_space=4, tokenizer_mode="auto", enable_dbo=False, max_num_seqs=8)
    assert settings == EngineSettings(max_num_seqs=8)
    assert "ignored: swap_space (a preempted request is computed again and never swapped)" in caplog.messages
    with pytest.raises(SettingsError, match="There is no setting enable_lora_bias: adapters with biases are not supported; merge this one"):
        engine_settings(enable_lora_bias=True)
    with pytest.raises(SettingsError, match="There is no setting tokenizer_mode: the tokenizer is the model folder's"):
        engine_settings(tokenizer_mode="custom")


@pytest.mark.parametrize("text", [["8", "16"], ["[8, 16]"]])
def test_a_list_may_be_json_as_vllm_has_it(text: list[str]) -> None:
    assert engine("--graph-sizes", *text).graph_sizes == (8, 16) == engine(VNEXT_GRAPH_SIZES=", ".join(text)).graph_sizes
    origins = parse(["serve", "--allowed-origins", '["https://a.example", "https://b.example"]'], {}).server.allowed_origins
    assert origins == ("https://a.example", "https://b.example")


def test_keywords_have_the_further_names_that_options_have() -> None:
    settings = engine_settings(num_gpu_blocks_override=5, kv_cache_memory_bytes="1M", cuda_graph_sizes=[1, 8], durable=True)
    assert settings == EngineSettings(num_blocks_override=5, kv_cache_memory=2**20, graph_sizes=(1, 8), log_durable=True)
    with pytest.raises(SettingsError, match="graph_sizes is given twice, as cuda_graph_sizes too"):
        engine_settings(graph_sizes=(1,), cuda_graph_sizes=(8,))


def test_options_may_have_underscores_as_in_python() -> None:
    assert engine("--max_model_len", "64", "--max_num_seqs=8") == EngineSettings(max_model_len=64, max_num_seqs=8)


def test_a_torch_dtype_is_a_dtype() -> None:
    import torch

    assert engine_settings(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize("text", ["4x", "1.5", "k", "4 thousand", "0x10", "1e6"])
def test_what_is_no_count_is_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    said = refusal(capsys, "serve", "--max-num-seqs", text)
    assert said == f"vnext serve: --max-num-seqs is {text!r}: it must be a whole number.\n"


# ---- other engines' options --------------------------------------------------------------------------------------

VLLM_LINE = (
    "--model folder --trust-remote-code --load-format auto --disable-log-requests --enable-auto-tool-choice "
    "--tool-call-parser hermes --reasoning-parser qwen3 --tokenizer-mode auto --swap-space 4 --kv-cache-dtype auto --distributed-executor-backend mp "
    "--pipeline-parallel-size 1 --enable-prefix-caching --enable-chunked-prefill --enforce-eager --generation-config vllm "
    "--dtype half --max-model-len 4k --uvicorn-log-level info --no-enable-lora --gpu-memory-utilization 0.9"
)


def test_a_line_for_vllm_starts_and_says_what_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["serve", *VLLM_LINE.split()], {})
    assert command.engine == EngineSettings(
        model="folder", load_format="auto", enforce_eager=True, generation_config="none", dtype="float16", max_model_len=4000
    )
    assert command.server == ServerSettings(log_level="info", tool_call_parser="hermes", reasoning_parser="qwen3")
    said = capsys.readouterr().err.splitlines()
    assert "vnext serve: ignored: --swap-space 4 (a preempted request is computed again and never swapped)" in said
    assert all(line.startswith("vnext serve: ignored: --") and line.endswith(")") for line in said)
    assert [line.split()[3] for line in said] == [
        "--trust-remote-code", "--disable-log-requests", "--enable-auto-tool-choice",
        "--tokenizer-mode", "--swap-space", "--distributed-executor-backend",
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["--enable-sleep-mode", "--enable-log-requests"])
def test_an_option_for_what_the_server_has_is_ignored_with_the_way_to_it(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert parse(["serve", option], {}).engine == EngineSettings()
    (said,) = capsys.readouterr().err.splitlines()
    ways = {"--enable-sleep-mode": "see LLM.sleep and --enable-rl-routes", "--enable-log-requests": "--log-level info"}
    assert said.startswith(f"vnext serve: ignored: {option} (") and ways[option] in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--load-format gguf", "--load-format is 'gguf': it must be one of 'auto', 'safetensors', 'dummy'"),
        ("--kv-cache-dtype fp4", "--kv-cache-dtype is 'fp4': it must be one of 'auto', 'int8', 'fp8'"),
        ("--distributed-executor-backend ray", "is 'ray': ranks are processes; see --executor, and docs/ray.md for Ray."),
        ("--stream-interval 4", "--stream-interval is '4': each token is streamed as soon as it is sampled"),
        ("--enable-lora-bias", "there is no option --enable-lora-bias: adapters with biases are not supported; merge this one into"),
        ("--reasoning-parser-plugin p.py", "the server runs no third-party code; leave it out"),
        ("--generation-config folder", "; another file's values go into the model folder's generation_config.json."),
        ("--port", "--port needs a value after it"),
        ("--served-model-name", "--served-model-name needs a value after it"),
        ("--enforce-eager=1", "--enforce-eager takes no value: write --enforce-eager or --no-enforce-eager."),
        ("folder --enforce-eager true", "--enforce-eager takes no value"),
        ("one --model other", "the model is named twice, as one and as other"),
        ("--no-such-thing 1", "there is no option --no-such-thing; `vnext serve --help` lists all options."),
    ],
)
def test_what_vnext_does_otherwise_is_refused_with_reason_and_remedy(
    capsys: pytest.CaptureFixture[str], argv: str, words: str
) -> None:
    said = refusal(capsys, "serve", *argv.split())
    assert words in said
    assert not [mark for mark in ("argument", "expected", "invalid", "--generation-config.json") if mark in said]


def test_the_table_of_other_engines_options_holds_none_of_ours_and_says_why_each_is_refused() -> None:
    ours = {flag for option in every_option() for flag in option.flags}
    assert ours & FOREIGN.keys() == set(), "an option that vnext has now leaves foreign.py"
    for name, foreign in FOREIGN.items():
        assert foreign.reason or foreign.remedy, name
        assert foreign.remedy or foreign.fine == ("*",), f"{name} may be refused and has no remedy"
        assert "leave it out" not in foreign.sentence(name, "x").removesuffix("; leave it out."), name
        assert not foreign.sentence(name, "x").endswith(": leave it out."), f"{name} is refused without a reason"


def test_remedies_name_options_that_there_are() -> None:
    measured = ("--url", "--input-len", "--output-len", "--random")  # vnext-bench's
    known = {*measured, *(flag for option in every_option() for flag in option.flags)}
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    remedies = {name: foreign.remedy for name, foreign in FOREIGN.items()} | dict(OLLAMA)
    wrong = [name for name, remedy in remedies.items() if not {*re.findall(r"(?<![\w-])--[a-z-]+", remedy)} <= known]
    assert wrong == [] and "--kv-cache-dtype" in OLLAMA["OLLAMA_KV_CACHE_TYPE"]


def test_options_of_llama_cpp_and_sglang_name_ours(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "serve", "-c", "4096", "-ctk", "q8_0", "--disable-radix-cache", "--cuda-graph-bs", "1", "2", "-np", "4")
    for words in ("-c: see --max-model-len", "-ctk: see --kv-cache-dtype", "radix-cache: see --no-enable-prefix-caching",
                  "--cuda-graph-bs: see --graph-sizes", "-np: see --max-num-seqs"):  # fmt: skip
        assert words in said
    parse(["serve", "--metrics", "-cb", "--embedding", "--grammar-backend", "xgrammar"])
    assert capsys.readouterr().err.count("ignored: ") == 4


def test_variables_of_ollama_are_named_with_what_takes_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    parse(["serve"], {"OLLAMA_HOST": "0.0.0.0", "OLLAMA_KEEP_ALIVE": "5m", "OLLAMA_UNKNOWN": "1"})
    assert "OLLAMA_HOST, OLLAMA_KEEP_ALIVE: Ollama's variables are not read; see --host and --port, --keep-alive.\n" in capsys.readouterr().err


def test_a_name_is_offered_only_for_its_misspelling() -> None:
    ours = [flag for option in every_option() for flag in option.flags]
    assert close_to("--stream-interval", ours) == ""
    assert close_to("--max-model-length", ours) == "--max-model-len"
    assert close_to("--expert-parallel", ours) == "--enable-expert-parallel" and close_to("--size", ours) == ""
    assert close_to("--gpu-memory-utilisation", ours) == "--gpu-memory-utilization"


def test_names_in_paths_and_quotes_are_not_options() -> None:
    for sentence in (
        "m/generation_config.json: correct it", "generation_config.json is no JSON", "the folder log_dir/max_model_len is gone",
        "log_level is 'log_dir'",
    ):  # fmt: skip
        assert as_flags(sentence).replace("--log-level", "log_level") == sentence
    assert as_flags("log_dir. And log_max_bytes, too") == "--log-dir. And --log-max-bytes, too"


# ---- the environment and a file ----------------------------------------------------------------------------------


def test_the_command_line_goes_before_the_environment_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max-model-len: 1K\nmax_num_seqs: 3\nblock-size: 32\nport: 9000\nserved-model-name: [a]\nmodel: folder\n")
    command = parse(
        ["serve", "--config", str(path), "--max-model-len", "4k"],
        {"VNEXT_MAX_NUM_SEQS": "5", "VNEXT_MAX_MODEL_LEN": "7"},
    )
    assert command.engine == EngineSettings(model="folder", max_model_len=4000, max_num_seqs=5, block_size=32)
    assert command.server == ServerSettings(port=9000, served_model_names=("a",))


def test_every_option_is_a_variable_and_a_key(tmp_path: Path) -> None:
    variables = {
        "VNEXT_MODEL": "folder", "VNEXT_DTYPE": "half", "VNEXT_ENFORCE_EAGER": "1", "VNEXT_GRAPH_SIZES": "1, 8",
        "VNEXT_SERVED_MODEL_NAME": "a b", "VNEXT_DRAIN_TIMEOUT": "2.5", "VNEXT_LOG": "off", "VNEXT_PORT": "",
        "VNEXT_ENABLE_PREFIX_CACHING": "false", "VNEXT_API_KEY": "k", "VNEXT_TEMPERATURE": "0.1",
    }
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: folder\ndtype: half\nenforce-eager: true\ngraph-sizes: [1, 8]\nserved-model-name:\n  - a\n  - b\n"
        "drain-timeout: 2.5\nlog: off\nenable-prefix-caching: false\napi-key: k\nport:\n"
    )
    expected = ServeCommand(
        engine=EngineSettings(
            model="folder", dtype="float16", enforce_eager=True, graph_sizes=(1, 8), log="off", enable_prefix_caching=False
        ),
        server=ServerSettings(served_model_names=("a", "b"), drain_s=2.5, api_keys=("k",)),
    )
    assert parse(["serve"], variables) == expected == parse(["serve"], {"VNEXT_CONFIG": str(path)})


def test_a_file_made_for_vllm_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "trust-remote-code: true\nswap-space: 4\nenable-lora-bias: false\nuvicorn-log-level: info\nno-enable-prefix-caching: true\n"
    )
    command = parse(["serve", "--config", str(path)], {})
    assert (command.server.log_level, command.engine.enable_prefix_caching) == ("info", False)
    assert [line.split()[3] for line in capsys.readouterr().err.splitlines()] == ["--trust-remote-code", "--swap-space"]
    path.write_text("enable-lora-bias: true\n")
    assert "adapters with biases are not supported" in refusal(capsys, "serve", "--config", str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-len: x", "max-model-len in {path} is 'x': it must be a whole number or auto."),
        ("max-modell-len: 4", "{path} has max-modell-len, which is not an option: did you mean max-model-len?"),
        ("temperature: 0", "{path} has temperature, which is not an option: take it out"),
        ("a: [", "{path} is no YAML in line 2: write one option a line"),
        ("- port", "{path} holds no options: write one a line"),
        ("port: 1\nhost: a\nport: 2", "{path} says port twice, in lines 1 and 3: leave one of them out."),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "{path} says max-num-seqs twice, in two spellings: leave one"),
        ("no-enable-prefix-caching: true\nenable-prefix-caching: true", "says enable-prefix-caching twice, in two spellings"),
        ("engine:\n  port: 3", "engine in {path} holds keys of its own"),
        (None, "the file {path} cannot be read (No such file or directory): give --config a YAML file."),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "serve.yaml"
    if text is not None:
        path.write_text(text + "\n")
    assert words.format(path=path) in refusal(capsys, "serve", "--config", str(path))


def test_a_variable_that_cannot_be_used_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "serve", VNEXT_PORT="x") == "vnext serve: VNEXT_PORT is 'x': it must be a whole number.\n"
    said = refusal(capsys, "serve", VNEXT_EXECUTOR="inproc", VNEXT_TENSOR_PARALLEL_SIZE="2")
    assert said == "vnext serve: VNEXT_TENSOR_PARALLEL_SIZE is 2 and the executor inproc has one rank: use mp.\n"


def test_an_unknown_variable_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    parse(["serve"], {"VNEXT_MAX_MODEL_LENGTH": "4", "VNEXT_WEATHER": "fine", "OTHER": "x", "VNEXT_URL": "http://host"})
    assert capsys.readouterr().err.splitlines() == [
        "vnext serve: VNEXT_MAX_MODEL_LENGTH is no option's variable: did you mean VNEXT_MAX_MODEL_LEN?",
        "vnext serve: VNEXT_WEATHER is no option's variable, and is not read.",
    ]


def test_vllms_key_is_a_key_and_its_other_variables_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A server whose operator gave it a key is never open."""
    assert parse(["serve"], {"VLLM_API_KEY": "secret"}).server.api_keys == ("secret",)
    assert parse(["serve"], {"VLLM_API_KEY": "secret", "VNEXT_API_KEY": "own"}).server.api_keys == ("own",)
    assert parse(["serve", "--api-key", "given"], {"VLLM_API_KEY": "secret"}).server.api_keys == ("given",)
    assert parse(["serve"], {"VLLM_API_KEY": ""}).server.api_keys == () and capsys.readouterr().err == ""
    parse(["serve"], {"VLLM_USE_V1": "1", "VLLM_API_KEY": "secret", "VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    line = "vnext serve: VLLM_ATTENTION_BACKEND, VLLM_USE_V1: vLLM's variables are not read, see vnext serve --help.\n"
    assert capsys.readouterr().err == line


def test_a_name_may_be_auto() -> None:
    assert parse(["serve"], {"VNEXT_SERVED_MODEL_NAME": "auto"}).server.served_model_names == ("auto",)


def test_a_service_of_kubernetes_named_vnext_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    added = {"VNEXT_PORT": "tcp://10.0.0.7:8000", "VNEXT_SERVICE_HOST": "10.0.0.7", "VNEXT_PORT_8000_TCP": "tcp://10.0.0.7:8000"}
    assert parse(["serve"], {"VNEXT_BLOCK_SIZE": "32", **added}).engine == EngineSettings(block_size=32)
    assert capsys.readouterr().err == ""


def test_variables_for_the_engine_do_not_disturb_a_talk_with_a_server() -> None:
    assert parse(["chat", "--url", "http://host:1"], {"VNEXT_BLOCK_SIZE": "32"}).url == "http://host:1"


def test_a_start_without_a_file_imports_no_yaml(root: Path) -> None:
    code = "import sys; from vnext.options.reader import parse; parse(['serve'], {}); assert not {'yaml', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_no_line_gets_argparse_s_own_words_or_a_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Lines of options of ours, of others and of nobody, with and without values of any kind."""
    rng = random.Random(7)
    flags = [*(flag for option in every_option() for flag in option.flags), *FOREIGN, "--nothing", "-z", "--", "-", "--=3", "---"]
    flags += ["--no-" + flag[2:] for flag in flags if flag.startswith("--")]
    values = [
        "",
        "1",
        "-1",
        "0.5",
        "auto",
        "true",
        "4k",
        "model",
        "a=b",
        "[1]",
        "{}",
        "-x",
        "none",
        str(tmp_path),
        "\u00e9",
        "%s",
        "1e999",
    ]
    for _ in range(400):
        line = [rng.choice(("serve", "chat", "doctor"))]
        for _ in range(rng.randrange(5)):
            flag, value = rng.choice(flags), rng.choice(values)
            line += [[flag], [flag, value], [f"{flag}={value}"], [value]][rng.randrange(4)]
        try:
            parse(line, {})
        except SystemExit as ended:
            assert ended.code in (0, 2), line
        said = capsys.readouterr().err
        assert not re.search(
            r"(?m)^usage:|argument -|argument s: |expected (one|at least)|invalid \w+ value|unrecognized|ambiguous",
            said,
        ), (line, said)


# ---- words -------------------------------------------------------------------------------------------------------


def test_bench_and_replay_are_words_of_vnext() -> None:
    assert parse(["bench", "latency", "--repeats", "2"], {}) == ProgramCommand(
        module="vnext.commands.bench.cli", argv=("latency", "--repeats", "2")
    )
    assert parse(["replay"], {}) == ProgramCommand(module="vnext.replay.cli.main", argv=())


EVERY = "serve, run, chat, pull, list, rm, quantize, batch, restart, router, doctor, size, bench, replay"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("sevre", "there is no command sevre: did you mean `vnext serve`?"),
        ("run", "vnext run: --model is missing: write `vnext run NAME`; `vnext list` shows names."),
        ("pull", "vnext pull: name is missing: write `vnext pull NAME`; `vnext list` shows names."),
        ("rm", "vnext rm: name is missing: write `vnext rm NAME`"),
        ("download owner/name", "there is no command download: did you mean `vnext pull`?"),
        ("delete x", "did you mean `vnext rm`?"),
        ("ps", "there is no command ps: a server names its model at /v1/models, and `vnext list` those on this machine."),
        ("stop", "Ctrl-C or SIGTERM stops a server"),
        ("serve --help nonsense", "vnext serve: no option is about 'nonsense'; `vnext serve --help` lists all options."),
        ("owner/name", "did you mean `vnext serve owner/name`?"),
        ("--port 80 serve", "name a command before --port: " + EVERY),
        ("dance", "there is no command dance: choose from " + EVERY + ", help, version."),
    ],
)
def test_words_that_people_try(capsys: pytest.CaptureFixture[str], argv: str, words: str) -> None:
    assert words in refusal(capsys, *argv.split())


@pytest.mark.parametrize(("argv", "words"), [("help", "serve a model"), ("help serve", "--max-model-len"), ("version", "vnext 0.")])
def test_help_and_version_are_words(capsys: pytest.CaptureFixture[str], argv: str, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv.split(), {})
    assert ended.value.code == 0 and words in capsys.readouterr().out


def test_the_bench_takes_the_engine_s_variables() -> None:
    given = make_parser().given(["latency"], {"VNEXT_THREADS": "2", "VNEXT_REPEATS": "9"})
    assert (given.values["threads"], given.values["repeats"]) == (2, 5), "what it measures stands on its command line"


def test_torchruns_variables_name_the_hosts_and_our_own_come_first() -> None:
    """As torchrun sets them for the programs that it starts."""
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000", "VNEXT_MASTER_PORT": "5000"}
    engine = parse(["serve", "-tp", "2", "--cluster-secret-file", "secret"], variables).engine
    assert (engine.nnodes, engine.node_rank, engine.master_addr, engine.master_port) == (2, 1, "10.0.0.1", 5000)


VLLM_LINES = [
    "-O3", "-O 2", "--compilation-config 3", '--structured-outputs-config {"backend":"xgrammar","disable_fallback":true}',
    "--structured-outputs-config.backend guidance", "--all2all-backend pplx", "--task embed", "--runner pooling",
    "--convert embed", "--kv-offloading-backend native", "--calculate-kv-scales", "--enable-sleep-mode", "--enable-log-requests",
]  # fmt: skip


@pytest.mark.parametrize("line", VLLM_LINES)
def test_lines_of_vllm_that_change_no_answer_start_with_a_reason(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert parse(["serve", *line.split()], {}).engine == EngineSettings()
    name = re.match(r"-O|[-.a-z0-9]+", line)[0]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"vnext serve: ignored: {name}") and said.endswith(")")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('--structured-outputs-config {"disable_any_whitespace":true}', "each request says how its JSON is written, in structured_outputs."),
        ("--structured-outputs-config xgrammar", "is 'xgrammar': llguidance keeps every schema"),
        ("--kv-offloading-size 4", "blocks that leave the cache go to a disk; see --kv-disk-dir and --kv-disk-bytes."),
        ("--quantization awq_marlin", "how a checkpoint is quantised already stands in its files, so leave it out"),
        ("--task classify", "--task is 'classify': the server generates text and answers /v1/embeddings"),
    ],
)
def test_lines_of_vllm_that_would_change_answers_are_refused(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    assert words in refusal(capsys, "serve", *line.split())


def test_no_reason_denies_what_there_is() -> None:
    """Images, sounds, recurrent layers, quantised files, 8-bit keys and the pages are all here."""
    reasons = {f"{foreign.reason}; {foreign.remedy}" for foreign in FOREIGN.values()} | {*REMEDIES.values()}
    assert not [each for each in reasons if re.search(r"(images|audio|pages|layers|quantised|scales).*\b(not|no)\b|\bno (such|family)", each)]


def test_all_that_is_wrong_with_a_line_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--uds x --middleware y --max-num-seqs many --nonsense 3 --api-kye z --port 99999 --kv-offloading-size 4"
    assert [re.search(r"--[-a-z]+", said)[0] for said in refusal(capsys, "serve", *line.split()).splitlines()] == [
        "--nonsense", "--api-kye", "--max-num-seqs", "--port", "--uds", "--middleware", "--kv-offloading-size", "--help",
    ]  # fmt: skip
    with pytest.raises(SettingsError) as wrong:
        engine_settings(max_num_seqs="many", uds="x", block_size=0)
    assert [name in str(wrong.value) for name in ("max_num_seqs is 'many'", "no setting uds", "block_size is 0")] == [True] * 3


@pytest.mark.parametrize(
    ("argv", "shown", "hidden"),
    [
        ("serve --help", ["usage: vnext serve [MODEL] [MODEL ...] [options]\n", "--max-model-len", "server, keys, chat", "--port", "\nlog:"], []),
        ("serve --help log", ["usage: vnext serve [MODEL] [MODEL ...] [options]\n\nlog:", "--log-keep "], ["--port", "--log-level"]),
        ("serve model -h adapters", ["--max-loras", "--lora-root"], ["--port", "--log "]),
        ("serve --help=prefix", ["--enable-prefix-caching", "--shared-prefix-cache"], ["--port"]),
        ("serve --help max_num_seqs", ["--max-num-seqs"], ["--max-model-len"]),
        ("help serve gpu", ["--gpu-memory-utilization"], ["--port"]),
        ("router --help tls", ["usage: vnext router [options]\n", "--ssl-certfile"], ["--policy"]),
        ("batch --help", ["usage: vnext batch [FILE] [options]\n", "--output-file"], []),
        ("bench throughput --help prompts", ["--num-prompts"], ["--log-keep"]),
        ("doctor --help", ["--production"], []),
    ],
)  # fmt: skip
def test_help_is_one_line_of_usage_and_finds_a_group_or_a_word(
    capsys: pytest.CaptureFixture[str], argv: str, shown: list[str], hidden: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        words = argv.split()
        bench.main(words[1:]) if words[0] == "bench" else parse(words, {})
    said = capsys.readouterr().out
    assert ended.value.code == 0 and [each for each in shown if each not in said] == []
    assert [each for each in hidden if each in said] == []


def test_every_option_has_a_group_of_its_kind() -> None:
    found = groups()
    assert found.keys() == {option.name for struct in (ServerSettings, EngineSettings) for option in options_of(struct)} >= FIRST.keys()
    assert [found[name] for name in ("ssl_keyfile", "log_required", "drain_s", "max_loras")] == ["tls", "log", "limits", "adapters"]
