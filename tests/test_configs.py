"""Launch choices: pure functions, whose promises are checked width by width."""

import math

import pytest

from ntops_ext import configs

GROUP_SIZES = [*range(1, 3000), 3584, 4096, 5120, 7168, 8192, 10240, 12288, 16384]

NUM_GROUPS = [1, 2, 16, 1023, 1024, 10**6]


@pytest.mark.parametrize("num_groups", NUM_GROUPS)
def test_no_two_threads_hold_the_same_column(num_groups):
    """Where there are several warps, each has lanes of its own: 256 or more, 8 a thread.

    Of a piece that is held 4 a thread, and of 7168 columns 2.
    """

    for group_size in [*GROUP_SIZES, 20000, 65536, 131072]:
        config = configs.gated_rms_norm_config(group_size, num_groups)
        lanes = configs.next_power_of_2(group_size)
        held = config.rows_per_program * min(lanes, config.columns_per_piece or lanes)

        lanes_per_warp = 128 if config.holds_pieces else 256

        if group_size == 7168:
            lanes_per_warp = 64

        assert config.num_warps == 1 or held >= lanes_per_warp * config.num_warps, (
            group_size
        )


def test_no_program_takes_more_rows_than_the_most():
    """By them it is decided which row strides fit in 32 bits."""

    for group_size in [*GROUP_SIZES, 20000]:
        most = configs.most_rows_of_a_program(group_size)
        backward = configs.gated_rms_norm_backward_config(group_size, 1)

        assert backward.rows_per_step <= most

        for num_groups in NUM_GROUPS:
            for num_row_dims in (1, 2):
                config = configs.gated_rms_norm_config(
                    group_size, num_groups, num_row_dims
                )

                assert config.rows_per_program <= most


def test_the_order_of_additions_depends_on_the_group_size_alone():
    """Of all choices, the pieces are what can change bits."""

    for group_size in [*GROUP_SIZES, 16385, 20000, 32768, 65536, 131072, 10**6]:
        pieces = {
            configs.gated_rms_norm_config(group_size, num_groups).columns_per_piece
            for num_groups in NUM_GROUPS
        }

        assert len(pieces) == 1, group_size


@pytest.mark.parametrize("num_groups", NUM_GROUPS)
def test_programs_that_share_a_group_add_up_what_one_would(num_groups):
    """The same pieces; each has columns of its own, 128 a warp."""

    for group_size in GROUP_SIZES:
        shared = configs.gated_rms_norm_config(group_size, num_groups, may_share=True)
        alone = configs.gated_rms_norm_config(group_size, num_groups)
        share = shared.columns_per_share

        if share is None:
            assert shared == alone

            continue

        assert share == configs.next_power_of_2(share) == 128 * shared.num_warps
        assert share < group_size and group_size % share == 0
        assert shared.rows_per_program == 1
        assert shared.columns_per_piece == alone.columns_per_piece
        # Nothing is padded.
        assert alone.holds_pieces or group_size == configs.next_power_of_2(group_size)


def test_few_rows_are_shared_by_a_few_hundred_programs():
    """One or many rows of 4096 columns; none where nobody may share."""

    def share(num_groups, **options):
        return configs.gated_rms_norm_config(
            4096, num_groups, **options
        ).columns_per_share

    assert share(1, may_share=True) == share(64, may_share=True) == 1024
    assert share(65, may_share=True) is None
    assert share(1) is None


@pytest.mark.parametrize(
    "group_size", [16385, 20000, 20480, 28672, 49152, 65536, 98304, 3 * 2**21]
)
def test_a_group_too_wide_to_be_held_is_read_twice(group_size):
    """In pieces of one size, also where it is 3, 5 or 7 times a power of two."""

    for num_groups in NUM_GROUPS:
        config = configs.gated_rms_norm_config(group_size, num_groups)

        assert not config.holds_pieces
        assert config.columns_per_piece == 8192


def test_pieces_that_are_held_are_a_group():
    """They are powers of two that divide it, whatever is computed."""

    for group_size in GROUP_SIZES:
        for config in (
            configs.gated_rms_norm_config(group_size, 10**6),
            configs.gated_rms_norm_backward_config(group_size, 1),
        ):
            piece = config.columns_per_piece

            if piece is not None:
                assert piece == configs.next_power_of_2(piece)
                assert group_size % piece == 0


@pytest.mark.parametrize("group_size", [768, 1280, 1536, 1792, 3072, 5120, 3584])
def test_a_group_of_3_5_or_7_pieces_is_not_padded(group_size):
    """Padding would leave up to 37 % of the lanes idle."""

    for num_groups in NUM_GROUPS:
        assert configs.gated_rms_norm_config(group_size, num_groups).holds_pieces


def test_groups_that_were_slower_in_pieces_are_padded():
    for num_groups in NUM_GROUPS:
        config = configs.gated_rms_norm_config(10240, num_groups)

        assert config.columns_per_piece is None


