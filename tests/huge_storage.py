"""CPU memory of which only what is touched exists, for offsets past 2^31 elements."""

import mmap

import torch

# Linux's value, which Python names from 3.11 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserve(num_elements, dtype=torch.float16):
    """A tensor of zeros that takes no memory until it is written to."""

    memory = mmap.mmap(
        -1,
        num_elements * dtype.itemsize,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
    )

    return torch.frombuffer(memory, dtype=dtype)
