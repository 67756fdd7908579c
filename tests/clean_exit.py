"""A program that makes plans, repeaters and prepared calls, and ends with all of them alive.

    python tests/clean_exit.py cuda|cpu

On a CPU launches are recorded.
"""

import contextlib
import sys
import threading
import warnings

with warnings.catch_warnings():
    # What other packages do when they are imported is theirs.
    warnings.simplefilter("ignore")

    import launch_kernels
    import recording_driver
    import torch

import ninetoothed_patches
import ntops_ext
from ntops_ext.torch import _launch, _qk_norm_rope, _qk_norm_rope_pack

(device,) = sys.argv[1:]
# Never left: the driver is active, and the modes are on, when the interpreter ends.
stack = contextlib.ExitStack()

if device == "cpu":
    stack.enter_context(recording_driver.recording())

    for module in (_launch, _qk_norm_rope, _qk_norm_rope_pack):
        module.runs_kernel = lambda tensor: True

assert ninetoothed_patches.apply(max_plans=2)
scale, tuned = launch_kernels.scale(), launch_kernels.scale_t()
heads = torch.ones(1, 5, 2, 64, device=device, dtype=torch.bfloat16)
weight = torch.ones(64, device=device, dtype=torch.bfloat16)
rope = torch.ones(5, 32, device=device, dtype=torch.complex64)
repeaters = []

for rows in (3, 4, 5):
    x = torch.ones(rows, 128, device=device)
    o = torch.empty_like(x)
    vector = torch.ones(16 * rows, device=device)

    for _ in range(3):
        scale(x, 2.0, o)
        tuned(vector, 2.0, vector)
        out = ntops_ext.torch.gated_rms_norm(x, gate=x)
        ntops_ext.torch.qk_norm_rope(heads, weight, rope)
        ntops_ext.torch.qk_norm_rope_pack_(
            *(torch.ones_like(heads) for _ in range(3)),
            *(weight, weight, rope, heads[:, :0], heads[:, :0]),
        )

    repeaters.append(ninetoothed_patches.repeater(scale, x, 2.0, o))
    assert repeaters[-1](x.data_ptr(), o.data_ptr())

info = ninetoothed_patches.cache_info()
assert info.hits and info.evictions and not info.bypasses, info

# A cycle, which the last collection of the interpreter finds, and a thread that outlives the program's last line.
scale.itself = scale
is_ending = threading.Event()


def call_to_the_end():
    is_ending.wait(1)
    scale(x, 2.0, o)


threading.Thread(target=call_to_the_end).start()
print("ended")
