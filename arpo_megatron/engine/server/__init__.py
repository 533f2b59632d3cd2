"""Code that runs inside an SGLang server: entry point, push gate, weight receiver, checksums, entropies, CPU stubs.

May import SGLang, `engine.request`, `engine.version`, `engine.wire`, `hardware`, `utils` and `errors`; processes
outside the server import only constants and entropies from here, and `bench.engine_kernels` the kernels.
"""
