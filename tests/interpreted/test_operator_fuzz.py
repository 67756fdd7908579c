"""The operators under fuzz, their kernels in Triton's interpreter: see `tests/test_operator_fuzz.py`.

TRITON_INTERPRET=1 OPERATOR_FUZZ_EXAMPLES=300 python -m pytest -m slow tests/interpreted/test_operator_fuzz.py
"""

import functools
import os

import hypothesis
import operator_fuzz_gated_rms_norm as of_norm
import operator_fuzz_qk_norm_rope as of_rope
import pytest

pytestmark = [
    # Of the kinds of tensors that are tried.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

# A kernel a width and layout of groups, of which each takes a second to make: few widths.
_few = functools.partial(of_norm.calls, columns=(8, 12))

# Examples in each run of the tests: none of gradients, whose kernels take longer to make.
FUZZED = {
    "gated_rms_norm": (_few, of_norm.check_call, {"is_truncated": True}, 10),
    "gated_rms_norm, gradients": (
        of_norm.calls_with_gradients,
        of_norm.check_gradients,
        {"is_truncated": True},
        0,
    ),
    "qk_norm_rope": (of_rope.calls, of_rope.check_call, {"is_truncated": True}, 5),
    "qk_norm_rope, gradients": (
        of_rope.calls_with_gradients,
        of_rope.check_gradients,
        {"is_kernel": True},
        0,
    ),
    "qk_norm_rope_pack_": (
        of_rope.calls_of_pack,
        of_rope.check_pack,
        {"is_truncated": True},
        3,
    ),
}


def fuzzed(name, **options):
    calls, check, keywords, _ = FUZZED[name]

    @hypothesis.settings(**options)
    @hypothesis.given(calls())
    def run(call):
        check(call, **keywords)

    return run


@pytest.mark.parametrize("name", [name for name in FUZZED if FUZZED[name][3]])
def test_calls_are_right_or_refused(name):
    """The same examples each time."""

    fuzzed(name, max_examples=FUZZED[name][3])()


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZED)
def test_many_calls_are_right_or_refused(name):
    examples = int(os.environ.get("OPERATOR_FUZZ_EXAMPLES", "300"))
    seed = int(os.environ.get("OPERATOR_FUZZ_SEED", "0"))
    run = fuzzed(name, derandomize=False, max_examples=examples)
    hypothesis.seed(seed)(run)()
