"""The Helm chart: rendered by Helm, valid for Kubernetes, confined, and read by the processes."""

from __future__ import annotations

import importlib.util
import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from services.chassis.config.load import load
from services.chassis.errors import ConfigError
from services.chassis.rpc.identities import Identity
from services.node_agent.config import NodeAgentConfig
from tests.lib.deploy.chart import CHART, EXAMPLES, Object, containers, environment, pods, render
from tests.unit.deploy.test_config_files import CLASSES, config_class

BUILT_IN = "1.33"
WORKER_ADDRESSES = {"SEAMFLOW_NODE_AGENT_ROLLOUT_SERVER", "SEAMFLOW_NODE_AGENT_TRAINER"}
CAPABILITY = "IPC_LOCK"
"""For RDMA, where values ask for it."""
OTHER_APIS = {"cert-manager.io/v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1"}
"""Their schemas come with their operators; only their form is checked here."""


@pytest.fixture(scope="module", params=sorted(EXAMPLES))
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """A release with each file of values."""
    return render(EXAMPLES[request.param])


def of_kind(objects: list[Object], *kinds: str) -> Iterator[Object]:
    """The objects of these kinds."""
    return (each for each in objects if each["kind"] in kinds)


def test_every_object_is_valid(objects: list[Object]) -> None:
    """By the schemas of Kubernetes, in which a misspelt field is an error."""
    assert objects
    for each in objects:
        if each["apiVersion"] not in OTHER_APIS:
            kubernetes_validate.validate(each, BUILT_IN, strict=True)
        else:
            assert each["spec"]


