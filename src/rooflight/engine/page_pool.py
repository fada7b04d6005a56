"""Pages of the KV cache by number: who holds them, and which of them hold a prefix that others may share.

A full page may be published under its tokens and the page before it. Whoever begins with the same tokens later holds
the same pages instead of computing them again. Python's dict is the hash table: it finds a page by the hash of its key
and compares the tokens themselves, so two prefixes with one hash are never mixed up.

A page has any number of holders. Once the last one gives it back, a published page stays as it is, and can be shared,
until its place is needed; the least recently used goes first, and of a chain its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = 0  # what the first page of a chain has before it

Key = tuple[int, tuple[int, ...]]  # link of the page before it, tokens


class PagePool:
    """See the module text. RuntimeError for taking more pages than there are, or giving back what nobody holds."""

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._published: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # of published pages
        # A link stands for a published page in the keys of those behind it. None is given twice, so that what follows
        # a page that is gone is never found behind the page that took its place.
        self._links: dict[int, int] = {}  # page -> link
        self._alive = {ROOT}
        self._newest = ROOT
        self._idle: dict[int, None] = {}  # published and held by nobody, the least recently used first

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def shareable(self) -> int:
        """Published pages, held or not."""
        return len(self._keys)

    def take(self, count: int) -> list[int]:
        """Hold this many pages; their contents are nothing."""
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} of {self.num_pages} are free")
        while len(self._free) < count:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._withdraw(oldest)
            self._free.append(oldest)
        left = len(self._free) - count
        taken = self._free[left:][::-1]  # from the end
        del self._free[left:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Let go of pages, in the order of a sequence."""
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise RuntimeError(f"page {page} was given back, but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def share(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Hold the published pages, at most so many, that begin with these tokens. Also returns the last one's link."""
        pages: list[int] = []
        link = ROOT
        for start in range(0, most * self.page_size, self.page_size):
            page = self._published.get((link, tuple(tokens[start : start + self.page_size])))
            if page is None:
                break
            pages.append(page)
            link = self._links[page]
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)
        return pages, link

    def publish(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Let others share a held, full page that follows the page with link `before`; returns its link.

        If there is such a page already, that one stays the shared one, and it is its link. Behind a page that is gone
        nothing is published.
        """
        if before not in self._alive:
            return before
        key = before, tuple(tokens)
        known = self._published.get(key)
        if known is not None:
            return self._links[known]
        self._newest += 1
        self._published[key], self._keys[page], self._links[page] = page, key, self._newest
        self._alive.add(self._newest)
        return self._newest

    def withdraw(self, pages: Iterable[int]) -> None:
        """Let nobody else share these pages; holders keep them."""
        for page in pages:
            if page in self._keys:
                self._withdraw(page)
                if page in self._idle:
                    del self._idle[page]
                    self._free.append(page)

    def _withdraw(self, page: int) -> None:
        del self._published[self._keys.pop(page)]
        self._alive.remove(self._links.pop(page))
