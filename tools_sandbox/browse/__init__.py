"""The browse tool, which returns a page of the public web as text. It runs in a worker process.

`addresses` decides which machines may be reached, `fetch` requests a page within bounds, `parser` starts the isolated
process in which `text` turns bytes into text, `tool` answers a call. May import `python_tool`, `tool`, `config`,
`answers` and `utils`. `text` and `page` import only libraries: the parsing processes load them.
"""
