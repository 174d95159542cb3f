"""The chart on a cluster, with real pods: nothing lost by what a cluster does to them.

PDMESH_KUBECONFIG names the cluster, which must have the images (docs/kubernetes.md, "What was
run"); without it the tests are skipped. PDMESH_IMAGE_PREFIX is the chart's ``image.prefix``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_chart import EVERYTHING
from tests.support.chart import CHART, OPERATORS, Manifest, program, render

CLUSTER = os.environ.get("PDMESH_KUBECONFIG", "")
IMAGES = os.environ.get("PDMESH_IMAGE_PREFIX", "pdmesh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CLUSTER, reason="no cluster: PDMESH_KUBECONFIG"),
    pytest.mark.timeout(900),
]

NAMESPACE = "pdmesh-test"
CLIENT = Path(__file__).with_name("client_in_a_pod.py")
ROLES = ("gateway", "prefill", "decode")
WORKER: Manifest = {
    "replicas": 2,
    "settings": {"num_blocks": 2048, "staging_mib": 16},
    "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
}
VALUES: Manifest = {
    "image": {"prefix": IMAGES},
    "settings": {"allow_unencrypted_kv": True},
    "gateway": {"replicas": 2, "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}},
    "prefill": WORKER,
    "decode": WORKER,
}


def kubectl(*words: str, given: str = "", limit_s: float = 300.0) -> str:
    """Run it in the namespace; raises CalledProcessError with what it wrote."""
    command = [program("kubectl"), "--kubeconfig", CLUSTER, "--namespace", NAMESPACE, *words]
    return _run(command, given, limit_s)


def helm(verb: str, *words: str, values: Manifest | None = None) -> str:
    """Run it for the release; waits until the cluster calls it ready."""
    command = [program("helm"), verb, "pdmesh", *words]
    if values is not None:
        command += [str(CHART), "--values", "-", "--wait", "--timeout", "5m"]
    options = ["--kubeconfig", CLUSTER, "--namespace", NAMESPACE]
    return _run([*command, *options], yaml.safe_dump(values or {}), 400.0)


def _run(command: list[str], given: str, limit_s: float) -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode, command, done.stdout, done.stdout + done.stderr
        )
    return done.stdout


def pods(role: str) -> list[str]:
    """Return the names of those that are ready and not about to go."""
    found = json.loads(
        kubectl("get", "pods", "-l", f"app.kubernetes.io/component={role}", "-o", "json")
    )
    return [
        one["metadata"]["name"]
        for one in found["items"]
        if "deletionTimestamp" not in one["metadata"]
        and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in one["status"]["conditions"]
        )
    ]


def nodes(*pods: str) -> set[str]:
    """Return where pods are: all of one name, or of one label."""
    path = "{.spec.nodeName}" if len(pods) == 1 else "{.items[*].spec.nodeName}"
    return set(kubectl("get", "pods", *pods, "-o", f"jsonpath={path}").split())


def settled() -> None:
    """Wait until every pod of the release is there and ready."""
    for role in ROLES:
        kubectl("rollout", "status", f"deployment/pdmesh-{role}", "--timeout=240s")


@pytest.fixture(scope="module")
def release() -> Iterator[None]:
    """The release and a client's pod, in a namespace that takes "restricted" pods alone."""
    with contextlib.suppress(subprocess.CalledProcessError):  # of a run that was killed
        kubectl("delete", "namespace", NAMESPACE)
    kubectl("create", "namespace", NAMESPACE)
    try:
        kubectl(
            *("label", "namespace", NAMESPACE),
            "pod-security.kubernetes.io/enforce=restricted",
        )
        helm("install", values=VALUES)
        kubectl("apply", "-f", "-", given=yaml.safe_dump(_client_pod()))
        kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=120s")
        yield
    finally:
        kubectl("delete", "namespace", NAMESPACE)


def _client_pod() -> Manifest:
    locked = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    container = {
        "name": "client",
        "image": f"{IMAGES}-gateway:{version}",
        "command": ["sleep", "infinity"],
        "securityContext": locked,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "client"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
    }


