"""``python -m services.gateway``: one gateway as a process, configured by ``PDMESH_*``."""

import sys

from services.gateway.process import run_gateway
from shared.config import GatewayConfig
from shared.runtime.service import run_configured

if __name__ == "__main__":
    sys.exit(run_configured("gateway", GatewayConfig, run_gateway))
