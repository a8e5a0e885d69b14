"""A pool never exceeds its bytes, and its slots never meet its scratch, whatever the shapes."""

from hypothesis import example, given
from hypothesis import strategies as st

from tierkv.geometry import MIN_SEGMENTS, PoolGeometry
from tierkv.layout import SEGMENT_TOKENS, BlockLayout, LayerSpec

shapes = st.tuples(st.integers(1, 4), st.integers(1, 24), st.integers(1, 24))
layouts = st.builds(
    lambda shapes, size, dtype: BlockLayout(
        tuple(LayerSpec(index, *shape) for index, shape in enumerate(shapes)), size, dtype
    ),
    st.lists(st.sampled_from([(1, 8, 8), (2, 16, 4)]) | shapes, min_size=1, max_size=7),
    st.sampled_from([16, 32, 48, 512]),
    st.sampled_from(["float32", "bfloat16"]),
)
capacities = st.integers(0, 40_000) | st.integers(0, 60_000_000)
scratches = st.integers(0, 200) | st.integers(0, 100_000)

ONE = BlockLayout((LayerSpec(0, 1, 4, 4),), 32, "float16")
"""16 bytes a token, 512 a block."""


@given(layouts, capacities)
def test_allocated_bytes_never_exceed_the_capacity(layout, capacity):
    geometry = PoolGeometry(layout, capacity)
    assert 0 <= geometry.allocated_bytes <= capacity
    assert capacity - geometry.allocated_bytes < layout.token_bytes
    # The flat tensors that a slab allocates are exactly that.
    elements = sum(
        geometry.total_tokens * len(group.members) * group.kv_heads * (group.key_dim + group.value_dim)
        for group in layout.groups
    )
    assert elements * layout.dtype_bytes == geometry.allocated_bytes
    assert geometry.num_slots() * layout.block_bytes <= geometry.allocated_bytes


@given(layouts, capacities, scratches)
@example(ONE, 16 * 512, 512)
@example(ONE, 16 * 512, 513)
def test_slots_and_scratch_never_overlap(layout, capacity, scratch):
    """Element by element: slots grow from the bottom of each flat tensor, scratch is lent from its top."""
    geometry = PoolGeometry(layout, capacity)
    slots, per_segment = geometry.num_slots(scratch), geometry.slots_per_segment
    assert slots % per_segment == 0
    for group in layout.groups:
        for dim in (group.key_dim, group.value_dim):
            size = geometry.total_tokens * len(group.members) * group.kv_heads * dim
            # The order of a slab: segment, layer, kv_head, slot in the segment, token, dim.
            ends = [0]
            for slot in {0, slots // 2, slots - 1} & set(range(slots)):
                segment, at = divmod(slot, per_segment)
                row = (segment * len(group.members) + len(group.members) - 1) * group.kv_heads + group.kv_heads - 1
                ends.append(((row * per_segment + at + 1) * layout.block_size) * dim)
            begin_of_scratch = size - scratch * group.kv_heads * dim
            if slots:
                assert max(ends) <= begin_of_scratch
                assert scratch <= geometry.total_tokens * len(group.members)


@given(layouts, capacities, scratches)
def test_no_more_than_a_segment_is_left_unused(layout, capacity, scratch):
    """In the group where it is tightest, another segment would not fit."""
    geometry = PoolGeometry(layout, capacity)
    segment_tokens = geometry.slots_per_segment * layout.block_size
    used = geometry.num_slots(scratch) * layout.block_size
    assert any(
        len(group.members) * (used + segment_tokens) + scratch > geometry.total_tokens * len(group.members)
        for group in layout.groups
    )


@given(layouts, capacities, scratches, scratches)
def test_more_scratch_never_leaves_more_slots(layout, capacity, one, other):
    geometry = PoolGeometry(layout, capacity)
    assert geometry.num_slots(max(one, other)) <= geometry.num_slots(min(one, other)) <= geometry.num_slots()


@given(layouts, capacities, st.integers(0, 10_000_000))
def test_more_bytes_never_hold_fewer_tokens_and_lose_at_most_a_segment(layout, capacity, more):
    small, large = PoolGeometry(layout, capacity), PoolGeometry(layout, capacity + more)
    assert small.total_tokens <= large.total_tokens
    assert small.slots_per_segment <= large.slots_per_segment
    assert small.num_slots() - large.num_slots() < large.slots_per_segment


@given(layouts, capacities)
def test_segments_are_large_only_where_there_are_several(layout, capacity):
    geometry = PoolGeometry(layout, capacity)
    slots = geometry.slots_per_segment
    segment_tokens = slots * layout.block_size
    assert slots == 1 or segment_tokens <= SEGMENT_TOKENS
    assert slots == 1 or geometry.total_tokens // segment_tokens >= MIN_SEGMENTS
    larger = max(1, SEGMENT_TOKENS // layout.block_size)
    while larger // 2 > slots:
        larger //= 2
    assert slots == larger or geometry.total_tokens // (larger * layout.block_size) < MIN_SEGMENTS


def test_some_numbers_by_hand():
    large = PoolGeometry(ONE, 16 * 512 * 8)
    assert (large.total_tokens, large.slots_per_segment, large.num_slots()) == (4096, 16, 128)
    assert large.num_slots(1) == large.num_slots(512) == 112
    assert large.num_slots(513) == 96
    assert large.num_slots(4096) == large.num_slots(10**9) == 0
    small = PoolGeometry(ONE, 16 * 512 * 8 - 1)
    assert (small.total_tokens, small.slots_per_segment, small.num_slots()) == (4095, 8, 120)
    nothing = PoolGeometry(ONE, 0)
    assert (nothing.total_tokens, nothing.slots_per_segment, nothing.num_slots(), nothing.allocated_bytes) == (
        0,
        1,
        0,
        0,
    )


def test_scratch_is_one_layer_so_many_layers_hardly_notice_it():
    layers = BlockLayout(tuple(LayerSpec(index, 1, 4, 4) for index in range(32)), 32, "float16")
    geometry = PoolGeometry(layers, 16 * 32 * 512 * 8)
    assert geometry.num_slots() - geometry.num_slots(32 * 512) == geometry.slots_per_segment
