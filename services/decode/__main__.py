"""``python -m services.decode``: one decode worker as a process, configured by ``PDMESH_*``."""

import sys

from services.decode.app import serve_decode
from shared.config import DecodeConfig
from shared.runtime.worker_process import run_worker_from_environment

if __name__ == "__main__":
    sys.exit(run_worker_from_environment("decode", serve_decode, DecodeConfig))
