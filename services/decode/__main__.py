"""``python -m services.decode``: one decode worker as a process, configured by ``PDMESH_*``."""

import sys

from shared.config import DecodeConfig
from shared.worker.process import run_worker_from_environment

if __name__ == "__main__":
    sys.exit(run_worker_from_environment(DecodeConfig))
