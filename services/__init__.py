"""The services: gateway, prefill, decode, and the command line that starts them. They meet in
proto/ alone."""

import sys

if "rich" not in sys.modules:
    # structlog takes it where it finds it, to draw tracebacks, which here are text: that would be
    # 45 ms of every start and 3 MiB of every process.
    sys.modules["rich"] = None  # pyright: ignore[reportArgumentType]
    try:
        import structlog  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except KeyboardInterrupt:  # of a command, which cannot say so yet
        raise SystemExit(130) from None

    del sys.modules["rich"]
