"""What a device can do at best."""

from __future__ import annotations

import torch

from gristmill.parallel.device import Device, matrix_rate


def test_the_rate_of_matrix_products_is_measured() -> None:
    rate = matrix_rate(Device(torch.device("cpu")))
    assert rate.format == "fp32"
    assert rate.size == 1024
    # Any processor does more than a thousandth, and none more than a thousand, of this.
    assert 1e8 < rate.flops < 1e14
