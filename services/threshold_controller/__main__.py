"""`python -m services.threshold_controller`"""

import sys

from services.runtime import main
from services.settings import ConfigError, load_section
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.service import make_serve

if __name__ == "__main__":
    try:
        config = load_section(ThresholdControllerConfig, "threshold_controller")
        serve = make_serve(config)
    except ConfigError as error:
        print(f"threshold-controller: {error}", file=sys.stderr)
        sys.exit(2)
    main("threshold-controller", serve, metrics_port=config.metrics_port)
