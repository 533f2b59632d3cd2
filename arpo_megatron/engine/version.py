"""The version of SGLang that the engines run."""

SGLANG_VERSION = "0.5.18"
"""The patches and stubs in `engine/server/cpu.py` were checked against it."""

_STREAMS_ENTROPIES = "0.5.18"
"""The first version that was found to: 0.5.12 keeps only those of the last piece of a streamed answer."""


def streams_entropies() -> bool:
    """Return whether the installed SGLang streams entropies with the tokens."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    try:
        return Version(version("sglang")) >= Version(_STREAMS_ENTROPIES)
    except PackageNotFoundError:
        return False
