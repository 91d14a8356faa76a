"""Ray on this machine, and the deployment of a Serve config file from within this process.

The file is the one that `serve deploy` takes on a cluster, and takes the same way here: Serve's
controller applies it, so that deploying an edited file again changes only what was edited. It
does not know what the application does.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError, EngineError

_POLL_S = 0.25
_CONNECT_TIMEOUT_S = 5.0
_OBJECT_STORE_BYTES = 256 << 20

Progress = Callable[[dict[str, str]], None]
"""Told the state of every deployment (`{"small": "UPDATING", ...}`) while a deployment runs."""


def start_local_ray(*, address: str = "local", num_cpus: int | None = None) -> None:
    """Start a Ray cluster that ends with this process, or join the one at `address`.

    `num_cpus` is how many CPUs the new cluster claims to have; unset, as many as there are. Its
    dashboard stays off and the output of its workers stays in their log files. Does nothing when
    Ray runs in this process already. Raises ConfigError when nothing answers at `address`.
    """
    # Must be set before Ray is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    _silence_task_errors()
    if address != "local":
        try:
            _require_listener(address)
            ray.init(address=address, namespace="serve", log_to_driver=False)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at {address!r} ({error}); start one with `ray start --head`, or "
                "leave the address out to have one started"
            ) from None
        return
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def deploy(
    document: dict[str, Any], *, timeout_s: float = 600.0, progress: Progress | None = None
) -> str:
    """Deploy the Serve config `document` on the running Ray cluster; return the endpoint's URL.

    Returns when every deployment runs, what it replaced has ended and the HTTP proxy routes to it.
    Deploying again with other `num_replicas` of one deployment leaves the replicas of the others
    alone; other `args` or `runtime_env` replace all of them (Ray 2.60, `DeploymentVersion`). Raises
    EngineError with the deployment's own message when one fails, or when `timeout_s` has passed.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    schema = ServeDeploySchema.model_validate(document)
    serve.start(proxy_location=schema.proxy_location, http_options=schema.http_options.model_dump())
    client = _get_global_client()
    assert client is not None, "serve.start() leaves a client"
    before = {name: app.last_deployed_time_s for name, app in serve.status().applications.items()}
    # `serve run` and the dashboard behind `serve deploy` call this; it has no public name.
    client.deploy_apps(schema)
    deadline = time.monotonic() + timeout_s
    for application in schema.applications:
        _wait(application.name, before.get(application.name), deadline, progress)
    client.wait_for_proxies_serving(wait_for_applications_running=True)
    return endpoint_url(document)


def endpoint_url(document: dict[str, Any]) -> str:
    """Where the document's HTTP proxy listens, as seen from this machine."""
    options = document.get("http_options") or {}
    host = options.get("host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"


def stop() -> None:
    """Delete all applications, and end the Ray cluster if this process started it."""
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()


def root_cause(message: str) -> str:
    """The last exception of a message of Serve's, which carries tracebacks of many processes."""
    lines = [line for line in message.partition("\nSystem error:")[0].splitlines() if line.strip()]
    inside = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[inside[-1] + 1 :] if inside else lines)


def _log_folder() -> Path:
    from ray._private.worker import global_worker

    node = global_worker.node
    assert node is not None, "only called while connected"
    return Path(node.get_logs_dir_path()) / "serve"


def _require_listener(address: str) -> None:
    """Raise OSError when nothing listens at host:port; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _silence_task_errors() -> None:
    """Keep Ray from printing the traceback of every attempt of a task that it tries again.

    What fails for good is the application's status, and reported from there.
    """
    from ray._private import worker

    def drop(data: Any, ignore_prefix: bool) -> None:
        pass

    worker.print_to_stdstream = drop


def _wait(
    name: str, deployed_before_s: float | None, deadline: float, progress: Progress | None
) -> None:
    from ray import serve

    while True:
        app = serve.status().applications.get(name)
        if app is not None and app.last_deployed_time_s != deployed_before_s:
            if progress is not None:
                progress({key: str(value.status.value) for key, value in app.deployments.items()})
            if app.status == "RUNNING":
                return
            if app.status == "DEPLOY_FAILED":
                messages = {key: one.message for key, one in app.deployments.items() if one.message}
                causes = [f"{key}: {root_cause(message)}" for key, message in messages.items()]
                raise EngineError(
                    "the deployment failed: "
                    + ("; ".join(causes) or root_cause(app.message))
                    + f"\nThe logs are in {_log_folder()}"
                )
        if time.monotonic() > deadline:
            state = "unknown" if app is None else f"{app.status.value} {app.message}".strip()
            raise EngineError(f"application {name!r} did not start in time; its state is {state}")
        time.sleep(_POLL_S)
