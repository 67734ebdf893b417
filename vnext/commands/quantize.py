"""`vnext quantize MODEL OUT`: a float checkpoint rounded to few bits, as a folder that vnext, vLLM and transformers serve."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from vnext.base.exits import DONE, FAILED, REFUSED
from vnext.models.config.folder import require_checkpoint
from vnext.models.errors import ModelError
from vnext.models.loading.quantise import Loss, Quantiser
from vnext.options.reader import QuantizeCommand

WORST = 5


def quantize(command: QuantizeCommand) -> int:
    """Run the command; returns the exit status (exits.py)."""
    folder, out = Path(command.model), Path(command.out)
    try:
        require_checkpoint(folder)
        quantiser = Quantiser(folder, out, command.scheme, command.group_size)
        bar = Console(stderr=True)
        losses = list(track(quantiser.run(), command.scheme, len(quantiser.names), console=bar, disable=not bar.is_terminal))
    except ModelError as error:
        print(f"vnext quantize: {error}.", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"vnext quantize: {out} cannot be written ({error.strerror}): make room for it, or name another.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("vnext quantize: stopped; nothing is left behind.", file=sys.stderr)
        return FAILED
    _report(folder, out, losses)
    return DONE


def _report(folder: Path, out: Path, losses: list[Loss]) -> None:
    before, after = (sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (folder, out))
    mean = sum(loss.share for loss in losses) / len(losses)
    print(f"{len(losses)} weights, {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {out}; mean error {mean:.2%}; the worst:")
    for loss in sorted(losses, key=lambda each: -each.share)[:WORST]:
        print(f"  {loss.share:7.2%}  {loss.name}")
