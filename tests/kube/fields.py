"""The owners of an object's fields and the conflicts between them, as server-side apply defines them.

A field is a path of `.name` and, in lists of objects with a key, `[key=value]`. Other lists are fields as a whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
Path = tuple[str, ...]

_KEYS = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets"), ("name",)),
    **{"volumeMounts": ("mountPath",), "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable")},
    "ownerReferences": ("uid",),
}
_IDENTITY = {("." + name,) for name in ("apiVersion", "kind")} | {
    (".metadata", "." + name)
    for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "managedFields")
}


class ConflictError(Exception):
    """A conflict; the message is that of the API server."""


@dataclass(frozen=True)
class Manager:
    """A field manager: its name, the operation of its write, and the subresource."""

    name: str
    operation: str = "Update"
    subresource: str = ""


@dataclass
class Owned:
    """One object, its fields and their owners."""

    fields: dict[Path, Any] = field(default_factory=dict)
    owners: dict[Manager, set[Path]] = field(default_factory=dict)

    def apply(self, manager: Manager, config: Body, force: bool = False) -> None:
        """Server-side apply. Raises ConflictError."""
        wanted = dict(flattened(config))
        others = [(other, paths) for other, paths in self.owners.items() if other != manager]
        refused = [
            f'conflict with "{other.name}"{_through(other)} using {config["apiVersion"]}: {"".join(path)}'
            for other, paths in others
            for path in sorted(paths & wanted.keys())
            if self.fields[path] != wanted[path]
        ]
        if refused and not force:
            plural = "" if len(refused) == 1 else "s"
            raise ConflictError(f"Apply failed with {len(refused)} conflict{plural}: {', '.join(refused)}")
        for _, paths in others:
            paths -= {path for path in paths & wanted.keys() if self.fields[path] != wanted[path]}
        for path in self.owners.get(manager, set()) - wanted.keys():
            if not any(path in paths for _, paths in others):
                del self.fields[path]
        self.fields |= wanted
        self.owners[manager] = set(wanted)
        self._settle(config["kind"])

    def update(self, manager: Manager, new: Body) -> None:
        """Any other write. Its manager owns the fields that it changed, and removed fields lose all owners."""
        after = dict(flattened(new))
        if new["kind"] == "Deployment":
            after.setdefault(_REPLICAS, 1)
        changed = {path for path, value in after.items() if self.fields.get(path, _NOTHING) != value}
        for paths in self.owners.values():
            paths -= changed
            paths &= after.keys()
        self.fields = after
        self.owners.setdefault(manager, set()).update(changed)
        self._settle(new["kind"])

    def managed_fields(self) -> list[Body]:
        """Return the owners in the format of `metadata.managedFields`."""
        entries = []
        for manager, paths in self.owners.items():
            tree: Body = {}
            for path in paths:
                node = tree
                for part in path:
                    node = node.setdefault("f:" + part[1:] if part[0] == "." else "k:" + part, {})
            entry = {"manager": manager.name, "operation": manager.operation, "fieldsV1": tree}
            entries.append({**entry, **({"subresource": manager.subresource} if manager.subresource else {})})
        return entries

    def _settle(self, kind: str) -> None:
        if kind == "Deployment":
            self.fields.setdefault(_REPLICAS, 1)
        self.owners = {manager: paths for manager, paths in self.owners.items() if paths}


def flattened(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the fields of an object, except those that identify it."""
    if path in _IDENTITY or node is None:
        return
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from flattened(value, (*path, f".{name}"))
        return
    keys = _keys(path, node)
    if keys:
        for item in node:
            yield from flattened(item, (*path, "[" + ",".join(f"{key}={item.get(key)}" for key in keys) + "]"))
    elif path:
        yield path, node


def three_way(original: Body, modified: Body, live: Body) -> Body:
    """Return an object after a client-side apply, which deletes fields that only the previous manifest had."""
    merged = dict(live)
    for name in original.keys() - modified.keys():
        merged.pop(name, None)
    for name, value in modified.items():
        if isinstance(value, dict):
            merged[name] = three_way(original.get(name) or {}, value, live.get(name) or {})
        else:
            merged[name] = value
    return merged


_REPLICAS = (".spec", ".replicas")
_NOTHING = object()


def _keys(path: Path, node: Any) -> tuple[str, ...]:
    if not isinstance(node, list) or not node or not all(isinstance(item, dict) for item in node):
        return ()
    if path[-1] == ".ports":
        return ("containerPort", "protocol") if "containerPort" in node[0] else ("port", "protocol")
    return _KEYS.get(path[-1].removeprefix("."), ())


def _through(manager: Manager) -> str:
    return f' with subresource "{manager.subresource}"' if manager.subresource else ""
