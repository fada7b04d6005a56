"""Pages by number: who holds them, what may be shared, what goes first. A machine compares them with a naive model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rooflight.engine.page_pool import ROOT, PagePool

BIG = 2**61 - 1  # CPython gives it the hash of 0, and so tuples with the one the hashes of tuples with the other


def publish(pool: PagePool, pages: list[int], tokens: list[int]) -> list[int]:
    """Publish full pages from the beginning of a chain; returns their links."""
    links, link, size = [], ROOT, pool.page_size
    for number, page in enumerate(pages):
        link = pool.publish(page, link, tokens[number * size : (number + 1) * size])
        links.append(link)
    return links


def shared(pool: PagePool, tokens: list[int]) -> list[int]:
    """The pages that are found for tokens; they are given back at once."""
    pages, _ = pool.share(tokens, len(tokens) // pool.page_size)
    pool.give_back(pages)
    return pages


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    pool.give_back(first)
    assert pool.free == 2
    assert sorted(pool.take(2)) == sorted(first)


def test_taking_more_than_is_free_takes_nothing_and_says_the_numbers() -> None:
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(RuntimeError, match="4 pages asked for, 3 of 4 are free"):
        pool.take(4)
    assert pool.free == 3
    assert pool.take(0) == []


def test_the_same_history_gives_the_same_pages() -> None:
    """Runs are repeatable down to the slots: the first pages go first, those given back last are reused first."""
    pool = PagePool(6)
    a, b = pool.take(2), pool.take(2)
    assert (a, b) == ([0, 1], [2, 3])
    pool.give_back(a)
    assert pool.take(3) == [0, 1, 4]


def test_giving_back_what_nobody_holds_is_an_error() -> None:
    pool = PagePool(3, page_size=2)
    pages = pool.take(2)
    publish(pool, pages[:1], [1, 2])
    pool.give_back(pages)
    for page in range(3):  # idle, free and never taken
        with pytest.raises(RuntimeError, match=f"page {page} was given back, but nobody holds it"):
            pool.give_back([page])
    assert pool.free == 3


def test_a_published_page_is_shared_while_held_and_afterwards() -> None:
    pool = PagePool(4, page_size=2)
    pages = pool.take(2)
    links = publish(pool, pages, [1, 2, 3, 4])
    assert pool.share([1, 2, 3, 4, 5], 2) == (pages, links[1])
    pool.give_back(pages)
    assert pool.free == 2  # the second holder still has them
    pool.give_back(pages)
    assert (pool.free, pool.shareable) == (4, 2)
    assert pool.share([1, 2, 3, 4, 5], 2) == (pages, links[1])
    assert (pool.free, pool.shareable) == (2, 2)


def test_a_prefix_is_shared_as_far_as_it_is_the_same_and_no_further_than_asked() -> None:
    pool = PagePool(4, page_size=2)
    pages = pool.take(3)
    links = publish(pool, pages, [1, 2, 3, 4, 5, 6])
    assert pool.share([1, 2, 3, 4, 5, 6], 3) == (pages, links[2])
    assert pool.share([1, 2, 3, 4, 5, 6], 2) == (pages[:2], links[1])
    assert pool.share([1, 2, 3, 4, 5, 6], 0) == ([], ROOT)
    assert pool.share([1, 2, 3, 9, 5, 6], 3) == (pages[:1], links[0])
    assert pool.share([9, 2, 3, 4, 5, 6], 3) == ([], ROOT)
    assert pool.share([3, 4, 5, 6], 2) == ([], ROOT)  # the same tokens elsewhere are another page
    assert [pool._holders[page] for page in pages] == [4, 3, 2]


def test_two_prefixes_may_have_the_same_tokens_behind_them() -> None:
    pool = PagePool(4, page_size=1)
    pages = pool.take(4)
    publish(pool, pages[:2], [1, 7])
    publish(pool, pages[2:], [2, 7])
    assert shared(pool, [1, 7]) == pages[:2]
    assert shared(pool, [2, 7]) == pages[2:]


def test_prefixes_with_one_hash_are_told_apart_by_their_tokens() -> None:
    assert hash((ROOT, (0, BIG, 5))) == hash((ROOT, (BIG, 0, 5)))
    pool = PagePool(3, page_size=3)
    pages = pool.take(3)
    publish(pool, pages[:1], [0, BIG, 5])
    assert shared(pool, [BIG, 0, 5]) == []
    publish(pool, pages[1:2], [BIG, 0, 5])
    publish(pool, pages[2:], [BIG, BIG, 5])
    assert shared(pool, [0, BIG, 5]) == pages[:1]
    assert shared(pool, [BIG, 0, 5]) == pages[1:2]
    assert shared(pool, [BIG, BIG, 5]) == pages[2:]
    assert shared(pool, [0, 0, 5]) == []


def test_pages_that_hold_nothing_are_taken_before_a_prefix_is_given_up() -> None:
    pool = PagePool(4, page_size=1)
    pages = pool.take(2)
    publish(pool, pages, [1, 2])
    pool.give_back(pages)
    assert pool.take(2) == [2, 3]
    assert shared(pool, [1, 2]) == pages
    assert (pool.free, pool.shareable) == (2, 2)


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    pool = PagePool(3, page_size=1)
    pages = pool.take(3)
    publish(pool, pages, [1, 2, 3])
    pool.give_back(pages)
    for left in (2, 1, 0):
        pool.take(1)
        assert shared(pool, [1, 2, 3]) == pages[:left]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = PagePool(3, page_size=1)
    pages = pool.take(3)
    for page, token in zip(pages, (1, 2, 3), strict=True):
        publish(pool, [page], [token])
        pool.give_back([page])
    assert shared(pool, [1]) == pages[:1]  # used again: now 2 is the oldest
    pool.take(1)
    assert [shared(pool, [token]) for token in (1, 2, 3)] == [pages[:1], [], pages[2:]]
    pool.take(1)
    assert [shared(pool, [token]) for token in (1, 2, 3)] == [[], [], pages[2:]]


def test_a_held_prefix_is_never_given_up() -> None:
    pool = PagePool(3, page_size=1)
    pages = pool.take(2)
    publish(pool, pages, [1, 2])
    pool.share([1], 1)
    pool.give_back(pages)
    assert pool.free == 2
    assert sorted(pool.take(2)) == [1, 2]
    with pytest.raises(RuntimeError, match="1 pages asked for, 0 of 3 are free"):
        pool.take(1)
    assert shared(pool, [1, 2]) == pages[:1]


def test_a_page_published_a_second_time_keeps_its_first_place() -> None:
    """Two sequences compute the same prompt at the same moment: one page is shared, the other one serves its holder."""
    pool = PagePool(5, page_size=1)
    a, b = pool.take(2), pool.take(2)
    links = publish(pool, a, [1, 2])
    assert publish(pool, b, [1, 2]) == links
    assert publish(pool, a, [1, 2]) == links
    assert (shared(pool, [1, 2]), pool.shareable) == (a, 2)
    pool.give_back(b)
    assert pool._idle == {}  # the second copy can be found by nobody: it is free, not idle
    assert pool.free == 3
    pool.give_back(a)
    assert list(pool._idle) == [1, 0]


def test_what_follows_a_second_copy_is_published_behind_the_first() -> None:
    pool = PagePool(4, page_size=1)
    (a,), b = pool.take(1), pool.take(2)
    publish(pool, [a], [1])
    publish(pool, b, [1, 2])
    assert shared(pool, [1, 2]) == [a, b[1]]


def test_what_follows_a_prefix_that_is_gone_is_not_found_behind_the_page_that_took_its_place() -> None:
    """Links are never given twice: the same page with the same tokens is a new beginning."""
    pool = PagePool(2, page_size=1)
    pages = pool.take(2)
    links = publish(pool, pages, [1, 2])
    pool.give_back(pages[:1])  # the child is still held while its parent goes
    (again,) = pool.take(1)
    assert again == pages[0]
    (link,) = publish(pool, [again], [7])
    assert link not in [ROOT, *links]
    assert shared(pool, [7, 2]) == [again]
    assert shared(pool, [1, 2]) == []
    pool.give_back([again])
    (third,) = pool.take(1)
    assert publish(pool, [third], [1])[0] not in [ROOT, link, *links]
    assert shared(pool, [1, 2]) == [third]  # the old child held the same tokens, but nobody can know


def test_behind_a_prefix_that_is_gone_nothing_is_published() -> None:
    pool = PagePool(3, page_size=1)
    parent, child, grandchild = pool.take(3)
    (link,) = publish(pool, [parent], [1])
    pool.give_back([parent])
    pool.take(1)
    assert pool.publish(child, link, [2]) == link
    assert pool.publish(grandchild, link, [2]) == link
    assert (pool.shareable, pool._published, pool._keys) == (0, {}, {})
    pool.give_back([child, grandchild])
    assert pool._free == [grandchild, child]


def test_withdrawn_pages_stay_with_their_holders_and_are_then_free() -> None:
    pool = PagePool(3, page_size=1)
    pages = pool.take(2)
    publish(pool, pages, [1, 2])
    pool.share([1, 2], 2)
    pool.withdraw(pages[1:])
    assert shared(pool, [1, 2]) == pages[:1]
    assert (pool.free, pool.shareable) == (1, 1)
    pool.give_back(pages)
    assert pool.free == 1
    pool.give_back(pages)
    assert (pool.free, pool.shareable, list(pool._idle)) == (3, 1, [0])
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_withdrawn_idle_pages_are_free_at_once() -> None:
    pool = PagePool(3, page_size=1)
    pages = pool.take(2)
    publish(pool, pages, [1, 2])
    pool.give_back(pages)
    pool.withdraw([pages[0], pages[0], 2])  # neither twice nor what was never published is an error
    assert (pool.free, pool.shareable, list(pool._idle), pool._free) == (3, 1, [1], [2, 0])
    assert shared(pool, [1, 2]) == []
    pool.withdraw(pages)
    assert (pool.free, pool.shareable, list(pool._idle), pool._free) == (3, 0, [], [2, 0, 1])
    assert sorted(pool.take(3)) == [0, 1, 2]


@dataclass(eq=False)
class Entry:
    """A published page of the model: all the tokens up to its end, and the very page that it follows."""

    page: int
    chain: list[int]
    before: Entry | None
    link: int


@dataclass(eq=False)
class Holder:
    tokens: list[int]
    pages: list[int]
    published: int
    link: int
    last: Entry | None
    lost: bool = False  # what its pages follow is gone


# Few texts, so that they meet; their pages of two tokens have one hash.
TEXTS = [[0, BIG] * 4, [0, BIG, 0, BIG, BIG, 0, 5, 5], [BIG, 0] * 4, [0, BIG, 5, 5, 0, BIG, 0, BIG]]
PLACES = st.integers(0, 3)  # in the list of holders, counted round and round


class Pages(RuleBasedStateMachine):
    """Holders come, publish, fail and go. The model is a list of all published pages with their tokens, searched
    from end to end, and a list of the idle ones."""

    counts: ClassVar[Counter[str]] = Counter()

    @initialize(num_pages=st.integers(1, 6), page_size=st.integers(1, 2))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.size = page_size
        self.holders: list[Holder] = []
        self.entries: list[Entry] = []
        self.idle: list[int] = []
        self.free = set(range(num_pages))

    def alive(self, entry: Entry | None) -> bool:
        return entry is None or any(entry is other for other in self.entries)

    def follower(self, before: Entry | None, chain: list[int]) -> Entry | None:
        return next((e for e in self.entries if e.before is before and e.chain == chain), None)

    @precondition(lambda self: len(self.holders) < 4)
    @rule(text=st.sampled_from(TEXTS), length=st.integers(0, 8))
    def come(self, text: list[int], length: int) -> None:
        tokens = text[:length]
        most = len(tokens) // self.size
        expected: list[Entry] = []
        before: Entry | None = None
        while len(expected) < most:
            found = self.follower(before, tokens[: (len(expected) + 1) * self.size])
            if found is None:
                break
            expected.append(found)
            before = found
        pages, link = self.pool.share(tokens, most)
        assert pages == [entry.page for entry in expected]
        assert link == (expected[-1].link if expected else ROOT)
        self.counts["come"] += 1
        self.counts["shared"] += len(pages)
        self.idle = [page for page in self.idle if page not in pages]
        holder = Holder(tokens, pages, len(pages), link, before)
        self.take(holder, most - len(pages))
        if holder.pages:
            self.holders.append(holder)

    def take(self, holder: Holder, count: int) -> None:
        if count > len(self.free) + len(self.idle):
            with pytest.raises(RuntimeError, match=f"^{count} pages asked for, {len(self.free) + len(self.idle)} of"):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        given_up = self.idle[: max(0, count - len(self.free))]
        if given_up:
            assert set(taken) == self.free | set(given_up)
        assert set(taken) <= self.free | set(given_up)
        self.counts["given up"] += len(given_up)
        self.free -= set(taken)
        self.idle = self.idle[len(given_up) :]
        self.entries = [entry for entry in self.entries if entry.page not in given_up]
        holder.pages += taken

    @precondition(lambda self: self.holders)
    @rule(place=PLACES, most=st.integers(1, 4))
    def publish(self, place: int, most: int) -> None:
        holder = self.holders[place % len(self.holders)]
        for number in range(holder.published, min(holder.published + most, len(holder.pages))):
            self.publish_page(holder, number)

    def publish_page(self, holder: Holder, number: int) -> None:
        chain = holder.tokens[: (number + 1) * self.size]
        link = self.pool.publish(holder.pages[number], holder.link, chain[number * self.size :])
        holder.lost = holder.lost or not self.alive(holder.last)
        known = self.follower(holder.last, chain)
        if holder.lost:
            assert link == holder.link
            self.counts["lost"] += 1
        elif known is not None:
            assert link == known.link
            holder.last = known
            self.counts["known"] += 1
        else:
            assert link not in [ROOT, *(entry.link for entry in self.entries)]
            holder.last = Entry(holder.pages[number], chain, holder.last, link)
            self.entries.append(holder.last)
        holder.link, holder.published = link, number + 1

    @precondition(lambda self: self.holders)
    @rule(place=PLACES, failed=st.sampled_from([False, False, False, True]))
    def go(self, place: int, failed: bool) -> None:
        holder = self.holders.pop(place % len(self.holders))
        if failed:
            self.pool.withdraw(holder.pages)
            self.entries = [entry for entry in self.entries if entry.page not in holder.pages]
        self.pool.give_back(holder.pages)
        held = {page for other in self.holders for page in other.pages}
        published = {entry.page for entry in self.entries}
        for page in reversed(holder.pages):
            if page not in held:
                if page in published:
                    self.idle.append(page)
                else:
                    self.free.add(page)

    @precondition(lambda self: self.idle)
    @rule(place=PLACES)
    def withdraw_an_idle_page(self, place: int) -> None:
        page = self.idle[place % len(self.idle)]
        self.pool.withdraw([page])
        self.entries = [entry for entry in self.entries if entry.page != page]
        self.idle.remove(page)
        self.free.add(page)

    @invariant()
    def every_page_is_where_the_model_has_it(self) -> None:
        pool = self.pool
        held = Counter(page for holder in self.holders for page in holder.pages)
        assert pool._holders == [held[page] for page in range(pool.num_pages)]
        assert set(pool._free) == self.free
        assert len(pool._free) == len(self.free)
        assert list(pool._idle) == self.idle
        assert pool._links == {entry.page: entry.link for entry in self.entries}
        assert (pool.free, pool.shareable) == (len(self.free) + len(self.idle), len(self.entries))
        assert sorted([*held, *self.free, *self.idle]) == list(range(pool.num_pages))


Pages.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestPages = Pages.TestCase


def test_long_random_histories_are_those_of_the_model() -> None:
    """Hypothesis makes short histories, which it can shrink; these are long, so that much happens in them."""
    Pages.counts.clear()
    for seed in range(16):
        draw = random.Random(seed)
        machine = Pages()
        machine.start(num_pages=1 + seed % 8, page_size=1 + seed // 8)
        for _ in range(3000):
            kind, place = draw.choices(["come", "publish", "go", "withdraw"], [4, 4, 3, 0.2])[0], draw.randrange(4)
            if kind == "come" and len(machine.holders) < 4:
                machine.come(draw.choice(TEXTS), draw.randint(1, 8))
            elif kind == "publish" and machine.holders:
                machine.publish(place, draw.randint(1, 4))
            elif kind == "go" and machine.holders:
                machine.go(place, failed=draw.random() < 0.1)
            elif kind == "withdraw" and machine.idle:
                machine.withdraw_an_idle_page(place)
            machine.every_page_is_where_the_model_has_it()
    assert all(Pages.counts[what] >= 50 for what in ("shared", "given up", "known", "lost"))
