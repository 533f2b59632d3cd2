"""Search over a local corpus: exact look-up of remembered queries, BM25 (library `bm25s`) for the rest."""

from __future__ import annotations

import re

import bm25s
import numpy as np
from bm25s.stopwords import STOPWORDS_EN

from tools_sandbox.corpus import Corpus, normalise_query

NO_RESULTS = "No results found."

# Every run of letters and digits counts, also a single one: names and numbers are what is asked for.
_TOKEN = re.compile(r"\w+")
_QUESTION_WORDS = "who whom whose what which when where why how did does do were has have had can many much"
_IGNORED_IN_QUERIES = frozenset((*STOPWORDS_EN, *_QUESTION_WORDS.split()))


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text.casefold())


class SearchIndex:
    """Finds passages of a corpus. Safe to use from several threads."""

    def __init__(self, corpus: Corpus) -> None:
        self.fingerprint = corpus.fingerprint
        self._passages = corpus.passages
        self._remembered = corpus.remembered
        self._bm25 = bm25s.BM25(method="lucene")
        tokens = [_tokens(passage) for passage in corpus.passages]
        self._searchable = any(tokens)
        if self._searchable:
            self._bm25.index(tokens, show_progress=False)

    def search(self, query: str, k: int) -> str:
        """At most k results as "Page 1: ...\\nPage 2: ...", best first; NO_RESULTS if no passage has a query word."""
        pages = self._remembered.get(normalise_query(query))
        if pages is None:
            pages = self._ranked(query, k)
        return "\n".join(f"Page {number}: {page}" for number, page in enumerate(pages[:k], start=1)) or NO_RESULTS

    def _ranked(self, query: str, k: int) -> list[str]:
        if not self._searchable:
            return []
        words = _tokens(normalise_query(query))
        # Otherwise "what is <unknown name>" would find whatever has an "is". A query of such words alone keeps them.
        words = [word for word in words if word not in _IGNORED_IN_QUERIES] or words
        words = [word for word in words if word in self._bm25.vocab_dict]
        if not words:
            return []
        scores = np.asarray(self._bm25.get_scores(words), dtype=np.float64)
        found = np.flatnonzero(scores > 0)
        # Stable, so equal scores keep the order of the corpus and an answer is the same on every machine.
        best = found[np.argsort(-scores[found], kind="stable")[:k]]
        return [self._passages[int(index)] for index in best]
