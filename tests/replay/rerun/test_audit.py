"""audit: a log that is what it says passes, and thirty falsifications are named; a careful forger has recomputed every digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoints import save_checkpoint
from model_logs import record, rewritten

from vnext.log import codec
from vnext.models.loading.checkpoint import weights_digest
from vnext.replay.reading.folding import Folded, fold
from vnext.replay.reading.source import open_log
from vnext.replay.reading.writer import Writer, snapshot_of_log
from vnext.state.events import AnyEvent, RequestArrived, StepCommitted, pack_tokens, unpack_tokens
from vnext.state.outputs import outputs
from vnext.state.params import DEFAULTS
from vnext.state.reduce import reduce, start

replace = msgspec.structs.replace
USUAL = {name: value for name, value in DEFAULTS.items() if name != "temperature"} | {"logit_bias": ()}
Change = Callable[[AnyEvent], AnyEvent]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of more pages than the short digest looks at."""
    return save_checkpoint(tmp_path_factory.mktemp("model") / "m", hidden_size=64, intermediate_size=300, vocab_size=97)


@pytest.fixture(scope="module")
def log(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(model, tmp_path_factory.mktemp("logs") / "full", requests=24, settings={"digests_weights": True})


def forged(log: Path, out: Path, change: Change, **header: object) -> Path:
    """The log with other events, and every chained digest, checksum and rank's digest as if an engine had written it."""
    source = open_log(log)
    started = replace(source.header.started, **header)
    state = start(started)
    writer = Writer(out, replace(source.header, started=started), lambda each: snapshot_of_log(each, "full"))
    for item in source.items():
        if not isinstance(item, codec.Frame) or not item.events:
            continue
        events, before = tuple(map(change, item.events)), state
        for event in events:
            state = reduce(state, event)
        writer.ready(before)
        writer.write(codec.encode_body(before.sequence, events, (), 0, source.header.token_width), state)
    writer.close()
    return out


class Answers:
    """Where the tokens of a log's answers are: for each request (step, place among its samples) of each token."""

    def __init__(self, log: Path) -> None:
        self.places: dict[int, list[tuple[int, int]]] = {}
        self.arrivals: dict[int, RequestArrived] = {}
        self.ended: set[int] = set()
        for item in fold(open_log(log)):
            if isinstance(item, Folded):
                if isinstance(item.event, RequestArrived):
                    self.arrivals[item.event.id] = item.event
                for output in outputs(item.before, item.event, item.after):
                    if output.token >= 0:
                        self.places.setdefault(output.id, []).append((item.event.step, output.sample))
                    if output.finish == "length":
                        self.ended.add(output.id)

    def of(self, greedy: bool, least: int = 6) -> Iterator[int]:
        """Finished requests that are greedy or drawn, without other parameters."""
        for id_, arrival in sorted(self.arrivals.items()):
            usual = all(getattr(arrival.sampling, name) == value for name, value in USUAL.items())
            if usual and id_ in self.ended and (arrival.sampling.temperature == 0) == greedy and len(self.places[id_]) >= least:
                yield id_


@pytest.fixture(scope="module")
def answers(log: Path) -> Answers:
    return Answers(log)


def tokens_changed(places: dict[tuple[int, int], Callable[[int], int]]) -> Change:
    """Another token at each (step, place)."""

    def change(event: AnyEvent) -> AnyEvent:
        if not isinstance(event, StepCommitted):
            return event
        tokens = unpack_tokens(event.tokens).copy()
        for (step, place), other in places.items():
            if step == event.step:
                tokens[place] = other(int(tokens[place]))
        return replace(event, tokens=pack_tokens(tokens))

    return change


def arrival_changed(id_: int | None, prompt: Callable[[np.ndarray], np.ndarray] | None = None, **sampling: object) -> Change:
    """Another prompt or other parameters of one request, None for all."""

    def change(event: AnyEvent) -> AnyEvent:
        if not isinstance(event, RequestArrived) or id_ not in (None, event.id):
            return event
        given = {name: value(event) if callable(value) else value for name, value in sampling.items()}
        found = replace(event, sampling=replace(event.sampling, **given))
        return found if prompt is None else replace(found, prompt=pack_tokens(prompt(unpack_tokens(event.prompt).copy())))

    return change


def other_token(token: int) -> int:
    return 1 + (token + 4) % 60


def replaced(tokens: np.ndarray, place: int) -> np.ndarray:
    tokens[place] = other_token(int(tokens[place]))
    return tokens


def test_an_honest_log_passes(log, model, answer):
    code, found = answer("audit", log, "--sample", "all")
    assert (code, found["same"], found["differ"], found["findings"]) == (0, True, 0, [])
    assert found["steps"] == found["steps_total"] > 30 and found["every_byte"] and found["missed"] == 0
    code, found = answer("audit", log, "--sample", "25%", "--seed", "7")
    assert (code, found["same"], found["seed"]) == (0, True, 7) and 0.7 < found["missed"] < 0.76
    assert answer("audit", log, "--sample", "25%", "--seed", "7")[1] == found


def test_steps_in_flight_where_a_log_ends_are_not_chosen(log, answer, sentence, tmp_path):
    """They have no tokens: a sample of them alone compared nothing, and found nothing wrong."""
    answer("cut", log, 0, 12, "-o", tmp_path / "begun")
    code, found = answer("audit", tmp_path / "begun", "--sample", "all")
    assert (code, found["same"]) == (0, True) and 8 < found["steps"] == found["steps_total"] < 12
    answer("cut", log, 0, 1, "-o", tmp_path / "flying")
    assert "there is nothing to audit" in sentence("audit", tmp_path / "flying")


CAREFUL: dict[str, tuple[Callable[[Answers], Change], str]] = {
    "a drawn token": (lambda a: tokens_changed({a.places[next(a.of(False))][2]: other_token}), "token"),
    "a greedy token": (lambda a: tokens_changed({a.places[next(a.of(True))][2]: other_token}), "token"),
    "a first token": (lambda a: tokens_changed({a.places[next(a.of(False))][0]: other_token}), "token"),
    "a last token": (lambda a: tokens_changed({a.places[next(a.of(False))][-1]: other_token}), "token"),
    "a token replaced by its neighbour": (lambda a: tokens_changed({a.places[next(a.of(True))][3]: lambda t: t - 1 or 2}), "token"),
    "tokens of two requests": (
        lambda a: tokens_changed({a.places[id_][1]: other_token for id_ in (next(a.of(True)), next(a.of(False)))}), "token",
    ),
    "two tokens of an answer": (
        lambda a: tokens_changed({a.places[next(a.of(False))][place]: other_token for place in (1, 3)}), "seed, prompt",
    ),
    "a whole answer": (
        lambda a: tokens_changed({place: lambda _: 7 for place in a.places[next(a.of(False))]}), "seed, prompt",
    ),
    "a seed": (lambda a: arrival_changed(next(a.of(False)), seed=12345), "seed, prompt"),
    "every seed": (lambda a: arrival_changed(None, seed=lambda event: event.sampling.seed ^ 1), "model or numerics"),
    "a temperature, slightly": (lambda a: arrival_changed(None, temperature=warmer(0.2)), "temperature"),
    "a temperature, to greedy": (lambda a: arrival_changed(next(a.of(False)), temperature=0.0), "temperature"),
    "greedy, to a temperature": (lambda a: arrival_changed(next(a.of(True)), temperature=1.1), "temperature"),
    "top_p": (lambda a: arrival_changed(next(a.of(False)), top_p=0.3), "top_p"),
    "top_k": (lambda a: arrival_changed(next(a.of(False)), top_k=2), "top_k"),
    "min_p": (lambda a: arrival_changed(next(a.of(False)), min_p=0.7), "min_p"),
    "top_n_sigma": (lambda a: arrival_changed(next(a.of(False)), top_n_sigma=0.5), "top_n_sigma"),
    "repetition_penalty": (lambda a: arrival_changed(next(a.of(True)), repetition_penalty=3.0), "repetition_penalty"),
    "presence_penalty": (lambda a: arrival_changed(next(a.of(False)), presence_penalty=2.0), "presence_penalty"),
    "frequency_penalty": (lambda a: arrival_changed(next(a.of(False)), frequency_penalty=2.0), "frequency_penalty"),
    "logit_bias": (lambda a: arrival_changed(next(a.of(True)), logit_bias=((9, 50.0),)), "logit_bias"),
    "a prompt's last token": (lambda a: arrival_changed(next(a.of(True)), prompt=lambda p: replaced(p, -1)), "seed, prompt"),
}  # fmt: skip
"""What a careful forger changes, and the field that is named (a beginning of it)."""


def warmer(more: float) -> Callable[[RequestArrived], float]:
    return lambda event: event.sampling.temperature + more if event.sampling.temperature else 0.0


@pytest.mark.parametrize("name", CAREFUL)
def test_a_careful_falsification_is_caught(name, log, answers, answer, tmp_path):
    make, field = CAREFUL[name]
    fake = forged(log, tmp_path / "fake", make(answers))
    assert answer("verify", fake)[1]["same"], "to the eye of the fold nothing is wrong"
    code, found = answer("audit", fake, "--sample", "all")
    assert code == 1 and not found["same"] and found["findings"]
    assert found["findings"][0]["field"].startswith(field), found["findings"]


def test_the_changed_token_is_named(log, answers, answer, tmp_path):
    id_ = next(answers.of(False))
    step, place = answers.places[id_][2]
    before = next(
        int(unpack_tokens(event.tokens)[place])
        for item in open_log(log).items() for event in getattr(item, "events", ())
        if isinstance(event, StepCommitted) and event.step == step
    )  # fmt: skip
    fake = forged(log, tmp_path / "fake", tokens_changed({(step, place): other_token}))
    finding = answer("audit", fake, "--sample", "all")[1]["findings"][0]
    position = len(answers.arrivals[id_].prompt) // 4 + 2
    named = (id_, position, step, str(other_token(before)), str(before))
    assert tuple(finding[name] for name in ("request", "position", "step", "recorded", "found")) == named


HEADERS: dict[str, tuple[dict[str, str], str]] = {
    "dtype": ({"dtype": "bfloat16"}, "dtype"),
    "quantization": ({"quantization": "int8", "dtype": "bfloat16"}, "quantization"),
    "kv_cache_dtype": ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_other_numbers_than_the_header_says_are_named(name, log, answer, tmp_path):
    change, field = HEADERS[name]
    environment = open_log(log).header.started.environment | change
    code, found = answer("audit", forged(log, tmp_path / "fake", lambda event: event, environment=environment), "--sample", "all")
    assert code == 1 and found["findings"][0]["field"] == field


def test_other_activations_than_the_header_says_are_named(model, answer, tmp_path):
    log = record(model, tmp_path / "log", settings={"quantization": "int8", "activations": "bf16", "digests_weights": True})
    assert answer("audit", log, "--sample", "all")[1]["same"]
    environment = {**open_log(log).header.started.environment}
    assert environment.pop("activations") == "bf16"
    code, found = answer("audit", forged(log, tmp_path / "fake", lambda event: event, environment=environment), "--sample", "all")
    assert code == 1 and found["findings"][0]["field"] == "activations"


def test_another_config_does_not_follow(log, answer, tmp_path):
    """Other limits than the engine's: its own scheduler would have decided otherwise."""
    config = open_log(log).header.started.config
    for change in ({"max_num_batched_tokens": 48}, {"max_num_seqs": 9}):
        fake = forged(log, tmp_path / str(change), lambda event: event, config=replace(config, **change))
        code, found = answer("audit", fake, "--sample", "all")
        assert code == 1 and found["findings"][0]["field"].startswith("log: plan")


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_byte_of_the_weights_is_named_with_both_digests(log, model, answer, tmp_path):
    recorded = open_log(log).header.started
    size = (model / "model.safetensors").stat().st_size
    looked_at = [size * index // 16 + offset for index in range(16) for offset in range(4096)]
    unseen = next(at for at in range(size - 1, 0, -1) if at not in set(looked_at))
    for place, at, field, digest in ((0, size // 16 * 3 + 9, "model", recorded.model_digest), (1, unseen, "weights", weights_digest(model))):
        other = shutil.copytree(model, tmp_path / f"m{place}")
        flip(other / "model.safetensors", at)
        code, found = answer("audit", log, "--sample", "all", "--model", other)
        (finding,) = found["findings"]
        assert (code, finding["field"], finding["recorded"], found["steps"]) == (1, field, digest, 0)
        assert finding["found"] not in ("", digest)


def test_another_configuration_file_is_named(log, model, answer, tmp_path):
    other = shutil.copytree(model, tmp_path / "m")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    code, found = answer("audit", log, "--model", other)
    assert code == 1 and found["findings"][0]["field"] == "model"


def test_other_digests_in_the_header_are_named(log, answer, tmp_path):
    started = open_log(log).header.started
    fake = forged(log, tmp_path / "a", lambda event: event, model_digest="0" * 32)
    assert answer("audit", fake)[1]["findings"][0]["field"] == "model"
    environment = started.environment | {"weights_digest": "0" * 64}
    fake = forged(log, tmp_path / "b", lambda event: event, environment=environment)
    assert answer("audit", fake)[1]["findings"][0]["field"] == "weights"


def test_a_careless_falsification_needs_no_model(log, answers, answer, tmp_path):
    """Whoever edits events and leaves the digests: the smallest sample suffices, since the whole log is folded."""
    id_ = next(answers.of(False))
    changes = tokens_changed({answers.places[id_][2]: other_token}), arrival_changed(id_, seed=3)
    shared = arrival_changed(next(id_ for id_, each in answers.arrivals.items() if len(each.prompt) > 100), lambda p: replaced(p, 0))
    for place, change in enumerate((*changes, shared)):
        fake = rewritten(log, tmp_path / str(place), event=change)
        code, found = answer("audit", fake, "--sample", "0.1%", "--any-model")
        assert code == 1 and found["findings"][0]["field"].startswith("log: ")


def test_a_frame_that_is_gone_is_named(log, answer, tmp_path):
    source, out = open_log(log), tmp_path / "fake"
    out.mkdir()
    items = [item for item in source.items() if isinstance(item, codec.Frame)]
    data = codec.open_segment(source.header)[0]
    for item in [*items[:9], *items[10:-1]]:
        body = codec.encode_body(item.first_event, item.events, item.rank_digests, item.lost, source.header.token_width)
        data += codec.encode_frame(item.digest, body)
    (out / source.paths[0].name).write_bytes(data)
    assert answer("verify", out)[0] == answer("audit", out)[0] == 1


def test_a_sample_misses_what_the_docs_say(log, answers, answer, tmp_path):
    """A last token changes nothing behind it: it is caught exactly where its step is in the sample."""
    id_ = next(answers.of(False))
    step, place = answers.places[id_][-1]
    fake = forged(log, tmp_path / "fake", tokens_changed({(step, place): other_token}))
    caught = []
    for seed in range(24):
        code, found = answer("audit", fake, "--sample", "30%", "--seed", seed)
        caught.append(code == 1)
        assert found["missed"] == pytest.approx(0.7, abs=0.03)
    assert 1 <= sum(caught) <= 16, "of 24, with probability 0.3 each"


def test_what_cannot_be_done_is_one_sentence(log, model, sentence, tmp_path):
    for share in ("0", "200%", "x"):
        assert "give a share of the steps, as 1% or 0.01, or all" in sentence("audit", log, "--sample", share)
    shape = record(model, tmp_path / "shape", requests=2, privacy="shape")
    assert "record with" in sentence("audit", shape)
