# SPDX-License-Identifier: Apache-2.0
"""What to copy and where it goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_insight_hooks.report.collect.model import FileStat, Survey
from rl_insight_hooks.report.collect.plan import (
    Kept,
    Offer,
    assign,
    conflict_path,
    group_by_folder,
    is_safe,
    is_same_folder,
    place,
)

P = "step_1/r/rank0/group_list.json"


def survey(*files, now=1000.0, fine=True):
    return Survey(
        folder="/d", files=tuple(FileStat(*f) for f in files), is_clock_fine=fine, listed_unix_s=now
    )


OLD_NS = 900 * 10**9


def test_one_folder_is_told_by_inode_and_mtime():
    a = survey(("a", 1, 10, OLD_NS), ("b", 2, 10, OLD_NS + 1))
    assert is_same_folder(a, a)
    assert not is_same_folder(a, survey(("a", 1, 10, OLD_NS), ("b", 3, 10, OLD_NS + 1)))  # a copy
    assert not is_same_folder(a, survey(("a", 1, 10, OLD_NS), ("b", 2, 10, OLD_NS + 2)))
    assert not is_same_folder(a, survey(("a", 1, 10, OLD_NS)))
    assert not is_same_folder(survey(), survey())
    coarse = survey(("a", 1, 10, OLD_NS), fine=False)
    assert not is_same_folder(coarse, coarse)  # seconds alone prove nothing


def test_files_that_change_while_we_look_do_not_hide_that_it_is_one_folder():
    a = survey(("a", 1, 10, OLD_NS), ("busy", 2, 10, 998 * 10**9))
    b = survey(("a", 1, 10, OLD_NS), ("busy", 7, 99, 1000 * 10**9), ("new", 9, 1, 1000 * 10**9))
    assert is_same_folder(a, b)
    only_new = survey(("busy", 2, 10, 998 * 10**9))
    assert not is_same_folder(only_new, only_new)


def test_groups():
    a, b = survey(("a", 1, 10, OLD_NS)), survey(("a", 2, 10, OLD_NS))
    assert group_by_folder({"n1": a, "n2": b, "n3": a}) == [["n1", "n3"], ["n2"]]


def test_each_version_is_asked_for_once_from_a_living_holder():
    holders = {("p", "x"): ["n1", "n2"], ("q", "y"): ["n2"], ("r", "z"): ["n3"]}
    assert assign(holders, holders, ["n1", "n2", "n3"]) == {"n1": ["p"], "n2": ["q"], "n3": ["r"]}
    assert assign(holders, holders, ["n2"]) == {"n2": ["p", "q"]}
    assert assign(holders, holders, []) == {}


def put_of(placement):
    return {(offer.source, target) for offer, target in placement.put}


def replaced(placement):
    return {(offer.source, target) for offer, target in placement.replace}


def test_a_new_file_and_its_copy_go_in_once():
    placement = place([Offer(P, "x", 1, "n1"), Offer(P, "x", 2, "n2")], {})
    assert put_of(placement) == {("n1", P)}
    assert placement.conflicts == {}


def test_different_content_is_kept_apart_and_no_side_is_taken():
    placement = place([Offer(P, "x", 1, "n1"), Offer(P, "y", 2, "n2")], {})
    targets = {"n1": conflict_path("n1", P), "n2": conflict_path("n2", P)}
    assert put_of(placement) == set(targets.items())
    assert placement.conflicts == {P: targets}


@pytest.mark.parametrize(
    ("mtime", "origin", "broken", "outcome"),
    [
        (20, "n1", False, "replace"),  # newer
        (10, "n1", False, "replace"),  # same moment: the source's present file
        (5, "n1", False, "older"),
        (20, None, False, "replace"),  # nobody knows where ours is from, theirs is newer
        (10, None, False, "older"),
        (5, None, True, "replace"),  # ours is torn
        (20, "n2", False, "apart"),  # ours came from elsewhere
    ],
)
def test_a_file_that_is_here(mtime, origin, broken, outcome):
    home = {P: Kept("old", 10, origin, broken)}
    placement = place([Offer(P, "new", mtime, "n1")], home)
    own = conflict_path("n1", P)
    assert replaced(placement) == ({("n1", P)} if outcome == "replace" else set())
    assert placement.older == ([P] if outcome == "older" else [])
    assert put_of(placement) == ({("n1", own)} if outcome == "apart" else set())
    apart = {P: {"n1": own, "n2": P}}
    assert placement.conflicts == (apart if outcome == "apart" else {})


def test_two_versions_against_one_of_unknown_origin_replace_nothing():
    home = {P: Kept("old", 10, None)}
    placement = place([Offer(P, "x", 20, "n1"), Offer(P, "y", 30, "n2")], home)
    assert placement.replace == []
    assert len(placement.put) == 2
    assert placement.conflicts[P]["already here"] == P


def test_a_conflict_stays_where_it_is_kept():
    own = conflict_path("n1", P)
    home = {own: Kept("x", 10, "n1")}
    same = place([Offer(P, "x", 10, "n1")], home)
    assert (same.put, same.replace) == ([], [])
    newer = place([Offer(P, "z", 20, "n1")], home)
    assert replaced(newer) == {("n1", own)}


OFFERS = st.lists(
    st.builds(
        Offer,
        path=st.sampled_from(["a", "b"]),
        sha256=st.sampled_from(["x", "y", "z"]),
        mtime_ns=st.integers(0, 3),
        source=st.sampled_from(["n1", "n2", "n3"]),
    ),
    max_size=6,
    unique_by=lambda offer: (offer.path, offer.source),
)
KEPT = st.builds(
    Kept,
    sha256=st.sampled_from(["x", "y", "z"]),
    mtime_ns=st.integers(0, 3),
    source=st.sampled_from([None, "n1", "n2", "n3"]),
    is_broken=st.booleans(),
)


@given(OFFERS, st.dictionaries(st.sampled_from(["a", "b"]), KEPT))
def test_no_content_is_lost_and_nothing_newer_is_replaced(offers, home):
    placement = place(offers, home)
    targets = [target for _, target in placement.put]
    assert len(set(targets)) == len(targets)
    assert not set(targets) & set(home)  # a put never covers a file
    for offer, target in placement.replace:
        assert home[target].is_broken or offer.mtime_ns >= home[target].mtime_ns
    after = {path: kept.sha256 for path, kept in home.items()}
    after |= {target: offer.sha256 for offer, target in [*placement.put, *placement.replace]}
    for offer in offers:
        versions = {
            digest
            for path, digest in after.items()
            if path == offer.path or path.endswith("/" + offer.path)
        }
        assert (
            offer.sha256 in versions
            or offer.path in placement.older
            or any(o.path == offer.path and t == offer.path for o, t in placement.replace)
        )


def test_conflict_paths_never_meet_and_stay_inside():
    names = ["u@h:/data", "u_h_data", "u@h_/data", "../../etc", "", ".", "h"]
    paths = [conflict_path(name, P) for name in names]
    assert len(set(paths)) == len(names)
    assert all(is_safe(path) and path.count("..") == 0 for path in paths)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b"])
def test_unsafe_paths(path):
    assert not is_safe(path)


def test_safe_path():
    assert is_safe("step_1/a role/..b/rank0/group_list.json")
