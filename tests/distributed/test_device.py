"""What a device can do at best."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.config.schema import RuntimeConfig
from gristmill.distributed.device import Device, memory_explained
from gristmill.distributed.world import open_world


def test_the_rate_of_matrix_products_is_measured() -> None:
    rate = Device(torch.device("cpu")).matrix_rate()
    assert rate.format == "fp32"
    assert rate.size == 1024
    # Any processor does more than a thousandth, and none more than a thousand, of this.
    assert 1e8 < rate.flops < 1e14


def test_too_little_host_memory_is_a_sentence() -> None:
    with (
        pytest.raises(UserError, match="too little memory: could not allocate 1024 TiB") as caught,
        memory_explained("buy some"),
    ):
        torch.empty(1 << 50, dtype=torch.int8)
    assert caught.value.problems[0].remedy == "buy some"
    with (
        pytest.raises(UserError, match=r"too little memory: Unable to allocate .* for an array"),
        memory_explained("buy some"),
    ):
        np.empty(1 << 55, dtype=np.int8)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), memory_explained("?"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_threads_beyond_all_measure_are_refused() -> None:
    with pytest.raises(UserError, match="100,000 threads are too many") as caught:
        open_world(RuntimeConfig(device="cpu", threads=100_000))
    assert caught.value.problems[0].where == "runtime.threads"
