"""The KubeRay and Kubernetes schemas, limited to the fields in cluster/: any other field in a manifest is a mistake.

Kubernetes drops unknown fields, so without this schema a typo would have no visible effect. The source is the API types
of KubeRay 1.6 (`RayCluster`, `RayJob`) and Kubernetes (`PodTemplateSpec`).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
"""Labels and start parameters: numbers must be quoted."""

QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"},
}


def mapping(required: dict[str, Schema], **optional: Schema) -> Schema:
    """The schema of a mapping with exactly these fields."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def items(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


RESOURCES = mapping({"requests": QUANTITIES, "limits": QUANTITIES})
CONTAINER = mapping(
    {"name": TEXT, "image": TEXT, "env": items(mapping({"name": TEXT, "value": TEXT})), "resources": RESOURCES},
    ports=items(mapping({"name": TEXT, "containerPort": COUNT})),
    volumeMounts=items(mapping({"name": TEXT, "mountPath": TEXT})),
)
TOLERATION = mapping({"key": TEXT, "operator": {"enum": ["Exists", "Equal"]}, "effect": {"const": "NoSchedule"}})
POD = mapping(
    {
        "spec": mapping(
            {"restartPolicy": {"const": "Never"}, "serviceAccountName": TEXT, "containers": items(CONTAINER)},
            tolerations=items(TOLERATION),
            volumes=items(mapping({"name": TEXT, "emptyDir": mapping({})})),
        )
    }
)
GROUP: dict[str, Schema] = {"labels": TEXTS, "rayStartParams": TEXTS, "template": POD}
WORKER_GROUP = mapping(
    GROUP | {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT},
    idleTimeoutSeconds=COUNT,
)
CLUSTER = mapping(
    {
        "rayVersion": TEXT,
        "authOptions": mapping({"mode": {"enum": ["token", "disabled"]}}),
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": mapping(
            {
                "version": {"enum": ["v1", "v2"]},
                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                "idleTimeoutSeconds": COUNT,
                "resources": RESOURCES,
            }
        ),
        "headGroupSpec": mapping(GROUP),
        "workerGroupSpecs": items(WORKER_GROUP),
    }
)
JOB = mapping(
    {
        "entrypoint": TEXT,
        "runtimeEnvYAML": TEXT,
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        "backoffLimit": COUNT,
        "shutdownAfterJobFinishes": {"type": "boolean"},
        "ttlSecondsAfterFinished": COUNT,
        "rayClusterSpec": CLUSTER,
    }
)


def manifest(kind: str, spec: Schema) -> Schema:
    return mapping(
        {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": kind},
            "metadata": mapping({"name": TEXT, "namespace": TEXT}),
            "spec": spec,
        }
    )


SCHEMAS = {"raycluster.yaml": manifest("RayCluster", CLUSTER), "rayjob.yaml": manifest("RayJob", JOB)}
