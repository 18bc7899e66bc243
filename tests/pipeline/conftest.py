from tests.core.conftest import optimizers_are_tried_once

__all__ = ["optimizers_are_tried_once"]
