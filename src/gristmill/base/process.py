"""Which process this is among those of the run: read once from the environment, then passed on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from gristmill.base.errors import UserError


@dataclass(frozen=True)
class Place:
    """This process's rank among all, its rank on its node, and how many there are."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    host: str = "localhost"

    @classmethod
    def current(cls, environment: Mapping[str, str] | None = None) -> Place:
        """Read the variables that torchrun sets; without them there is one process."""
        values = os.environ if environment is None else environment
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        given = [name for name in names if name in values]
        if not given:
            return cls(host=socket.gethostname())
        if len(given) < len(names):
            missing = ", ".join(name for name in names if name not in values)
            raise UserError(
                f"{given[0]} is set but {missing} is not",
                where="environment",
                remedy="start with torchrun, which sets all three, or unset them",
            )
        try:
            rank, local_rank, world = (int(values[name]) for name in names)
        except ValueError as error:
            raise UserError(
                "RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers", where="environment"
            ) from error
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
            if not 0 <= value < world:
                what = f"{name}={value} does not fit WORLD_SIZE={world}"
                raise UserError(what, where="environment")
        return cls(rank, local_rank, world, socket.gethostname())