def test_what_is_held_fits_in_registers():
    """At most 64 float32 values of a tensor a thread."""

    for group_size in [*GROUP_SIZES, 65536]:
        for num_groups in NUM_GROUPS:
            config = configs.gated_rms_norm_config(group_size, num_groups)
            lanes = configs.next_power_of_2(group_size)
            held = config.rows_per_program * min(
                lanes, config.columns_per_piece or lanes
            )

            if config.holds_pieces:
                held = group_size

            assert held <= 64 * 32 * config.num_warps, (group_size, num_groups)


def test_every_choice_is_a_power_of_two():
    """As Triton needs it."""

    for group_size in GROUP_SIZES:
        for num_groups in NUM_GROUPS:
            config = configs.gated_rms_norm_config(group_size, num_groups)

            for value in (config.rows_per_program, config.num_warps):
                assert value == configs.next_power_of_2(value)


def test_new_numbers_of_rows_make_few_kernels():
    """Case P2: from 1 row to any number, a width has at most two configurations, and one of shared rows."""

    for group_size in GROUP_SIZES:
        for may_share in (False, True):
            found = {
                configs.gated_rms_norm_config(
                    group_size, num_groups, may_share=may_share
                )
                for num_groups in (1, 2, 63, 64, 1000, 1023, 1024, 1025, 4096, 10**6)
            }

            assert len(found) <= 2 + may_share, group_size


@pytest.mark.parametrize("rows_per_program", [1, 2, 8, 32, 1024])
@pytest.mark.parametrize(
    "row_sizes",
    [(1,), (5,), (10**6,), (3, 2), (7, 40), (10**6, 3), (2, 3, 5), (4, 1, 9)],
)
def test_a_tile_of_rows_has_as_many_as_asked(rows_per_program, row_sizes):
    """In powers of two, and none reaches further than its dimension but the first."""

    tile = configs.row_tile(rows_per_program, row_sizes)

    assert len(tile) == len(row_sizes)
    assert math.prod(tile) == rows_per_program
    assert all(rows == configs.next_power_of_2(rows) for rows in tile)
    assert all(
        rows <= configs.next_power_of_2(size)
        for rows, size in zip(tile[1:], row_sizes[1:], strict=True)
    )


def test_the_first_dimension_does_not_choose_the_tile():
    """So that a new number of tokens makes no new kernel."""

    assert {configs.row_tile(32, (tokens, 8)) for tokens in range(1, 100)} == {(4, 8)}


@pytest.mark.parametrize(
    "value, expected", [(1, 1), (2, 2), (3, 4), (4, 4), (1280, 2048), (8193, 16384)]
)
def test_next_power_of_2(value, expected):
    """The smallest that is not less."""

    assert configs.next_power_of_2(value) == expected


@pytest.mark.parametrize(
    "group_size, kilobytes, stages",
    [
        # 24 KiB a step, beside 20 KiB of other use.
        *((4096, 227, 4), (4096, 99, 4), (4096, 64, 2), (4096, 32, 1)),
        # Five pieces of 1024 columns: 30 KiB, beside 24.
        *((5120, 99, 3), (5120, 64, 2), (5120, 48, 1)),
        # 4 rows at once: 3 KiB, beside 6.
        *((128, 24, 3), (128, 10, 2), (128, 8, 1)),
    ],
)
def test_what_is_on_its_way_fits_in_shared_memory(group_size, kilobytes, stages):
    """The rows of three tensors of 2 bytes, in a step."""

    config = configs.gated_rms_norm_backward_config(group_size, 1)

    assert configs.pipeline_stages(config, group_size, 6, 1024 * kilobytes) == stages


@pytest.mark.parametrize("options", [{"item_size": 4}, {"has_bias": True}], ids=str)
def test_gradients_that_take_more_registers_hold_fewer_columns_a_thread(options):
    """Of float32, and with sums of a bias; the columns of a piece stay, and with them the bits."""

    narrow = configs.gated_rms_norm_backward_config(5120, 1)
    wide = configs.gated_rms_norm_backward_config(5120, 1, **options)

    assert wide.num_warps == 2 * narrow.num_warps
    assert wide.columns_per_piece == narrow.columns_per_piece
    assert narrow.recomputes and not wide.recomputes


def test_gradients_of_a_wide_group_are_summed_in_pieces_where_registers_are_left():
    """Of 16 bits without a bias; otherwise in parts, as all others that are as wide."""

    held = configs.gated_rms_norm_backward_config(10240, 1)
    others = [
        configs.gated_rms_norm_backward_config(*sizes, **options)
        for *sizes, options in (
            (10240, 1, {"item_size": 4}),
            (10240, 1, {"has_bias": True}),
            (12288, 1, {}),
        )
    ]

    assert held.columns_per_program is None and held.columns_per_piece == 2048
    assert all(other.columns_per_program == 1024 for other in others)


def test_a_device_without_a_limit_has_all_stages():
    """The interpreter's."""

    for group_size in GROUP_SIZES:
        config = configs.gated_rms_norm_backward_config(group_size, 1)

        assert (
            configs.pipeline_stages(config, group_size, 12, math.inf)
            == config.pipeline_stages
        )
