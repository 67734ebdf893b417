"""A file of packed weights gives the bits of packing, for what it was made for and nothing else, and never changes."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "kernels")]
from checkpoints import PLAIN, random_tensors, save_checkpoint
from cpu_levels import LEVELS, needs_native, using
from msgspec.structs import replace
from safetensors.torch import save_file

from vnext.commands.cli import main
from vnext.kernels.arrays import address, host_dtype
from vnext.kernels.cpu import native
from vnext.kernels.format import weight_formats
from vnext.models.config.model_config import load_config
from vnext.models.layers.sharding import Parallel, alone
from vnext.models.loading import packed_file
from vnext.models.loading.kept import Kept, arrays_of
from vnext.models.loading.overlay import gguf_folder
from vnext.models.loading.packed_file import ALIGNMENT
from vnext.models.loading.update import open_update
from vnext.models.loading.weights import load_params
from vnext.runtime.processes.launch import DEMO_MODEL
from vnext.runtime.protocol.settings import ModelSettings
from vnext.runtime.rank.runner import ModelRunner

pytestmark = needs_native
NUMBERS = {"float32": ("float32", "none"), "bfloat16": ("bfloat16", "none"), "int8": ("bfloat16", "int8")}


def rank(number: int, count: int) -> Parallel:
    return Parallel(rank=number, world_size=count, all_reduce=lambda tensor: tensor, all_gather=lambda tensor, dim: tensor)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return save_checkpoint(folder)


def loaded(model: Path, folder: Path | str, parallel: Parallel | None = None, numbers: str = "bfloat16", **given: Any) -> ModelRunner:
    """A rank whose file is written by now, if it writes one."""
    dtype, quantization = NUMBERS[numbers]
    settings = ModelSettings(dtype=dtype, quantization=quantization, packed_weights_dir=str(folder), **given)
    runner = ModelRunner(model, settings, "cpu", parallel or alone(), config=load_config(model))
    runner.close()
    return runner


def weights(runner: ModelRunner) -> list[bytes]:
    """All bytes of all weights, in the order in which they were loaded."""
    return [np.asarray(array).tobytes() for product in runner.weights.kept._products for array in arrays_of(product)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def is_mapped(runner: ModelRunner) -> bool:
    """Whether every weight lies in the mapping of the file."""
    file = runner.weights.kept.packed_file
    if file is None or file._mapped is None:
        return False
    memory = file._mapped.memory
    places = [address(array) for product in runner.weights.kept._products for array in arrays_of(product)]
    return all(memory.ctypes.data <= place < memory.ctypes.data + len(memory) for place in places)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=["untied", "tied"])
def test_a_later_start_maps_the_bits_of_the_first(tmp_path: Path, numbers: str, ranks: int, changes: dict[str, Any]) -> None:
    model, folder = tmp_path / "model", tmp_path / "packed"
    model.mkdir()
    save_checkpoint(model, **changes)
    for number in range(ranks):
        plain = loaded(model, "", rank(number, ranks), numbers)
        first = loaded(model, folder, rank(number, ranks), numbers)
        later = loaded(model, folder, rank(number, ranks), numbers)
        assert not is_mapped(first) and is_mapped(later)
        assert weights(plain) == weights(first) == weights(later)
        assert later.weights.kept.names == plain.weights.kept.names != {} and len(later.weights.kept.targets) == len(plain.weights.kept.targets)
    assert len(files(folder)) == ranks, "each rank has a file of its own, and no draft is left"


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", ["mixtral", "gemma2", "gpt2", "olmo2"])
def test_experts_computed_norms_and_turned_weights(tmp_path: Path, name: str, numbers: str) -> None:
    cases = pytest.importorskip("family_cases", reason="transformers makes the models: pip install transformers")
    model = tmp_path / "model"
    cases.save_case(model, name)
    plain, _, later = loaded(model, "", numbers=numbers), *(loaded(model, tmp_path / "packed", numbers=numbers) for _ in range(2))
    assert later.weights.kept.packed_file.is_mapped and weights(plain) == weights(later)


def test_a_gguf_file_has_one_beside_what_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an option: where there is room, and for as long as the GGUF file is there."""
    file, places = tmp_path / "model.gguf", tmp_path / "places"
    assert main(["quantize", str(DEMO_MODEL), str(file), "--scheme", "q8_0"]) == 0
    folder = gguf_folder(file, places)
    assert not is_mapped(loaded(folder, "off")) and not is_mapped(loaded(folder, "")) and is_mapped(loaded(folder, ""))
    assert len(files(folder.parent / packed_file.BESIDE)) == 1 and gguf_folder(file, places) == folder
    assert not is_mapped(loaded(folder, "off")) and packed_file.packed_folder(DEMO_MODEL) is None
    usage = shutil.disk_usage(tmp_path)._replace(free=10 * file.stat().st_size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert not is_mapped(loaded(folder, ""))
    file.unlink()
    assert main(["quantize", str(DEMO_MODEL), str(tmp_path / "other.gguf"), "--scheme", "q8_0"]) == 0
    gguf_folder(tmp_path / "other.gguf", places)
    assert not folder.parent.exists()


def test_all_instruction_sets_share_a_file(model: Path, tmp_path: Path) -> None:
    expected = []
    for level in LEVELS:
        with using(level):
            expected.append(weights(loaded(model, tmp_path / level.name, numbers="int8")))
            assert weights(loaded(model, tmp_path / LEVELS[0].name, numbers="int8")) == expected[0] == expected[-1]
    assert len({path.read_bytes() for level in LEVELS for path in files(tmp_path / level.name)}) == 1


# ---- what a file was not made for --------------------------------------------------------------------------------


def touched(model: Path) -> None:
    stat = (model / "model.safetensors").stat()
    os.utime(model / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def other_weights(model: Path) -> None:
    save_file(random_tensors(PLAIN, seed=1), model / "model.safetensors")


def other_size(model: Path) -> None:
    save_file(random_tensors(PLAIN) | {"more": torch.zeros(3)}, model / "model.safetensors")


def other_config(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 1e-6}))


