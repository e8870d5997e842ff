"""Which process this is, from the environment."""

from __future__ import annotations

import socket

import pytest

from gristmill.base.errors import UserError
from gristmill.base.process import Place


def test_without_variables_there_is_one_process() -> None:
    place = Place.current({"HOME": "/home/miller"})
    assert place == Place(rank=0, local_rank=0, world=1, host=socket.gethostname())


def test_the_three_variables_of_torchrun_are_read() -> None:
    place = Place.current({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"})
    assert (place.rank, place.local_rank, place.world) == (5, 1, 8)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert Place.current().world == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0"},
            "environment: RANK is set but LOCAL_RANK, WORLD_SIZE is not\n"
            "    start with torchrun, which sets all three, or unset them",
        ),
        (
            {"LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "environment: LOCAL_RANK is set but RANK is not\n"
            "    start with torchrun, which sets all three, or unset them",
        ),
        (
            {"RANK": "first", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            "environment: RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers",
        ),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "environment: RANK=2 does not fit WORLD_SIZE=2",
        ),
        (
            {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "environment: RANK=-1 does not fit WORLD_SIZE=2",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "0"},
            "environment: RANK=0 does not fit WORLD_SIZE=0",
        ),
    ],
)
def test_variables_that_do_not_fit_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Place.current(environment)
    assert str(caught.value) == message


def test_a_wrong_local_rank_is_named() -> None:
    with pytest.raises(UserError, match="LOCAL_RANK=7"):
        Place.current({"RANK": "0", "LOCAL_RANK": "7", "WORLD_SIZE": "2"})
