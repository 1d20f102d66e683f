"""A fake Kubernetes API server in this process, for controllers and watchers.

It keeps any namespaced objects, counts resource versions, refuses updates of old ones (409), streams watches from a
version on, with bookmarks, forgets old events when told so (410), patches by merging, and has the scale subresource.
It knows who owns which field, applies on the server's side, and removes what the owner of an object leaves behind.
"""

import copy
import json
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

from tests.kube.fields import ConflictError, Manager, Owned

Body = dict[str, Any]
KINDS = {
    "configmaps": ("v1", "ConfigMap"),
    "pods": ("v1", "Pod"),
    "events": ("v1", "Event"),
    "deployments": ("apps/v1", "Deployment"),
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "secrets": ("v1", "Secret"),
    "services": ("v1", "Service"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "roles": ("rbac.authorization.k8s.io/v1", "Role"),
    "rolebindings": ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget"),
}


class StatusError(Exception):
    def __init__(self, code: int, reason: str, message: str = "") -> None:
        self.body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
        self.code = code


@dataclass(frozen=True)
class Place:
    """The resource, namespace, name and subresource in a request path."""

    resource: str
    namespace: str
    name: str | None
    sub: str | None

    @classmethod
    def of(cls, path: str) -> "Place":
        parts = path.strip("/").split("/")
        rest = parts[parts.index("namespaces") + 1 :] if "namespaces" in parts else []
        if len(rest) < 2 or rest[1] not in KINDS:
            raise StatusError(404, "NotFound", path)
        return cls(rest[1], rest[0], *[*rest[2:], None, None][:2])


@dataclass(frozen=True)
class Change:
    version: int
    type: str
    place: Place
    object: Body


@dataclass
class ApiServer:
    """Use it as a context manager. requests: verb and resource of each, for checks of permissions."""

    objects: dict[tuple[str, str, str], Body] = field(default_factory=dict)
    requests: set[tuple[str, str]] = field(default_factory=set)
    down: bool = False

    def __post_init__(self) -> None:
        self._version = 1000
        self._kept_from = 0
        self._changes: list[Change] = []
        self._changed = threading.Condition()
        self._cuts = 0
        self._owned: dict[tuple[str, str, str], Owned] = {}
        server = self

        class Handler(_Handler):
            api = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    def __enter__(self) -> "ApiServer":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def client(self) -> client.ApiClient:
        return client.ApiClient(client.Configuration(host=self.url))

    def compact(self) -> None:
        """Drop the history of events, as etcd does after minutes."""
        with self._changed:
            self._kept_from = self._version
            self._changes.clear()

    def cut(self) -> None:
        """End all watches."""
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    def put(self, resource: str, name: str, labels: dict[str, str] | None = None, **body: Any) -> Body:
        """Create or replace an object of the namespace `default`, as another client."""
        place = Place(resource, "default", name, None)
        with self._changed:
            known = self.objects.get((resource, "default", name))
            new = {"metadata": {"name": name, "labels": labels or {}}, **body}
            return self._store(place, new, known, Manager("somebody"))

    def remove(self, resource: str, name: str) -> None:
        with self._changed:
            self._delete(Place(resource, "default", name, None))

    def get(self, resource: str, name: str) -> Body:
        return self.objects[resource, "default", name]

    def all(self, resource: str) -> list[Body]:
        return [body for (kind, _, _), body in self.objects.items() if kind == resource]

    def answer(self, verb: str, place: Place, query: dict[str, str], body: Body | None) -> Body:
        with self._changed:
            if verb == "list":
                items = [found for found in self.objects.values() if self._matches(found, place, query)]
                api, kind = KINDS[place.resource]
                metadata = {"resourceVersion": str(self._version)}
                return {"apiVersion": api, "kind": f"{kind}List", "metadata": metadata, "items": items}
            manager = Manager(query.get("fieldManager") or "OpenAPI-Generator", subresource=place.sub or "")
            if verb == "apply":
                assert body is not None
                return self._apply(place, Manager(manager.name, "Apply"), body, query.get("force") == "true")
            if verb == "create":
                assert body is not None
                metadata = body["metadata"]
                name = metadata.get("name") or metadata["generateName"] + uuid.uuid4().hex[:5]
                place = Place(place.resource, place.namespace, name, None)
                if self._key(place) in self.objects:
                    raise StatusError(409, "AlreadyExists", name)
                return self._store(place, body, None, manager)
            known = self.objects.get(self._key(place))
            if known is None:
                raise StatusError(404, "NotFound", str(place.name))
            if verb == "delete":
                return self._delete(place)
            if verb == "get":
                return _scale(known) if place.sub == "scale" else known
            assert body is not None
            expected = body.get("metadata", {}).get("resourceVersion")
            if expected not in (None, known["metadata"]["resourceVersion"]):
                raise StatusError(409, "Conflict", "the object has been modified")
            if place.sub == "scale":
                new = copy.deepcopy(known)
                new["spec"]["replicas"] = body["spec"]["replicas"]
                return _scale(self._store(place, new, known, manager))
            return self._store(place, body if verb == "update" else _merged(known, body), known, manager)

    @property
    def cuts(self) -> int:
        """How often all watches were ended."""
        return self._cuts

    def watch(self, place: Place, query: dict[str, str], cuts: int) -> Iterator[Body]:
        """Yield the events after a version, until the watch's timeout or until all watches are ended.

        cuts: the value of `self.cuts` when the request arrived. A watch that is still being opened ends with the rest.
        """
        since = int(query.get("resourceVersion") or 0)
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 300)
        if since < self._kept_from:
            yield {"type": "ERROR", "object": StatusError(410, "Expired", "too old resource version").body}
            return
        while True:
            with self._changed:
                if self._cuts != cuts:
                    return
                news = [change for change in self._changes if change.version > since]
                left = deadline - time.monotonic()
                if not news and left > 0:
                    self._changed.wait(left)
                    continue
                if not news:
                    api, kind = KINDS[place.resource]
                    metadata = {"resourceVersion": str(self._version)}
                    yield {"type": "BOOKMARK", "object": {"apiVersion": api, "kind": kind, "metadata": metadata}}
                    return
            for change in news:
                since = change.version
                if change.place.resource == place.resource and self._matches(change.object, place, query):
                    yield {"type": change.type, "object": change.object}

    def _apply(self, place: Place, manager: Manager, config: Body, force: bool) -> Body:
        """Server-side apply."""
        known = self.objects.get(self._key(place))
        owned = copy.deepcopy(self._owned.get(self._key(place), Owned()))  # a refusal changes nothing
        before = set(owned.fields)
        try:
            owned.apply(manager, config, force)
        except ConflictError as error:
            raise StatusError(409, "Conflict", str(error)) from None
        body = copy.deepcopy(known or {})
        for path in before - owned.fields.keys():
            _without(body, [part[1:] for part in path])
        body = _merged(body, config)
        _check_selector(body)
        self._owned[self._key(place)] = owned
        return self._store(place, body, known)

    def _store(self, place: Place, body: Body, known: Body | None, manager: Manager | None = None) -> Body:
        """manager: the field manager of the write. None: the fields already have owners."""
        api, kind = KINDS[place.resource]
        self._version += 1
        metadata = {
            "uid": known["metadata"]["uid"] if known else str(uuid.uuid4()),
            **body["metadata"],
            "name": place.name,
            "namespace": place.namespace,
            "resourceVersion": str(self._version),
        }
        stored = {**copy.deepcopy(body), "apiVersion": api, "kind": kind, "metadata": metadata}
        if not stored.get("data", True):
            del stored["data"]  # empty ones are left out
        _check_selector(stored)
        owned = self._owned.setdefault(self._key(place), Owned())
        if manager is not None:
            owned.update(manager, stored)
        if kind == "Deployment":
            stored["spec"] = {**stored["spec"], "replicas": owned.fields[".spec", ".replicas"]}
        metadata["managedFields"] = owned.managed_fields()
        self.objects[self._key(place)] = stored
        self._note("MODIFIED" if known else "ADDED", place, stored)
        return stored

    def _delete(self, place: Place) -> Body:
        gone = self.objects.pop(self._key(place))
        self._version += 1
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}}
        self._note("DELETED", place, gone)
        del self._owned[self._key(place)]
        for (resource, namespace, name), body in list(self.objects.items()):
            owners = body["metadata"].get("ownerReferences") or []
            if owners and all(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                self._delete(Place(resource, namespace, name, None))
        return gone

    def _note(self, type: str, place: Place, body: Body) -> None:
        self._changes.append(Change(self._version, type, place, body))
        self._changed.notify_all()

    def _key(self, place: Place) -> tuple[str, str, str]:
        return place.resource, place.namespace, place.name or ""

    def _matches(self, body: Body, place: Place, query: dict[str, str]) -> bool:
        metadata = body["metadata"]
        if (body["kind"], metadata["namespace"]) != (KINDS[place.resource][1], place.namespace):
            return False
        labels = metadata.get("labels") or {}
        wanted = [part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part]
        fields = [part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part]
        return all(labels.get(name) == value for name, value in wanted) and all(
            name == "metadata.name" and metadata["name"] == value for name, value in fields
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApiServer

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        place = Place.of(split.path)
        if query.get("watch", "").lower() == "true":
            self._stream(place, query)
        else:
            self._reply("get" if place.name else "list", query)

    def do_POST(self) -> None:
        self._reply("create", self._query())

    def do_PUT(self) -> None:
        self._reply("update", self._query())

    def do_PATCH(self) -> None:
        applied = self.headers.get("content-type", "").startswith("application/apply-patch")
        self._reply("apply" if applied else "patch", self._query())

    def _query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}

    def do_DELETE(self) -> None:
        self._reply("delete", {})

    def _reply(self, verb: str, query: dict[str, str]) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        try:
            if self.api.down:
                raise StatusError(503, "ServiceUnavailable")
            place = Place.of(urlsplit(self.path).path)
            self._note(verb, place)
            code, answer = 201 if verb == "create" else 200, self.api.answer(verb, place, query, body)
        except StatusError as error:
            code, answer = error.code, error.body
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, place: Place, query: dict[str, str]) -> None:
        # The count is read before `down`: whoever sets `down` and then cuts leaves no watch open.
        cuts = self.api.cuts
        if self.api.down:
            self._reply("watch", query)
            return
        self._note("watch", place)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in self.api.watch(place, query, cuts):
            data = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _note(self, verb: str, place: Place) -> None:
        self.api.requests.add((verb, f"{place.resource}/{place.sub}" if place.sub else place.resource))

    def log_message(self, *_: object) -> None: ...


def _check_selector(body: Body) -> None:
    if body.get("kind") != "Deployment":
        return
    spec = body["spec"]
    labels = spec.get("template", {}).get("metadata", {}).get("labels", {})
    if not spec.get("selector", {}).get("matchLabels", {}).items() <= labels.items():
        why = f"spec.template.metadata.labels: Invalid value: {labels}: `selector` does not match template `labels`"
        raise StatusError(422, "Invalid", f'Deployment.apps "{body["metadata"]["name"]}" is invalid: {why}')


def _scale(body: Body) -> Body:
    replicas = body["spec"]["replicas"]
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": body["metadata"],
        "spec": {"replicas": replicas},
        "status": {"replicas": replicas},
    }


def _without(body: Body, path: list[str]) -> None:
    """Remove a field that is not in a list."""
    for name in path[:-1]:
        found = body.get(name)
        if not isinstance(found, dict):
            return
        body = found
    body.pop(path[-1], None)


def _merged(known: Body, patch: Body) -> Body:
    """JSON merge patch (RFC 7386)."""
    merged = dict(known)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(known.get(name), dict):
            merged[name] = _merged(known[name], value)
        else:
            merged[name] = value
    return merged
