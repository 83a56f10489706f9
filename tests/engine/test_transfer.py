import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from jaxinfer.engine.transfer import put

LEAVES = st.sampled_from([np.int32, np.uint32, np.float32, np.bool_]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
)


@settings(max_examples=25)
@given(st.lists(LEAVES, max_size=4))
def test_what_arrives_is_what_was_sent(leaves: list[np.ndarray]) -> None:
    arrived = put({"some": tuple(leaves), "none": None})
    assert arrived["none"] is None
    for sent, got in zip(leaves, arrived["some"], strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert np.asarray(got).tobytes() == sent.tobytes()


def test_refuses_what_is_not_of_four_bytes() -> None:
    with pytest.raises(ValueError, match="float64"):
        put((np.zeros(2), np.zeros(3, np.int32)))