@contextlib.contextmanager
def clients(expected: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Clients that ask without end, until the block is left; then what they got."""
    command = [program("kubectl"), "--kubeconfig", CLUSTER, "--namespace", NAMESPACE]
    command += ["exec", "-i", "client", "--", "python3", "-c", CLIENT.read_text()]
    found: dict[str, Any] = {}
    with subprocess.Popen(
        [*command, json.dumps(expected or {})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield found
        finally:
            words, _ = process.communicate(timeout=120)  # its end of stdin is their end
        found.update(json.loads(words))


def rolled(role: str) -> None:
    """As `helm upgrade` does: a new pod, then the old one drains."""
    kubectl("rollout", "restart", f"deployment/pdmesh-{role}")


def deleted(role: str) -> None:
    """One drains before there is another."""
    kubectl("delete", "pod", pods(role)[0], "--wait=false")


def killed(role: str) -> None:
    """SIGKILL at once, without a word."""
    kubectl("delete", "pod", pods(role)[0], "--grace-period=0", "--force", "--wait=false")


def evicted(role: str) -> str:
    """As `kubectl drain` asks; '' or why the cluster refuses."""
    name = pods(role)[0]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    try:
        kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
    except subprocess.CalledProcessError as error:
        return str(error.stderr)
    return ""


@pytest.mark.parametrize(
    ("what", "role"),
    [
        (rolled, "gateway"),
        *((what, role) for what in (rolled, deleted, killed) for role in ("prefill", "decode")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_no_token_is_lost_or_wrong(what: Callable[[str], None], role: str, release: None) -> None:
    """Four clients ask all the time, and get the texts that they got before anything happened."""
    settled()
    with clients() as before:
        time.sleep(5)
    assert before["failed"] == []
    with clients(before["texts"]) as during:
        time.sleep(1)
        what(role)
        time.sleep(3)  # until the cluster has begun
        settled()
        time.sleep(3)
    assert during["failed"] == []
    assert during["wrong"] == []
    assert during["whole"] >= 10


def test_a_drained_node_takes_no_answer_along(release: None) -> None:
    """Its pods leave one of a kind at a time, amid answers; their successors are elsewhere."""
    settled()
    (home,) = nodes("client")
    away = nodes("-l", "app.kubernetes.io/instance=pdmesh") - {home}
    if not away:
        pytest.skip("no pod of the mesh is on another node than the client")
    node = min(away)
    with clients() as before:
        time.sleep(5)
    try:
        with clients(before["texts"]) as during:
            time.sleep(1)
            kubectl("drain", node, "--delete-emptydir-data", "--ignore-daemonsets")
            settled()
            time.sleep(3)
    finally:
        kubectl("uncordon", node)
    assert node not in nodes("-l", "app.kubernetes.io/instance=pdmesh")
    assert during["failed"] == []
    assert during["wrong"] == []
    assert during["whole"] >= 10


def test_one_pod_of_a_kind_is_evicted_at_a_time(release: None) -> None:
    """The second waits until the first is replaced."""
    settled()
    assert evicted("decode") == ""
    assert "disruption budget" in evicted("decode")
    settled()
    deadline = time.monotonic() + 60
    while evicted("decode"):
        assert time.monotonic() < deadline
        time.sleep(1)
    settled()


def test_an_upgrade_finds_the_secret_again(release: None) -> None:
    """Also a second install does, after the release was taken away."""
    settled()
    secret = kubectl("get", "secret", "pdmesh-secret", "-o", "jsonpath={.data}")
    helm("upgrade", values={**VALUES, "settings": {**VALUES["settings"], "exact": True}})
    assert kubectl("get", "secret", "pdmesh-secret", "-o", "jsonpath={.data}") == secret
    helm("uninstall")
    assert kubectl("get", "secret", "pdmesh-secret", "-o", "jsonpath={.data}") == secret
    helm("install", values=VALUES)
    assert kubectl("get", "secret", "pdmesh-secret", "-o", "jsonpath={.data}") == secret
    assert "42" in helm("test", "--logs")


def test_the_server_takes_every_object() -> None:
    """Its own checks go further than the schemas; what operators add is not asked for."""
    own = [
        one for one in render(EVERYTHING) if one["apiVersion"].partition("/")[0] not in OPERATORS
    ]
    for one in own:
        one["metadata"].pop("namespace", None)
    words = kubectl(
        *("apply", "--namespace", "default", "--dry-run=server", "--validate=strict", "-f", "-"),
        given=yaml.safe_dump_all(own),
    )
    assert words.count("created (server dry run)") == len(own)
