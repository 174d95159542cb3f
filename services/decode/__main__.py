"""``python -m services.decode``: one decode worker as a process, configured by ``PDMESH_*``."""

import sys

from services.decode.role import decode_launch
from shared.config import DecodeConfig
from shared.runtime.service import run_configured
from shared.worker.process import run_worker

if __name__ == "__main__":
    sys.exit(
        run_configured(
            "decode", DecodeConfig, lambda config: run_worker(config, decode_launch(config))
        )
    )