def test_a_misspelt_field_is_found(objects: list[Object]) -> None:
    """Negative control of the validation."""
    deployment = next(of_kind(objects, "Deployment"))
    broken = json.loads(json.dumps(deployment))
    broken["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, BUILT_IN, strict=True)


def test_no_two_objects_have_one_name(objects: list[Object]) -> None:
    """Of a kind."""
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_every_container_is_confined(objects: list[Object]) -> None:
    """No root, read-only, no capability, limits, a tagged image, no token of the cluster."""
    for name, template in pods(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
    for name, container in containers(objects):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"], name
        assert context["capabilities"].pop("drop") == ["ALL"], name
        given = [CAPABILITY] if name == "seamflow-train" else []
        assert context["capabilities"].get("add", given) == given, name
        assert container["resources"]["limits"]["memory"], name
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert ":" in container["image"] and not container["image"].endswith(":latest"), name


def test_every_service_has_probes_and_a_port(objects: list[Object]) -> None:
    """Alive is asked of the process alone: an outage of Redis restarts nothing."""
    for name, container in containers(list(of_kind(objects, "Deployment", "StatefulSet"))):
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")]
        assert all(probe == {"path": "/healthz", "port": "admin"} for probe in probes), name
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz", name
        serves = "rendezvous" if name.endswith("-rendezvous") else "grpc"
        assert {serves, "admin"} <= {port["name"] for port in container["ports"]}, name


def test_the_scheduler_is_alone(objects: list[Object]) -> None:
    """Two at once take over from each other for ever, also while one is exchanged for the next.

    As is the rendezvous of a trainer of several pods.
    """
    for each in of_kind(objects, "Deployment"):
        is_alone = each["metadata"]["name"].endswith(("-scheduler", "-rendezvous"))
        assert (each["spec"]["strategy"]["type"] == "Recreate") == is_alone
        assert not is_alone or each["spec"]["replicas"] == 1


def test_every_module_exists(objects: list[Object]) -> None:
    """Of the pods, and of the processes that node agents start."""
    modules = [container["args"][0] for _, container in containers(objects)]
    for _, container in containers(objects):
        processes = environment(container, "pod-0").get("SEAMFLOW_NODE_AGENT_PROCESSES", "{}")
        modules += [each["command"][-3] for each in json.loads(processes).values()]
    assert {"trainer", "services.node_agent"} <= set(modules)
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module


def test_workloads_are_selected_by_services_budgets_and_policies(objects: list[Object]) -> None:
    """Each selector fits the labels of just one workload."""
    labels = {name: template["metadata"]["labels"] for name, template in pods(objects)}
    for each in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = each["spec"].get("podSelector", each["spec"].get("selector"))
        wanted = selector.get("matchLabels", selector)
        fits = [name for name, own in labels.items() if wanted.items() <= own.items()]
        assert fits == [each["metadata"]["name"]]


def settings_of(objects: list[Object]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name of the object, table and values of each table of settings."""
    for each in of_kind(objects, "ConfigMap"):
        tables = tomllib.loads(each["data"]["seamflow.toml"])
        for table, values in tables.items():
            yield each["metadata"]["name"], table, values


def test_every_process_reads_its_settings(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the very class that will read them, with the variables of its pod."""
    by_table = dict(CLASSES.values())
    secret_files(objects, tmp_path)
    pod_of = dict(containers(objects))
    for name, table, _ in settings_of(objects):
        file = next(e for e in of_kind(objects, "ConfigMap") if e["metadata"]["name"] == name)
        text = file["data"]["seamflow.toml"].replace('"/secrets/', f'"{tmp_path}/')
        path = tmp_path / f"{name}.toml"
        path.write_text(text.replace("'/secrets/", f"'{tmp_path}/"))
        with monkeypatch.context() as patch:
            for variable, value in environment(pod_of.get(name, {}), f"{name}-0").items():
                patch.setenv(variable, value)
            load(config_class(by_table[table]), table, ["--config", str(path)])


def test_a_wrong_setting_is_refused(tmp_path: Path) -> None:
    """Negative control: what values give is really read."""
    objects = render()
    secret_files(objects, tmp_path)
    file = next(
        e for e in of_kind(objects, "ConfigMap") if e["metadata"]["name"] == "seamflow-train"
    )
    path = tmp_path / "train.toml"
    text = file["data"]["seamflow.toml"].replace("/secrets/", f"{tmp_path}/")
    path.write_text(text.replace("num_steps", "nmu_steps"))
    with pytest.raises(ConfigError, match="nmu_steps"):
        load(config_class("trainer.config.trainer_config"), "trainer", ["--config", str(path)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer.settings.nmu_steps": 3}, "nmu_steps is not allowed"),
        ({"trainer.settings.optimizer.learning_rate": "fast"}, "learning_rate"),
        ({"services.weights.replica": 9}, "replica is not allowed"),
        ({"nodePools.train.nodeSelector": {}}, "nodeSelector is not allowed"),
        ({"extraEnv": []}, "extraEnv is not allowed"),
        ({"only": ["trianer"]}, '"trianer" is no service, no node pool'),
        ({"image.tag": "sha256:0"}, "image.tag is a digest"),
        (
            {"kueue.queueName": "q", "nodePools.rollout.autoscaling.enabled": True},
            "Kueue admits no",
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(
    given: dict[str, object], message: str
) -> None:
    """By the schema of the values, or where a template meets it."""
    with pytest.raises(AssertionError, match=message):
        render(given=given)


def secret_files(objects: list[Object], folder: Path) -> None:
    """Every file that a pod's volume of secrets has."""
    for _, template in pods(objects):
        for source in secret_sources(template):
            for item in source["secret"]["items"]:
                file = folder / item["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                is_url = item["path"] == "redis_url"
                file.write_text("redis://redis:6379" if is_url else "x" * 40)


def secret_sources(template: Object) -> list[Object]:
    """Of the volume of secrets, which all pods but a rendezvous have."""
    volumes = [v for v in template["spec"]["volumes"] if v["name"] == "secrets"]
    return [source for volume in volumes for source in volume["projected"]["sources"]]


def test_every_file_of_the_settings_is_mounted(objects: list[Object]) -> None:
    """Secrets by name; folders by a volume."""
    for name, template in pods(objects):
        sources = secret_sources(template)
        files = {f"/secrets/{i['path']}" for s in sources for i in s["secret"]["items"]}
        mounts = [m["mountPath"] for m in template["spec"]["containers"][0]["volumeMounts"]]
        for found, _, values in settings_of(objects):
            for path in paths_in(values) if found == name else ():
                assert path in files or any(path.startswith(m) for m in mounts), (name, path)
                assert not path.startswith("/secrets/") or path in files, (name, path)


def paths_in(values: dict[str, Any]) -> Iterator[str]:
    """Absolute paths among settings."""
    for value in values.values():
        if isinstance(value, dict):
            yield from paths_in(value)
        elif isinstance(value, str) and value.startswith("/"):
            yield value


def test_each_certificate_names_an_identity() -> None:
    """Of those that the services know, and the hosts under which it is called."""
    objects = render(EXAMPLES["everything"])
    certificates = list(of_kind(objects, "Certificate"))
    known = {f"spiffe://seamflow/{identity.value}" for identity in Identity}
    assert {c["spec"]["uris"][0] for c in certificates} <= known
    secrets = {c["spec"]["secretName"] for c in certificates}
    for _, template in pods(objects):
        mounted = {s["secret"]["name"] for s in secret_sources(template)}
        assert {name for name in mounted if name.endswith("-tls")} <= secrets
    by_name = {c["metadata"]["name"]: c["spec"]["dnsNames"] for c in certificates}
    assert "seamflow-scheduler.training.svc" in by_name["seamflow-scheduler"]
    workers = ["*.seamflow-train.training.svc", "*.seamflow-rollout.training.svc"]
    assert {workers[0], "seamflow-train.training.svc"} <= set(by_name["seamflow-train-trainer"])
    for pool, worker in (("train", workers[0]), ("rollout", workers[1])):
        assert worker in by_name[f"seamflow-{pool}-rollout-server"]
    assert {"seamflow-agent", "seamflow-operator"} <= by_name.keys()
    for names in by_name.values():  # gRPC accepts a wildcard before two labels and more
        assert all(name.count(".") >= 2 for name in names if name.startswith("*"))


def test_workers_are_called_by_a_name_of_their_certificates() -> None:
    """Pod, Service and namespace; of a trainer of several pods their common name."""
    for name, container in containers(render(EXAMPLES["everything"])):
        found = environment(container, f"{name}-0")
        addresses = [value for key, value in found.items() if key in WORKER_ADDRESSES]
        hosts = {f"{name}-0.{name}.training.svc", f"{name}.training.svc"}
        assert {a.split(":")[0] for a in addresses} <= hosts
        assert bool(addresses) == (name in ("seamflow-train", "seamflow-rollout"))


def test_each_service_is_installed_alone() -> None:
    """Releases with one service each make what one release of all makes, each object once."""
    values = EXAMPLES["everything"]
    whole = {key(each): each for each in render(values)}
    names = [key(each)[1].removeprefix("seamflow-") for each in whole.values()]
    parts = {name for name in names if ("ConfigMap", f"seamflow-{name}") in whole}
    found: dict[tuple[str, str], Object] = {}
    for part in sorted(parts | {"data", "service-account", "clients", "pod-monitor"}):
        made = {key(each): each for each in render(values, {"only": [part]})}
        assert not found.keys() & made.keys(), part
        found |= made
    assert found == whole


UPGRADES: dict[str, tuple[dict[str, object], set[str]]] = {
    "run_id": ({"run.settings.run_id": "other"}, {"trainer", "all"}),
    "model": ({"model": "/data/other"}, {"rollout-gateway", "console", "train", "rollout"}),
    "a setting of one": ({"services.scheduler.settings.lease_seconds": 60}, {"scheduler"}),
    "a setting of nodes": ({"trainer.settings.num_steps": 3}, {"train"}),
    "durability": ({"run.settings.durability": "fast"}, {"trajectory-manager", "create-run"}),
    "tag": ({"image.tag": "1.2.3"}, {"all"}),
    "only replicas": ({"services.trajectory-manager.replicas": 3}, set()),
    "interval": ({"metrics.podMonitor.enabled": True}, set()),
}
"""Values of an upgrade, and whose pods it has to restart."""


@pytest.mark.parametrize("change", UPGRADES)
def test_an_upgrade_restarts_the_pods_whose_configuration_changed_and_no_other(change: str) -> None:
    """What Kubernetes forbids to change stays, or has another name."""
    given, restarted = UPGRADES[change]
    before, after = dict(pods(render())), dict(pods(render(given=given)))
    differ = {name.removeprefix("seamflow-") for name in before if before[name] != after.get(name)}
    if "all" not in restarted:
        assert differ == restarted
    else:
        assert {"train", "rollout", "rollout-gateway"} <= differ
    old, new = ({key(e): e for e in render(given=g)} for g in ({}, given))
    for name in old.keys() & new.keys():
        assert immutable(old[name]) == immutable(new[name]), name


def immutable(each: Object) -> Object:
    """What an API server refuses to change in an object of its kind."""
    spec = each.get("spec", {})
    match each["kind"]:
        case "Job":
            return {**spec}
        case "StatefulSet":
            names = ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
            return {name: spec.get(name) for name in names}
        case "Deployment":
            return {"selector": spec["selector"]}
        case "Service":
            return {"clusterIP": spec.get("clusterIP")}
        case "PersistentVolumeClaim":
            return {**spec, "resources": None}
    return {}


def test_versions_of_chart_and_release_restart_nothing() -> None:
    """No pod has the label of a version; "+" is replaced, as no label may have it."""
    for _, template in pods(render()):
        labels = " ".join(template["metadata"]["labels"])
        assert "version" not in labels and "chart" not in labels
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    assert helpers.count('replace "+" "_"') == 2


def test_settings_reach_the_process_as_they_are() -> None:
    """Braces too."""
    factor = '{"rope":{"factor":2}}'
    objects = render(given={"rolloutServer.settings.sglang_flags": ["--json", factor]})
    tables = {(name, table): values for name, table, values in settings_of(objects)}
    assert tables["seamflow-train", "rollout_server"]["sglang_flags"] == ["--json", factor]


def test_every_metrics_port_is_declared_admitted_and_scraped() -> None:
    """Of rollout servers and trainers as well as of what the chart's own probes ask."""
    objects = render(EXAMPLES["everything"])
    (monitor,) = of_kind(objects, "PodMonitor")
    scraped = {each["port"]: each for each in monitor["spec"]["podMetricsEndpoints"]}
    for name, container in containers(objects):
        ports = {p["name"]: p["containerPort"] for p in container.get("ports", ())}
        admin = {port: number for port, number in ports.items() if port.startswith("admin")}
        assert admin.keys() <= scraped.keys()
        variables = environment(container, "p")
        processes = json.loads(variables.get("SEAMFLOW_NODE_AGENT_PROCESSES", "{}"))
        assert len(admin) == len(processes) + ("create-run" not in name), name
        if processes:
            (policy,) = (
                e for e in of_kind(objects, "NetworkPolicy") if e["metadata"]["name"] == name
            )
            ranges = [p for rule in policy["spec"]["ingress"] for p in rule.get("ports", ())]
            assert any(
                p["port"] == min(admin.values()) and p["endPort"] >= max(admin.values())
                for p in ranges
                if isinstance(p["port"], int) and "endPort" in p
            )
    for endpoint in scraped.values():
        targets = {each["targetLabel"] for each in endpoint["relabelings"]}
        assert targets == {"job", "service"}


def test_pools_with_gpus_have_cuda_and_those_without_have_not() -> None:
    """By their image; a whole reference is taken as it is."""
    found = {name: c["image"] for name, c in containers(render())}
    assert found["seamflow-train"].endswith("-gpu")
    assert not found["seamflow-weights"].endswith("-gpu")
    given = {"nodePools.train.gpus": 0, "nodePools.rollout.image": "mine/node:7"}
    found = {name: c["image"] for name, c in containers(render(given=given))}
    assert not found["seamflow-train"].endswith("-gpu")
    assert found["seamflow-rollout"] == "mine/node:7"


def test_what_a_cluster_asks_for_is_merged_into_every_pod() -> None:
    """Of all, then of one; lists are added, other fields replaced."""
    given: dict[str, object] = {
        "podSpec": {"runtimeClassName": "nvidia", "volumes": [{"name": "a", "emptyDir": {}}]},
        "containerSpec": {"env": [{"name": "A", "value": "1"}]},
        "podAnnotations": {"team": "rl"},
        "serviceSpec": {"ipFamilyPolicy": "PreferDualStack"},
        "services.weights.podSpec": {"priorityClassName": "high", "runtimeClassName": "runc"},
        "nodePools.train.podSpec": {"terminationGracePeriodSeconds": 900},
    }
    objects = render(given=given)
    by_name = dict(pods(objects))
    for name, template in by_name.items():
        assert "a" in {volume["name"] for volume in template["spec"]["volumes"]}, name
        assert template["metadata"]["annotations"]["team"] == "rl", name
        env = template["spec"]["containers"][0]["env"]
        assert {"name": "A", "value": "1"} in env, name
    assert by_name["seamflow-weights"]["spec"]["runtimeClassName"] == "runc"
    assert by_name["seamflow-weights"]["spec"]["priorityClassName"] == "high"
    assert by_name["seamflow-train"]["spec"]["terminationGracePeriodSeconds"] == 900
    assert by_name["seamflow-scheduler"]["spec"]["runtimeClassName"] == "nvidia"
    for each in of_kind(objects, "Service"):
        if "rendezvous" not in each["metadata"]["name"]:
            assert each["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    for each in objects:
        if each["apiVersion"] not in OTHER_APIS:
            kubernetes_validate.validate(each, BUILT_IN, strict=True)


def test_what_ends_is_a_job_whose_position_is_kept() -> None:
    """A StatefulSet would start a dataloader again that has submitted all tasks."""
    objects = render()
    (job,) = (e for e in of_kind(objects, "Job") if "dataloader" in e["metadata"]["name"])
    spec = job["spec"]["template"]["spec"]
    assert spec["restartPolicy"] == "OnFailure"
    (claim,) = (v for v in spec["volumes"] if v["name"] == "storage")
    named = claim["persistentVolumeClaim"]["claimName"]
    (kept,) = (
        e for e in of_kind(objects, "PersistentVolumeClaim") if e["metadata"]["name"] == named
    )
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_templates_stay_small() -> None:
    """Each line fits a screen."""
    files = [*(CHART / "templates").glob("*.yaml"), *(CHART / "templates").glob("*.tpl")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert len(lines) <= 950
    assert max(map(len, lines)) <= 120


def key(each: Object) -> tuple[str, str]:
    """Kind and name."""
    return each["kind"], each["metadata"]["name"]


def test_several_gpus_of_a_pod_are_the_ranks_of_its_trainer() -> None:
    """By torchrun; one GPU needs none."""
    for gpus, ranks in ((8, "--nproc-per-node=8"), (1, None)):
        objects = render(given={"nodePools.train.gpus": gpus})
        (container,) = [c for name, c in containers(objects) if name == "seamflow-train"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        processes = json.loads(environment(container, "p")["SEAMFLOW_NODE_AGENT_PROCESSES"])
        command = shlex.join(processes["trainer"]["command"])
        assert (ranks in command) if ranks else ("torch.distributed.run" not in command)


def test_pods_that_train_together_meet_at_a_rendezvous() -> None:
    """Each is a node of its own, all answer for one trainer; too few replicas are refused."""
    given = {"nodePools.train.replicas": 3, "nodePools.train.trainerPods": 2}
    objects = render(given=given)
    (container,) = [c for name, c in containers(objects) if name == "seamflow-train"]
    variables = environment(container, "seamflow-train-1")
    trainer = json.loads(variables["SEAMFLOW_NODE_AGENT_PROCESSES"])["trainer"]
    assert {"--nnodes=2:2", "--rdzv-endpoint=seamflow-train-rendezvous:29400"} <= {
        *trainer["command"]
    }
    assert "--local-addr=seamflow-train-1.seamflow-train.training.svc" in trainer["command"]
    assert trainer["environment"]["SEAMFLOW_TRAINER_GANG__NODE_ID"] == "seamflow-train-1"
    assert trainer["address"] == variables["SEAMFLOW_NODE_AGENT_TRAINER"]
    settings = {table: values for name, table, values in settings_of(objects) if "train" in name}
    assert settings["trainer"]["gang"] == {"nodes": 2}
    with pytest.raises(AssertionError, match="1 replicas are fewer than the 2 trainerPods"):
        render(given={"nodePools.train.trainerPods": 2})


def test_an_image_can_be_pinned_by_its_digest() -> None:
    """The others keep their tag."""
    digest = f"sha256:{'0' * 64}"
    images = {
        name: container["image"]
        for name, container in containers(render(given={"image.digests": {"node-gpu": digest}}))
    }
    assert images["seamflow-train"] == f"seamflow/node@{digest}"
    assert "@" not in images["seamflow-weights"]


def test_a_ranker_with_a_language_model_has_torch_and_the_model() -> None:
    """Its own image and the data; *control*: by default neither."""
    model = {"kind": "language_model", "language_model": {"model": "/data/ranker"}}
    given: dict[str, object] = {"services.ranker.enabled": True}
    for image, uses_data in (("ranker", False), ("ranker-language-model", True)):
        if uses_data:
            given |= {"services.ranker.image": image, "services.ranker.usesData": True}
            given |= {f"services.ranker.settings.{name}": value for name, value in model.items()}
        found = dict(containers(render(given=given)))["seamflow-ranker"]
        assert found["image"].split(":")[0].endswith(f"/{image}")
        assert any(each["mountPath"] == "/data" for each in found["volumeMounts"]) is uses_data


def test_memory_follows_from_the_model() -> None:
    """32 billion parameters, two pods that train together; *control*: resources as given."""
    for given, wanted in ((0, ("64Gi", "256Gi")), (3.2e10, ("515Gi", "772Gi"))):
        together = {"nodePools.train.replicas": 2, "nodePools.train.trainerPods": 2}
        objects = render(given={"modelParameters": given, **together})
        (container,) = [c for name, c in containers(objects) if name == "seamflow-train"]
        found = container["resources"]
        assert (found["requests"]["memory"], found["limits"]["memory"]) == wanted


def test_rdma_and_a_queue_are_values() -> None:
    """Its devices and locked memory on the pods of the pool, the queue on its StatefulSet."""
    objects = render(EXAMPLES["everything"])
    (train,) = [
        each
        for each in of_kind(objects, "StatefulSet")
        if each["metadata"]["name"] == "seamflow-train"
    ]
    queues = {
        each["metadata"]["name"]: each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        for each in of_kind(render(EXAMPLES["queued"]), "StatefulSet")
    }
    assert queues["seamflow-train"] == queues["seamflow-rollout"] == "training"
    assert queues["seamflow-weights"] is None
    (container,) = train["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert container["securityContext"]["capabilities"]["add"] == [CAPABILITY]
    (shm,) = [v for v in train["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "64Gi"


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
def test_rollout_servers_of_a_pod_have_disjoint_gpus(servers: int) -> None:
    """Pairwise; each has its own port, address, name and cache, and SGLang as many GPUs as it."""
    objects = render(given={"nodePools.train.gpus": 8, "nodePools.train.servers": servers})
    (container,) = [c for name, c in containers(objects) if name == "seamflow-train"]
    variables = environment(container, "p")
    settings = {table: values for name, table, values in settings_of(objects) if "train" in name}
    config = NodeAgentConfig(
        **{"node_id": "p", "run_id": "r", "capability_tags": ["rollout", "train"]},
        **{"state_folder": "/state", "gpus": settings["node_agent"]["gpus"]},
        rollout_server=variables["SEAMFLOW_NODE_AGENT_ROLLOUT_SERVER"],
        trainer=variables["SEAMFLOW_NODE_AGENT_TRAINER"],
        workers=json.loads(variables.get("SEAMFLOW_NODE_AGENT_WORKERS", "[]")),
        processes=json.loads(variables["SEAMFLOW_NODE_AGENT_PROCESSES"]),
    )
    found = [
        config.environment_of(process)
        for name, process in config.processes.items()
        if name.startswith("rollout-server")
    ]
    gpus = [set(each["CUDA_VISIBLE_DEVICES"].split(",")) for each in found]
    assert len(gpus) == servers
    assert set.union(*gpus) == set("01234567")
    assert sum(map(len, gpus)) == 8
    assert settings["rollout_server"]["num_gpus"] == 8 // servers
    assert settings["rollout_server"]["lends_device"]
    for name in ("PORT", "ADMIN_PORT", "SERVER_ID", "CACHE_FOLDER"):
        given = {each.get(f"SEAMFLOW_ROLLOUT_SERVER_{name}") for each in found}
        assert len(given) == servers


@pytest.mark.parametrize("servers", [1, 2])
def test_rollout_servers_of_a_zone_relay_weights(servers: int) -> None:
    """At the addresses at which they are reached; without a zone they do not."""
    relay = "SEAMFLOW_ROLLOUT_SERVER_WEIGHT_RELAY_ADDRESS"
    pool = {"nodePools.train.servers": servers, "nodePools.train.gpus": servers}
    for zone in ("", "west"):
        objects = render(given={**pool, "nodePools.train.zone": zone})
        (container,) = [c for name, c in containers(objects) if name == "seamflow-train"]
        variables = environment(container, "p")
        processes = json.loads(variables["SEAMFLOW_NODE_AGENT_PROCESSES"])
        given = {
            each["environment"].get(relay) == each["address"]
            for name, each in processes.items()
            if name.startswith("rollout-server")
        }
        assert given == {bool(zone)}
        (settings,) = [
            values
            for name, table, values in settings_of(objects)
            if "train" in name and table == "rollout_server"
        ]
        assert settings.get("zone", "") == zone


def test_generation_and_training_stand_in_zones_of_their_own() -> None:
    """What records stands with what generates; without such values nothing is placed."""
    key, jobs = "topology.kubernetes.io/zone", ("create-run",)
    objects = render(EXAMPLES["two_zones"])
    found = {
        name.removeprefix("seamflow-"): template["spec"].get("nodeSelector", {}).get(key)
        for name, template in pods(objects)
        if not any(job in name for job in jobs)
    }
    west = {name for name, zone in found.items() if zone == "west"}
    assert west == {"train", "weights", "scheduler"}
    assert {zone for name, zone in found.items() if name not in west} == {"east"}
    tables = {(name, table): values for name, table, values in settings_of(objects)}
    assert tables["seamflow-rollout", "rollout_server"]["zone"] == "east"
    assert tables["seamflow-rollout", "node_agent"]["kind"] == "h20-96"
    assert "kind" not in tables["seamflow-train", "node_agent"]
    assert not any("nodeSelector" in template["spec"] for _, template in pods(render()))


def test_servers_that_cannot_share_the_gpus_are_refused() -> None:
    """With the pool and both numbers."""
    with pytest.raises(AssertionError, match=r"nodePools\.train: 3 servers cannot share 8 gpus"):
        render(given={"nodePools.train.gpus": 8, "nodePools.train.servers": 3})


def test_pods_that_end_serve_new_connections_for_a_while() -> None:
    """Until every load balancer knows; the time to end begins with it."""
    for given, seconds in (({}, 5), ({"preStopSeconds": 20}, 20)):
        objects = render(given=given)
        long_lived = list(of_kind(objects, "Deployment", "StatefulSet"))
        for template in (each["spec"]["template"]["spec"] for each in long_lived):
            assert template["terminationGracePeriodSeconds"] >= 30 + seconds
            for container in template["containers"]:
                stop = container["lifecycle"]["preStop"]["exec"]["command"]
                assert stop == ["sleep", str(seconds)]


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_all_pods_listen_on_one_address(address: str) -> None:
    """Of IPv4 or of IPv6, by one value."""
    objects = render(given={"listenAddress": address})
    hosts = [
        settings["host"]
        for each in of_kind(objects, "ConfigMap")
        for text in each["data"].values()
        for settings in tomllib.loads(text).values()
        if isinstance(settings, dict) and "host" in settings
    ]
    assert {*hosts} == {address}
    assert len(hosts) > 10
