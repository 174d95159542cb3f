"""The services: gateway, prefill, decode, and the command line that starts them. They meet in
proto/ alone."""

import sys

if "rich" not in sys.modules:
    # structlog takes it where it finds it, to draw tracebacks, which here are text: that would be
    # 45 ms of every start and 3 MiB of every process.
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType]
    import structlog  # noqa: F401  # pyright: ignore[reportUnusedImport]

    del sys.modules["rich"]
