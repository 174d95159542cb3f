"""``python -m services.prefill``: one prefill worker as a process, configured by ``PDMESH_*``."""

import sys

from services.prefill.role import prefill_launch
from shared.config import PrefillConfig
from shared.runtime.service import run_configured
from shared.worker.process import run_worker

if __name__ == "__main__":
    sys.exit(
        run_configured(
            "prefill", PrefillConfig, lambda config: run_worker(config, prefill_launch(config))
        )
    )
