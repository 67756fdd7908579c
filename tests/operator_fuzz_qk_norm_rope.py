"""Calls of `qk_norm_rope` and `qk_norm_rope_pack_` under fuzz: each argument right in some way, at most two wrong."""

import operator_fuzz as fuzz
import torch
from huge_storage import reserve
from hypothesis import strategies as st

from ntops_ext import reference
from ntops_ext.torch import qk_norm_rope, qk_norm_rope_pack_

# Heads of a token are dense; only rows and batch entries have gaps.
_LAYOUTS = ["dense", "misaligned"]


@st.composite
def heads(draw, shape, dtype, *, is_written=False):
    """What is right for `(batch, tokens, heads, head_dim)`."""

    batch, tokens, num_heads, width = shape
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    gap = draw(st.sampled_from([0, 0, 1, 16]))
    is_transposed = draw(st.booleans())
    row = num_heads * width + gap
    strides = (max(tokens, 1) * row, row)

    if is_transposed:
        strides = (row, max(batch, 1) * row)

    if not is_written and draw(st.integers(0, 9)) == 0:
        strides = (0, strides[1])

    strides = (*strides, width)

    if draw(st.integers(0, 3)) == 0:
        # Strides of dimensions of one element, or of none, move nothing.
        meaningless = draw(st.sampled_from([0, 3, 2**40]))
        strides = tuple(
            meaningless if length < 2 or 0 in shape else stride
            for length, stride in zip(shape[:3], strides, strict=True)
        )

    offset = draw(st.sampled_from([16, 17]))

    if tokens in (2, 3) and batch == 1 and draw(st.integers(0, 5)) == 0:
        # Further than 32 bits reach: the call is cut.
        strides = (0, 2**30 + 16, *strides[2:])
        far = reserve(2**31 + 2**16, dtype)
        tensor = far.as_strided(shape, (*strides, 1), offset)
    else:
        size = 64 + sum(
            (length - 1) * stride
            for length, stride in zip(shape, (*strides, 1), strict=True)
            if 0 not in shape
        )
        buffer = torch.full((size,), fuzz.CANARY).to(dtype)
        tensor = buffer.as_strided(shape, (*strides, 1), offset)

    values = torch.randn(shape, generator=generator).to(dtype)

    if batch:
        # Entry by entry: expanded ones share memory.
        for entry in range(batch):
            tensor[entry].copy_(values[entry])

    kind = draw(st.sampled_from(["plain"] * 6 + ["subclass", "inference"]))

    if kind == "subclass":
        return tensor.as_subclass(fuzz.Subclass)

    if kind == "inference" and not is_written:
        with torch.inference_mode():
            return tensor.clone(memory_format=torch.contiguous_format)

    return tensor


