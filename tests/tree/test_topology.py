"""Topologies: how many children, how many nodes, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.errors import ConfigError
from specinfer.tree import Chain, Expansion, Level, parse_topology
from specinfer.tree.token_tree import MAX_NODES


def level(depth, frontier):
    return Level(depth, np.zeros(frontier, np.int64), np.zeros(frontier, np.int64), np.ones(frontier))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_an_expansion_grows_its_schedule(schedule):
    topology = Expansion(*schedule)
    assert topology.max_depth == len(schedule)
    frontier = total = 1
    for depth, k in enumerate(schedule):
        counts = topology.expand(level(depth, frontier))
        assert counts.tolist() == [k] * frontier
        frontier = int(counts.sum())
        total += frontier
    assert topology.expand(level(len(schedule), 3)).tolist() == [0, 0, 0]
    assert topology.num_nodes == total == 1 + sum(math.prod(schedule[: i + 1]) for i in range(len(schedule)))
    assert parse_topology(",".join(map(str, schedule))) == topology


def test_the_papers_schedule():
    assert Expansion(3, 2, 1, 1).num_nodes == 1 + 3 + 6 + 6 + 6
    assert str(Expansion(3, 2, 1, 1)) == "<3,2,1,1>"


@given(st.integers(1, MAX_NODES - 1))
def test_a_chain_has_one_child_a_node(k):
    chain = Chain(k)
    assert chain.num_nodes == k + 1 and chain.max_depth == k
    assert chain.expand(level(k - 1, 2)).tolist() == [1, 1] and chain.expand(level(k, 2)).tolist() == [0, 0]


@pytest.mark.parametrize("schedule", [(), (0,), (2, -1), (2, 0, 1), (1.5,), (True,), ("2",)])
def test_widths_must_be_positive_integers(schedule):
    with pytest.raises(ConfigError, match="positive widths"):
        Expansion(*schedule)


@pytest.mark.parametrize("schedule", [(1023, 1), (1024,), (4,) * 5, (2,) * 10, (10_000,) * 100])
def test_too_many_nodes_name_the_limit(schedule):
    with pytest.raises(ConfigError, match="limit is 1024"):
        Expansion(*schedule)


def test_the_largest_expansions_fit():
    assert Expansion(1023).num_nodes == Chain(1023).num_nodes == MAX_NODES


@pytest.mark.parametrize("k", [0, -1, True, 2.0, None])
def test_a_chain_needs_a_token(k):
    with pytest.raises(ConfigError, match="at least 1"):
        Chain(k)


def test_a_chain_too_long_names_the_limit():
    with pytest.raises(ConfigError, match="at most 1023"):
        Chain(MAX_NODES)


@pytest.mark.parametrize("text", ["", "3,", "a", "3;2", "3.5"])
def test_a_text_that_is_no_schedule_is_refused(text):
    with pytest.raises(ConfigError, match="separated by commas"):
        parse_topology(text)
