"""Backends for end-to-end tests, run in replicas of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from stretto.backends.scripted import Scripted

if TYPE_CHECKING:
    from stretto.backends.contract import Capabilities


class Patient(Scripted):
    """A step may take as long as usual."""


class Impatient(Scripted):
    """A step of more than half a second has hung."""

    capabilities: ClassVar[Capabilities] = replace(Scripted.capabilities, max_step_s=0.5)
