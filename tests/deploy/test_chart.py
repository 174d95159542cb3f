"""What the Helm chart renders: within Kubernetes' schemas, locked down, and as its values say."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.mesh_secret import MeshSecret
from shared.settings import ROLES, field_types
from tests.support.chart import (
    CHART,
    KUBERNETES,
    Manifest,
    Refused,
    find,
    pod_of,
    render,
    schema_errors,
    variables,
)
from tests.support.house import ROOT
from tools.generate_chart import CHOSEN

WORKERS = ("prefill", "decode")
SIZES = ("threads", "_cache", "_cache_size")
"""Whole numbers that come from elsewhere, or with a unit."""
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}
EVERYTHING: Manifest = {
    "image": {"prefix": "registry.example/pdmesh", "pullSecrets": [{"name": "pull"}]},
    "model": {
        "name": "llama",
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
        "folder": "llama-3",
    },
    "listen": "::",
    "settings": {"allow_unencrypted_kv": True, "token_budget": 10_000_000},
    "meshSecret": {"existing": "the-secret"},
    "meshTls": {"secret": "mesh-tls"},
    "gateway": {
        "replicas": 2,
        "settings": {"max_running": 4096},
        "apiKeys": {"secret": "keys"},
        "tls": {"secret": "tls", "clientCa": True},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "autoscaling": {"kind": "hpa"},
        "annotations": {"c": "d"},
    },
    "prefill": {
        "settings": {"kv_gib": 2.5},
        "gpu": {"count": 2, "runtimeClassName": "nvidia"},
        "cache": {"dram": "4GB", "ssd": {"volume": {"hostPath": {"path": "/mnt/nvme"}}}},
        "sharedMemory": "8Gi",
        "hostIPC": True,
        "autoscaling": {"kind": "hpa", "target": 4096},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "h100"},
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "env": [{"name": "UCX_NET_DEVICES", "value": "eth0"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "decode": {
        "resources": {"limits": {"cpu": "4", "memory": "16Gi"}},
        "cache": {"ssd": {"claim": CLAIM, "size": "90GB"}},
        "autoscaling": {"kind": "keda"},
    },
    "autoscaling": {"prometheus": "http://prometheus.monitoring:9090"},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
        "egress": [{"ports": [{"port": 4318}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}


@pytest.mark.parametrize("release", KUBERNETES)
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_schemas_take_every_object(
    values: Manifest, release: str, tmp_path: Path
) -> None:
    """In the oldest release that the chart allows and in the newest; no field is unknown."""
    assert schema_errors(render(values), release, tmp_path) == ""


def test_the_schema_check_sees_an_unknown_field(tmp_path: Path) -> None:
    """Or it would prove nothing."""
    manifests = render()
    pod_of(find(manifests, "Deployment", "pdmesh-gateway"))["hostIpc"] = True
    assert "hostIpc" in schema_errors(manifests, KUBERNETES[0], tmp_path)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("role", [*ROLES, "test"])
def test_every_pod_is_locked(values: Manifest, role: str) -> None:
    """No root, no capability, nothing to write but what is mounted, no account of the cluster; and
    no variables of Services, of which PDMESH_PORT would be one."""
    manifests = render(values)
    if role == "test":
        pod = find(manifests, "Pod", "pdmesh-test")["spec"]
    else:
        (pod,) = (
            pod_of(m)
            for m in manifests
            if m["kind"] in ("Deployment", "StatefulSet")
            and m["metadata"]["name"] == f"pdmesh-{role}"
        )
    assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 10001  # as in the Dockerfile
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_every_variable_is_a_setting_that_the_service_reads(values: Manifest) -> None:
    """With a value that it takes: a worker's settings in all pods, the gateway's in its own."""
    manifests = render(values)
    workers = {name for role in WORKERS for name in field_types(ROLES[role])}
    for role, kind in ROLES.items():
        (workload,) = (
            m
            for m in manifests
            if m["kind"] in ("Deployment", "StatefulSet")
            and m["metadata"]["name"] == f"pdmesh-{role}"
        )
        given = {
            name.removeprefix("PDMESH_").lower(): value
            for name, value in variables(workload).items()
            if name.startswith("PDMESH_")
        }
        assert given.keys() - field_types(kind).keys() - workers == set()
        assert given["host"] == values.get("listen", "0.0.0.0")
        for name, value in given.items():
            if field_types(kind).get(name) is int and not name.endswith(SIZES):
                int(value)  # 10000000, not 1e+07


def test_pods_with_ipv6_alone_listen_there() -> None:
    """At every port; the gateway's for scrapes names its address in brackets."""
    gateway = variables(find(render({"listen": "::"}), "Deployment", "pdmesh-gateway"))
    assert (gateway["PDMESH_HOST"], gateway["PDMESH_MESH_HOST"]) == ("::", "::")
    assert gateway["PDMESH_METRICS_ADDRESS"] == "[::]:9090"


