"""`python -m services.threshold_controller`"""

from services.runtime import start
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.service import make_serve

if __name__ == "__main__":
    start("threshold-controller", ThresholdControllerConfig, make_serve)
