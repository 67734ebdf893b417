"""`vnext quantize MODEL OUT`: a model rounded to few bits, as a folder that vnext, vLLM and transformers serve, or a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from vnext.base.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.commands.models import weights_in
from vnext.models.config.folder import require_checkpoint
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import gguf_in, is_gguf, linked_files
from vnext.models.loading.calibration import Squares, column_squares
from vnext.models.loading.gguf_out import GgufQuantiser
from vnext.models.loading.gguf_tensors import gguf_tensors
from vnext.models.loading.quantise import Loss, Quantiser
from vnext.options.reader import GGUF_SCHEMES, QuantizeCommand
from vnext.runtime.processes.launch import model_folder
from vnext.text.files import CheckpointUnreadable, chat_templates

WORST = 5


def quantize(command: QuantizeCommand) -> int:
    """Run the command; returns the exit status (exits.py)."""
    model, out = Path(command.model), Path(command.out)
    try:
        squares, heard = _squares(command, model)
        quantiser = _quantiser(command, model, out, squares)
        bar = Console(stderr=True)
        losses = list(track(quantiser.run(), command.scheme, len(quantiser.names), console=bar, disable=not bar.is_terminal))
    except (ModelError, CheckpointUnreadable) as error:
        print(f"vnext quantize: {str(error).removesuffix('.')}.", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"vnext quantize: {out} cannot be written ({error.strerror}): make room for it, or name another.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("vnext quantize: stopped; nothing is left behind.", file=sys.stderr)
        return INTERRUPTED
    if heard:
        print(f"calibrated: the scales of {len(squares)} weights by their inputs over {heard:,} tokens of {command.calibrate}")
    _report(model, out, losses)
    return DONE


def _quantiser(command: QuantizeCommand, model: Path, out: Path, squares: Squares) -> Quantiser | GgufQuantiser:
    """Raises ModelError and CheckpointUnreadable."""
    file = gguf_in(model) if model.is_dir() else model
    if command.scheme not in GGUF_SCHEMES:
        if file and is_gguf(file):
            schemes = ", ".join(GGUF_SCHEMES)
            raise ModelError(f"{file} becomes a GGUF file alone: take --scheme {schemes}, or the folder of the float checkpoint")
        require_checkpoint(model)
        return Quantiser(model, out, command.scheme, command.group_size, squares)
    return GgufQuantiser(file or model, out, command.scheme, {} if file else chat_templates(model), squares)


def _squares(command: QuantizeCommand, model: Path) -> tuple[Squares, int]:
    """The squares of the calibration by the model's own names of weights, and its tokens. Raises ModelError."""
    if not command.calibrate:
        return {}, 0
    if Path(command.out).exists():
        raise ModelError(f"{command.out} is there already: give a name that is not")
    folder = model_folder(command.model)
    squares, heard = column_squares(folder, Path(command.calibrate))
    if not linked_files(folder):
        return squares, heard
    names = {name: tensor.own_name for name, tensor in gguf_tensors(folder).items() if tensor.columns is None}
    return {names[name]: each for name, each in squares.items() if name in names}, heard


def _report(model: Path, out: Path, losses: list[Loss]) -> None:
    before, after = (sum(file.stat().st_size for file in weights_in(each)) for each in (model, out))
    mean = sum(loss.share for loss in losses) / len(losses)
    print(f"{len(losses)} weights, {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {out}; mean error {mean:.2%}; the worst:")
    for loss in sorted(losses, key=lambda each: -each.share)[:WORST]:
        print(f"  {loss.share:7.2%}  {loss.name}")
