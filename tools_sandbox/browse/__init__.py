"""The browse tool, which returns a page of the public web as text. All of it runs in a worker process.

`addresses` decides which machines may be reached, `fetch` requests a page within bounds, `page` turns bytes into text,
`tool` answers a call. May import `tool`, `config`, `answers` and `utils`.
"""
