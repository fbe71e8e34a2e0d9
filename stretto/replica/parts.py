"""The parts of one replica, wired once and shared by whichever driver runs its backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.replica.intake import AdapterShop, Intake

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.replica.compute import ComputeThread
    from stretto.replica.outlet import Outlet
    from stretto.replica.tasks import HeldTask, TaskTable
    from stretto.transport.payload_store import PayloadReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a driver works with.

    Attributes:
        table: The bookkeeping.
        compute: The thread in which backends and adapters compute.
        outlet: Where outputs go.
        reader: Where payloads in shared memory come from, if there are any.
        send: Sends what the table has to say.
        where: The replica's name, for failures.
    """

    table: TaskTable
    compute: ComputeThread
    outlet: Outlet
    reader: PayloadReader | None
    send: Callable[[], None]
    where: str
    _adapters: AdapterShop = field(default_factory=AdapterShop)

    def intake(self, task: HeldTask) -> Intake:
        """Return a new task's input side."""
        return Intake(task.opening, self.reader, self._adapters)
