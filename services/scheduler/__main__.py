"""`python -m services.scheduler`"""

import sys

from services.runtime import main
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import make_serve
from services.settings import ConfigError, load_section

if __name__ == "__main__":
    try:
        config = load_section(SchedulerConfig, "scheduler")
        serve = make_serve(config)
    except ConfigError as error:
        print(f"scheduler: {error}", file=sys.stderr)
        sys.exit(2)
    main("scheduler", serve, metrics_port=config.metrics_port)
