"""The published CUDA scheme of the pack, as a yardstick: compiled by NVRTC when it is asked for.

See cuda_scheme.cu. It takes one batch of dense bfloat16 tensors with heads of 128.
"""

import pathlib

import torch

SOURCE = pathlib.Path(__file__).with_name("cuda_scheme.cu")

HEADS_PER_BLOCK, THREADS = 8, 128


class NotAvailableError(Exception):
    """The yardstick cannot be compiled here, or not for this case; the message says why."""


def make_call(case, inputs, output=None, eps=1e-6):
    """A call without arguments that does what the operator does, in place where that does.

    :param case: A case of run_rope_pack_smoke.py.
    :param inputs: What `make_inputs` of it returned, on a GPU.
    :param output: Where a single tensor's result goes.
    :return: A function that returns the tensors it wrote.
    :raises NotAvailableError: If the scheme does not cover the case, or is not compiled.
    """

    if (case.layout, case.dtype, case.head_dim, case.batch) != (
        "dense",
        "bfloat16",
        128,
        1,
    ):
        raise NotAvailableError("it takes one dense batch of bfloat16 heads of 128")

    kernel = _compile()
    q, k_out, v_out = inputs.written
    q_weight, k_weight, rope, k_prefix, v_prefix, k_source, v_source = inputs.read
    k_rows = v_rows = prefix_rows = 0
    q_out = q

    if case.mode == "single_tensor":
        q_out = output
    else:
        prefix_rows = case.prefix * case.kv_heads
        k_rows = (case.prefix + case.tokens) * case.kv_heads
        v_rows = prefix_rows if v_source is None else k_rows

    q_rows = case.tokens * case.heads
    arguments = [
        q,
        q_out,
        k_out[:, case.prefix :] if k_source is None else k_source,
        k_out,
        # Not read where only the prefix is written; an argument must be a tensor.
        v_out if v_source is None else v_source,
        v_out,
        k_prefix,
        v_prefix,
        q_weight,
        k_weight,
        torch.view_as_real(rope),
        q_rows,
        k_rows,
        v_rows,
        prefix_rows,
        case.heads,
        case.kv_heads,
        eps,
    ]
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    _check(tensors, (q_rows + k_rows + v_rows) * case.head_dim)
    blocks = -(-(q_rows + k_rows + v_rows) // HEADS_PER_BLOCK)
    written = (q_out,) if case.mode == "single_tensor" else (q, k_out, v_out)

    def call():
        kernel(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=arguments)

        return written

    return call


def _check(tensors, num_elements):
    """A wrong argument would be a wrong access, not an error."""

    if num_elements >= 2**31:
        raise NotAvailableError("it indexes with 32 bits")

    for tensor in tensors:
        if tensor.numel() and not tensor.is_contiguous():
            raise NotAvailableError(f"it takes dense tensors, not {tensor.stride()}")

        if tensor.data_ptr() % 16:
            raise NotAvailableError("it takes tensors that are aligned to 16 bytes")


_compiled = []


def _compile():
    if not _compiled:
        try:
            _compiled.append(
                torch.cuda._compile_kernel(SOURCE.read_text(), "cuda_scheme")
            )
        except Exception as error:
            # No NVRTC, another PyTorch, another GPU: whatever it is, the benchmark goes on.
            _compiled.append(NotAvailableError(f"{type(error).__name__}: {error}"))

    if isinstance(_compiled[0], Exception):
        raise _compiled[0]

    return _compiled[0]
