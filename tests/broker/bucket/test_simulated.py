"""Nothing acknowledged is lost, repeated or changed, whatever fails and in which order.

Seeds draw crashes, faults and turns of reduced owners. `test_pairs` enumerates crash points and
faults of whole ones, and `test_watched_owners` draws them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.runs.bucket_owners import Crashed, World
from kit.tiers import PLANTED, sized
from logmirror.broker.bucket import chain_writer
from logmirror.broker.bucket.bundles import BUNDLES
from logmirror.broker.bucket.chain import Coverage
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.tiling import tiled
from logmirror.errors import FencedError, LogmirrorError
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
SEEDS = sized(150, 1_000, 10_000)
_BUG_SEEDS = 2_000
_FIRST_SEED = {"merged without a commit": 340, "merged anywhere": 5_600}
"""Where the search for a rare loss begins; 0 for the others."""


@pytest.mark.thinned
@pytest.mark.timeout(sized(600, 600, 3_600))
def test_no_seed_loses_anything(tmp_path):
    kinds = set()
    crashed = fenced = acked = bundled = merged = compacted = passed = 0
    for seed in range(SEEDS):
        world = World(seed, tmp_path / str(seed), is_busy=seed % 3 == 0)
        problems = world.run()
        assert problems == [], f"seed {seed}"
        crashed += any(type(one.end) is Crashed for one in world.turns.owners)
        fenced += any(type(one.end) is FencedError for one in world.turns.owners)
        acked += len(world.acked)
        merged += world.merged
        compacted += world.compacted
        passed += world.passed
        kinds |= {name.split("/")[0] for name in world.store.objects}
        bundled += any(name.startswith(BUNDLES) for name in world.store.objects)
    assert len(kinds) == 2  # commits and objects
    assert min(bundled, merged, compacted) > SEEDS / 4
    assert min(crashed, fenced, passed) > SEEDS / 4
    assert acked > 10 * SEEDS


def found_by(tmp_path: Path, bug: str = "", *, is_busy: bool = False) -> list[str]:
    first = _FIRST_SEED.get(bug, 0)
    for seed in range(first, first + _BUG_SEEDS):
        if problems := World(seed, tmp_path / str(seed), bug=bug, is_busy=is_busy).run():
            return problems
    return []


@PLANTED
def test_a_store_that_replaces_is_found(tmp_path, monkeypatch):
    def add(self: Any, name: str, data: bytes) -> None:
        self.objects[name] = data

    monkeypatch.setattr("logmirror.testing.memory_store.MemoryStore._add", add)
    assert found_by(tmp_path)


@PLANTED
def test_a_number_that_is_used_again_after_an_unknown_outcome_is_found(tmp_path, monkeypatch):
    def create(self: Any, data: bytes) -> int:
        name = chain_writer.commit_name(self.next_sequence)
        try:
            self._store.create(name, data)
        except AlreadyExistsError:
            pass
        except LogmirrorError:
            self.next_sequence += 1
            raise
        self.next_sequence += 1
        return int(self.next_sequence) - 1

    monkeypatch.setattr(ChainWriter, "create", create)
    assert found_by(tmp_path)


@PLANTED
def test_an_owner_that_believes_every_object_is_its_own_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(ChainWriter, "_is_ours", lambda *_: True)
    assert found_by(tmp_path)


@PLANTED
def test_commits_that_are_removed_too_early_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Coverage, "_missing", lambda *_: False)
    assert found_by(tmp_path)


@PLANTED
def test_a_takeover_without_a_fence_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(ChainWriter, "take_over", _take_over_without_fence)
    assert found_by(tmp_path)


@PLANTED
def test_a_fence_that_is_removed_is_found(tmp_path, monkeypatch):
    add = Coverage.add

    def as_any_other(self: Any, *args: Any, is_fence: bool = False) -> None:
        add(self, *args)

    monkeypatch.setattr(Coverage, "add", as_any_other)
    assert found_by(tmp_path)


@PLANTED
def test_a_fence_that_is_not_looked_behind_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(ChainWriter, "check", lambda _: None)
    assert found_by(tmp_path)


@PLANTED
def test_an_epoch_that_others_between_listing_and_fence_have_is_found(tmp_path, monkeypatch):
    def go_on(self: Any) -> None:
        self.next_sequence += 1

    monkeypatch.setattr(ChainWriter, "_pass", go_on)
    assert any("epoch of a fence" in one for one in found_by(tmp_path, is_busy=True))


def _take_over_without_fence(self: Any, _: int | None = None) -> None:
    """Begin behind what is there, as if no other owner could write."""
    found = list(self._store.names(chain_writer.COMMITS))
    self.epoch, self.next_sequence = len(found) + 1, 1_000 * (1 + int(self._writer))


@PLANTED
def test_a_bundle_of_what_is_not_in_the_chain_is_found(tmp_path):
    assert found_by(tmp_path, bug="bundled early")


@PLANTED
@pytest.mark.parametrize("bug", ["merged without a commit", "deleted first", "merged anywhere"])
def test_merges_in_another_order_are_found(tmp_path, bug):
    assert found_by(tmp_path, bug=bug)


@PLANTED
@pytest.mark.parametrize(
    "bug", ["no row", "row first", "row last", "compacted under the same name", "merged over"]
)
def test_compactions_in_another_way_are_found(tmp_path, bug):
    assert found_by(tmp_path, bug=bug)


@PLANTED
def test_a_segment_beside_the_compacted_one_that_replaced_it_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("logmirror.broker.bucket.sealed_objects._is_replaced", lambda *_: False)
    assert found_by(tmp_path)


@PLANTED
def test_sources_that_are_preferred_to_the_merged_object_are_found(tmp_path, monkeypatch):
    def smallest(objects: Any, log_start: int) -> Any:
        nested = {
            one
            for one in objects
            for other in objects
            if one != other and other.first >= one.first and other.last <= one.last
        }
        return tiled([one for one in objects if one not in nested], log_start)

    monkeypatch.setattr("logmirror.broker.bucket.sealed_objects.tiled", smallest)
    assert found_by(tmp_path)


@PLANTED
@pytest.mark.parametrize(
    ("bug", "problem"), [("switched late", ", not ["), ("reported early", "A16")]
)
def test_what_readers_notice_is_found(tmp_path, bug, problem):
    """A last owner finds everything."""
    assert any(problem in one for one in found_by(tmp_path, bug=bug))


@PLANTED
def test_objects_without_a_cut_in_the_chain_are_found(tmp_path):
    assert found_by(tmp_path, bug="cut late")


@PLANTED
def test_a_commit_that_is_removed_before_its_object_exists_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.runs.bucket_owners.upload", lambda *_: None)
    assert found_by(tmp_path)
