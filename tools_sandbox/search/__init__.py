"""The search tool: it answers remembered queries from its index and other queries from one search engine.

`corpus` reads the sources, `index` builds and opens their BM25 index (library `tantivy`, memory-mapped, shared by all
processes), `remote` calls engines over HTTP, `tool` answers a call. May import `tool`, `config`, `answers`, `utils`.
"""
