"""A dashboard: its name, its variables and its panels."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from .panels import DATASOURCE, Panel

_TAG = "baton"
_ANY = ".*"  # matches series without the label, too


@dataclass(frozen=True)
class Variable:
    """A dashboard variable with fixed values. The first value is the default."""

    name: str
    label: str
    description: str
    values: Sequence[str]


@dataclass(frozen=True)
class Board:
    """A dashboard. rows: titles and their panels. by_…: whether the dashboard has a variable for that label."""

    name: str  # of its file
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[Variable] = ()
    by_model: bool = True
    by_revision: bool = False
    by_tenant: bool = False

    def to_json(self) -> str:
        """Return the JSON for Grafana. It is deterministic."""
        return JSONEncoder(sort_keys=True, indent=2).encode(self._build()) + "\n"

    def _build(self) -> models.Dashboard:
        board = builders.Dashboard(f"Baton / {self.title}").uid(f"baton-{self.name}").description(self.description)
        board.tags([_TAG]).time("now-1h", "now").refresh("30s").timezone("browser").editable()
        board.tooltip(models.DashboardCursorSync.CROSSHAIR)
        board.link(
            builders.DashboardLink("Baton")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        board.with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        board.with_variable(_labels("namespace", "Namespace", "baton_gateway_draining"))
        for wanted, label, metric in (
            (self.by_model, "model", "baton_gateway_live_pods"),
            (self.by_revision, "revision", "baton_worker_info"),
            (self.by_tenant, "tenant", "baton_gateway_tenant_requests_total"),
        ):
            if wanted:
                board.with_variable(_labels(label, label.capitalize(), metric))
        for variable in self.variables:
            board.with_variable(_variable(variable))
        for title, panels in self.rows:
            board.with_row(builders.Row(title))
            for panel in panels:
                board.with_panel(panel)
        built = board.build()
        for number, panel in enumerate(built.panels or (), start=1):
            panel.id_val = number
        return built


def _labels(label: str, title: str, metric: str) -> builders.QueryVariable:
    variable = builders.QueryVariable(label).label(title).datasource(DATASOURCE)
    variable.query(f"label_values({metric}, {label})").refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.sort(models.VariableSort.ALPHABETICAL_ASC).multi(True).include_all(True).all_value(_ANY)
    return variable.current(models.VariableOption(selected=True, text="All", value="$__all"))


def _variable(variable: Variable) -> builders.CustomVariable:
    first = variable.values[0]
    custom = builders.CustomVariable(variable.name).values(",".join(variable.values))
    option = models.VariableOption(selected=True, text=first, value=first)
    return custom.label(variable.label).description(variable.description).current(option)
