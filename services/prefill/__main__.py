"""``python -m services.prefill``: one prefill worker as a process, configured by ``PDMESH_*``."""

import sys

from shared.config import PrefillConfig
from shared.runtime.worker_process import run_worker_from_environment
from shared.worker.worker import serve_worker

if __name__ == "__main__":
    sys.exit(run_worker_from_environment(serve_worker, PrefillConfig))
