"""`python -m services.scheduler`"""

from services.runtime import start
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import make_serve

if __name__ == "__main__":
    start("scheduler", SchedulerConfig, make_serve)