@st.composite
def tables(draw, tokens, width):
    """What is right for `rope`: a slice of a longer table."""

    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    angles = torch.rand(tokens + 3, width // 2 + 2, generator=generator)
    table = torch.polar(torch.ones_like(angles), 6.28 * angles)
    start = draw(st.integers(0, 2))

    rows = table[start : start + tokens, : width // 2]
    form = draw(st.sampled_from(["slice", "dense", "dense", "expanded", "single"]))

    if form == "dense":
        return rows.contiguous()

    if form == "expanded":
        return table[:1, : width // 2].expand(tokens, -1)

    if form == "single" and tokens < 2:
        return rows.as_strided(rows.shape, (2**40, 1))

    return rows


@st.composite
def no_tables(draw, tokens, width):
    shape = (tokens, width // 2)
    table = torch.ones(shape, dtype=torch.complex64)
    wrong = {
        "conjugate": (ValueError, table.conj()),
        "negative": (ValueError, torch._neg_view(table)),
        "negative conjugate": (ValueError, torch._neg_view(table.conj())),
        "lazy": (ValueError, torch.nn.parameter.UninitializedParameter()),
        "real": (TypeError, torch.ones(tokens, width)),
        "complex128": (TypeError, table.to(torch.complex128)),
        "complex32": (TypeError, table.real.half().to(torch.complex32)),
        "rank": (ValueError, table[:, None]),
        "long": (ValueError, torch.ones(tokens + 1, width // 2, dtype=torch.complex64)),
        "narrow": (ValueError, torch.ones(tokens, width, dtype=torch.complex64)),
        "no tensor": (TypeError, draw(st.sampled_from(fuzz.NO_TENSORS))),
        "meta": (ValueError, table.to("meta")),
        "sparse": (TypeError, table.to_sparse()),
    }

    if tokens and width > 2:
        wide = torch.ones(tokens, width, dtype=torch.complex64)
        wrong["every second"] = ValueError, wide[:, ::2]

    return fuzz.wrong(*wrong[draw(st.sampled_from(list(wrong)))])


@st.composite
def no_heads(
    draw, shape, dtype, *, is_first=False, is_optional=False, is_written=False
):
    """What is wrong for heads of this shape."""

    others = fuzz.no_right_tensors(shape, dtype=dtype, is_optional=is_optional)
    choice = draw(st.sampled_from(["any", "any", "dtype", "gaps", "shared"]))

    if choice == "dtype" and not is_first:
        other = torch.float32 if dtype != torch.float32 else torch.float16

        return fuzz.wrong(TypeError, torch.zeros(shape, dtype=other))

    if choice == "gaps" and shape[2] > 1 and 0 not in shape:
        wide = torch.zeros(*shape[:3], shape[3] + 2, dtype=dtype)

        return fuzz.wrong(ValueError, wide[..., : shape[3]])

    if choice == "shared" and is_written and shape[0] > 1 and 0 not in shape:
        return fuzz.wrong(
            ValueError, torch.zeros(1, *shape[1:], dtype=dtype).expand(shape)
        )

    drawn = draw(others)
    value = drawn.value

    if isinstance(value, torch.Tensor) and value.is_meta:
        # Heads must have data, also where all tensors are on one device.
        return fuzz.wrong(ValueError, value)

    return drawn


@st.composite
def shapes(draw):
    return (
        draw(st.sampled_from([1, 2, 0])),
        draw(st.sampled_from([3, 1, 0, 5])),
        draw(st.sampled_from([2, 1, 3])),
        draw(st.sampled_from([8, 2, 6, 64])),
    )


@st.composite
def some_wrong(draw, names, *, is_right=False):
    if is_right:
        return set()

    return set(draw(st.lists(st.sampled_from(names), max_size=2)))


@st.composite
def calls(draw, *, is_right=False):
    """A `fuzz.Call` of `qk_norm_rope`."""

    shape, dtype = draw(shapes()), draw(st.sampled_from(fuzz.FLOATS))
    _, tokens, _, width = shape
    names = ["input", "weight", "rope", "eps", "out", "overlap"]
    wrong = draw(some_wrong(names, is_right=is_right))
    drawn, errors = {}, {}

    if "input" in wrong:
        drawn["input"] = draw(no_heads(shape, dtype, is_first=True))
    else:
        drawn["input"] = fuzz.right(draw(heads(shape, dtype)))

    drawn["weight"] = draw(weights(width, dtype, is_wrong="weight" in wrong))
    drawn["rope"] = (
        draw(no_tables(tokens, width))
        if "rope" in wrong
        else fuzz.right(draw(tables(tokens, width)))
    )

    if "eps" in wrong:
        drawn["eps"] = draw(fuzz.no_eps)
    elif draw(st.booleans()):
        drawn["eps"] = draw(fuzz.eps)

    input = drawn["input"].value

    if "out" in wrong:
        out = draw(no_heads(shape, dtype, is_optional=True, is_written=True))

        if out.value is not None:
            drawn["out"] = out
    elif "overlap" in wrong and 0 not in shape and "input" not in wrong:
        size = torch.Size(shape).numel()
        buffer = torch.randn(2 * size).to(dtype)
        shift = draw(st.integers(1, size - 1))
        drawn["input"] = fuzz.right(buffer[:size].view(shape))
        drawn["out"] = fuzz.right(buffer[shift : shift + size].view(shape))
        errors["out"] = ValueError
    elif draw(st.booleans()):
        if draw(st.booleans()) and "input" not in wrong and _is_writable(input):
            drawn["out"] = fuzz.right(input)
        else:
            drawn["out"] = fuzz.right(draw(heads(shape, dtype, is_written=True)))

    def of_leaves(leaves):
        wrong_leaves = {"out": ValueError} if "out" in drawn else {}

        return wrong_leaves | (
            {"rope": NotImplementedError} if "rope" in leaves else {}
        )

    mode = "no grad"

    if not is_right:
        mode = draw(fuzz.modes_and_leaves(drawn, errors, of_leaves=of_leaves))

    return fuzz.Call.of(drawn, errors, mode)


@st.composite
def weights(draw, width, dtype, *, is_wrong):
    if not is_wrong:
        layout = st.sampled_from(["dense", "misaligned", "every second"])

        return fuzz.right(fuzz.embedded((width,), dtype, draw(layout)))

    if draw(st.booleans()):
        other = torch.float32 if dtype != torch.float32 else torch.float16

        return fuzz.wrong(TypeError, torch.ones(width, dtype=other))

    drawn = draw(fuzz.no_right_tensors((width,), dtype=dtype))

    return fuzz.wrong(TypeError, None) if drawn.value is None else drawn


def _is_writable(tensor):
    return not tensor.is_inference() and (
        tensor.numel() == 0
        or all(
            stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if size > 1
        )
    )


def _units(tensor, is_truncated):
    """How far a result may be from the definition in float64 between roundings (`reference.rotation_error`).

    The interpreter truncates bfloat16 at each of the three. In float32 there are more.
    """

    if tensor.dtype == torch.float32:
        return 8

    return 3 if is_truncated and tensor.dtype == torch.bfloat16 else 1


def check_call(call, *, is_truncated=False):
    """Make the call, and require what must become of it."""

    arguments = dict(call.arguments)
    wanted = None

    if not call.errors and not call.is_unsure:
        input, weight, rope = (
            arguments[name].detach().clone().as_subclass(torch.Tensor)
            for name in ("input", "weight", "rope")
        )
        wanted = reference.qk_norm_rope_in_float64(
            input, weight, rope, float(arguments.get("eps", 1e-6))
        )

    def check(result):
        input, out = arguments["input"], arguments.get("out")
        assert result is out if out is not None else result.is_contiguous()
        assert (result.shape, result.dtype) == (input.shape, input.dtype)

        if wanted is not None:
            plain = result.detach().as_subclass(torch.Tensor)
            assert reference.rotation_error(plain, wanted) <= _units(
                plain, is_truncated
            )

    return fuzz.run(qk_norm_rope, call, check, written=("out",))


@st.composite
def calls_of_pack(draw, *, is_right=False):
    """A `fuzz.Call` of `qk_norm_rope_pack_`."""

    batch, tokens, num_heads, width = draw(shapes())
    dtype, prefix = draw(st.sampled_from(fuzz.FLOATS)), draw(st.sampled_from([2, 0, 1]))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    packed = (batch, prefix + tokens, num_kv_heads, width)
    behind, before = ((batch, rows, num_kv_heads, width) for rows in (tokens, prefix))
    own = {
        "q": (batch, tokens, num_heads, width),
        "k_out": packed,
        "v_out": packed,
        "k_prefix": before,
        "v_prefix": before,
        "k_src": behind,
        "v_src": behind,
    }
    written = ("q", "k_out", "v_out")
    names = [*own, "q_weight", "k_weight", "rope", "eps", "overlap"]
    wrong = draw(some_wrong(names, is_right=is_right))
    drawn, errors = {}, {}

    for name, shape in own.items():
        is_optional = name in ("k_src", "v_src")

        if name in wrong:
            drawn[name] = draw(
                no_heads(
                    shape,
                    dtype,
                    is_first=name == "q",
                    is_optional=is_optional,
                    is_written=name in written,
                )
            )

            if name in ("k_out", "k_prefix") and drawn[name].error is ValueError:
                # The others' shapes follow from theirs.
                drawn[name] = fuzz.unsure(drawn[name].value)
        elif not is_optional or draw(st.booleans()):
            drawn[name] = fuzz.right(
                draw(heads(shape, dtype, is_written=name in written))
            )

    for name in ("q_weight", "k_weight"):
        drawn[name] = draw(weights(width, dtype, is_wrong=name in wrong))

    drawn["rope"] = (
        draw(no_tables(tokens, width))
        if "rope" in wrong
        else fuzz.right(draw(tables(tokens, width)))
    )

    if "eps" in wrong:
        drawn["eps"] = draw(fuzz.no_eps)
    elif draw(st.booleans()):
        drawn["eps"] = draw(fuzz.eps)

    buffers_are_right = not wrong & {"k_out", "v_out", "k_prefix", "v_prefix"}

    if buffers_are_right and draw(st.booleans()):
        for name in "kv":
            buffer = drawn[f"{name}_out"].value
            drawn[f"{name}_prefix"] = fuzz.right(buffer[:, :prefix])

    if "overlap" in wrong and not wrong - {"overlap"} and 0 not in own["q"]:
        what = draw(st.sampled_from(["q", "k_out", "k_src", "any", "any", "any"]))

        if what == "q":
            drawn["v_src"] = fuzz.right(drawn["q"].value[:, :, :1].expand(behind))
            errors |= {"q": ValueError} if num_kv_heads == 1 else {"v_src": ValueError}
        elif what == "k_out":
            drawn["v_out"] = drawn["k_out"]
            errors["k_out"] = ValueError
        elif prefix + tokens > 1 and prefix:
            drawn["k_src"] = fuzz.right(drawn["k_out"].value[:, prefix - 1 : -1])
            errors["k_out"] = ValueError
        elif what == "any":
            draw(_overlaps(drawn, errors))
    elif not wrong and num_heads == num_kv_heads and draw(st.booleans()):
        packed = torch.randn(batch, prefix + tokens, 3, num_heads, width).to(dtype)
        drawn["q"] = fuzz.right(packed[:, prefix:, 0])
        drawn["k_out"] = fuzz.right(packed[:, :, 1])
        drawn["v_out"] = fuzz.right(packed[:, :, 2])

    mode = "no grad"

    if not is_right:
        mode = draw(
            fuzz.modes_and_leaves(
                drawn,
                errors,
                of_leaves=lambda leaves: {"qk_norm_rope_pack_": NotImplementedError},
            )
        )

    return fuzz.Call.of(drawn, errors, mode)


@st.composite
def _overlaps(draw, drawn, errors):
    """Another argument that begins where one begins that is written."""

    written = draw(st.sampled_from(["q", "k_out", "v_out"]))
    others = ["q_weight", "k_weight", "rope", "k_prefix", "v_prefix", "k_src", "v_src"]
    # Rows of its own may be rows of the buffer.
    own = {"k_out": ("k_prefix", "k_src"), "v_out": ("v_prefix", "v_src")}
    name = draw(st.sampled_from([n for n in others if n not in own.get(written, ())]))

    if name not in drawn or drawn[name].value.numel() == 0:
        return

    memory, tensor = drawn[written].value, drawn[name].value
    offset = memory.storage_offset()
    shape = tensor.shape

    if name == "rope":
        if memory.dtype != torch.float32 or offset % 2:
            return

        memory = torch.empty(0, dtype=torch.complex64).set_(memory.untyped_storage())
        offset //= 2

    strides = torch.empty(shape, device="meta").stride()

    if memory.untyped_storage().nbytes() < memory.element_size() * (
        offset + shape.numel()
    ):
        return

    drawn[name] = fuzz.right(
        memory.as_subclass(torch.Tensor).as_strided(shape, strides, offset)
    )
    errors[written] = ValueError


def check_pack(call, *, is_truncated=False):
    """Make the call, and require what must become of it."""

    arguments = dict(call.arguments)
    wanted = None

    if not call.errors and not call.is_unsure:
        copies = {
            name: value.detach().clone().as_subclass(torch.Tensor)
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor)
        }
        wanted = _pack_in_float64(**copies, eps=float(arguments.get("eps", 1e-6)))

    def check(results):
        given = [arguments[name] for name in ("q", "k_out", "v_out")]
        assert all(
            result is tensor for result, tensor in zip(results, given, strict=True)
        )

        if wanted is not None:
            for result, (expected, is_exact) in zip(results, wanted, strict=True):
                plain = result.detach().as_subclass(torch.Tensor)

                for rows, exact in is_exact:
                    if exact:
                        assert torch.equal(plain[:, rows], expected[:, rows])
                    else:
                        error = reference.rotation_error(
                            plain[:, rows], expected[:, rows]
                        )
                        assert error <= _units(plain, is_truncated)

    return fuzz.run(qk_norm_rope_pack_, call, check, written=("q", "k_out", "v_out"))


def _pack_in_float64(
    q,
    k_out,
    v_out,
    q_weight,
    k_weight,
    rope,
    k_prefix,
    v_prefix,
    k_src=None,
    v_src=None,
    eps=1e-6,
):
    """What is written, and which of its rows are copies."""

    rotate = reference.qk_norm_rope_in_float64
    prefix = k_prefix.shape[1]
    before, behind = slice(0, prefix), slice(prefix, None)
    k = k_out[:, prefix:] if k_src is None else k_src
    v = v_out[:, prefix:] if v_src is None else v_src

    return (
        (rotate(q, q_weight, rope, eps), [(slice(None), False)]),
        (
            torch.cat([k_prefix, rotate(k, k_weight, rope, eps)], 1),
            [(before, True), (behind, False)],
        ),
        (torch.cat([v_prefix, v], 1), [(slice(None), True)]),
    )


@st.composite
def calls_with_gradients(draw):
    """A right call of `qk_norm_rope`, its leaves, and a gradient of the result."""

    call = draw(calls(is_right=True))
    call.arguments.pop("out", None)
    call.mode = "grad"
    leaves = draw(st.sets(st.sampled_from(["input", "weight"]), min_size=1))
    fuzz.make_leaves(call, leaves)
    input = call.arguments["input"]
    layouts = st.sampled_from(fuzz.LAYOUTS)
    gradient = fuzz.embedded(input.shape, input.dtype, draw(layouts), 7)

    return call, gradient


def check_gradients(call_and_gradient, *, is_kernel=False):
    """The gradients of a call are right, or it is refused for a named reason."""

    call, gradient = call_and_gradient
    leaves = fuzz.leaves_of(call)
    memory = fuzz.Memory([gradient])

    def check(result):
        if not leaves:
            return

        found = dict(
            zip(
                leaves,
                torch.autograd.grad(result, list(leaves.values()), gradient),
                strict=True,
            )
        )
        input, weight, rope = (
            call.arguments[name].detach().as_subclass(torch.Tensor)
            for name in ("input", "weight", "rope")
        )
        tensors = gradient, input, weight, rope, float(call.arguments.get("eps", 1e-6))
        wanted = reference.qk_norm_rope_gradients(*tensors)
        tolerances = reference.qk_norm_rope_gradients_tolerance(*tensors)
        near = dict(
            zip(("input", "weight"), zip(wanted, tolerances, strict=True), strict=True)
        )

        for name, one in found.items():
            leaf = leaves[name]
            assert (one.shape, one.dtype) == (leaf.shape, leaf.dtype)
            expected, tolerance = near[name]

            if not is_kernel and input.dtype != torch.float32:
                # PyTorch differentiates the definition, and rounds to 16 bits between.
                continue

            if is_kernel and input.dtype == torch.bfloat16:
                # The interpreter truncates.
                tolerance = 2 * tolerance
            elif not is_kernel:
                tolerance = 4 * tolerance

            is_near = (one.double() - expected).abs() <= tolerance
            assert (is_near | expected.isnan() & one.isnan()).all()

    outcome = fuzz.run(qk_norm_rope, call, check)
    memory.assert_unchanged()

    return outcome
