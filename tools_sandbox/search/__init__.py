"""The search tool: remembered queries first, then one engine.

`corpus` reads the sources, `index` builds and opens what is kept of them (BM25 by the library `tantivy`, memory-mapped,
one for all processes), `remote` speaks to engines behind HTTP, `tool` answers a call.
"""
