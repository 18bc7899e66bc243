"""Lightning's own tests, with another strategy in place of the one that ``"auto"`` means on one CPU.

``docs/project/lightnings_own_tests.md`` says what came of it, and how to repeat it.
"""
