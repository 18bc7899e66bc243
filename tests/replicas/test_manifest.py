"""``examples/kubernetes/replicas.yaml`` agrees with itself and with the package. No cluster has run it here."""

from __future__ import annotations

import inspect
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

import megastrategy._replicas as package
from tests.support.scripts import ROOT

Manifest = dict[str, Any]
ITEMS: list[Manifest] = yaml.safe_load((ROOT / "examples" / "kubernetes" / "replicas.yaml").read_text())["items"]
LIGHTHOUSE_PORT = 29510


def named(kind: str, name: str) -> Manifest:
    [found] = [item for item in ITEMS if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    spec: Manifest = found["spec"]
    return spec


def jobs() -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item["spec"] for item in ITEMS if item["kind"] == "Job"}


def container(spec: Manifest) -> Manifest:
    [found] = spec["template"]["spec"]["containers"]
    return dict(found)


def test_services_select_pods_and_their_ports() -> None:
    deployment, service = named("Deployment", "lighthouse"), named("Service", "lighthouse")
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    assert service["ports"] == [{"port": LIGHTHOUSE_PORT}]
    lighthouse = container(deployment)
    assert lighthouse["ports"] == [{"containerPort": LIGHTHOUSE_PORT}]
    options = lighthouse["command"][1:] + lighthouse["args"]
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--bind": f"[::]:{LIGHTHOUSE_PORT}",
        "--min_replicas": "1",
        "--join_timeout_ms": str(int(1000 * package.SKEW_S)),
        "--heartbeat_timeout_ms": str(int(1000 * package.HEARTBEAT_S)),
    }
    names = named("Service", "replicas")
    assert names["clusterIP"] == "None"
    for spec in jobs().values():
        pod = spec["template"]
        assert pod["metadata"]["labels"] == names["selector"]
        assert pod["spec"]["subdomain"] == "replicas"


def test_each_job_is_a_replica(tmp_path: Path) -> None:
    """Its command is run, with a torchrun that prints its slot and its arguments."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$REPLICA_GROUP_ID" "$@"\n')
    torchrun.chmod(0o755)
    for slot, (name, spec) in enumerate(jobs().items()):
        assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == ("Indexed", "OnFailure")
        train = container(spec)
        given = {entry["name"]: entry.get("value", "") for entry in train["env"]}
        assert int(given["NUM_REPLICA_GROUPS"]) == len(jobs())
        assert given["TORCHFT_LIGHTHOUSE"] == f"http://lighthouse:{LIGHTHOUSE_PORT}"
        assert int(given["NODES"]) == spec["completions"] == spec["parallelism"]
        source = inspect.getsource(package)
        known = [variable for variable in (*given, "REPLICA_GROUP_ID") if f'"{variable}"' in source]
        assert known == ["NUM_REPLICA_GROUPS", "TORCHFT_LIGHTHOUSE", "MEGASTRATEGY_HOST", "REPLICA_GROUP_ID"]

        of_pod = {"JOB": name, "JOB_COMPLETION_INDEX": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = [*train["command"], *train["args"]]
        done = subprocess.run(command, env=given | of_pod, capture_output=True, text=True, check=True)
        expected = f"{slot} --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr {name}-0.replicas"
        assert done.stdout == f"{expected} --master-port 29400 examples/replicas.py\n"
