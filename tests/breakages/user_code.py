"""Lists faults in the way the engine meets what user code does between wrap and close."""

from __future__ import annotations

from .breakage import Breakage

USER_CODE = (
    Breakage(
        "the broadcast of module buffers is seen by autograd",
        "core/engine.py",
        "[buffer.data for buffer in",
        "[buffer for buffer in",
        "tests/ranks/test_version_counters.py",
    ),
    Breakage(
        "a step of shards is not seen by autograd",
        "core/sharded_step.py",
        "        torch.autograd.graph.increment_version([engine.params[index] for index in begun.with_grads])\n",
        "",
        "tests/ranks/test_version_counters.py",
    ),
    Breakage(
        "a gradient's view that was given other memory comes back with its old content",
        "core/contiguous_buffers.py",
        "        self._bring_moved_back()\n",
        "",
        "tests/ranks/test_moved_grads.py",
    ),
    Breakage(
        "a backward that no forward prepared is synchronised",
        "core/reducer.py",
        "            if not (self._prepared or self.buffers.main_grads):\n",
        "            self._prepared.add(syncs=True)\n            if False:\n",
        "tests/ranks/test_unprepared_backwards.py",
    ),
    Breakage(
        "what a module names in _ddp_params_and_buffers_to_ignore is reduced",
        "core/module_params.py",
        '        if f"{prefix}.{key}" not in ignored:\n',
        "        if True:\n",
        "tests/ranks/test_module_params.py",
    ),
    Breakage(
        "a buffer of each rank's own is broadcast",
        "core/module_watch.py",
        "            if buffer is not None and key not in ignored\n",
        "            if buffer is not None\n",
        "tests/ranks/test_module_params.py",
    ),
    Breakage(
        "a trainable head that named_parameters() hides is not reduced",
        "core/module_params.py",
        "    for prefix, child in module.named_modules():\n",
        "    shown = {id(param) for _, param in module.named_parameters()}\n"
        "    for prefix, child in module.named_modules():\n"
        "        if not shown.issuperset(map(id, child._parameters.values())):\n            continue\n",
        "tests/ranks/test_module_params.py",
    ),
    Breakage(
        "a parameter that is marked as an expert's is replaced by rank 0's",
        "core/engine.py",
        "                check_no_experts(self.named_params(), self.local_parts)\n",
        "                pass\n",
        "tests/ranks/test_module_params.py",
    ),
)
