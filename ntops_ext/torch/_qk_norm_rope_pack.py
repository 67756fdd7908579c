"""The machinery of `qk_norm_rope_pack_`: checks, dispatch, one launch."""

import dataclasses

import torch

from ntops_ext import configs, reference
from ntops_ext._handles import import_kernels, make_handle
from ntops_ext.torch import _checks, _heads, _layouts, _prepared, _rows
from ntops_ext.torch._chunks import plan_chunks
from ntops_ext.torch._launch import dispatched, launch, runs_kernel, waits
from ntops_ext.torch._qk_norm_rope import eager_roundings

_NAMES = (
    "q",
    "k_out",
    "v_out",
    "q_weight",
    "k_weight",
    "rope",
    "k_prefix",
    "v_prefix",
    "k_src",
    "v_src",
)

_WRITTEN = ("q", "k_out", "v_out")

_prepared_calls = _prepared.PreparedCalls(
    (*_NAMES, "eps"), result="q, k_out, v_out", optional=("k_src", "v_src")
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """What is known of all calls with these shapes, strides, dtypes and devices."""

    prefix: int
    # Whether a kernel can compute the offsets of the weights.
    weights_fit: bool
    # The launches of a call; none if there is nothing to write.
    chunks: list
    # The addresses of the tensors, checked -> whether both prefixes are the buffers' own rows.
    verdicts: dict = dataclasses.field(default_factory=dict)
    # The handle, once it was made.
    handles: list = dataclasses.field(default_factory=list)
    prepared: _prepared.OfLayout = dataclasses.field(default_factory=_prepared.OfLayout)


def qk_norm_rope_pack_(
    q,
    k_out,
    v_out,
    q_weight,
    k_weight,
    rope,
    k_prefix,
    v_prefix,
    k_src,
    v_src,
    eps,
):
    """See `ntops_ext.torch.qk_norm_rope_pack_`."""

    for prepared_call in _prepared_calls.recent:
        result = prepared_call(
            q,
            k_out,
            v_out,
            q_weight,
            k_weight,
            rope,
            k_prefix,
            v_prefix,
            k_src,
            v_src,
            eps,
        )

        if result is not None:
            return result

    tensors = (q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix)
    arguments = (*tensors, k_src, v_src)
    whole_call = (*arguments, eps)

    if k_src is not None:
        tensors += (k_src,)

    if v_src is not None:
        tensors += (v_src,)

    as_operator = dispatched("qk_norm_rope_pack_", tensors, True)

    if as_operator is not None:
        return as_operator(*whole_call)

    layout = layouts.get((k_src is None, v_src is None), tensors, arguments)

    result = _prepared_calls.repeat(layout.prepared, whole_call)

    if result is not None:
        return result

    eps = _checks.check_eps(eps)

    if rope.is_conj() or any(map(torch.Tensor.is_neg, tensors)):
        _heads.check_not_lazy(_NAMES, arguments)

    if _layouts.requires_grad(tensors):
        raise no_gradients()

    addresses = tuple(map(torch.Tensor.data_ptr, tensors))
    prefixes_are_kept = layout.verdicts.get(addresses)

    if prefixes_are_kept is None:
        prefixes_are_kept = _check_aliases(layout, arguments)
        layouts.remember_addresses(layout.verdicts, addresses, prefixes_are_kept)

    if not runs_kernel(q):
        _layouts.check_writable(_WRITTEN, (q, k_out, v_out))

        return reference.qk_norm_rope_pack_(*arguments, eps=eps)

    part, parts = layout, arguments

    if prefixes_are_kept:
        # There is nothing to bring: what is left are the rows behind the prefix.
        parts = _behind_prefix(layout.prefix, *arguments)
        part = layouts.get(
            (k_src is None, v_src is None),
            [tensor for tensor in parts if tensor is not None],
            parts,
        )

    if part.chunks:
        launches = _launches(part, parts, eps)

        for launched in launches:
            launch(part.handles[0], q.device, *launched)

        written = _WRITTEN if part.prefix or v_src is not None else _WRITTEN[:2]
        named = dict(zip(_NAMES, arguments, strict=True))
        _layouts.mark_as_written(*map(named.get, written))

        if len(launches) == 1 and part.weights_fit:
            _prepared_calls.prepare(
                layout.prepared,
                whole_call,
                part.handles[0],
                launches[0],
                addressed=[
                    name for name, tensor in named.items() if tensor is not None
                ],
                checked=_prepared.CheckedAddresses(
                    found=layout.verdicts,
                    verdict=prefixes_are_kept,
                    remember=layouts.remember_addresses,
                    written=_WRITTEN,
                ),
                written=written,
            )

    return q, k_out, v_out


def no_gradients():
    """The error to raise where gradients are recorded."""

    return NotImplementedError(
        "`qk_norm_rope_pack_` writes in place and has no gradient: call it under"
        " `torch.no_grad()` or with detached tensors, or use `qk_norm_rope` and"
        " `torch.cat`, which have one."
    )


def _behind_prefix(
    prefix, q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, *sources
):
    return (
        q,
        k_out[:, prefix:],
        v_out[:, prefix:],
        q_weight,
        k_weight,
        rope,
        k_prefix[:, :0],
        v_prefix[:, :0],
        *sources,
    )


def _check_layout(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src
):
    """Check what the layouts alone decide, and work out the launches."""

    heads = (q, k_out, v_out, k_prefix, v_prefix, k_src, v_src)
    check_call(
        q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src
    )

    for name, tensor in zip(_WRITTEN, (q, k_out, v_out), strict=True):
        _checks.check_no_self_overlap(name, tensor)

    batch, num_rows = k_out.shape[:2]
    chunks = []

    if batch and num_rows:
        rows = [_heads.rows_of(tensor) for tensor in heads if tensor is not None]
        chunks = plan_chunks(batch, num_rows, [*rows, _heads.rows_of_table(rope)])

    return _Layout(
        prefix=k_prefix.shape[1],
        weights_fit=_rows.fits(q_weight) and _rows.fits(k_weight),
        chunks=chunks,
    )


def check_call(
    q, k_out, v_out, q_weight, k_weight, rope, k_prefix, v_prefix, k_src, v_src
):
    """Refuse what the layouts alone decide to be wrong. `torch.compile` traces it."""

    _heads.check_heads("q", q)
    _heads.check_head_dim("q", q)
    heads = {
        "k_out": k_out,
        "v_out": v_out,
        "k_prefix": k_prefix,
        "v_prefix": v_prefix,
        "k_src": k_src,
        "v_src": v_src,
    }
    heads = {name: tensor for name, tensor in heads.items() if tensor is not None}

    for name, tensor in heads.items():
        _heads.check_heads(name, tensor, "q", q)

    _check_shapes(q, **heads)

    for name, tensor in {"q": q, **heads}.items():
        _heads.check_dense_heads(name, tensor)

    _heads.check_weight("q_weight", q_weight, "q", q)
    _heads.check_weight("k_weight", k_weight, "q", q)
    _heads.check_rope(rope, "q", q)


layouts = _layouts.Layouts(_NAMES, ("k_src", "v_src"), _check_layout)


def _check_shapes(q, k_out, v_out, k_prefix, v_prefix, k_src=None, v_src=None):
    batch, tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_out.shape[2]
    prefix = k_prefix.shape[1]

    for name, tensor in (("q", q), ("k_out", k_out)):
        if tensor.shape[2] == 0:
            raise ValueError(
                f"`{name}` must have at least one head, but has shape"
                f" {tuple(tensor.shape)}."
            )

    expected = {
        "k_prefix": (k_prefix, prefix, "(batch, prefix, kv_heads, head_dim)"),
        "v_prefix": (v_prefix, prefix, "the shape of `k_prefix`"),
        "k_out": (
            k_out,
            prefix + tokens,
            "(batch, prefix + tokens, kv_heads, head_dim), of which batch, tokens and"
            " head_dim are those of `q`",
        ),
        "v_out": (v_out, prefix + tokens, "the shape of `k_out`"),
        "k_src": (k_src, tokens, "(batch, tokens, kv_heads, head_dim)"),
        "v_src": (v_src, tokens, "(batch, tokens, kv_heads, head_dim)"),
    }

    for name, (tensor, num_rows, meaning) in expected.items():
        if tensor is not None:
            _checks.check_shape(
                name, tensor, (batch, num_rows, num_kv_heads, head_dim), meaning
            )


def _check_aliases(layout, arguments):
    """Check what is written against everything else.

    :return: Whether both prefixes are the rows that they would be copied to.
    :raises ValueError: If two tensors share memory otherwise than row on row.
    """

    named = dict(zip(_NAMES, arguments, strict=True))
    prefix = layout.prefix
    # The rows that a program reads before it writes them itself.
    own_rows = {
        ("k_out", "k_prefix"): slice(0, prefix),
        ("v_out", "v_prefix"): slice(0, prefix),
        ("k_out", "k_src"): slice(prefix, None),
        ("v_out", "v_src"): slice(prefix, None),
    }
    kept = set()

    for position, written_name in enumerate(_WRITTEN):
        written = named[written_name]

        for name in (*_WRITTEN[position + 1 :], *_NAMES[len(_WRITTEN) :]):
            tensor = named[name]

            if tensor is None or not _checks.overlap(
                written_name, written, name, tensor
            ):
                continue

            rows = own_rows.get((written_name, name))

            if rows is None or not _checks.is_same_view(written[:, rows], tensor):
                raise ValueError(
                    f"`{written_name}` is written and must share no memory with `{name}`"
                    f"{_but_its_own(rows, prefix)}, but overlaps it."
                )

            kept.add(name)

    return kept >= {"k_prefix", "v_prefix"}


def _but_its_own(rows, prefix):
    if rows is None:
        return ""

    range_of_rows = f"[0, {prefix})" if rows.start == 0 else f"[{prefix}, ...)"

    return f" unless that is exactly its own rows {range_of_rows}"


def _launches(layout, arguments, eps):
    """The arguments to call the layout's handle with, launch by launch."""

    q, k_out, v_out, q_weight, k_weight, rope, *sources = arguments

    if not layout.handles:
        layout.handles.append(_make_handle(q, k_out, *sources[2:]))

    if not layout.weights_fit:
        q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()

    table = _heads.real_view(rope)

    if len(layout.chunks) == 1:
        given = [source for source in sources if source is not None]

        return [(q, k_out, v_out, q_weight, k_weight, table, *given, eps)]

    prefix = layout.prefix
    launches = []

    for chunk in layout.chunks:
        batch = slice(chunk.batch_start, chunk.batch_stop)
        packed = slice(chunk.row_start, chunk.row_stop)
        in_prefix = slice(min(chunk.row_start, prefix), min(chunk.row_stop, prefix))
        behind = slice(
            max(chunk.row_start - prefix, 0), max(chunk.row_stop - prefix, 0)
        )
        rows_of_sources = (in_prefix, in_prefix, behind, behind)
        given = [
            source[batch, rows]
            for source, rows in zip(sources, rows_of_sources, strict=True)
            if source is not None
        ]
        launches.append(
            (
                q[batch, behind],
                k_out[batch, packed],
                v_out[batch, packed],
                q_weight,
                k_weight,
                table[behind],
                *given,
                eps,
            )
        )

    return launches


def _make_handle(q, k_out, k_src, v_src):
    kernels = import_kernels()
    batch, tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_out.shape[2]
    rounding = eager_roundings.get(q.device, q.dtype, head_dim)
    config = configs.qk_norm_rope_config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        item_size=q.element_size(),
    )

    return make_handle(
        kernels.qk_norm_rope_pack.premake,
        num_warps=config.num_warps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        heads_per_program=config.heads_per_program,
        kv_heads_per_program=config.kv_heads_per_program,
        q_order=rounding.order(batch * tokens * num_heads),
        k_order=rounding.order(batch * tokens * num_kv_heads),
        real_part=rounding.real_part,
        imaginary_part=rounding.imaginary_part,
        squares_are_exact=q.element_size() == 2,
        has_k_src=k_src is not None,
        has_v_src=v_src is not None,
        waits=waits(q.device),
    )
