"""A runtime patch for NineToothed 0.26: kernels that are cheap to call, and kernels without a GPU."""
