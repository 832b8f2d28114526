"""`python -m services.step_predictor`. A predictor is made by `python -m tools.predictor`."""

import sys

from services.runtime import main
from services.settings import ConfigError, load_section
from services.step_predictor.config import StepPredictorConfig
from services.step_predictor.service import make_serve

if __name__ == "__main__":
    try:
        config = load_section(StepPredictorConfig, "step_predictor")
        serve = make_serve(config)
    except ConfigError as error:
        print(f"step-predictor: {error}", file=sys.stderr)
        sys.exit(2)
    main("step-predictor", serve, metrics_port=config.metrics_port)