@pytest.mark.parametrize("change", [touched, other_weights, other_size, other_config])
def test_a_changed_checkpoint_is_packed_and_written_again(
    model: Path, tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "packed"
    loaded(model, folder)
    change(model)
    found = loaded(model, folder)
    assert not found.weights.kept.packed_file.is_mapped and weights(found) == weights(loaded(model, ""))
    assert is_mapped(loaded(model, folder)) and len(files(folder)) == 1 and caplog.text == "", "it is replaced, without a warning"


def test_a_checkpoint_that_changes_while_it_is_packed_leaves_no_file(model: Path, tmp_path: Path) -> None:
    file = packed_file.PackedFile(tmp_path / "packed", model, {})
    file.keep("a", np.ones(10, np.uint8))
    touched(model)
    file.write_soon()
    file.close()
    assert files(tmp_path / "packed") == []


def test_other_kernels_other_layouts_and_other_parts_do_not_share(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packed"
    loaded(model, folder)
    for parallel, numbers in ((rank(0, 2), "bfloat16"), (rank(1, 2), "bfloat16"), (alone(), "float32"), (alone(), "int8")):
        assert not loaded(model, folder, parallel, numbers).weights.kept.packed_file.is_mapped
    assert not loaded(model, folder, deterministic=False).weights.kept.packed_file.is_mapped or native.is_built()
    assert is_mapped(loaded(model, folder))
    monkeypatch.setattr(packed_file, "FORMAT_VERSION", packed_file.FORMAT_VERSION + 1)
    assert not loaded(model, folder).weights.kept.packed_file.is_mapped and is_mapped(loaded(model, folder))
    monkeypatch.setattr(packed_file, "kernels", type("kernels", (), {"BUILT_FROM": "other sources"}))
    assert not loaded(model, folder).weights.kept.packed_file.is_mapped


GATE_UP = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")
ASSEMBLIES: dict[str, tuple[Parallel, Callable[..., Any]]] = {
    "gated": (rank(0, 2), lambda source, config: source.packed_gated(GATE_UP)),
    "another rank's": (rank(1, 2), lambda source, config: source.packed_gated(GATE_UP)),
    "plain": (rank(0, 2), lambda source, config: source.packed(GATE_UP)),
    "exact": (rank(0, 2), lambda source, config: source.packed(GATE_UP, exact=True)),
    "in another order": (rank(0, 2), lambda source, config: source.packed(GATE_UP[::-1])),
    "in shards": (alone(), lambda source, config: source.packed(("model.layers.0.self_attn.o_proj.weight",))),
    "in one shard": (
        replace(alone(), is_exact=False), lambda source, config: source.packed(("model.layers.0.self_attn.o_proj.weight",))
    ),
    "an array": (rank(0, 2), lambda source, config: source.fused(GATE_UP)),
}  # fmt: skip


def test_a_buffer_that_is_made_otherwise_has_another_name(model: Path, tmp_path: Path) -> None:
    """As after a change of code that the purpose of a file does not show."""
    folder, dtype, seen = tmp_path / "packed", host_dtype("bfloat16"), set()
    for parallel, assemble in ASSEMBLIES.values():
        given = (model, load_config(model), parallel, dtype, "cpu", weight_formats("int8"), assemble)
        plain = load_params(*given)
        for turn in ("packed", "mapped"):
            file = packed_file.PackedFile(folder, model, {"part": "the same"})
            found = load_params(*given, kept=Kept(packed_file=file))
            assert [array.tobytes() for array in arrays_of(found)] == [array.tobytes() for array in arrays_of(plain)]
            assert file._lacks == (turn == "packed")
            file.write_soon()
            file.close()
        seen |= set(packed_file.PackedFile(folder, model, {"part": "the same"})._mapped.buffers)
    assert len(seen) == len(ASSEMBLIES)


def test_a_buffer_of_another_name_or_size_is_packed(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    loaded(model, folder)
    file = packed_file.PackedFile(folder, model, loaded(model, folder).weights.kept.packed_file._part)
    name, buffer = next(iter(file._mapped.buffers.items()))
    assert file.find(name, len(buffer)) is buffer
    assert file.find(name, len(buffer) + 1) is None and file.find("another " + name, len(buffer)) is None
    file.keep("another", np.full(5, 7, np.uint8))
    file.write_soon()
    file.close()
    assert packed_file.PackedFile(folder, model, file._part).find("another", 5).tolist() == [7] * 5, "the file is replaced"


# ---- damage ------------------------------------------------------------------------------------------------------


def flipped(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return damage


def flipped_in_the_last_buffer(path: Path) -> None:
    end = packed_file._HEAD.unpack(path.read_bytes()[: packed_file._HEAD.size])[1]
    flipped(end - ALIGNMENT)(path)


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - size if size > 0 else -size)


DAMAGE = {
    "magic": (flipped(2), "no file of packed weights"),
    "place of the index": (flipped(24), "not as long"),
    "checksum": (flipped(45), "header has changed"),
    "first buffer": (flipped(ALIGNMENT), "bytes have changed"),
    "last buffer": (flipped_in_the_last_buffer, "bytes have changed"),
    "index": (flipped(-1), "header has changed"),
    "a byte less": (cut(1), "not as long"),
    "half of it": (cut(20_000), "not as long"),
    "a head alone": (cut(-64), "not as long"),
    "nothing": (lambda path: path.write_bytes(b""), "no file of packed weights"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_one_sentence_and_replaced(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "packed"
    loaded(model, folder)
    damage(files(folder)[0])
    found = loaded(model, folder)
    assert not found.weights.kept.packed_file.is_mapped and weights(found) == weights(loaded(model, ""))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and reason in caplog.text
    caplog.clear()
    assert is_mapped(loaded(model, folder)) and caplog.text == "" and len(files(folder)) == 1


# ---- writing -----------------------------------------------------------------------------------------------------


def test_ranks_that_write_at_once_leave_one_whole_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, barrier, drafts = tmp_path / "packed", threading.Barrier(4, timeout=60), []
    write = packed_file.write_draft

    def together(*given: Any) -> Path | None:
        barrier.wait()
        draft = write(*given)
        drafts.append(draft)
        barrier.wait()
        return draft

    monkeypatch.setattr(packed_file, "write_draft", together)
    group = [threading.Thread(target=loaded, args=(model, folder)) for _ in range(4)]
    for each in group:
        each.start()
    for each in group:
        each.join()
    assert len(set(drafts)) == 4 and len(files(folder)) == 1
    assert is_mapped(loaded(model, folder))


def test_one_that_another_has_written_meanwhile_is_not_written_again(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    late = packed_file.PackedFile(folder, model, loaded(model, folder).weights.kept.packed_file._part)
    early = files(folder)[0].stat().st_ino
    late._mapped = None
    late.keep("a", np.ones(10, np.uint8))
    late.write_soon()
    late.close()
    assert files(folder)[0].stat().st_ino == early


def test_drafts_that_a_killed_process_has_left_are_removed(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    loaded(model, folder)
    old, new = (files(folder)[0].with_suffix(f".packed.{name}.part") for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    touched(model)
    loaded(model, folder)
    assert not old.exists() and new.exists(), "one that is young may still be written"


def no_room(*given: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("function", ["pwrite", "fsync"])
def test_a_full_disk_is_one_sentence(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    folder = tmp_path / "packed"
    monkeypatch.setattr(packed_file.os, function, no_room)
    found = loaded(model, folder)
    assert weights(found) == weights(loaded(model, "")) and files(folder) == []
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text and "make room" in caplog.text


def test_a_folder_that_cannot_be_made_is_one_sentence(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        caplog.clear()
        found = loaded(model, tmp_path / "file" / "packed")
        assert not found.weights.kept.packed_file.is_mapped and len(caplog.records) >= 1 and "Not a directory" in caplog.text


def test_numbers_that_the_kernels_lack_are_one_sentence(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = ModelRunner(model, ModelSettings(dtype="float16", packed_weights_dir=str(tmp_path / "packed")), "cpu", alone())
    assert runner.weights.kept.packed_file is None and files(tmp_path / "packed") == []
    assert "--packed-weights-dir is ignored" in caplog.text and len(caplog.records) == 1


# ---- weights that change -----------------------------------------------------------------------------------------


def test_an_update_changes_no_file_and_no_address(model: Path, tmp_path: Path) -> None:
    folder, update = tmp_path / "packed", tmp_path / "update.safetensors"
    save_file(random_tensors(PLAIN, seed=1), update)
    before = weights(loaded(model, folder))
    runner, content = loaded(model, folder), files(folder)[0].read_bytes()
    beside = loaded(model, folder)
    places = [address(array) for product in runner.weights.kept._products for array in arrays_of(product)]
    runner.refill(open_update(update))
    other_weights(other := save_checkpoint(tmp_path / "other"))
    assert weights(runner) == weights(loaded(other, "")) != before
    assert places == [address(array) for product in runner.weights.kept._products for array in arrays_of(product)]
    assert not runner.weights.kept.packed_file.is_mapped and files(folder)[0].read_bytes() == content
    assert weights(beside) == before, "of an engine that has mapped the same file"
    assert weights(loaded(model, folder)) == before and is_mapped(loaded(model, folder))


def test_writing_to_mapped_weights_changes_no_file(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    loaded(model, folder)
    runner, content = loaded(model, folder), files(folder)[0].read_bytes()
    for product in runner.weights.kept._products:
        for array in arrays_of(product):
            array[...] = 3
    assert files(folder)[0].read_bytes() == content and weights(loaded(model, folder)) != weights(runner)


def test_an_update_while_the_file_is_written_leaves_none(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, update = tmp_path / "packed", tmp_path / "update.safetensors"
    save_file(random_tensors(PLAIN, seed=1), update)
    began, may_go_on = threading.Event(), threading.Event()
    pieces = packed_file._pieces

    def slow(*given: Any) -> Any:
        for piece in pieces(*given):
            began.set()
            assert may_go_on.wait(60)
            yield piece

    monkeypatch.setattr(packed_file, "_pieces", slow)
    monkeypatch.setattr(packed_file, "PIECE_BYTES", 4096)
    monkeypatch.setattr(packed_file, "WRITE_AFTER_S", 0.0)
    runner = ModelRunner(model, ModelSettings(dtype="bfloat16", packed_weights_dir=str(folder)), "cpu", alone())
    assert began.wait(60)
    updating = threading.Thread(target=runner.refill, args=(open_update(update),))
    before = weights(runner)
    updating.start()
    updating.join(0.2)
    assert updating.is_alive() and weights(runner) == before, "it waits until nobody reads the weights"
    may_go_on.set()
    updating.join(60)
    runner.close()
    assert weights(runner) != before and files(folder) == []
    monkeypatch.undo()
    assert weights(loaded(model, folder)) == before
