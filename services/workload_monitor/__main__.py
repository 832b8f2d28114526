"""`python -m services.workload_monitor`"""

import sys

from services.runtime import main
from services.settings import ConfigError, load_section
from services.workload_monitor.config import WorkloadMonitorConfig
from services.workload_monitor.service import make_serve

if __name__ == "__main__":
    try:
        config = load_section(WorkloadMonitorConfig, "workload_monitor")
        serve = make_serve(config)
    except ConfigError as error:
        print(f"workload-monitor: {error}", file=sys.stderr)
        sys.exit(2)
    main("workload-monitor", serve, metrics_port=config.metrics_port)
