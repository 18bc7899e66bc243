"""Lists faults of models that several ranks share: tensor ranks and stages."""

from __future__ import annotations

from .breakage import Breakage

SHARED_MODELS = (
    Breakage(
        "a logged sum counts each sample once for every rank of its model",
        "_lightning/tensor_parallel.py",
        "        return super().reduce(tensor, self._device_mesh.get_group(DATA), reduce_op)\n",
        "        return super().reduce(tensor, None, reduce_op)\n",
        "tests/doors/test_logged_sums.py",
    ),
    Breakage(
        "a schedule is kept for layers whose shapes have changed with an attribute",
        "pipeline/module.py",
        "seen != self._seen or self._numbers.have_changed()",
        "seen != self._seen",
        "tests/ranks/test_pipeline_outputs.py",
    ),
    Breakage(
        "the parameters of a pipeline's loss are trained on the last stage only",
        "pipeline/module.py",
        "            _check_loss(loss)\n",
        "",
        "tests/ranks/test_pipeline_outputs.py",
    ),
)
