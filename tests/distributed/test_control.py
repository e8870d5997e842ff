"""What processes tell one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.distributed.control import ControlGroup, RefusedError, _joined, _refusal


def meet() -> dict[str, Any]:
    control = ControlGroup(dist.group.WORLD)
    control.barrier()
    said = {"rank": control.rank, "words": "ä" * control.rank}
    return {
        "all_gathered": control.all_gather(said),
        "gathered": control.gather(said),
        "told": control.broadcast(f"from {control.rank}"),
        "by rank 0": control.on_rank0(lambda: {"done by": control.rank}),
        "by all": control.on_all_ranks(lambda: control.rank),
        "any": control.any(control.rank == 2),
        "none": control.any(False),
        "rank 0": control.is_rank0,
    }


def test_all_hear_the_same(crowd: Callable[..., list[Any]]) -> None:
    answers = crowd(3, meet)
    everything = [{"rank": n, "words": "ä" * n} for n in range(3)]
    for rank, answer in enumerate(answers):
        assert answer["all_gathered"] == everything
        # What many processes say is long, and rank 0 alone needs it.
        assert answer["gathered"] == (everything if rank == 0 else [])
        assert answer["by all"] == ([0, 1, 2] if rank == 0 else [])
        assert answer["told"] == "from 0"
        assert answer["by rank 0"] == {"done by": 0}
        assert answer["any"] and not answer["none"]
        assert answer["rank 0"] == (rank == 0)


def refuse() -> list[str]:
    control = ControlGroup(dist.group.WORLD)
    said = []

    def act(error: Exception) -> None:
        if control.rank == 1:
            raise error

    for error in (
        UserError("no room", where="disk", exit=Exit.STORAGE),
        OSError(28, "No space left", "file"),
        ZeroDivisionError("a defect"),
    ):
        try:
            control.on_all_ranks(lambda error=error: act(error))
        except (UserError, ZeroDivisionError) as caught:
            said.append(f"{type(caught).__name__}: {caught}")
    return said


def test_what_one_cannot_do_is_refused_by_all(crowd: Callable[..., list[Any]]) -> None:
    for rank, (refused, disk, defect) in enumerate(crowd(3, refuse)):
        assert refused.startswith("RefusedError") and "no room" in refused
        assert "rank 1 on " in refused
        assert disk.startswith("RefusedError") and "No space left" in disk
        own = "ZeroDivisionError: a defect"
        assert defect == own if rank == 1 else f"rank 1 failed: {own}" in defect


def test_one_process_answers_itself() -> None:
    control = ControlGroup()
    control.barrier()
    assert control.gather([1]) == [[1]] == control.all_gather([1])
    assert control.broadcast(2) == 2 and control.is_rank0
    assert control.any(True) and not control.any(False)
    with pytest.raises(RefusedError, match="no room"):
        control.on_rank0(_no_room)


def _no_room() -> None:
    raise UserError("no room")


def test_an_error_of_the_disk_without_a_number_keeps_its_message() -> None:
    def act() -> None:
        raise OSError("Cannot call rmtree on a symbolic link")

    with pytest.raises(UserError) as error:
        ControlGroup().on_rank0(act)
    assert str(error.value) == "the disk refused: Cannot call rmtree on a symbolic link"


def test_what_all_ranks_report_alike_names_none_of_them() -> None:
    def said(*failures: UserError | None) -> str:
        return str(_joined([None if one is None else _refusal(one) for one in failures]))

    assert said(UserError("wrong", where="a"), UserError("wrong", where="a")) == "a: wrong"
    assert "rank 1 on " in said(None, UserError("wrong"))
    assert "(and 1 other ranks)" in said(UserError("wrong"), UserError("worse"))
