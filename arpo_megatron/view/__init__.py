"""`arpo view`: the pages of a run and of its trees, live from a small web server or as one HTML file.

Everything that a model or a tool wrote is untrusted text here: the server sends it as JSON, and the page shows it as
text only. This package may import `launch` and the layers below it, but no layer above.
"""
