"""`vnext pull`, `vnext list` and `vnext rm`: the models that lie on this machine, fetched by name or from the hub.

Those with a name are in --models-dir (vnext/models/loading/named.py); the hub's are in its own cache, which `hf` knows too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants
from rich.console import Console
from rich.table import Table

from vnext.base.exits import DONE, FAILED, INTERRUPTED, REFUSED
from vnext.commands.restart import servers
from vnext.models.errors import ModelError
from vnext.models.gguf.folder import SUFFIX, files_of, gguf_in
from vnext.models.loading.hub import resolve
from vnext.models.loading.named import MODELS, fetched, here, name_of, remove
from vnext.options.reader import ModelsCommand
from vnext.runtime.processes.launch import named_models

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

WEIGHTS = (".safetensors", SUFFIX)


def models(command: ModelsCommand) -> int:
    """Run the command; returns the exit status (exits.py)."""
    try:
        folder = named_models(command.models_dir)
        match command.word:
            case "pull":
                return _pull(command, folder)
            case "list":
                return _list(folder)
            case "rm":
                return _remove(command, folder)
    except ModelError as error:
        print(f"vnext {command.word}: {error}{'' if str(error)[-1] == '?' else '.'}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        if error.filename is None:  # the output's
            raise
        print(f"vnext {command.word}: {error.filename} cannot be used ({error.strerror}).", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"vnext {command.word}: stopped.", file=sys.stderr)
        return INTERRUPTED


def _pull(command: ModelsCommand, folder: Path) -> int:
    found = resolve(command.name, command.revision, named=folder)
    files = weights_in(found)
    size = sum(path.stat().st_size for path in files)
    place = files[0] if files and files[0].suffix == SUFFIX else found
    print(f"{command.name}: {size / 1e6:,.0f} MB in {place}; `vnext run {command.name}` talks with it")
    return DONE


def weights_in(place: Path) -> list[Path]:
    """The files of weights of a model's folder or GGUF file. Raises ModelError."""
    file = gguf_in(place) if place.is_dir() else place
    return files_of(file) if file else [path for path in place.iterdir() if path.suffix in WEIGHTS]


def _list(folder: Path) -> int:
    table = Table("name", "size", "source", box=None, header_style="bold")
    here_already = fetched(folder)
    for each in here_already:
        table.add_row(each.name, f"{each.size_bytes / 1e6:,.0f} MB", each.source or str(folder / each.name))
    for repository in of_hub():
        table.add_row(repository.repo_id, f"{repository.size_on_disk / 1e6:,.0f} MB", "the hub's cache")
    for name in sorted(MODELS.keys() - {each.name for each in here_already}):
        named = MODELS[name]
        table.add_row(name, f"{named.wanted.size_bytes / 1e6:,.0f} MB", f"not fetched: `vnext pull {name}` ({named.licence})")
    Console(highlight=False).print(table, markup=False)
    for server in servers():
        where = f"the server of several models, process {server.pid}" if server.is_behind else server.url
        print(f"loaded: {', '.join(server.models)} in {where}")
    return DONE


def _remove(command: ModelsCommand, folder: Path) -> int:
    name = command.name
    if not command.force:
        require_unserved(name, folder)
    cached = {each.repo_id: each for each in of_hub()}
    if name in cached and here(name, folder) is None:
        from huggingface_hub import scan_cache_dir

        strategy = scan_cache_dir().delete_revisions(*(each.commit_hash for each in cached[name].revisions))
        size = strategy.expected_freed_size
        strategy.execute()
    else:
        size = remove(name, folder)
    print(f"{name}: removed, {size / 1e6:,.0f} MB are free again")
    return DONE


def require_unserved(name: str, folder: Path) -> None:
    """Raises ModelError where a running server has the model."""
    place = here(name, folder)
    for server in servers():
        model = Path(server.model).expanduser()
        is_inside = place is not None and server.model and model.exists() and model.resolve().is_relative_to(place.resolve())
        if is_inside or name == server.model.partition(":")[0] or (name_of(name) and name_of(name) == name_of(server.model)):
            where = f"process {server.pid}" if server.is_behind else f"process {server.pid} at {server.url}"
            raise ModelError(f"{name} is served by {where}: stop that first, or remove the files under it with --force")


def of_hub() -> list[CachedRepoInfo]:
    """The models in the hub's cache that have weights, by name."""
    if not Path(constants.HF_HUB_CACHE).is_dir():
        return []
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    of_models = (each for each in found if each.repo_type == "model")
    names = {each: {file.file_name for revision in each.revisions for file in revision.files} for each in of_models}
    return sorted((each for each in names if any(name.endswith(WEIGHTS) for name in names[each])), key=lambda each: each.repo_id)
