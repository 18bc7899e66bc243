"""Support for tests. With pytest's ``--odd-offsets`` each process that imports it places memory so."""

import os

if os.environ.get("ODD_OFFSETS"):
    from . import odd_offsets

    odd_offsets.install()
