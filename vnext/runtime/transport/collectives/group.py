"""This process's group: joining the other ranks, and leaving them.

Owns the joined group, as torch.distributed does. cpu_collectives.py chooses the implementation for tensors on the CPU, and
choose_collectives.py, which only ranks with a GPU import, the one for other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vnext.models.layers.sharding import Parallel, alone
from vnext.runtime.transport.collectives.errors import GaveUp

if TYPE_CHECKING:
    import torch

    from vnext.runtime.transport.collectives.cpu_collectives import Group

BESIDE_BYTES_MIN = 2 * 2**20  # not measured: above this a sum over NCCL alone takes longer than its second launch

_joined: list[Group] = []
agreements: list[Callable[[], None]] = []
"""Each waits until every rank has computed the step, in groups that can give one up. Raises GaveUp if one has, and RankLost."""


class StoreAddress(NamedTuple):
    """Where ranks of several hosts meet: `store` is rank 0's address:port, `address` that of this rank's host."""

    store: str
    address: str


def join_group(
    rank: int,
    world_size: int,
    rendezvous: Path | StoreAddress,
    device: torch.device | str = "cpu",
    ipc_bytes_max: int | None = None,
) -> Parallel:
    """Meet the other ranks in the folder `rendezvous` (fresh for each start) and return this rank's collectives for tensors
    on `device`, which is the current one where it is a GPU. `ipc_bytes_max`: see device_group.Limits; None for its default.
    Ranks of several hosts, on a CPU, meet elsewhere. Raises RankLost for those that do not come there.
    """
    if world_size == 1:
        return alone()
    from vnext.runtime.transport.collectives.cpu_collectives import choose_group, group_of_hosts  # one rank alone does without
    from vnext.runtime.transport.collectives.meeting import Meeting
    from vnext.runtime.transport.collectives.shared_group import SharedGroup

    if isinstance(rendezvous, StoreAddress):
        group: Group = group_of_hosts(*rendezvous, rank, world_size)
    else:
        meeting = Meeting(rendezvous)
        group = choose_group(meeting, rank, world_size, lambda: meeting.torch_store("gloo", world_size))
    if not str(device).startswith("cpu"):
        import torch  # ranks on a CPU do without

        from vnext.runtime.transport.collectives.choose_collectives import choose_device_group
        from vnext.runtime.transport.collectives.device_group import default_limits

        limits = default_limits(world_size, ipc_bytes_max)
        store = meeting.torch_store("device", world_size)
        group = choose_device_group(store, rank, world_size, torch.device(device), group, limits)
    _joined.append(group)
    if isinstance(group, SharedGroup):
        agreements.append(group.agree)
    return Parallel(
        rank=rank, world_size=world_size, all_reduce=group.all_reduce, all_gather=group.all_gather,
        can_capture=group.can_capture, begin_all_reduce=getattr(group, "begin_all_reduce", None),
        beside_bytes_min=getattr(group, "beside_bytes_min", BESIDE_BYTES_MIN),
        host=group if isinstance(group, SharedGroup) else None,
    )  # fmt: skip


def require_whole_group() -> None:
    """Raise RankLost if this process's group lost a rank on its GPU. Call it before using a result of the device."""
    for group in _joined:
        group.require_whole()


def give_up_in_group(error: Exception) -> None:
    """This rank computes no more of the step that the others compute. Raises `error` if it cannot tell them."""
    for group in _joined:
        if not hasattr(group, "give_up"):
            raise error
        if not isinstance(error, GaveUp):
            group.give_up()


def leave_group() -> None:
    """End this process's group, if it joined one."""
    agreements.clear()
    while _joined:
        _joined.pop().close()
