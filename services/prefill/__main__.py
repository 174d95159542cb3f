"""``python -m services.prefill``: one prefill worker as a process, configured by ``PDMESH_*``."""

import sys

from services.prefill.app import serve_prefill
from shared.config import PrefillConfig
from shared.runtime.worker_process import run_worker_from_environment

if __name__ == "__main__":
    sys.exit(run_worker_from_environment("prefill", serve_prefill, PrefillConfig))
