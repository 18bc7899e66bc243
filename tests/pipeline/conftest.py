from tests.core.conftest import both_ways_into_a_bucket, optimizers_are_tried_once

__all__ = ["both_ways_into_a_bucket", "optimizers_are_tried_once"]
