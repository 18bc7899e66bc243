"""Edits a file that was written for Lightning's ModelParallelStrategy on GPUs, for our strategy and for CPUs."""

from __future__ import annotations

import ast
import dataclasses

SHARDING = "fully_shard"
STRATEGY = "ModelParallelStrategy"


def _is_call_of(node: ast.AST | None, name: str) -> bool:
    """Whether it is ``name(...)`` or ``module.name(...)``."""
    called = getattr(node, "func", None)
    return isinstance(node, ast.Call) and name in (getattr(called, "id", None), getattr(called, "attr", None))


class _OnCpus(ast.NodeTransformer):
    """Asks for CPUs where a GPU is asked for, and for no GPUs where some are needed."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("cpu") if node.value in ("cuda", "gpu") else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _is_call_of(node, "device"):
            del node.args[1:]  # CPUs have no numbers
        if _is_call_of(node, "RunIf"):
            node.keywords = [item for item in node.keywords if item.arg not in ("min_cuda_gpus", "bf16_cuda")]
        return node


class _WithoutSharding(ast.NodeTransformer):
    """Leaves the statements out that call ``fully_shard``, and its import."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if _is_call_of(node.value, SHARDING) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if _is_call_of(node.value, SHARDING) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        node.names = [alias for alias in node.names if alias.name != SHARDING]
        return node if node.names else None


@dataclasses.dataclass
class _WithStrategy(ast.NodeTransformer):
    """Imports ``name`` of ``module`` in place of Lightning's strategy."""

    module: str
    name: str
    takes_both_sizes: bool

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        if all(alias.name != STRATEGY for alias in node.names):
            return node
        ours = ast.ImportFrom(self.module, [ast.alias(self.name, STRATEGY)], 0)
        node.names = [alias for alias in node.names if alias.name != STRATEGY]
        return [node, ours] if node.names else ours

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _is_call_of(node, STRATEGY) and not self.takes_both_sizes:
            node.keywords = [item for item in node.keywords if item.arg != "data_parallel_size"]
        return node


ONLY_SHARDED, CUT = "_parallelize_feed_forward_fsdp2", "_parallelize_feed_forward_tp"
OF_BOTH_DIMENSIONS = ("weight.device_mesh.", "tensor.device_mesh.ndim", "grad.device_mesh == device_mesh\n")


class _CutInstead(ast.NodeTransformer):
    """Cuts over tensor ranks the modules that Lightning's tests only shard over data-parallel ones.

    It does not check that parameters are DTensors of both dimensions, as FSDP2's are."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(CUT, node.ctx) if node.id == ONLY_SHARDED else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # The function that does both calls it by its name, after the other.
        if not _is_call_of(node, ONLY_SHARDED):
            self.generic_visit(node)
        sizes = {item.arg: item for item in node.keywords}
        if _is_call_of(node, STRATEGY) and "tensor_parallel_size" in sizes:
            tensor, data = sizes["tensor_parallel_size"], sizes["data_parallel_size"]
            if isinstance(tensor.value, ast.Constant) and tensor.value.value == 1:
                tensor.value, data.value = data.value, tensor.value
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST | None:
        text = ast.unparse(node.test) + "\n"
        return None if any(part in text for part in OF_BOTH_DIMENSIONS) else self.generic_visit(node)


def for_cpus(source: str) -> str:
    return _apply(source, _OnCpus())


def for_ours(source: str, module: str, name: str = "MegatronDDPStrategy", *, takes_both_sizes: bool = False) -> str:
    """The ``fully_shard`` lines are gone, and a strategy of ours is there for Lightning's. Ours gets the number of
    data-parallel ranks by division."""
    return _apply(source, _WithoutSharding(), _WithStrategy(module, name, takes_both_sizes))


def for_tensor_ranks(source: str) -> str:
    return _apply(source, _CutInstead())


def ranks_of_tests(source: str) -> dict[str, int]:
    """How many GPUs each test of a file asks for, and so how many ranks it has."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            conditions = [item for item in node.decorator_list if _is_call_of(item, "RunIf")]
            gpus = [word.value for call in conditions for word in call.keywords if word.arg == "min_cuda_gpus"]
            found[node.name] = max((int(ast.literal_eval(number)) for number in gpus), default=1)
    return found


def _apply(source: str, *edits: ast.NodeTransformer) -> str:
    tree = ast.parse(source)
    for edit in edits:
        tree = edit.visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))
