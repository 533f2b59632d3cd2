"""The counting cache finds exactly the longest stored prefix."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.rollout.prefix_cache import PrefixCache

sequences = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


@given(sequences)
def test_insert_tells_the_longest_prefix_of_any_earlier_sequence(stored: list[list[int]]) -> None:
    cache = PrefixCache()
    for number, ids in enumerate(stored):
        longest = 0
        for earlier in stored[:number]:
            same = 0
            while same < min(len(ids), len(earlier)) and ids[same] == earlier[same]:
                same += 1
            longest = max(longest, same)
        assert cache.insert(np.array(ids, np.int32)) == longest
