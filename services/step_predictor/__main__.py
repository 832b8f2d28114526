"""`python -m services.step_predictor`. A predictor is made by `python -m tools.predictor`."""

from services.runtime import start
from services.step_predictor.config import StepPredictorConfig
from services.step_predictor.service import make_serve

if __name__ == "__main__":
    start("step-predictor", StepPredictorConfig, make_serve)
