"""The acceptance test of a machine with GPUs, ``python -m benchmarks.gpu_check``; docs/project/gpu_check.md
explains its lines.

[Note: the same lines on the host]
A GPU may be had for minutes, and then this program must not be what fails. So all that differs between a GPU and the
host is behind one object (``devices``), and ``--device cpu`` runs everything else. On the host it proves little about
streams, and all about this program.

To follow one section: ``command`` chooses it, ``children`` gives it a process and a time box, ``sections`` has what it
does, on ``ranks`` that are processes of their own, and ``lines`` are what it says.
"""
