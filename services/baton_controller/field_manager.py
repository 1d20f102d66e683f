"""The controller's name in `metadata.managedFields` and in Events."""

FIELD_MANAGER = "baton-controller"