def test_gateways_are_found_before_they_are_ready() -> None:
    """They become ready by the workers that find them; and a worker says where it is itself."""
    manifests = render()
    service = find(manifests, "Service", "pdmesh-mesh")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]
    assert service["selector"]["app.kubernetes.io/component"] == "gateway"
    for role in WORKERS:
        given = variables(find(manifests, "Deployment", f"pdmesh-{role}"))
        assert given["PDMESH_GATEWAY"] == "pdmesh-mesh:8200"
        assert given["PDMESH_ADVERTISE"] == "$(POD_IP)"
        assert given["POD_IP"] == "status.podIP"


@pytest.mark.parametrize("role", list(ROLES))
def test_nothing_is_cut_off_before_its_drain_ends(role: str) -> None:
    """The kubelet waits for the hook, the drain and the end; and a rollout adds before it takes."""
    own = {"drainSeconds": 600}
    workload = find(render({role: own}), "Deployment", f"pdmesh-{role}")
    pod = pod_of(workload)
    (container,) = pod["containers"]
    assert variables(workload)["PDMESH_DRAIN_S"] == "600"
    hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert bool(hook) == (role == "gateway")
    assert pod["terminationGracePeriodSeconds"] >= hook + 600 + 10
    assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("role", list(ROLES))
def test_probes_ask_for_life_and_for_the_canary(role: str) -> None:
    """At the listener for scrapes, which stays without key and TLS."""
    (container,) = pod_of(find(render(), "Deployment", f"pdmesh-{role}"))["containers"]
    asked = {
        name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")
    }
    assert {probe["port"] for probe in asked.values()} == {"metrics"}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }


