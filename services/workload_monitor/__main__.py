"""`python -m services.workload_monitor`"""

from services.runtime import start
from services.workload_monitor.config import WorkloadMonitorConfig
from services.workload_monitor.service import make_serve

if __name__ == "__main__":
    start("workload-monitor", WorkloadMonitorConfig, make_serve)
