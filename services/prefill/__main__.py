"""``python -m services.prefill``: one prefill worker as a process, configured by ``PDMESH_*``."""

import sys

from shared.config import PrefillConfig
from shared.worker.process import run_worker_from_environment

if __name__ == "__main__":
    sys.exit(run_worker_from_environment(PrefillConfig))
