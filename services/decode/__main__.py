"""``python -m services.decode``: one decode worker as a process, configured by ``PDMESH_*``."""

import sys

from shared.config import DecodeConfig
from shared.runtime.worker_process import run_worker_from_environment
from shared.worker.worker import serve_worker

if __name__ == "__main__":
    sys.exit(run_worker_from_environment(serve_worker, DecodeConfig))
