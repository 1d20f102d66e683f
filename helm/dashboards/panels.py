"""The kinds of panels that the dashboards use."""

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SECONDS = units.Seconds
SHARE = units.PercentUnit  # from 0 to 1
PER_SECOND = "/s"
REQUESTS = units.RequestsPerSecond
TOKENS = "tokens/s"
BYTES = units.BytesPerSecondSI
COUNT = units.Short
DOLLARS = units.Dollars

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_HEIGHT = 8
_STAT_HEIGHT = 4
WIDTH = 24

QUANTILES = (0.5, 0.95, 0.99)

Panel = Any  # of the SDK, whose builders have no common type


@dataclass(frozen=True)
class Query:
    """A PromQL query. legend: with {{label}} for the value of a label. traced: show exemplars, which link to traces."""

    expression: str
    legend: str = ""
    traced: bool = False


def lines(
    title: str, description: str, unit: str, *queries: Query, span: int = WIDTH // 2, stacked: bool = False
) -> Panel:
    """Return a panel that plots values over time."""
    panel = timeseries.Panel().fill_opacity(40 if stacked else 5).line_width(1).show_points(common.VisibilityMode.AUTO)
    panel.legend(
        options.VizLegendOptions()
        .show_legend(True)
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull", "max"])
    )
    panel.tooltip(options.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
    if stacked:
        panel.stacking(options.StackingConfig().mode(common.StackingMode.NORMAL))
    panel.min(0)
    return _filled(panel, title, description, unit, queries, span, _HEIGHT)


def number(title: str, description: str, unit: str, expression: str, span: int = 4) -> Panel:
    """Return a panel with the current value, and its history as the background."""
    panel = stat.Panel().graph_mode(common.BigValueGraphMode.AREA).color_mode(common.BigValueColorMode.NONE)
    panel.reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]))
    return _filled(panel, title, description, unit, [Query(expression)], span, _STAT_HEIGHT)


def heatmap_panel(
    title: str, description: str, unit: str, expression: str, span: int = WIDTH // 2, traced: bool = False
) -> Panel:
    """Return a heatmap of a histogram over time. expression: the rates of its buckets, by `le`. traced: as in Query."""
    panel = heatmap.Panel().calculate(False).show_legend().y_axis(heatmap.YAxisConfig().unit(unit))
    panel.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
    query = _target(Query(expression, "{{le}}", traced), 0).format(PromQueryFormat.HEATMAP)
    return _described(panel, title, description, span, _HEIGHT).with_target(query)


def _filled(
    panel: Panel,
    title: str,
    description: str,
    unit: str,
    queries: "list[Query] | tuple[Query, ...]",
    span: int,
    height: int,
) -> Panel:
    _described(panel, title, description, span, height).unit(unit)
    for index, query in enumerate(queries):
        panel.with_target(_target(query, index))
    return panel


def _described(panel: Panel, title: str, description: str, span: int, height: int) -> Panel:
    return panel.title(title).description(description).datasource(DATASOURCE).span(span).height(height)


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expression).range().ref_id(chr(ord("A") + index))
    if query.traced:
        target.exemplar(True)
    return target.legend_format(query.legend) if query.legend else target
