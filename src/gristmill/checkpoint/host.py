"""Host memory that a state is copied to when it is saved.

Training waits for this copy, so it has to be fast. From a GPU that takes page-locked memory, which
is slow to come by: it is reserved once, in the background after the first step, and kept from one
save to the next. The next copy goes to the same place, so nothing may still be reading it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

_ALIGNMENT = 512
"""Tensors begin at multiples of this many bytes."""


class HostMemory:
    """Copies tensors to host memory; those from a GPU to memory of its own, which it keeps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = False
        self._reserving: threading.Thread | None = None

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Contiguous copies of tensors; those of the call before are overwritten."""
        if self.device.type != "cuda":
            return {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in tensors.items()
            }
        memory, begin, copies = self._at_least(required_bytes(tensors)), 0, {}
        for name, tensor in tensors.items():
            place = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(tensor.detach(), non_blocking=True)
            begin += _aligned(tensor.nbytes)
        torch.cuda.synchronize(self.device)
        return copies

    def reserve(self, size: int) -> None:
        """Begin to reserve this many bytes in the background."""
        if self.device.type == "cuda" and self._reserving is None:
            self._reserving = threading.Thread(target=self._grow, args=(size,), daemon=True)
            self._reserving.start()

    def close(self) -> None:
        """Give the memory back."""
        if self._reserving is not None:
            self._reserving.join()
        if self._locked:
            _cuda().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._locked = torch.empty(0, dtype=torch.uint8), False

    def _at_least(self, size: int) -> torch.Tensor:
        if self._reserving is not None:
            self._reserving.join()
        if self._memory.numel() < size:
            self.close()
            self._grow(size)
        return self._memory

    def _grow(self, size: int) -> None:
        memory = torch.empty(size, dtype=torch.uint8)
        # Touched by several threads first, memory is locked eight times faster.
        memory.zero_()
        failure = _cuda().cudaHostRegister(memory.data_ptr(), size, 0)
        self._memory, self._locked = memory, int(failure) == 0
        if not self._locked:
            # A limit of this machine: the copies are slower. The next call would report the error.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)


HOST = HostMemory(torch.device("cpu"))
"""For a state that is in host memory already."""


def required_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """The memory that copies of tensors take."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _cuda() -> Any:
    """Functions of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
