"""The browse tool: a page of the public web as text.

`addresses` decides which machines may be asked, `fetch` asks them within bounds, `page` turns bytes into readable text,
`tool` answers a call. All of it runs in a worker process.
"""