def test_a_pool_is_a_stateful_set_when_its_replicas_keep_a_disk() -> None:
    """And scales as what it is."""
    manifests = render(EVERYTHING)
    decode = find(manifests, "StatefulSet", "pdmesh-decode")
    (claim,) = decode["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == CLAIM
    assert variables(decode)["PDMESH_SSD_CACHE"] == "/ssd"
    assert variables(decode)["PDMESH_SSD_CACHE_SIZE"] == "90GB"
    scaled = find(manifests, "ScaledObject", "pdmesh-decode")["spec"]
    assert scaled["scaleTargetRef"]["kind"] == "StatefulSet"
    assert "replicas" not in decode["spec"]
    prefill = find(manifests, "Deployment", "pdmesh-prefill")
    assert {"name": "ssd", "hostPath": {"path": "/mnt/nvme"}} in pod_of(prefill)["volumes"]
    assert "PDMESH_SSD_CACHE" not in variables(find(render(), "Deployment", "pdmesh-decode"))


def test_a_role_s_own_setting_comes_before_that_of_all() -> None:
    """Also where it says no, or 0."""
    own = {"prefill": {"settings": {"allow_unencrypted_kv": False, "token_budget": 0}}}
    manifests = render({"settings": {"allow_unencrypted_kv": True, "token_budget": 512}, **own})
    prefill = variables(find(manifests, "Deployment", "pdmesh-prefill"))
    assert prefill["PDMESH_ALLOW_UNENCRYPTED_KV"] == "false"
    assert prefill["PDMESH_TOKEN_BUDGET"] == "0"
    decode = variables(find(manifests, "Deployment", "pdmesh-decode"))
    assert decode["PDMESH_ALLOW_UNENCRYPTED_KV"] == "true"
    assert decode["PDMESH_TOKEN_BUDGET"] == "512"


def test_workers_take_the_cores_and_gpus_that_they_were_given() -> None:
    """A limit if there is one, else the request."""
    manifests = render(EVERYTHING)
    prefill = find(manifests, "Deployment", "pdmesh-prefill")
    (container,) = pod_of(prefill)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["resources"]["limits"]["memory"] == "8Gi"
    assert variables(prefill)["PDMESH_DEVICE"] == "cuda"
    assert variables(prefill)["PDMESH_THREADS"] == "requests.cpu"
    decode = find(manifests, "StatefulSet", "pdmesh-decode")
    assert variables(decode)["PDMESH_THREADS"] == "limits.cpu"
    assert "PDMESH_DEVICE" not in variables(decode)
    own = render({"prefill": {"settings": {"threads": 3}}})
    assert variables(find(own, "Deployment", "pdmesh-prefill"))["PDMESH_THREADS"] == "3"
    of_all = render({"settings": {"device": "cuda:1"}, "prefill": {"gpu": {"count": 2}}})
    assert variables(find(of_all, "Deployment", "pdmesh-prefill"))["PDMESH_DEVICE"] == "cuda:1"


def test_only_workers_reach_workers_and_only_the_gateway_gives_orders() -> None:
    """UCX's ports are open to this mesh's workers alone."""
    manifests = render(EVERYTHING)
    reach, order, scrape = find(manifests, "NetworkPolicy", "pdmesh-workers")["spec"]["ingress"]
    (peer,) = reach["from"]
    assert "ports" not in reach
    (roles,) = peer["podSelector"]["matchExpressions"]
    assert roles["values"] == list(WORKERS)
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "pdmesh"
    assert order["ports"] == [{"port": "worker"}]
    assert scrape["ports"] == [{"port": "metrics"}]
    clients, *_ = find(manifests, "NetworkPolicy", "pdmesh-gateway")["spec"]["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"team": "a"}}} in clients["from"]
    anybody, *_ = find(render(), "NetworkPolicy", "pdmesh-gateway")["spec"]["ingress"]
    assert "from" not in anybody


def test_the_chart_makes_a_secret_or_takes_one() -> None:
    """What it makes is what `pdmesh secret` makes, and `helm uninstall` leaves it."""
    secret = find(render(), "Secret", "pdmesh-secret")
    MeshSecret(base64.b64decode(secret["data"]["mesh-secret"]).decode())
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    manifests = render(EVERYTHING)
    assert not [one for one in manifests if one["kind"] == "Secret"]
    volumes = pod_of(find(manifests, "Deployment", "pdmesh-prefill"))["volumes"]
    (mesh,) = (one["secret"] for one in volumes if one["name"] == "mesh-secret")
    assert mesh["secretName"] == "the-secret"


def test_scaling_asks_for_metrics_that_there_are() -> None:
    """By the names of docs/metrics.md, with jobs as the dashboard wants them."""
    manifests = render({**EVERYTHING, "prefill": {"autoscaling": {"kind": "keda"}}})
    page = (ROOT / "docs/metrics.md").read_text().replace("{prefill,decode}", "prefill")
    page += page.replace("pdmesh_prefill", "pdmesh_decode")
    (trigger,) = find(manifests, "ScaledObject", "pdmesh-prefill")["spec"]["triggers"]
    (hpa,) = find(render(EVERYTHING), "HorizontalPodAutoscaler", "pdmesh-prefill")["spec"][
        "metrics"
    ]
    asked = [
        *re.findall(r"pdmesh_\w+", trigger["metadata"]["query"]),
        hpa["pods"]["metric"]["name"],
    ]
    (decode,) = find(manifests, "ScaledObject", "pdmesh-decode")["spec"]["triggers"]
    asked += re.findall(r"pdmesh_\w+", decode["metadata"]["query"])
    assert [name for name in asked if f"`{name}`" not in page] == []
    assert len(asked) == 3
    assert hpa["pods"]["target"]["averageValue"] == "4096000m"
    (endpoint,) = find(manifests, "ServiceMonitor", "pdmesh")["spec"]["endpoints"]
    (relabel,) = endpoint["relabelings"]
    assert relabel["replacement"] == "pdmesh-$1"
    assert 'job=~\\"pdmesh-.*' in (ROOT / "deploy/grafana/pdmesh.json").read_text()


@pytest.mark.parametrize("role", list(ROLES))
def test_one_pod_of_a_kind_is_disturbed_at_a_time(role: str) -> None:
    """And one that is not ready never keeps a node from being drained."""
    budget = find(render(), "PodDisruptionBudget", f"pdmesh-{role}")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["selector"]["matchLabels"]["app.kubernetes.io/component"] == role


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "gatway"),
        ({"decode": {"settings": {"kv_gibs": 24}}}, "'kv_gibs' not allowed"),
        ({"decode": {"settings": {"dtype": "int4"}}}, "'bfloat16'"),
        ({"settings": {"drain_s": 3}}, "'drain_s' not allowed"),
        ({"gateway": {"replicas": 0}}, "minimum"),
        ({"gateway": {"settings": {"api_key": "secret"}}}, "'api_key' not allowed"),
        ({"prefill": {"cache": {"dram": "4 gigabytes"}}}, "/prefill/cache/dram"),
        ({"prefill": {"cache": {"ssd": {"claim": CLAIM, "volume": {"emptyDir": {}}}}}}, "keep one"),
        ({"prefill": {"cache": {"ssd": {"size": "40GB"}}}}, "prefill.cache.ssd.volume or claim"),
        ({"prefill": {"autoscaling": {"kind": "keda"}}}, "autoscaling.prometheus"),
        ({"decode": {"autoscaling": {"min": 9}}}, "more than max"),
        ({"gateway": {"tls": {"clientCa": True}}}, "needs gateway.tls.secret"),
        ({"model": {"folder": "llama"}}, "model.volume"),
        ({"model": {"volume": {"emptyDir": {}}, "folder": "../etc"}}, "/model/folder"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_words_that_name_it(values: Manifest, words: str) -> None:
    """Before anything is installed."""
    with pytest.raises(Refused, match=re.escape(words)):
        render(values)


@pytest.mark.parametrize("release", ["pdmesh", "prod", "a" * 53])
def test_two_releases_share_no_name_and_no_label(release: str) -> None:
    """Names stay within Kubernetes' 63 characters, whatever the release is called."""
    names = [one["metadata"]["name"] for one in render(release=release)]
    assert max(map(len, names)) <= 63
    assert release in ("pdmesh", "a" * 53) or all(name.startswith("prod-pdmesh") for name in names)
    service = find(render(release=release), "Service", names[0].rpartition("-")[0])
    assert service["spec"]["selector"]["app.kubernetes.io/instance"] == release


def test_what_the_chart_chooses_itself_is_a_setting() -> None:
    """A name that is none any more is found."""
    known = {name for kind in ROLES.values() for name in field_types(kind)}
    chosen = [name for names in CHOSEN.values() for name in names]
    assert set(chosen) - known == set()
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    for section in ("mesh", *ROLES):
        assert not {*chosen} & schema["$defs"][f"{section}_settings"]["properties"].keys()


def test_the_chart_is_of_this_release() -> None:
    """Its version and its images' are the package's."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["version"]}"\n' in project
    assert chart["appVersion"] == chart["version"]
