"""Code that runs inside an SGLang server: entry point, push gate, weight receiver, checksums, entropies, CPU stubs.

Processes outside the server import only constants from here.
"""
