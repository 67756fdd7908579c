"""What runs on a GPU during a call."""

import torch


def gpu_events(function):
    """The names of what runs on the GPU during a call that has been made before: kernels, copies, fills."""

    function()
    torch.cuda.synchronize()
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    ]

    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()

    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
