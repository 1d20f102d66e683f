"""`baton model`: looks at models."""

from typing import Any

import typer
from typer.core import TyperGroup

from baton_cli.model_show import show
from baton_demo import MODEL_DIR


class _ShowByDefault(TyperGroup):
    """Takes `baton model FOLDER` for `baton model show FOLDER`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_ShowByDefault, invoke_without_command=True, add_completion=False)
app.command()(show)


@app.callback()
def model(context: typer.Context) -> None:
    """Print facts about a model: what it is, and which GPUs it fits on. Without a folder: the demo model."""
    if context.invoked_subcommand is None:
        show(str(MODEL_DIR))
