"""`ntops_ext.torch.eager_rounding` under fuzz."""

import numpy as np
import operator_fuzz as fuzz
import torch
from hypothesis import strategies as st

from ntops_ext.torch import eager_rounding

_NO_DTYPES = [None, "float32", float, np.float32, torch.int8, torch.complex64, [], {}]
_NO_WIDTHS = [0, -2, 3, -(10**30), 10**30 + 1]
_NO_WIDTH_KINDS = [
    None,
    True,
    8.0,
    "8",
    [8],
    np.int64(8),
    torch.tensor(8),
    8j,
    object(),
]
_NO_DEVICES = ["nowhere", "", "cpu:x", 1.5, [], {}, object(), -7, 2**70, "meta", True]


def _wrong(error, values):
    return st.sampled_from(values).map(lambda value: fuzz.wrong(error, value))


@st.composite
def calls(draw):
    """A `fuzz.Call` of it, on a CPU."""

    wrong = draw(st.sets(st.sampled_from(["dtype", "head_dim", "device"])))
    right = {
        "dtype": st.sampled_from(fuzz.FLOATS).map(fuzz.right),
        "head_dim": st.sampled_from([2, 6, 64, 128, 256, 1000]).map(fuzz.right),
        "device": st.sampled_from(["cpu", None, torch.device("cpu"), "cpu:0"]).map(
            fuzz.right
        ),
    }
    of_wrong = {
        "dtype": _wrong(TypeError, _NO_DTYPES),
        "head_dim": _wrong(ValueError, _NO_WIDTHS) | _wrong(TypeError, _NO_WIDTH_KINDS),
        "device": _wrong((TypeError, ValueError), _NO_DEVICES),
    }

    return fuzz.Call.of(
        {
            name: draw(of_wrong[name] if name in wrong else right[name])
            for name in right
            # The default device may be there or not.
            if name in wrong or name == "device" or draw(st.booleans())
        },
        mode=draw(fuzz.modes),
    )


def check_call(call):
    """On a CPU nothing is promised, and it says why."""

    def check(rounding):
        assert rounding.is_reproduced is False
        assert "CPU" in rounding.reason

    return fuzz.run(eager_rounding, call, check)
